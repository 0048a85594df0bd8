"""Recorded file trees, as text: what the kernels of real machines write, laid out under a folder.

sys/class/powercap/intel-rapl:0/name = package-0
proc/stat <<
cpu  123450 …
>>
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edgetrain.measure.sensors import Source, find

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
