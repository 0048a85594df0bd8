"""Messages have one form: lower case, and no full stop on the first line; so have the next steps that they name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgetrain

PACKAGE = Path(edgetrain.__file__).parent
ERRORS = {"UserError", "Infeasible", "InternalError", "BadParameter", "Taken", "Refused"}
NOT_YET = ("graph", "ops", "costs", "plan", "run", "firmware", "cli/plan")  # their turn comes with the work on them
FILES = [
    path for path in sorted(PACKAGE.rglob("*.py"))
    if not path.relative_to(PACKAGE).as_posix().startswith(NOT_YET)
]  # fmt: skip
NAMES = re.compile(r"CIFAR|PyTorch|Python|EMDL|[A-Z]{2}")  # what is written with a capital wherever it stands


def texts(node: ast.expr) -> Iterator[str]:
    """What a message can begin with and end with; … stands for what is filled in."""
    if isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)
    elif isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def messages(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ERRORS:
            steps = [keyword.value for keyword in node.keywords if keyword.arg == "next_step"]
            for part in [*node.args[:1], *steps]:
                yield from texts(part)


def is_right(message: str) -> bool:
    first = message.split("\n")[0]
    return not first.endswith(".") and (not first[:1].isupper() or NAMES.match(first) is not None)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_messages_have_one_form(path: Path) -> None:
    assert [message for message in messages(path.read_text()) if not is_right(message)] == []


def test_the_check_sees_a_wrong_form() -> None:
    source = "raise UserError(f'{a} is bad.', next_step='Mend' if a else 'leave it')\nraise e.UserError('CIFAR-10 is')"
    assert [is_right(message) for message in messages(source)] == [False, False, True, True]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_the_first_line_of_a_docstring_is_complete(path: Path) -> None:
    docstrings = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    ]
    firsts = [text.split("\n")[0].rstrip() for text in docstrings if text]
    assert [first for first in firsts if not first.endswith((".", ":", "?", "…", ")"))] == []
