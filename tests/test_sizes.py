"""Files, functions and lists of parameters of readable size, and no module that reaches into another.

What is larger stands in one list with a reason. The list only shrinks: an entry that is no longer needed fails too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import edgetrain

PACKAGE = Path(edgetrain.__file__).parent
ROOT = PACKAGE.parent
MAX_LINES = 500  # a file has fewer
MAX_BODY = 60  # lines of a function, without its signature and its docstring: it has fewer
MAX_PARAMETERS = 8
MAX_FORMATTED_BY_HAND = 438  # `fmt: skip` in the package, its tests and benchmarks

Function = ast.FunctionDef | ast.AsyncFunctionDef

LARGE_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
PUBLIC = "public: each parameter is an option of the user's"
MANY_PARAMETERS = {
    "measure/profile.py profile": PUBLIC,
    "plan/planning.py plan": PUBLIC,
    "run/step.py prepare": PUBLIC,
    "graph/capture/value_checks.py _istft": "the signature of torch.istft, which it stands in for",
    "ops/norm.py backward": "the signature of the kernel",
    "firmware/emulate.py run_firmware": PUBLIC,
    "graph/capture/training.py capture_with_externals": "those of et.capture, and two choices of its own",
    "plan/layout.py lay_out": "each heuristic of the search is a switch, for ablations",
}  # fmt: skip
# Names of PyTorch and ctypes that modules of ours store into, too.
OF_LIBRARIES = {"_buffers", "_backward_hooks", "_objects", "_fields_", "_ops", "_version", "_c"}


def sources() -> Iterator[tuple[str, str]]:
    """The name of each module of the package, from its folder, and its text."""
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text()


def functions() -> Iterator[tuple[str, Function]]:
    for name, text in sources():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, Function):
                yield f"{name} {node.name}", node


def n_lines(function: Function) -> int:
    """Of the body."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def n_parameters(function: Function) -> int:
    names = [each.arg for each in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def is_command(name: str, function: Function) -> bool:
    """A command of the command line: its parameters are the options."""
    file, _, own = name.partition(" ")
    return file == f"cli/{own}.py"


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.Module) -> set[str]:
    """The private names that a module makes itself: functions, classes, variables, attributes."""
    nodes = list(ast.walk(tree))
    names = {node.name for node in nodes if isinstance(node, Function | ast.ClassDef)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return {name for name in names if private(name)}


def is_own(value: ast.expr) -> bool:
    """The object of a method: what it has from a base class is its own."""
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def reaches(tree: ast.Module, elsewhere: set[str]) -> Iterator[str]:
    """Private names of other modules that a module uses: `other._name`, or `from edgetrain.other import _name`."""
    foreign = elsewhere - defined(tree) - OF_LIBRARIES
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "edgetrain":
            yield from (alias.name for alias in node.names if private(alias.name))
        elif (
            isinstance(node, ast.Attribute) and node.attr in foreign and ast.unparse(node.value) not in ("self", "cls")
        ):
            yield ast.unparse(node)  # of self it is a base class's


def test_files_are_short() -> None:
    large = {name for name, text in sources() if len(text.splitlines()) >= MAX_LINES}
    assert large == LARGE_FILES.keys()


def test_functions_are_short() -> None:
    long = {name for name, function in functions() if n_lines(function) >= MAX_BODY}
    assert long == LONG_FUNCTIONS.keys()


def test_functions_take_few_parameters() -> None:
    many = {
        name
        for name, function in functions()
        if n_parameters(function) > MAX_PARAMETERS and not is_command(name, function)
    }
    assert many == MANY_PARAMETERS.keys()


def test_no_module_reaches_into_another() -> None:
    trees = {name: ast.parse(text) for name, text in sources()}
    everywhere = set().union(*map(defined, trees.values()))
    assert [f"{name}: {reach}" for name, tree in trees.items() for reach in reaches(tree, everywhere)] == []


def test_little_is_formatted_by_hand() -> None:
    texts = [
        path.read_text() for folder in ("edgetrain", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]
    assert sum(text.count("# fmt: " + "skip") for text in texts) <= MAX_FORMATTED_BY_HAND


def test_the_checks_see_what_they_look_for() -> None:
    tree = ast.parse("from edgetrain.saved import _KINDS, load\nload._there\nload._here\nself._there\n_here = 1\n")
    assert list(reaches(tree, {"_there", "_here"})) == ["_KINDS", "load._there"]
    lines = "\n".join("    x = 1" for _ in range(59))
    (short,) = ast.parse(f'def f(self, a, *, b):\n    """Doc."""\n{lines}').body
    assert isinstance(short, ast.FunctionDef)
    assert (n_lines(short), n_parameters(short)) == (59, 2)
