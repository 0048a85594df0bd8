"""Random programs trained for real while everything moves: a store of any speed, a budget that falls and rises between
steps and in the middle of them, and a disk that fails. Plans are legal, numbers are bitwise those of keeping all, and
no step takes more than the budget that was there when it began.

    budget   ──┐  ┌────┐      ┌───        asked before every op
               └──┘    └──────┘
    store      ├─ out ─┤  ├─ in ─✗        one transfer goes wrong
    steps    │ 0 │ 1 │ 2 │ 3 │            each with the loss, and at the end the state, of keeping all

What ops ask of the allocator is measured, so that bytes are real; their times and the store are made up. Most plans
page at random (`paged.py`), some are those of the planners. `EDGETRAIN_EXAMPLES` asks for more.
"""

from __future__ import annotations

import functools
import math
import os
import random
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import edgetrain as et
from edgetrain.costs.measured import measure_costs
from edgetrain.costs.table import Costs, OpCost, Run, Store
from edgetrain.errors import Infeasible, UserError
from edgetrain.graph.ir import Graph
from edgetrain.plan.plan import Plan
from edgetrain.plan.planning import Series
from edgetrain.plan.problem import Problem
from edgetrain.run import adaptive
from edgetrain.run.compiled import CompiledStep
from edgetrain.run.paging import Pages
from edgetrain.run.step import PagingWarning, Step
from tests.helpers.marks import needs_arena
from tests.helpers.paged import Disk, paged_plan, random_gaps
from tests.helpers.plain import Training, bits, differing, sgd
from tests.plan.test_random_programs import BATCH, WIDTH, Instruction, Program, instructions, loss

pytestmark = [
    needs_arena,
    pytest.mark.usefixtures("one_cache"),
]
EXAMPLES = int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 12
PLENTY = 10**12
STEPS = 4
PLAN = Series.plan
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"check_finite": True}, {"clip_norm": 1.0})


class Deep(Program):
    """Each value joins a running total, which the backward pass reads: so there is something to make again or to page
    all along the step. (`Program` reads all values at once, and no plan is much smaller than keeping all.)"""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [self.first(x)]
        total: torch.Tensor = values[0]
        for number, step in enumerate(self.code):
            values.append(self.execute(str(number), step, values[step.a % len(values)], values[step.b % len(values)]))
            total = torch.tanh(total + values[-1]) * 1.5
        return total


def fresh(code: list[Instruction]) -> tuple[Training, list[tuple[torch.Tensor]]]:
    torch.manual_seed(0)
    model = Deep(code).double()
    batches = [(torch.randn(BATCH, WIDTH, dtype=torch.float64),) for _ in range(2)]
    return Training(model, sgd(model.parameters()), loss), batches


@dataclass
class Trace:
    """A budget that changes now and then when it is asked for, within what plans hold and below."""

    draw: random.Random
    often: float
    low: int = PLENTY
    high: int = PLENTY
    now: int = PLENTY
    calm: bool = True  # until the next time it is asked for
    falls: int = 0

    def __call__(self) -> int:
        if not self.calm and self.draw.random() < self.often:
            before, self.now = self.now, self.draw.choice((PLENTY, self.draw.randint(self.low, self.high)))
            self.falls += self.now < before
        self.calm = False
        return self.now

    def plenty(self) -> None:
        self.now, self.calm = PLENTY, True


class Fire:
    """What a step meets: costs that are made up, a disk, and the budgets at which it began."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.disk = draw, Disk()
        self.seed = draw.random()
        self.store = Store(10 ** draw.uniform(4, 9), 10 ** draw.uniform(4, 9), 10 ** draw.uniform(-7, -4), 1e-6)
        self.began: list[int] = []  # budgets

    def costs(self, graph: Graph, *, page_to: str | None = None, **how: Any) -> Costs:
        """Measured bytes, made-up times."""
        real = measure_costs(graph, rounds=1, **how)
        times = random.Random(self.seed)

        def cost(op: OpCost) -> OpCost:
            return OpCost({way: Run(10 ** times.uniform(-6, -3), run.events) for way, run in op.ways.items()})

        ops = tuple(
            OpCost({"first": Run(0.0)}) if op.view else cost(c) for op, c in zip(graph.ops, real.ops, strict=True)
        )
        return replace(real, ops=ops, store=None if page_to is None else self.store)

    def plan(self, series: Series, task: Problem, budget: et.Budget, **how: Any) -> Plan:
        """One that pages at random where the store is there and that keeps the budget; else the planner's own."""
        if task.costs.store is not None and series.planner.name == "fast" and budget.memory_bytes is not None:
            for _ in range(5):
                made = paged_plan(task, random_gaps(task, self.draw, self.draw.uniform(0.1, 1.0)))
                if made.paged and made.peak_bytes <= budget.memory_bytes:
                    return made
        return PLAN(series, task, budget, **how)

    @contextmanager
    def around(self) -> Iterator[None]:
        within = adaptive.Ladder.within

        def noted(ladder: adaptive.Ladder, budget_bytes: int) -> int:
            self.began.append(budget_bytes)
            return within(ladder, budget_bytes)

        with (
            patch("edgetrain.run.graph_planner.measure_costs", self.costs),
            patch.object(Series, "plan", lambda series, *given, **how: self.plan(series, *given, **how)),
            patch("edgetrain.run.compiled.Pages", lambda *args, calls: Pages(*args, calls=self.disk.calls)),
            patch.object(adaptive, "PERIOD_S", 0.0),
            patch.object(adaptive, "ASKING_PART", math.inf),
            patch.object(adaptive, "RUNGS", 4),
            patch.object(adaptive.Ladder, "within", noted),
        ):
            yield


