"""Plans that page, made by hand or at random, and disks that fail: for tests of several folders."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from edgetrain.costs.table import Costs, Store
from edgetrain.errors import InternalError
from edgetrain.pagefile import Calls
from edgetrain.plan.plan import Free, Item, PageIn, PageOut, Plan
from edgetrain.plan.problem import Problem
from edgetrain.plan.validate import validate

STORE = Store(in_bytes_s=1e9, out_bytes_s=5e8, in_latency_s=1e-4, out_latency_s=2e-4, power_w=2.0)


@dataclass(frozen=True, order=True)
class Gap:
    """A storage that is away between two uses, by positions in the order: paged out after the op at `out`, freed after
    that at `free`, paged in before that at `back`. stores: False where the store still has it from an earlier gap."""

    out: int
    free: int
    back: int
    storage: int
    stores: bool = True


def with_store(costs: Costs, store: Store = STORE) -> Costs:
    return replace(costs, store=store)


def uses(task: Problem) -> dict[int, list[int]]:
    """Storage that can be paged → the positions of the ops that make and read it."""
    found: dict[int, list[int]] = {}
    for at, op in enumerate(task.order):
        for s in dict.fromkeys((*task.makes[op], *task.reads[op])):
            if s in task.pageable:
                found.setdefault(s, []).append(at)
    return found


def widest_gaps(task: Problem) -> list[Gap]:
    """Each storage away as long as can be: between the two uses that are farthest apart."""
    gaps = []
    for s, at in uses(task).items():
        out, back = max(pairwise(at), key=lambda pair: pair[1] - pair[0], default=(0, 0))
        if back - out > 1:
            gaps.append(Gap(out, (out + back) // 2, back, s))
    return sorted(gaps)


def random_gaps(task: Problem, draw: random.Random, part: float) -> list[Gap]:
    """Some storages, away at any time at which that is legal, in some of their gaps again."""
    gaps = []
    for s, at in uses(task).items():
        stored = False
        for use, following in pairwise(at):
            if draw.random() < part:
                out, free, back = use, *sorted(draw.randint(use, following) for _ in range(2))
                again = stored and draw.random() < 0.7
                gaps.append(Gap(out, out if again else min(free, following - 1), max(back, out + 1), s, not again))
                stored = True
    return sorted(gaps)


def items(task: Problem, gaps: Iterable[Gap], order: Sequence[int] | None = None) -> list[Item]:
    after: dict[int, list[Item]] = {}
    before: dict[int, list[Item]] = {}
    for gap in gaps:
        if gap.stores:
            after.setdefault(gap.out, []).insert(0, PageOut(gap.storage))
            after.setdefault(gap.free, []).append(Free(gap.storage))
        before.setdefault(gap.back, []).append(PageIn(gap.storage))
    found: list[Item] = []
    for at, op in enumerate(order or task.order):
        found += [*before.get(at, ()), op, *after.get(at, ())]
    return found


def legal(task: Problem, plan: Plan) -> bool:
    """False where something is paged in that could not be recomputed, and must be. Any other fault of the plan is
    raised."""
    try:
        validate(task.graph, plan)
    except InternalError as error:
        if "could not be recomputed" not in str(error):
            raise
        return False
    return True


def paged_plan(task: Problem, gaps: Sequence[Gap]) -> Plan:
    """The plan with as many of the gaps as are legal."""
    until = task.tables.until
    updated = next(at for at, op in enumerate(task.order) if task.graph.ops[op].phase == "update")
    first = {"early": 0, "guarded": len(task.order), "together": updated}[task.updates]  # from here on, none is lost
    taken = [gap for gap in gaps if gap.back < first or until[gap.storage] >= gap.back]
    plan = task.plan(items(task, taken), planner="by hand")
    while not legal(task, plan):
        taken = taken[: len(taken) // 2]
        plan = task.plan(items(task, taken), planner="by hand")
    return plan


class Disk:
    """A disk whose transfers can be told to fail.

    log: "w" or "r" for each. at: the number of the one that goes wrong: "error", "flip" (another bit comes back),
    "short" (the file ends), "interrupt" (Ctrl-C comes meanwhile). A write goes wrong by an error in any case but the
    last. slow_s: what each takes at least.
    """

    def __init__(self, at: int = -1, kind: str = "error", *, slow_s: float = 0.0) -> None:
        self.log: list[str] = []
        self.at, self.kind, self.slow_s = at, kind, slow_s
        self.moving = False
        self.calls = Calls(self._write, self._read)

    def arm(self, at: int, kind: str) -> None:
        self.log.clear()
        self.at, self.kind = at, kind

    def disarm(self) -> None:
        self.arm(-1, "error")

    def _begin(self, sort: str) -> bool:
        self.moving = True
        self.log.append(sort)
        bad = len(self.log) - 1 == self.at
        if bad and self.kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
            return False
        time.sleep(self.slow_s)
        if bad and (sort == "w" or self.kind == "error"):
            self.moving = False
            raise OSError(errno.EIO, "Input/output error")
        return bad

    def _write(self, file: int, view: memoryview, at: int) -> int:
        self._begin("w")
        n = os.pwrite(file, view, at)
        self.moving = False
        return n

    def _read(self, file: int, view: memoryview, at: int) -> int:
        bad = self._begin("r")
        n = 0 if bad and self.kind == "short" else os.preadv(file, [view], at)
        if bad and self.kind == "flip":
            view[0] ^= 4
        self.moving = False
        return n
