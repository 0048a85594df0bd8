"""Each example runs as its docstring says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Those of firmware need data and an emulator: tests/firmware/test_studies.py runs them.
EXAMPLES = sorted(
    path for path in (Path(__file__).parent.parent / "examples").glob("*.py") if not path.name.startswith("firmware_")
)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(example: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", str(example)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout
