"""Captured graphs on disk, so that a second run of the same program starts at once.

A graph is found under the hash of everything it depends on (`fingerprint.py`). A file that cannot be read is a miss,
never an error. Files are written whole or not at all; the oldest go when there are more than `MOST`.

The folder is `$EDGETRAIN_CACHE/graphs`, else `$XDG_CACHE_HOME/edgetrain/graphs`, else `~/.cache/edgetrain/graphs`.
`EDGETRAIN_CACHE=off` turns it off.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from edgetrain.errors import EdgetrainError
from edgetrain.graph.ir import Graph

MOST = 200


def folder() -> Path | None:
    """Where graphs are kept; None when the cache is off."""
    chosen = os.environ.get("EDGETRAIN_CACHE")
    if chosen == "off":
        return None
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgetrain"
    return base / "graphs"


def find(digest: str) -> Graph | None:
    where = folder()
    if where is None:
        return None
    path = where / f"{digest}.json"
    try:
        graph = Graph.load(path)
        os.utime(path)
    except (EdgetrainError, OSError):
        return None
    return graph


def keep(digest: str, graph: Graph) -> None:
    """Write the graph. A folder that cannot be written is no reason to stop a training run."""
    where = folder()
    if where is None:
        return
    with contextlib.suppress(OSError):
        where.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=where, suffix=".part")
        os.close(handle)
        try:
            graph.save(temporary)
            os.replace(temporary, where / f"{digest}.json")
        finally:
            Path(temporary).unlink(missing_ok=True)
        _drop_oldest(where)


def _drop_oldest(where: Path) -> None:
    files = sorted(where.glob("*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[MOST:]:
        file.unlink(missing_ok=True)
