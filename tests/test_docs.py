"""What the pages say can be followed: links lead somewhere, commands and their options exist, examples are Python."""

from __future__ import annotations

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from edgetrain.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
MAX_COLUMNS, MAX_README_LINES, MAX_NOTE_WORDS = 100, 150, 800
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?<![\w./-])edgetrain ((?:[a-z]+)\b[^\n`|#]*)")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(page.read_text()):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@every_page
def test_no_line_is_wider_than_a_screen(page: Path) -> None:
    wide = [
        n for n, line in enumerate(page.read_text().splitlines(), 1) if len(line) > MAX_COLUMNS and "](" not in line
    ]
    assert not wide, f"lines {wide} have more than {MAX_COLUMNS} columns"


def test_the_list_of_files_is_that_of_the_package() -> None:
    made: str = runpy.run_path(str(ROOT / "docs/make_layout.py"))["page"]()
    assert (ROOT / "docs/layout.md").read_text() == made, "run python docs/make_layout.py"


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < MAX_README_LINES


@pytest.mark.parametrize("note", sorted((ROOT / "docs/design").glob("*.md")), ids=lambda note: note.stem)
def test_design_notes_are_short(note: Path) -> None:
    assert len(note.read_text().split()) <= MAX_NOTE_WORDS


def commands(page: Path) -> Iterator[list[str]]:
    """Each call of the command line in a page, as words."""
    for call in _COMMAND.findall(page.read_text()):
        yield shlex.split(call.split(" && ")[0].split(";")[0].replace("…", "").replace("'", "").rstrip("\\ "))


@every_page
def test_commands_and_their_options_exist(page: Path) -> None:
    group: Any = typer.main.get_command(app)
    for name, *words in commands(page):
        if name not in group.commands:
            assert not any(word.startswith("--") for word in words), f"edgetrain {name} is no command"
            continue
        known = {option for parameter in group.commands[name].params for option in (*parameter.opts, "--help")}
        unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
        assert not unknown, f"edgetrain {name} has no option {unknown}"


@every_page
def test_examples_are_python(page: Path) -> None:
    for language, text in _FENCE.findall(page.read_text()):
        if language == "python":
            compile(text, str(page), "exec")
