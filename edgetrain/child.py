"""Run a function of edgetrain in a process of its own, which is gone when it returns.

In:  the function by name (`edgetrain.costs.measured:measured_in_child`) and plain JSON data.
Out: the plain JSON data that it returns.

What the work loads and allocates goes with the process: solvers take 50 MB and more and cannot be loaded beside each
other, and measuring ops leaves memory behind that a small device does not have.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from edgetrain.errors import InternalError

Progress = Callable[[int, int], None]
_CODE = "import sys; sys.path[:] = sys.argv[3:]; from edgetrain.child import main; main(sys.argv[1], sys.argv[2])"


def run(
    function: str, data: Any, *, progress: Progress | None = None, environment: Mapping[str, str] | None = None
) -> Any:
    """Call `function(data, progress)` there. `progress` is told how many of how many parts are done."""
    with tempfile.TemporaryDirectory(prefix="edgetrain-") as folder:
        (Path(folder) / "data.json").write_text(json.dumps(data), encoding="utf-8")
        # -c and not -m: the package may have been found through a path that only this process knows.
        process = subprocess.Popen(
            [sys.executable, "-c", _CODE, function, folder, *sys.path],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            for line in process.stdout:
                if progress is not None:
                    done, _, total = line.partition(" ")
                    progress(int(done), int(total))
            said = process.stderr.read()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            process.stderr.close()
        result = Path(folder) / "result.json"
        if not result.exists():
            raise InternalError(f"{function} failed in its process ({process.returncode}): {said[-2000:]}")
        return json.loads(result.read_text(encoding="utf-8"))


def main(function: str, folder: str) -> None:
    """The other side."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends this process
    module, _, name = function.partition(":")
    data = json.loads((Path(folder) / "data.json").read_text(encoding="utf-8"))
    found = getattr(importlib.import_module(module), name)(data, lambda done, total: print(done, total, flush=True))
    part = Path(folder) / "part"
    part.write_text(json.dumps(found), encoding="utf-8")
    os.replace(part, Path(folder) / "result.json")