def prepared(ours: Training, batch: tuple[torch.Tensor], **how: Any) -> Step:
    return et.prepare(ours.model, loss, ours.optimizer, batch, unused="freeze", use_cache=False, **how)


def under_budget(make: Callable[[int], Step], keep_all_bytes: int, part: float) -> tuple[Step, int]:
    """The step for a part of what keeping all holds, or for the least that there is."""
    memory = max(1, int(part * keep_all_bytes))
    try:
        return make(memory), memory
    except Infeasible as answer:
        return make(answer.smallest_bytes), answer.smallest_bytes


def call(step: Step, number: int, batch: tuple[torch.Tensor]) -> torch.Tensor | None:
    """The loss; None where something is not finite."""
    torch.manual_seed(number)
    try:
        return step(*batch)
    except UserError as error:
        if "not finite" not in str(error):
            raise
        return None


def called(
    step: Step, ours: Training, number: int, batch: tuple[torch.Tensor], trace: Trace | None
) -> torch.Tensor | None:
    """As `call`, again where it was refused or taken back; nothing has changed then."""
    while True:
        torch.manual_seed(number)
        before = ours.snapshot()
        try:
            return call(step, number, batch)
        except Infeasible:  # a budget under the smallest plan
            assert trace is not None
            trace.plenty()
        except UserError as error:  # a gradient that did not come back
            if "the step was taken back" not in str(error):
                raise
        assert differing(ours.snapshot(), before) == []


def require_account(step: Step, budget_bytes: int) -> None:
    """The plan keeps the budget with which the step began, and so does the step, but for what a fault is said to
    take."""
    used = step.used
    assert isinstance(used, CompiledStep)
    assert used.arena is not None
    assert used.plan.peak_bytes <= budget_bytes
    more = re.search(r"(\d+) bytes more than planned", str(used.page_fault))
    assert used.arena.most_bytes + used.plan.persistent_bytes <= used.plan.peak_bytes + (int(more[1]) if more else 0)


@settings(
    max_examples=EXAMPLES, deadline=None, derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    code=st.lists(instructions, min_size=3, max_size=12),
    options=st.sampled_from(OPTIONS),
    seed=st.integers(0, 2**32),
)
def test_whatever_moves_or_fails_the_numbers_are_those_of_keeping_all(
    code: list[Instruction], options: dict[str, Any], seed: int
) -> None:
    draw = random.Random(seed)
    planner = draw.choice(("fast",) * 8 + ("optimal", "sage"))
    moves, fault = draw.random() < 0.8, draw.choice((None, "error", "flip", "short"))
    fire = Fire(draw)
    plain, batches = fresh(code)
    ours, _ = fresh(code)
    trace = Trace(draw, often=draw.choice((0.005, 0.02, 0.1))) if moves else None
    with tempfile.TemporaryDirectory() as folder, fire.around(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        right = prepared(plain, batches[0], **options)
        make = functools.partial(
            prepared, ours, batches[0], planner=planner, plan_time_s=0.1, page_to=folder, **options
        )
        if trace is None:
            step, budget_bytes = under_budget(lambda m: make(memory=m), right.plan.peak_bytes, draw.uniform(0.2, 1.1))
        else:
            step, budget_bytes = make(memory=trace), 0
            (variant,) = step._variants.values()
            assert variant.ladder is not None
            most, least = (variant.ladder.plans[at].peak_bytes for at in (0, -1))
            trace.low, trace.high = least - draw.choice((0, 0, (most - least) // 2)), most
        struck = draw.randrange(STEPS)
        for number in range(STEPS):
            if fault is not None and number == struck:
                fire.disk.arm(draw.randrange(8), fault)
            batch = batches[number % len(batches)]
            expected = call(right, number, batch)
            found = called(step, ours, number, batch, trace)
            assert (found is None) == (expected is None)
            assert found is None or expected is None or torch.equal(bits(found), bits(expected))
            if found is not None:
                require_account(step, fire.began[-1] if moves else budget_bytes)
        assert differing(ours.snapshot(), plain.snapshot()) == []
        assert os.listdir(folder) == []
    faults = [warning for warning in told if issubclass(warning.category, PagingWarning)]
    assert not faults or fault is not None
    event(f"transfers: {bool(fire.disk.log)}")
    event(f"faults: {len(faults)}")
    event(f"falls within steps: {any(switch.in_step for switch in step.switches)}")
    event(f"faults and falls: {bool(faults) and any(switch.in_step for switch in step.switches)}")
