"""A plan: the full sequence of what happens in one step.

Plain data, made by a planner (one file each in this folder), checked by `validate.py`, executed by `run/`. It can be
saved, read back equal, and is refused for any graph but the one that it was made for.

    Compute(op)              run the op; its results get fresh memory. An op that comes again is recomputed
    Compute(op, into=s)      run the op over storage s, whose content nobody needs any more
    Free(s)                  give the memory of storage s back; if it is being paged out, when that is done
    PageOut(s)               begin to write storage s to the store
    PageIn(s)                give storage s memory, and begin to read it back; who reads it first waits for it
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from edgetrain import files, saved
from edgetrain.costs.table import WAYS, Kernels, Origin, Way

SCHEMA = 2
Exact = Literal["bitwise", "rounding", "no"]
Updates = Literal["early", "guarded", "together", "final"]
RANDOM_STATE_BYTES = 5056  # of torch's generator, as a step that draws random numbers keeps it to be taken back
Workspace = Mapping[Way, Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class Compute:
    op: int
    into: int | None = None


@dataclass(frozen=True, slots=True)
class Free:
    storage: int


@dataclass(frozen=True, slots=True)
class PageOut:
    storage: int


@dataclass(frozen=True, slots=True)
class PageIn:
    storage: int


Action = Compute | Free | PageOut | PageIn
# What a planner says of a step: op numbers in the order in which they run, and what is paged in between. A storage is
# freed after its last use; `Free` among the items is such a use.
Item = int | PageOut | PageIn | Free


_EXACT = {
    "bitwise": "bitwise equal to PyTorch",
    "rounding": "equal to PyTorch up to rounding",
    "no": "other numbers than plain training",
}


@dataclass(frozen=True, slots=True)
class Bound:
    """No schedule of this class takes less time in the same memory; or less energy, where that was sought."""

    time_s: float | None
    schedules: str
    energy_j: float | None = None


@dataclass(frozen=True)
class Plan:
    """What happens in a step, and what it takes.

    peak_bytes: the most that the step holds: persistent tensors, activations, gradients, what takes it back if it fails
             (copies and, where it draws random numbers, the generator's state), and the workspace of kernels as far as
             it was measured (`workspace_bytes`: way to run an op → op → bytes above its results).
    exact:   how its numbers relate to plain PyTorch's: the same bits, the same but for rounding, or not the same.
    updates: "early": each parameter is updated as soon as its gradient is there; the executor sees to it that nothing
             can fail from the first update on. "guarded": as early, and a copy of what an update changes is kept until
             the step has succeeded. "together": all updates at the end of the step, when nothing can fail any more. In
             each of these ways a step that fails changes nothing. "final": as early, for a program that never takes a
             step back, which needs no copies: firmware. undo_bytes: what is kept to take the step back, in all.
    time_s, energy_j: predicted from the costs that it was planned with, which were measured or modelled (`origin`);
             `bound` says how far from the best it can be. None where the costs do not tell.
    note:    what else there is to say of it: why nothing is paged, for instance.
    kernels: which kernel of its entry runs an op in each way, where it is not the first.
    """

    planner: str
    graph_key: str
    schedule: tuple[Action, ...]
    peak_bytes: int
    persistent_bytes: int
    undo_bytes: int
    exact: Exact
    updates: Updates
    workspace_bytes: Workspace = field(default_factory=dict)
    time_s: float | None = None
    energy_j: float | None = None
    keep_all_time_s: float | None = None
    origin: Origin | None = None
    bound: Bound | None = None
    note: str = ""
    kernels: Kernels = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, ...]:
        """The ops in the order in which they run, recomputed ones again."""
        return tuple(action.op for action in self.schedule if isinstance(action, Compute))

    @property
    def items(self) -> tuple[Item, ...]:
        """The ops in order, and between them what is paged: what `lifetimes.schedule` makes this schedule from."""
        out = {action.storage for action in self.schedule if isinstance(action, PageOut)}
        return tuple(
            action.op if isinstance(action, Compute) else action
            for action in self.schedule
            if not isinstance(action, Free) or action.storage in out
        )

    @property
    def paged(self) -> tuple[int, ...]:
        """The storages that go to the store, in order."""
        return tuple(action.storage for action in self.schedule if isinstance(action, PageOut))

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The ops that run again, in order, once for each time."""
        seen: set[int] = set()
        return tuple(op for op in self.order if op in seen or seen.add(op))  # type: ignore[func-returns-value]

    def kernel_of(self, action: Compute, *, again: bool) -> str:
        """The kernel that runs the op; "" for the first one of its entry."""
        way: Way = "over" if action.into is not None else "again" if again else "first"
        return self.kernels.get(way, {}).get(action.op, "")

    @property
    def gap(self) -> float | None:
        """How much less time, or energy, as a part of it, a schedule of the bound's class could take at most."""
        if self.bound is None:
            return None
        pairs = ((self.bound.energy_j, self.energy_j), (self.bound.time_s, self.time_s))
        return next(
            (max(0.0, 1 - lower_bound / amount) for lower_bound, amount in pairs if lower_bound is not None and amount),
            None,
        )

    def __str__(self) -> str:
        mb = 1e6
        ops = self.order
        again = f", {len(ops) - len(set(ops))} recomputed" if len(ops) > len(set(ops)) else ""
        time = ""
        if self.time_s is not None and self.keep_all_time_s and (self.recomputed or self.paged):
            time = f", {100 * (self.time_s / self.keep_all_time_s - 1):.1f} % more time than keeping all"
            time += f" (within {100 * self.gap:.1f} % of the best)" if self.gap is not None else ""
        time += f", {len(self.paged)} storages paged" if self.paged else ""
        time += f", {self.energy_j:.3g} J {self.origin}" if self.energy_j is not None else ""
        return (
            f"{self.planner}: {len(ops)} ops{again}, peak {self.peak_bytes / mb:.1f} MB of tensors "
            f"({self.persistent_bytes / mb:.1f} MB of it parameters, state, buffers and inputs){time}, "
            f"updates {self.updates}, {_EXACT[self.exact]}{f'; {self.note}' if self.note else ''}"
        )

    def save(self, path: str | Path) -> None:
        files.write_text(path, json.dumps(to_json(self)))

    @staticmethod
    def load(path: str | Path) -> Plan:
        return saved.load(path, "plan file", from_json)


def items_to_json(items: Iterable[Item]) -> list[list[int]]:
    return [[item] if isinstance(item, int) else [_NUMBERS[type(item)], item.storage] for item in items]


def items_from_json(rows: Iterable[Any]) -> tuple[Item, ...]:
    actions = (_action(row) for row in rows)
    return tuple(action.op if isinstance(action, Compute) else action for action in actions)


def to_json(plan: Plan) -> dict[str, Any]:
    schedule: list[list[int]] = []
    for action in plan.schedule:
        if isinstance(action, Compute):
            schedule.append([action.op] if action.into is None else [action.op, action.into])
        else:
            schedule.append([_NUMBERS[type(action)], action.storage])
    fields = {name: getattr(plan, name) for name in _FIELDS}
    return {
        "edgetrain plan": SCHEMA,
        **fields,
        "schedule": schedule,
        "workspace_bytes": {
            way: {str(op): n_bytes for op, n_bytes in bytes_of.items()}
            for way, bytes_of in plan.workspace_bytes.items()
        },
        "time_s": plan.time_s,
        "energy_j": plan.energy_j,
        "origin": plan.origin,
        "keep_all_time_s": plan.keep_all_time_s,
        "bound": None if plan.bound is None else [plan.bound.time_s, plan.bound.schedules, plan.bound.energy_j],
        "note": plan.note,
        "kernels": {way: {str(op): name for op, name in names.items()} for way, names in plan.kernels.items()},
    }


# In a file an action is a list of numbers: that of the op, and of what it overwrites; or one of these and a storage.
_NUMBERS: dict[type[Free | PageOut | PageIn], int] = {Free: -1, PageOut: -2, PageIn: -3}
_FIELDS = {
    "planner": str,
    "graph_key": str,
    "peak_bytes": int,
    "persistent_bytes": int,
    "undo_bytes": int,
    "exact": str,
    "updates": str,
}


def from_json(data: dict[str, Any]) -> Plan:
    if data["edgetrain plan"] != SCHEMA:
        raise ValueError(f"schema {data['edgetrain plan']!r}, expected {SCHEMA}")
    for name, kind in _FIELDS.items():
        if type(data[name]) is not kind:
            raise ValueError(f"{name} is {data[name]!r}")
    if data["origin"] not in (None, "measured", "modelled"):
        raise ValueError(f"origin is {data['origin']!r}")
    if data["exact"] not in get_args(Exact) or data["updates"] not in get_args(Updates):
        raise ValueError(f"exact is {data['exact']!r}, updates is {data['updates']!r}")
    workspace = {
        way: {int(op): n_bytes for op, n_bytes in bytes_of.items()} for way, bytes_of in data["workspace_bytes"].items()
    }
    numbers = [n for bytes_of in workspace.values() for entry in bytes_of.items() for n in entry]
    if not set(workspace) <= set(WAYS) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("workspace_bytes holds something else than numbers of bytes")
    return Plan(
        **{name: data[name] for name in _FIELDS},
        schedule=tuple(_action(row) for row in data["schedule"]),
        workspace_bytes=workspace,
        time_s=_amount(data["time_s"]),
        energy_j=_amount(data["energy_j"]),
        origin=data["origin"],
        keep_all_time_s=_amount(data["keep_all_time_s"]),
        bound=None if data["bound"] is None else _bound(*data["bound"]),
        note=str(data["note"]),
        kernels=_kernels(data.get("kernels", {})),
    )


def _kernels(data: Any) -> Kernels:
    """Plans that were saved before there were several kernels name none."""
    if not set(data) <= set(WAYS) or not all(type(name) is str for names in data.values() for name in names.values()):
        raise ValueError("kernels holds something else than names of kernels")
    return {way: {int(op): name for op, name in names.items()} for way, names in data.items()}


def _bound(time_s: Any, schedules: Any, energy_j: Any) -> Bound:
    return Bound(_amount(time_s), str(schedules), _amount(energy_j))


def _amount(value: Any) -> float | None:
    if value is not None and not (isinstance(value, float | int) and math.isfinite(value) and value >= 0):
        raise ValueError(f"a time or an energy is {value!r}")
    return None if value is None else float(value)


def _action(row: Any) -> Action:
    if not all(type(n) is int for n in row) or not 1 <= len(row) <= 2 or min(row[1:], default=0) < 0:
        raise ValueError(f"an action is {row!r}")
    if row[0] >= 0:
        return Compute(row[0], row[1] if len(row) == 2 else None)
    kind = next((kind for kind, number in _NUMBERS.items() if number == row[0]), None)
    if kind is None or len(row) != 2:
        raise ValueError(f"an action is {row!r}")
    return kind(row[1])
