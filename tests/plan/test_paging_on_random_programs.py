"""Random programs that page at random: what goes, when its memory goes, when it comes back, how fast the store is, and
whether the disk fails. Every plan is legal and gives the numbers of keeping all."""

from __future__ import annotations

import os
import random
import tempfile

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgetrain.costs.table import Store
from edgetrain.errors import UserError
from edgetrain.plan.plan import Updates
from edgetrain.plan.problem import problem
from edgetrain.plan.timing import play
from edgetrain.plan.validate import validate
from edgetrain.run.compiled import CompiledStep
from edgetrain.run.conditions import Conditions
from tests.helpers.paged import Disk, paged_plan, random_gaps, with_store
from tests.helpers.plain import bits, differing, run
from tests.plan.test_plans_on_random_programs import fresh, learnt, made_up
from tests.plan.test_random_programs import Instruction, instructions

EXAMPLES = int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 3


@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
@given(
    code=st.lists(instructions, min_size=1, max_size=12),
    updates=st.sampled_from(["early", "guarded", "together"]),
    part=st.floats(0.05, 1.0),
    speed=st.floats(3.0, 10.0),
    seed=st.integers(0, 2**16),
    fault=st.sampled_from([None, "error", "flip", "short"]),
)
def test_random_programs_page_as_they_like(
    code: list[Instruction], updates: Updates, part: float, speed: float, seed: int, fault: str | None
) -> None:
    graph, (losses, right) = learnt(code, updates)
    draw = random.Random(seed)
    costs = with_store(made_up(graph, seed), Store(10**speed, 10 ** draw.uniform(3, 10), 1e-5, 1e-4))
    task = problem(graph, costs, updates)
    plan = paged_plan(task, random_gaps(task, draw, part))
    validate(graph, plan)
    assert plan.peak_bytes == task.peak_bytes(plan.items)
    timing = play(graph, plan.schedule, costs)
    assert timing.time_s >= task.keep_all_time_s - 1e-12
    assert abs(timing.time_s - timing.waited_s - costs.time_s(plan.order)) < 1e-9
    if not plan.paged:
        return
    disk = Disk()
    if fault is not None:
        disk.arm(draw.randrange(2 * len(plan.paged)), fault)
    ours, batches = fresh(code)
    with tempfile.TemporaryDirectory() as folder:
        step = CompiledStep(
            graph,
            plan,
            ours.model,
            ours.optimizer,
            {},
            costs=costs,
            conditions=Conditions(page_to=folder, page_calls=disk.calls),
        )
        try:
            found = run(step, batches)
        except UserError:  # taken back, where that is possible; nothing has changed
            assert fault is not None
            assert updates != "early"
            found = run(step, batches)
        assert torch.equal(bits(found), bits(losses))
        assert differing(ours.snapshot(), right) == []
        assert fault is None or step.page_fault is not None
        assert os.listdir(folder) == []
