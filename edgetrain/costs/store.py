"""Measure what moving bytes to a folder's storage and back takes here.

In:  a folder. Out: `Store`, with the bandwidth and the latency of the page file that a step would use there.

Blocks of two sizes are written and read back by the same code that pages tensors, checksums included and past the
system's cache where that is possible. The latency is what the small block takes; the bandwidth what the large one takes
beyond it. Medians over a few rounds count, fewer where the storage is slow. The result is kept on disk, by machine and
file system, so that plans for the same storage are found again.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from edgetrain import cache, files
from edgetrain.costs.table import Store, store_from_json
from edgetrain.errors import UserError
from edgetrain.pagefile import PageFault, PageFile

SMALL_BYTES, LARGE_BYTES = 4096, 8 << 20
ROUNDS = 5
MOST_S = 3.0  # after this no new round begins


def measure_store(folder: str | Path, *, use_cache: bool = True) -> Store:
    """What the storage under the folder moves in a second, and how long each transfer takes before it does."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"there is no folder {folder} to page to", next_step="make it, or name another one")
    known = _known() if use_cache else {}
    key = f"{os.uname().nodename}, device {path.stat().st_dev}"
    if key not in known:
        known[key] = _measured(path)
        if use_cache:
            _keep(known)
    return known[key]


def _measured(folder: Path) -> Store:
    file = PageFile(folder, [SMALL_BYTES, LARGE_BYTES])
    times: dict[str, list[float]] = {"out small": [], "out large": [], "in small": [], "in large": []}
    begin = time.perf_counter()
    try:
        with mmap.mmap(-1, LARGE_BYTES) as memory:
            view = ctypes.c_char.from_buffer(memory)
            address = ctypes.addressof(view)
            while len(times["in large"]) < ROUNDS and (not times["in large"] or time.perf_counter() - begin < MOST_S):
                for slot, size in enumerate(("small", "large")):
                    times[f"out {size}"].append(_timed(file, slot, lambda n: file.write(n, address)))
                    times[f"in {size}"].append(_timed(file, slot, lambda n: file.read(n, address)))
            del view
    except PageFault as fault:
        raise UserError(f"what is written to {folder} does not come back", received=fault.why) from None
    finally:
        file.close()
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    rates = {way: LARGE_BYTES / max(median[f"{way} large"] - median[f"{way} small"], 1e-9) for way in ("in", "out")}
    return Store(rates["in"], rates["out"], median["in small"], median["out small"])


def _timed(file: PageFile, slot: int, transfer: Callable[[int], None]) -> float:
    begin = time.perf_counter()
    transfer(slot)
    file.wait(slot)
    return time.perf_counter() - begin


# ---- kept on disk


def _file() -> Path | None:
    folder = cache.folder()
    return None if folder is None else folder / "costs" / "stores.json"


def _known() -> dict[str, Store]:
    """What is known; a file that cannot be read is as good as none."""
    file = _file()
    if file is None:
        return {}
    try:
        return {key: store_from_json(store) for key, store in json.loads(file.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return {}


def _keep(known: dict[str, Store]) -> None:
    file = _file()
    if file is None:
        return
    files.write_cache(file, json.dumps({key: asdict(store) for key, store in known.items()}))
