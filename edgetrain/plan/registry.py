"""The planners by name. A planner of one's own comes in by `register`."""

from __future__ import annotations

from edgetrain.closest import unknown
from edgetrain.errors import UserError
from edgetrain.plan.planner import Planner
from edgetrain.plan.planners.chen import CHEN
from edgetrain.plan.planners.dtr import DTR
from edgetrain.plan.planners.fast import FAST
from edgetrain.plan.planners.keep_all import KEEP_ALL
from edgetrain.plan.planners.melon import MELON
from edgetrain.plan.planners.only import PAGE_ONLY, RECOMPUTE_ONLY
from edgetrain.plan.planners.optimal import AUTO, OPTIMAL
from edgetrain.plan.planners.poet import POET
from edgetrain.plan.planners.sage import SAGE

_PLANNERS = {
    planner.name: planner
    for planner in (
        AUTO, KEEP_ALL, OPTIMAL, POET, RECOMPUTE_ONLY, PAGE_ONLY, FAST, CHEN, DTR, MELON, SAGE,
    )
}  # fmt: skip


def register(planner: Planner) -> None:
    """Make a planner known by its name: to `et.prepare`, `et.plan` and the commands of this process."""
    if planner.name in _PLANNERS:
        raise UserError(f"there is a planner {planner.name} already", next_step="give it another name")
    _PLANNERS[planner.name] = planner


def named(name: str) -> Planner:
    """The planner of this name; a UserError with the nearest name where there is none."""
    if name not in _PLANNERS:
        raise unknown("planner", name, names())
    return _PLANNERS[name]


def names() -> tuple[str, ...]:
    return tuple(_PLANNERS)


def quick(planner: Planner) -> Planner:
    """The one that answers at once in its place."""
    return named(planner.quick or planner.name)


def help_text() -> str:
    """Every name with its line of help."""
    return "; ".join(f"{planner.name}: {planner.help}" for planner in _PLANNERS.values())
