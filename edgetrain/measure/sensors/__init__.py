"""What this machine can tell of itself: one file a source, each under a root folder that tests replace."""

from __future__ import annotations

from pathlib import Path

from edgetrain.measure.sensors.source import Channel, Finding, Kind, Source

__all__ = ["Channel", "Finding", "Kind", "Source", "find"]


def find(root: Path = Path("/"), *, pid: int | None = None) -> list[tuple[Finding, Source | None]]:
    """Every source: what was found of it, and the source itself where it can be read. pid: of the process to watch."""
    return []
