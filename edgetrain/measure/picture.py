"""The bytes that a step holds, and what less of them costs in time, as plain data in a run folder: memory.json.

In:  `Picture`: curves of bytes over the ops of a step, points of memory against time, tables of text. `edgetrain plan`
     makes one of its plans, `et.profile` of what it traced (`traced`).
Out: the same from the file, which may come from anywhere: each field is checked. `report/memory.py` draws it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from edgetrain.files import write_text
from edgetrain.plan.budget import show_bytes
from edgetrain.run.memory import MemoryTrace
from edgetrain.saved import load as load_saved

SCHEMA = 1
FILE = "memory.json"
ALIVE_SHOWN = 25
_MAX_NUMBER = 1e300  # of a number that is drawn: what is larger would leave the drawing's own arithmetic
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Instant:
    """One op as it runs. `held_bytes`: the most that the step holds meanwhile. `again`: it ran before."""

    op: str
    module: str
    phase: str
    held_bytes: int
    again: bool


@dataclass(frozen=True)
class Curve:
    """A step under one plan; `lasting_bytes` of what it holds are there before and after it."""

    name: str
    lasting_bytes: int
    instants: tuple[Instant, ...]

    @property
    def peak(self) -> Instant:
        return max(self.instants, key=lambda instant: instant.held_bytes)

    @property
    def spans(self) -> tuple[tuple[str, int, int], ...]:
        """Name, begin, end: the forward pass, what follows it, and the updates at the end where they come together."""
        phases = [instant.phase for instant in self.instants]
        middle = next((at for at, phase in enumerate(phases) if phase != "forward"), len(phases))
        end = len(phases)
        while end > middle and phases[end - 1] == "update":
            end -= 1
        inside = "update" in phases[middle:end]
        if inside:  # they come one by one: those at the end are no part of their own
            end = len(phases)
        spans = (
            ("forward", 0, middle),
            ("backward and updates" if inside else "backward", middle, end),
            ("updates", end, len(phases)),
        )
        return tuple(span for span in spans if span[1] < span[2])


@dataclass(frozen=True)
class Point:
    """What one budget costs.

    part: of what keep-all holds at its peak beside the lasting tensors. extra: time above keep-all's, as a part of it;
    None: no plan was found. gap: how much less time a plan could take, as a part.
    """

    memory_bytes: int
    part: float
    extra: float | None = None
    recomputed: int | None = None
    planner: str | None = None
    gap: float | None = None


@dataclass(frozen=True)
class Frontier:
    """Points from most memory to least. None is possible below `bound_bytes`; none was found below `smallest_bytes`."""

    points: tuple[Point, ...]
    smallest_bytes: int | None = None
    bound_bytes: int | None = None


@dataclass(frozen=True)
class Table:
    """Text in rows. A row's first cell that begins with a space belongs to the row above it."""

    title: str
    note: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Picture:
    title: str
    note: str
    budget_bytes: int | None
    curves: tuple[Curve, ...]
    frontier: Frontier | None
    tables: tuple[Table, ...]
    frontier_table: Table | None = None


# ---- from what was traced -------------------------------------------------------------------------------------


def traced(traces: Sequence[MemoryTrace], ran: Collection[str], name: str = "this step") -> Picture:
    """The bytes over the ops that ran, with kernels' workspace, and what is alive at the peak.

    By their names: views do not run. traces: of each micro-batch in turn; of one where the batch is taken whole.
    """
    instants = []
    for trace in traces:
        seen: set[str] = set()
        for op in trace.ops:
            if op.name in ran:
                instants.append(Instant(op.name, op.module, op.phase, op.most_bytes, op.name in seen))
                seen.add(op.name)
    most = max(traces, key=lambda trace: trace.peak_with_workspace_bytes)
    curves = (Curve(name, most.persistent_bytes, tuple(instants)),) if instants else ()
    return Picture("Memory", "", None, curves, None, (_roles(most), _alive(most)))


