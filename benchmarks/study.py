"""What the studies with several sections and models share: their common options, and results that outlive a run.

benchmarks/results/NAME.json     {section: {model: {"about": …, …}}}; a run replaces what it measured
benchmarks/results/NAME.md       the same as tables
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import RESULTS, about

Page = Callable[[Mapping[str, Mapping[str, Any]]], str]


@dataclass(frozen=True)
class Kept:
    """The results of one study. page: all of them as Markdown."""

    folder: Path
    name: str
    page: Page

    def load(self) -> dict[str, Any]:
        file = self.folder / f"{self.name}.json"
        found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        return found

    def put(self, section: str, model: str, result: Mapping[str, Any]) -> None:
        """Write both files with this result among the others."""
        everything = self.load()
        everything.setdefault(section, {})[model] = {"about": about(), **result}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{self.name}.json").write_text(json.dumps(everything, indent=1) + "\n")
        (self.folder / f"{self.name}.md").write_text(self.page(everything))

    def show(self) -> None:
        print(self.page(self.load()))


@contextlib.contextmanager
def keeping(name: str, page: Page, given: argparse.Namespace) -> Iterator[Kept]:
    """Where the results of this run go. Meanwhile plans and costs are cached in a folder that ends with it."""
    with tempfile.TemporaryDirectory(prefix=f"edgetrain-{name}-") as scratch:
        os.environ["EDGETRAIN_CACHE"] = str(Path(scratch) / "cache")
        yield Kept(given.results or (Path(scratch) if given.small else RESULTS), name, page)


def options(text: str | None, models: Iterable[str], sections: Iterable[str]) -> argparse.ArgumentParser:
    """The options that all of these studies have; --small is for their tests."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(models)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", type=_one_of(names), help=f"which of {', '.join(names)}; all by default"
    )
    parser.add_argument("--only", action="append", choices=list(sections), help="this section alone")
    parser.add_argument("--results", type=Path, help="a folder for the results, in place of benchmarks/results")
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    return parser


def _one_of(names: list[str]) -> Callable[[str], str]:
    def known(name: str) -> str:
        if name not in names:
            raise argparse.ArgumentTypeError(f"there is no model {name}; choose from {', '.join(names)}")
        return name

    return known
