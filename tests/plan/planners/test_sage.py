"""SAGE's eviction, played on graphs; and the number of micro-batches that is taken where it is not enough."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import Infeasible, UserError
from edgetrain.plan.micro_batches import within
from edgetrain.plan.plan import Plan, Updates
from edgetrain.plan.planners.fast import FAST
from edgetrain.plan.planners.sage import SAGE, Sage, sage
from edgetrain.plan.refusal import TooSmall
from edgetrain.plan.walk import NoRoom
from tests.plan.problems import STEPS, budget, check_order, small


@settings(max_examples=40, deadline=None)
@given(
    **STEPS,
    part=st.floats(0.3, 1.0),
)
def test_every_order_is_within_the_budget_and_legal(name: str, updates: Updates, part: float) -> None:
    check_order(small(name, updates), part, sage)


class Watched(Sage):
    """Notes what is evicted, and what could have been."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.evicted: list[tuple[int, list[int]]] = []

    def choose(self, options: list[tuple[int, int]]) -> tuple[int | None, bool]:
        there = [s for s in range(len(self.live)) if self.evictable[s]]
        assert all(self.live[s] and not self.locks[s] for s in there)
        found, overwrite = super().choose(options)
        if found is not None and not overwrite:
            self.evicted.append((found, there))
        return found, overwrite


@pytest.mark.parametrize(("name", "part"), [("residual", 0.7), ("chain", 0.8), ("attention", 0.8)])
def test_what_goes_is_least_by_time_and_size(name: str, part: float) -> None:
    problem = small(name)
    walk = Watched(problem.tables, budget(problem, part))
    walk.run()
    size, maker = problem.size, problem.maker
    score = {s: (1e6 * problem.costs.ops[op].again_s + 1) / (size[s] + 1) for s, op in maker.items()}
    assert len(walk.evicted) >= 2
    assert all(score[s] == pytest.approx(min(score[other] for other in there)) for s, there in walk.evicted)
    assert any(s != max(there) for s, there in walk.evicted)


def test_it_evicts_where_memory_is_short_and_only_there() -> None:
    problem = small("residual")
    assert sage(problem, problem.keep_all.peak_bytes) == problem.order
    order = sage(problem, budget(problem, 0.7))
    assert order is not None
    assert len(order) > len(problem.order)
    assert sage(problem, problem.keep_all.persistent_bytes) is None
    with pytest.raises(NoRoom):
        Sage(problem.tables, problem.keep_all.persistent_bytes).run()


# ---- the number of micro-batches


@dataclass(frozen=True)
class Made:
    count: int
    plan: Plan


def attempts(fits: Callable[[int], bool], tried: list[int]) -> Callable[[int, bool], Made]:
    """Each takes as many seconds as there are micro-batches, and makes something twice up to 8."""
    schedule = small("chain").keep_all.schedule

    def attempt(count: int, quickly: bool) -> Made:
        tried.append(count)
        if not fits(count):
            raise (TooSmall if quickly and count == 1 else Infeasible)(
                f"{count} do not fit", smallest_bytes=100 - count, bound_bytes=1
            )
        twice = schedule if count > 8 else (*schedule, schedule[0])
        return Made(count, Plan("sage", "", twice, 1, 0, 0, "rounding", "early", time_s=float(20 - count)))

    return attempt


@pytest.mark.parametrize("least", [1, 2, 3, 5, 6, 8, 11, 13, 16])
def test_the_largest_micro_batch_that_fits_is_found_in_few_attempts(least: int) -> None:
    tried: list[int] = []
    made = within(16, attempts(lambda count: count >= least, tried), "fewest")
    assert made.count == least
    assert len(tried) == len(set(tried)) <= 8
    assert tried[0] == 1
    if least < 8:  # the other way goes on while something is made twice, and takes the least time
        assert within(16, attempts(lambda count: count >= least, []), "auto").count == 16


def test_where_none_fits_the_smallest_that_works_is_told() -> None:
    for number in ("fewest", "auto"):
        with pytest.raises(Infeasible, match="16 do not fit") as answer:
            within(16, attempts(lambda count: False, []), number)
        assert answer.value.smallest_bytes == 84


def test_a_refusal_is_told_in_the_answer_and_never_hides_a_whole_batch_that_fits() -> None:
    def attempt(count: int, quickly: bool) -> Made:
        if count > 1:
            raise UserError("micro-batches mix samples")
        return attempts(lambda _: fits, [])(count, quickly)

    fits = True
    assert within(16, attempt, "fewest").count == 1
    fits = False
    with pytest.raises(Infeasible, match="micro-batches: refused; micro-batches mix samples"):
        within(16, attempt, "fewest")
    with pytest.raises(Infeasible, match="micro-batches: so it is with 99"):
        within(16, attempt, "fewest", lambda refused, answer: f"so it is with {answer.smallest_bytes}")


def test_what_is_asked_for_counts() -> None:
    assert FAST.number_of(None) == 1
    assert SAGE.number_of(None) == "fewest"
    assert SAGE.number_of(1) == 1
    assert SAGE.number_of("auto") == "auto"