def _roles(trace: MemoryTrace) -> Table:
    sizes: dict[str, int] = {}
    for tensor in trace.alive:
        sizes[tensor.role] = sizes.get(tensor.role, 0) + tensor.n_bytes
    ordered = sorted(sizes.items(), key=lambda entry: -entry[1])
    total = max(sum(sizes.values()), 1)
    rows = tuple((role, show_bytes(size), f"{100 * size / total:.0f} %") for role, size in ordered)
    where = f"{show_bytes(trace.peak_with_workspace_bytes)} at {trace.peak_op}, by what they are for."
    return Table("Alive at the peak", where, ("role", "bytes", "part"), rows)


def _alive(trace: MemoryTrace) -> Table:
    rows = [(tensor.name, str(tensor.role), show_bytes(tensor.n_bytes)) for tensor in trace.alive[:ALIVE_SHOWN]]
    rest = trace.alive[ALIVE_SHOWN:]
    if rest:
        rows.append((f"{len(rest)} more", "", show_bytes(sum(tensor.n_bytes for tensor in rest))))
    return Table("", "The largest of them:", ("tensor", "role", "bytes"), tuple(rows))


# ---- to a file and back ---------------------------------------------------------------------------------------


def save(picture: Picture, folder: Path) -> None:
    """Write memory.json into the folder."""
    data = {"edgetrain memory": SCHEMA, **asdict(picture)}
    for curve in data["curves"]:
        curve["instants"] = [list(instant.values()) for instant in curve["instants"]]
    write_text(folder / FILE, json.dumps(data, allow_nan=False))


def load(folder: Path) -> Picture:
    """Read memory.json back; one that is not ours is a UserError."""
    return load_saved(folder / FILE, "picture of memory", _picture)


def _picture(data: dict[str, Any]) -> Picture:
    if data["edgetrain memory"] != SCHEMA:
        raise ValueError(f"schema {data['edgetrain memory']!r}, expected {SCHEMA}")
    return Picture(
        title=_text(data["title"]),
        note=_text(data["note"]),
        budget_bytes=_maybe(data["budget_bytes"], _whole),
        curves=tuple(map(_curve, data["curves"])),
        frontier=_maybe(data["frontier"], _frontier),
        tables=tuple(map(_table, data["tables"])),
        frontier_table=_maybe(data["frontier_table"], _table),
    )


def _curve(data: Any) -> Curve:
    rows = [_instant(*row) for row in data["instants"]]
    if not rows:
        raise ValueError("a curve has no ops")
    return Curve(_text(data["name"]), _whole(data["lasting_bytes"]), tuple(rows))


def _instant(op: Any, module: Any, phase: Any, held_bytes: Any, again: Any) -> Instant:
    if type(again) is not bool:
        raise ValueError(f"{again!r} is neither true nor false")
    return Instant(_text(op), _text(module), _text(phase), _whole(held_bytes), again)


def _frontier(data: Any) -> Frontier:
    points = tuple(
        Point(
            _whole(row["memory_bytes"]), _number(row["part"]), _maybe(row["extra"], _number),
            _maybe(row["recomputed"], _whole), _maybe(row["planner"], _text), _maybe(row["gap"], _number),
        )
        for row in data["points"]
    )  # fmt: skip
    return Frontier(points, _maybe(data["smallest_bytes"], _whole), _maybe(data["bound_bytes"], _whole))


def _table(data: Any) -> Table:
    rows = tuple(tuple(map(_text, row)) for row in data["rows"])
    return Table(_text(data["title"]), _text(data["note"]), tuple(map(_text, data["header"])), rows)


def _maybe(value: Any, kind: Callable[[Any], T]) -> T | None:
    return None if value is None else kind(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.60} is no text")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.60} is no number of bytes or ops")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_MAX_NUMBER <= value <= _MAX_NUMBER:
        raise ValueError(f"{value!r:.60} is no number")
    return float(value)
