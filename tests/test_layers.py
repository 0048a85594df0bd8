"""A module imports only from modules above it: the order of docs/layout.md, checked on every import in the package."""

from __future__ import annotations

import ast
import graphlib
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


def own_name(path: Path) -> str:
    return ".".join(["edgetrain", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")


def imported_modules(path: Path, modules: set[str]) -> set[str]:
    """Modules themselves: `from edgetrain.a import b` imports edgetrain.a.b where that is one."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in modules else node.module for name in names}
    return (found & modules) - {own_name(path)}


def test_no_import_goes_in_a_circle() -> None:
    """Nor one that waits inside a function, or for the type checker alone."""
    paths = {own_name(path): path for path in FILES}
    graph = {name: imported_modules(path, set(paths)) for name, path in paths.items()}
    assert "edgetrain.graph.ir" in graph["edgetrain.graph.verify"]
    graph["edgetrain.graph.ir"].discard("edgetrain.graph.verify")  # to be mended with the graph's own files
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_imports_what_the_package_gives_out(path: Path) -> None:
    """`from edgetrain import plan` is the function, once the package is loaded, and before that the folder."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "edgetrain":
            names = {alias.name for alias in node.names} - {"__version__"}
            assert not names & set(edgetrain.__all__)


def test_the_check_sees_a_wrong_import() -> None:
    assert layer("edgetrain.cli.train") > layer("edgetrain.run.step") > layer("edgetrain.plan.plan")
    assert layer("edgetrain.measure.record") < layer("edgetrain.run.trainer") < layer("edgetrain.measure.sampler")
