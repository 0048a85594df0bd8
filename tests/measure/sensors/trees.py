"""Recorded file trees, as text: what the kernels of real machines write, laid out under a folder.

sys/class/powercap/intel-rapl:0/name = package-0
proc/stat <<
cpu  123450 …
>>
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from edgetrain.measure.sensors import Source, find
from edgetrain.measure.sensors import source as reading

FOLDER = Path(__file__).with_name("trees")
NAMES = tuple(sorted(path.stem for path in FOLDER.glob("*.tree")))
PID = 4242


def files(name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    lines = iter((FOLDER / f"{name}.tree").read_text().splitlines())
    for line in lines:
        if line.endswith(" <<"):
            found[line[:-3]] = "".join(f"{row}\n" for row in _block(lines))
        elif line and not line.startswith("#"):
            path, _, content = line.partition(" = ")
            found[path] = content + "\n"
    return found


def _block(lines: Iterator[str]) -> Iterator[str]:
    for line in lines:
        if line == ">>":
            return
        yield line


def lay(root: Path, name: str) -> Path:
    for path, content in files(name).items():
        write(root, path, content)
    return root


def write(root: Path, path: str, content: str) -> None:
    """Into the same file, as a kernel would: sources keep theirs open."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(content)


def remove(root: Path, path: str) -> None:
    """As a device that goes away: whoever has the file open reads nothing more."""
    (root / path).write_text("")
    (root / path).unlink()


def source(root: Path, name: str) -> Source:
    """The source of that name, which must be there; open."""
    found = {finding.name: each for finding, each in find(root, pid=PID, reads=0)}[name]
    assert found is not None, f"{name} was not found"
    found.open()
    return found


def values(found: Source) -> dict[str, float | None]:
    read = found.read()
    assert len(read) == len(found.channels)
    return dict(zip((channel.name for channel in found.channels), read, strict=True))


def closer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function of paths: from its call on, opening these is refused, also to root."""
    refused: set[str] = set()
    real = os.open

    def check(path: Any) -> None:
        if str(path) in refused:
            raise PermissionError(13, "Permission denied", str(path))

    def by_name(path: Any, *args: Any, **options: Any) -> Any:
        check(path)
        return builtins.open(path, *args, **options)

    def by_handle(path: Any, *args: Any, **options: Any) -> int:
        check(path)
        return real(path, *args, **options)

    monkeypatch.setattr(reading, "open", by_name, raising=False)
    monkeypatch.setattr(os, "open", by_handle)
    return lambda *paths: refused.update(str(path) for path in paths)
