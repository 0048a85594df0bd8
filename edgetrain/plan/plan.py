"""A plan: the full sequence of what happens in one step.

Plain data, made by a planner (`keep_all.py`), checked by `validate.py`, executed by `run/`. It can be saved, read
back equal, and is refused for any graph but the one that it was made for.

    Compute(op)              run the op; its results get fresh memory
    Compute(op, into=s)      run the op over storage s, whose content nobody needs any more
    Free(s)                  give the memory of storage s back
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from edgetrain.errors import UserError

SCHEMA = 1
Exact = Literal["bitwise", "rounding", "no"]
Updates = Literal["early", "together"]


@dataclass(frozen=True, slots=True)
class Compute:
    op: int
    into: int | None = None


@dataclass(frozen=True, slots=True)
class Free:
    storage: int


Action = Compute | Free


_SAID = {"bitwise": "numbers bitwise", "rounding": "numbers to rounding", "no": "other numbers than plain training"}


@dataclass(frozen=True)
class Plan:
    """What happens in a step, and what it takes.

    exact:   how its numbers relate to plain PyTorch's: the same bits, the same but for rounding, or not the same.
    updates: "early": each parameter is updated as soon as its gradient is there; a copy of what an update changes is
             kept until the step has succeeded (`undo_bytes` in all). "together": all updates at the end of the step,
             when nothing can fail any more. Either way a step that fails changes nothing.
    """

    planner: str
    graph_key: str
    schedule: tuple[Action, ...]
    peak_bytes: int
    persistent_bytes: int
    undo_bytes: int
    exact: Exact
    updates: Updates

    def __str__(self) -> str:
        mb = 1e6
        return (
            f"{self.planner}: {sum(isinstance(a, Compute) for a in self.schedule)} ops, "
            f"peak {self.peak_bytes / mb:.1f} MB of tensors "
            f"({self.persistent_bytes / mb:.1f} MB of it parameters, state, buffers and inputs), "
            f"updates {self.updates}, {_SAID[self.exact]}"
        )

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(_to_json(self)), encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Plan:
        try:
            return _from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise UserError(f"there is no plan file {path}") from error
        except OSError as error:
            raise UserError(f"the plan file {path} cannot be read", received=str(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{path} is not a plan file of edgetrain", received=f"{type(error).__name__}: {error}"
            ) from error


def _to_json(plan: Plan) -> dict[str, Any]:
    schedule: list[list[int]] = []
    for action in plan.schedule:
        if isinstance(action, Free):
            schedule.append([-1, action.storage])
        else:
            schedule.append([action.op] if action.into is None else [action.op, action.into])
    fields = {name: getattr(plan, name) for name in _FIELDS}
    return {"edgetrain plan": SCHEMA, **fields, "schedule": schedule}


_FIELDS = {
    "planner": str,
    "graph_key": str,
    "peak_bytes": int,
    "persistent_bytes": int,
    "undo_bytes": int,
    "exact": str,
    "updates": str,
}


def _from_json(data: dict[str, Any]) -> Plan:
    if data["edgetrain plan"] != SCHEMA:
        raise ValueError(f"schema {data['edgetrain plan']!r}, expected {SCHEMA}")
    for name, kind in _FIELDS.items():
        if type(data[name]) is not kind:
            raise ValueError(f"{name} is {data[name]!r}")
    if data["exact"] not in ("bitwise", "rounding", "no") or data["updates"] not in ("early", "together"):
        raise ValueError(f"exact is {data['exact']!r}, updates is {data['updates']!r}")
    return Plan(**{name: data[name] for name in _FIELDS}, schedule=tuple(_action(row) for row in data["schedule"]))


def _action(row: Any) -> Action:
    if not all(type(n) is int for n in row) or not 1 <= len(row) <= 2 or row == [-1]:
        raise ValueError(f"an action is {row!r}")
    if min(row) < -1 or row[-1] == -1:
        raise ValueError(f"an action is {row!r}")
    if row[0] == -1:
        return Free(row[1])
    return Compute(row[0], row[1] if len(row) == 2 else None)
