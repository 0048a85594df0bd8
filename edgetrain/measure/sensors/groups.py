"""The control groups of a process, from its own up to the root: folders under /sys/fs/cgroup, of version 1 and 2."""

from __future__ import annotations

import functools
from pathlib import Path


def folders(root: Path, controller: str, pid: int | None = None) -> tuple[tuple[Path, int], ...]:
    """Each group with its version, innermost first. pid: of another process than this one."""
    try:
        content = (root / "proc" / ("self" if pid is None else str(pid)) / "cgroup").read_text()
    except OSError:
        return ()
    return _folders(root, controller, content)


@functools.lru_cache(maxsize=16)  # a budget that moves asks many times a second
def _folders(root: Path, controller: str, content: str) -> tuple[tuple[Path, int], ...]:
    groups = []
    for line in content.splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if version == 1 else "")
        if version == 1 and not top.is_dir():  # mounted together, as cpu,cpuacct, and no link leads there
            top = top.with_name(controllers)
        if version == 2 and (root / "sys/fs/cgroup/unified").is_dir():
            top = root / "sys/fs/cgroup/unified"
        parts = [part for part in path.split("/") if part not in ("", "..")]
        groups += [(top.joinpath(*parts[:n]), version) for n in range(len(parts), -1, -1)]
    return tuple(groups)
