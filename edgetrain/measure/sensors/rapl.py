"""Energy counters of Intel and AMD processors: the powercap interface to RAPL.

    /sys/class/powercap/intel-rapl:0      name package-0    ┐ what the socket takes
                        intel-rapl:0:0    name core         ├ inside the package: never added to it
                        intel-rapl:0:1    name uncore       ┘
                        intel-rapl:0:2    name dram           apart from the package (on servers)
                        intel-rapl:1      name psys           the whole platform: the others are inside
                        intel-rapl-mmio:0 name package-0      the same counter by another way: left out

energy_uj grows and starts again from 0 after max_energy_range_uj: some 262 kJ, an hour at 70 W. Only root may read it
since 2020 (CVE-2020-8694), unless an administrator allows it.
"""

from __future__ import annotations

import re
from pathlib import Path

from edgetrain.measure.sensors.source import (
    Channel,
    Found,
    Number,
    Numbers,
    OpenFile,
    let_read,
    may_read,
    missing,
    not_readable,
    plain,
    readable,
    text,
)

NAME = "rapl"
GIVES = "energy of the processor"
RESOLUTION = "about 61 µJ, a new value every 1 ms"


def find(root: Path) -> Found:
    folders = _domains(root / "sys/class/powercap")
    files = [folder / "energy_uj" for folder in folders]
    bad = not_readable(NAME, GIVES, RESOLUTION, files)
    if bad is not None:
        return bad
    closed = [file for file in files if file.exists() and not may_read(file)]
    numbers = [_number(folder, folders) for folder in folders if folder / "energy_uj" not in closed]
    domains = [number for number in numbers if number is not None]
    if not domains:
        return missing(NAME, GIVES, RESOLUTION)
    gives = GIVES + ": " + ", ".join(number.channel.name[5:-9] for number in domains)
    return readable(Numbers(NAME, domains), gives, RESOLUTION, let_read(*closed) if closed else None)


def _domains(folder: Path) -> list[Path]:
    """Outer ones first. The memory-mapped copies count only where there is nothing else."""
    for prefix in ("intel-rapl", "intel-rapl-mmio"):
        folders = [path for path in folder.glob(f"{prefix}:*") if re.fullmatch(rf"{prefix}(:\d+){{1,2}}", path.name)]
        if folders:
            return sorted(folders, key=lambda path: [int(n) for n in path.name.split(":")[1:]])
    return []


def _number(folder: Path, folders: list[Path]) -> Number | None:
    range_ = OpenFile(folder / "max_energy_range_uj").number()
    name = _channel(folder, folders)
    if name is None or range_ is None or range_ <= 0:  # without its range, a counter that goes round cannot be undone
        return None
    channel = Channel(name, "J", True, "measured", least_window_s=0.002, part_of=_part_of(folder, folders))
    return Number(channel, folder / "energy_uj", 1e-6, range_)


def _channel(folder: Path, folders: list[Path]) -> str | None:
    """rapl_package_0_energy_j, rapl_package_0_core_energy_j, rapl_psys_energy_j."""
    name = text(folder / "name")
    if name is None:
        return None
    parent = _parent(folder, folders)
    outer = None if parent is None else text(parent / "name")
    return "_".join(["rapl", *([] if outer is None else [plain(outer)]), plain(name), "energy_j"])


def _parent(folder: Path, folders: list[Path]) -> Path | None:
    parent = folder.with_name(folder.name.rpartition(":")[0])
    return parent if parent in folders else None


def _part_of(folder: Path, folders: list[Path]) -> str | None:
    parent = _parent(folder, folders)
    if parent is not None and text(folder / "name") != "dram":
        return _channel(parent, folders)
    psys = next((other for other in folders if text(other / "name") == "psys" and may_read(other / "energy_uj")), None)
    return None if psys is None or psys == folder else _channel(psys, folders)
