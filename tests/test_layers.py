"""A module imports only from modules above it: the order of docs/layout.md, checked on every import in the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgetrain

ROOT = Path(edgetrain.__file__).parent
ORDER = (
    "errors", "machine", "names", "dtypes", "ranges", "arguments", "closest", "files", "saved", "cache", "child",
    "pagefile", "native", "interrupts",
    "graph.ir", "ops", "graph", "adapt", "devices", "measure.sensors",
    "measure.record", "costs", "plan", "run", "firmware", "measure", "report", "zoo", "bench", "fleet", "cli",
    "__main__",
)  # fmt: skip
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def layer(module: str) -> int:
    """The place in the order of `edgetrain.a.b`; the longest name that fits counts."""
    words = module.split(".")[1:]
    for length in (2, 1):
        name = ".".join(words[:length])
        if name in ORDER:
            return ORDER.index(name)
    raise AssertionError(f"{module} belongs to no layer")


def imports(path: Path) -> Iterator[str]:
    """Every module of edgetrain that the file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "edgetrain")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "edgetrain":
            assert node.module is not None
            if node.module == "edgetrain":
                yield from (f"edgetrain.{alias.name}" for alias in node.names if alias.name != "__version__")
            else:
                yield node.module
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_upwards(path: Path) -> None:
    own = ".".join(["edgetrain", *path.relative_to(ROOT).with_suffix("").parts])
    for found in imports(path):
        assert layer(found) <= layer(own), f"{own} imports {found}, which stands below it"


def test_the_check_sees_a_wrong_import() -> None:
    assert layer("edgetrain.cli.train") > layer("edgetrain.run.step") > layer("edgetrain.plan.plan")
    assert layer("edgetrain.measure.record") < layer("edgetrain.run.trainer") < layer("edgetrain.measure.sampler")
