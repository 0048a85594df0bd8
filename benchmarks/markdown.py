"""Tables in Markdown, and where, when and from what a result is: for every page in benchmarks/results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def head(*names: str) -> Iterator[str]:
    yield line(*names)
    yield "|" + "---|" * len(names)


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def made(about: Mapping[str, Any]) -> str:
    commit = f"{(about['commit'] or 'no commit')[:10]}{' with changes' if about['dirty'] else ''}"
    return f"{about['created']}, {about['machine']}, {about['cores']} cores, torch {about['torch']}, {commit}"
