"""Refuse what could never fit in the memory of this machine, by arithmetic, before any of it is allocated.

In:  what is about to be made, and its bytes. Out: nothing, or a `UserError` with both numbers. Where the system does
not say how much memory there is, nothing is refused.
"""

from __future__ import annotations

from pathlib import Path

from edgetrain.errors import UserError
from edgetrain.machine import amount
from edgetrain.measure.sensors.memory import memory


def room_bytes(root: str | Path = "/") -> int | None:
    """The memory of the machine, or of the control group, with swap; None where the system does not say."""
    available = memory(root)
    if available is None:
        return None
    swap = amount((Path(root) / "proc/meminfo").read_bytes(), b"SwapTotal:") or 0
    return available.limit_bytes + 1024 * swap


def require_room(what: str, n_bytes: int, *, next_step: str) -> None:
    """what: a noun with its article; the message goes on with how much memory it takes."""
    room = room_bytes()
    if room is not None and n_bytes > room:
        raise UserError(
            f"{what} would take {_gigabytes(n_bytes)} of memory", expected=f"at most {_gigabytes(room)}, which is here",
            next_step=next_step,
        )  # fmt: skip


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:,.3g} GB" if n_bytes < 10**12 else f"{n_bytes // 10**9:,} GB"
