"""What the ops of a step take, kept in a run folder: attribution.json.

In:  the shares that `attribute.py` found, over the ops of a timeline, by their places in it.
Out: `Attributed`, one a quantity (energy in J, CPU time in s), with amounts of one step, and back from the file.

    ops       0 conv   1 norm   2 relu   3 conv …
    groups    (0,)     (1, 2)            (3,)            1 and 2 could not be told apart: one amount for both

Promised: an op is in one group at most; an amount that is not known is None, never 0; an end of an interval that is not
known is None. What is read may come from anywhere: a field that is wrong is a `UserError` that names it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol, cast, get_args

from edgetrain.files import write_text
from edgetrain.measure.record import Origin
from edgetrain.saved import Fields, read_object

SCHEMA = 1
FILE = "attribution.json"
_MAX_QUANTITIES = 100


@dataclass(frozen=True, slots=True)
class Group:
    """Ops that could not be told apart, and what they take together in one step, with its 95 % interval.

    ops: places in the timeline. idle: the time between ops is in it, too.
    """

    ops: tuple[int, ...]
    amount: float | None
    low: float | None
    high: float | None
    idle: bool = False


@dataclass(frozen=True)
class Attributed:
    """One quantity over the ops of a step.

    quantity: "energy", "cpu time" …  unit: "J", "s" …  source: the channel whose samples were attributed.
    noise: what one sample window differs from what the groups say, as a part; None where it is not known.
    """

    quantity: str
    unit: str
    origin: Origin
    source: str
    groups: tuple[Group, ...]
    windows: int
    noise: float | None = None


class ShareLike(Protocol):
    """A share of `attribute.py`: names of ops, and what they take over all steps."""

    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def amount(self) -> float | None: ...
    @property
    def amount_low(self) -> float | None: ...
    @property
    def amount_high(self) -> float | None: ...


def op_names(n_ops: int) -> tuple[str, ...]:
    """Names under which the ops of a timeline are attributed.

    Their own will not do: an op that is recomputed, or that runs in each micro-batch, has the same name each time.
    """
    return tuple(str(place) for place in range(n_ops))


def groups(shares: Sequence[ShareLike], steps: int) -> tuple[Group, ...]:
    """Shares over so many steps, named by `op_names`, as groups of one step; any other name is idle time."""
    return tuple(_group(share, steps) for share in shares)


def _group(share: ShareLike, steps: int) -> Group:
    places = tuple(sorted(int(name) for name in share.names if name.isdecimal()))
    amount, low, high = (_known(value, steps) for value in (share.amount, share.amount_low, share.amount_high))
    return Group(places, amount, low, high, len(places) < len(share.names))


def _known(value: float | None, steps: int) -> float | None:
    return value / steps if value is not None and math.isfinite(value) else None


# To a file and back


def save_attributed(quantities: Sequence[Attributed], folder: Path) -> None:
    data = {"schema": SCHEMA, "attributed": [asdict(quantity) for quantity in quantities]}
    write_text(folder / FILE, json.dumps(data, allow_nan=False))


def load_attributed(folder: Path, n_ops: int) -> tuple[Attributed, ...]:
    """What a run folder holds for a timeline of so many ops; nothing where it has no attribution.json."""
    if not (folder / FILE).exists():
        return ()
    data = read_object(folder / FILE)
    data.schema(SCHEMA)
    return tuple(_attributed(entry, n_ops) for entry in data.each("attributed", _MAX_QUANTITIES))


def _attributed(data: Fields, n_ops: int) -> Attributed:
    groups = tuple(_group_from(entry, n_ops) for entry in data.each("groups"))
    places = [place for group in groups for place in group.ops]
    if len(set(places)) < len(places):
        raise data.wrong("groups", "each op in one group at most", f"op {max(places, key=places.count)} in several")
    return Attributed(
        quantity=data.get("quantity", str),
        unit=data.get("unit", str),
        origin=cast(Origin, data.choice("origin", get_args(Origin))),
        source=data.get("source", str),
        groups=groups,
        windows=data.get("windows", int),
        noise=data.maybe("noise", float),
    )


def _group_from(data: Fields, n_ops: int) -> Group:
    places = data.get("ops", list)
    for place in places:
        if type(place) is not int or not 0 <= place < n_ops:
            raise data.wrong("ops", f"places from 0 to {n_ops - 1}", repr(place)[:60])
    amount, low, high = (data.maybe(name, float) for name in ("amount", "low", "high"))
    inside = amount is None or ((low is None or low <= amount) and (high is None or amount <= high))
    if not inside:
        raise data.wrong("amount", "an amount between low and high", repr(amount)[:60])
    return Group(tuple(places), amount, low, high, data.get("idle", bool))
