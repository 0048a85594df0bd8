"""Writes the list of files in docs/layout.md from the first lines of their docstrings.

python docs/make_layout.py      a test fails where the page is not what this writes
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/layout.md"
BEGIN, END = "<!-- from the docstrings, by docs/make_layout.py -->\n", "<!-- end -->\n"
COLUMNS, INDENT = 98, 4


def page() -> str:
    """The page with its list made anew."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    lines = ["", *_folder(ROOT / "edgetrain", 0), ""]
    return "\n".join([before + BEGIN.rstrip(), *lines, END.rstrip()]) + "\n" + after


def _folder(folder: Path, depth: int) -> Iterator[str]:
    yield from _entry(f"{folder.name}/", _first_sentence(folder / "__init__.py"), depth)
    for path in sorted(folder.glob("*.py")):
        if path.name != "__init__.py":
            yield from _entry(path.name, _first_sentence(path), depth + 1)
    for inner in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        yield from _folder(inner, depth + 1)


def _first_sentence(path: Path) -> str:
    paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
    return " ".join(paragraph.split()).rstrip(".:")


def _entry(name: str, what: str, depth: int) -> Iterator[str]:
    indent = " " * (INDENT + 2 * depth)
    begin = f"{indent}{name:<{30 - 2 * depth}}"
    begin = begin if begin.endswith("  ") else f"{begin.rstrip()}  "
    further = " " * (INDENT + 30)
    lines = textwrap.wrap(what, COLUMNS - len(further), break_long_words=False) or [""]
    yield (begin + lines[0]).rstrip()
    yield from (further + line for line in lines[1:])


if __name__ == "__main__":
    PAGE.write_text(page())
