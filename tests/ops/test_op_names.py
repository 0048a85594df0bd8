"""What is known of an op stands in its entry: no other part of the package knows one by its name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgetrain
from edgetrain.ops.entry import registered
from edgetrain.ops.work import KINDS

ROOT = Path(edgetrain.__file__).parent
# Entries; what changes graphs, one file a rewrite; firmware's rules, one file a family.
ROOMS = ("ops/", "graph/rewrite/", "firmware/lower")
EXCEPTIONS = {
    "graph/capture/kinds.py": "the ops that capture itself treats unlike others, each with its reason",
    "graph/capture/value_checks.py": "functions that consist of ops, taken apart while a step is recorded",
    "graph/capture/scripts.py": "warnings of TorchScript, known by their text",
    "graph/capture/counters.py": "operators of Python, some of which have the names of ops",
    "firmware/instead.py": "advice for ops that lowering has no rule for",
}
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
_KIND = re.compile(r"\b(aten|prims)(\.|::)\w")
# Names of optimizers and of kinds of work say the same as op names, and are asked for by users and devices.
_OTHER = {*KINDS, "sgd", "adam", "adamw"}
_NAMES = {kind.split(".")[1] for kind in registered()} - _OTHER


def named(source: str) -> Iterator[str]:
    """The op names in a file, each with its line: kinds, kernels as attributes, and tables of bare names."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            own = any(kind in node.value for kind in registered() if kind.startswith("edgetrain."))
            if own or _KIND.search(node.value) or (node.value in _NAMES and "_" in node.value.strip("_")):
                yield f"line {node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in ("aten", "prims"):
            yield f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.Set | ast.Tuple | ast.List | ast.Dict):
            items = node.keys if isinstance(node, ast.Dict) else node.elts
            bare = [item.value for item in items if isinstance(item, ast.Constant) and item.value in _NAMES]
            if len(bare) > 1:
                yield f"line {node.lineno}: a table of {', '.join(map(str, bare))}"


@pytest.mark.parametrize("file", [file for file in FILES if not file.startswith(ROOMS) and file not in EXCEPTIONS])
def test_ops_are_named_in_their_rooms_alone(file: str) -> None:
    assert not list(named((ROOT / file).read_text()))


@pytest.mark.parametrize("file", EXCEPTIONS)
def test_exceptions_are_needed(file: str) -> None:
    assert list(named((ROOT / file).read_text()))


@pytest.mark.parametrize(
    "line",
    ['KIND = "aten.relu.default"', 'KIND = "edgetrain.norm.apply"', "f(torch.ops.aten.clone.default)",
     'if name == "native_batch_norm": ...', 'SUMS = {"sum", "mean"}', 'LIMITS = {"relu": 0, "tanh": 1}'],
)  # fmt: skip
def test_the_check_sees_a_name(line: str) -> None:
    assert list(named(line))


def test_the_check_passes_over_prose_and_other_words() -> None:
    assert not list(named('"""aten.relu.default is an op."""\nWORDS = ("sum", "product")\nname = "view"'))
