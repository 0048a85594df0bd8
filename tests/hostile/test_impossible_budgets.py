"""Budgets that no plan keeps, of every size, for every planner: each call ends in its time, and what it says is true.

Nets are drawn at random, budgets go from a byte to keeping all. Each net is planned in a process of its own that is
ended when it takes too long, so that a hang fails here and does not hang. `EDGETRAIN_EXAMPLES` asks for more nets.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain import child
from edgetrain.costs.measured import measure_costs, measure_events
from edgetrain.errors import Infeasible, UserError
from edgetrain.graph.ir import PERSISTENT, Graph
from edgetrain.plan import planning, process, refusal, registry, unmeasured
from edgetrain.plan.budget import show_bytes
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.mip import apart, search
from edgetrain.plan.planner import Aim, Request, Schedule
from edgetrain.plan.problem import Problem, problem
from edgetrain.run import capturing, making
from edgetrain.run.activity import doing, shown_by

NETS = max(2, int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 30)
PLAN_TIME_S = 0.3
SLACK_S = 10.0  # a busy machine: what capturing, measuring and forking may take above that, for each call
GREEDY = tuple(name for name in registry.names() if registry.quick(registry.named(name)).name == name != "keep-all")
PLANNERS = ("auto", "recompute-only", "keep-all", *GREEDY)
PARTS = (0.0, 0.3, 0.9, 1.0, 1.02, 1.2, 1.6)  # of what lasts


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


@dataclass(frozen=True)
class Drawn:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, Tensor]

    def prepare(self, memory: object, **options: Any) -> et.Step:
        settings = {"plan_time_s": PLAN_TIME_S, **options}
        return et.prepare(self.model, loss, self.optimizer, self.batch, memory=memory, **settings)  # type: ignore[arg-type]

    @property
    def graph(self) -> Graph:
        return et.capture(self.model, loss, self.optimizer, self.batch)


def drawn(seed: int) -> Drawn:
    """From a single small layer to a dozen of them; one sample or several."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    widths = [rng.choice((1, 2, 3, 8, 33)) for _ in range(rng.choice((1, 2, 4, 12)))]
    layers: list[nn.Module] = []
    for a, b in zip([rng.choice((1, 3, 7)), *widths], [*widths, 2], strict=True):
        layers += [nn.Linear(a, b, bias=rng.random() < 0.7), rng.choice((nn.Tanh(), nn.ReLU(), nn.Identity()))]
    model = nn.Sequential(*layers[:-1])
    first = layers[0]
    assert isinstance(first, nn.Linear)
    makers: tuple[Callable[..., torch.optim.Optimizer], ...] = (torch.optim.SGD, torch.optim.Adam)
    samples = rng.choice((1, 2, 5, 16))
    batch = torch.randn(samples, first.in_features), torch.randint(2, (samples,))
    return Drawn(model, rng.choice(makers)(model.parameters(), lr=0.1), batch)


def lasting_of(graph: Graph) -> int:
    return sum(storage.n_bytes for storage in graph.storages if storage.role in PERSISTENT)


def working_set(graph: Graph) -> int:
    """Of the op that reads most beside what lasts: its inputs are there while it runs, whatever it overwrites."""

    def read(reads: tuple[int, ...]) -> int:
        storages = {graph.tensors[t].storage for t in reads}
        return sum(graph.storages[s].n_bytes for s in storages if graph.storages[s].role not in PERSISTENT)

    return max(read(op.reads) for op in graph.ops)


def watched(work: Callable[[], list[str]], limit_s: float) -> list[str]:
    """What `work` says in a process of its own; it fails where that does not end."""

    def alone() -> list[str]:
        torch.set_num_threads(1)
        return work()

    try:
        found: list[str] = child.forked(alone, time_limit_s=limit_s)
    except child.Ended:
        pytest.fail(f"it did not end in {limit_s:.0f} s")
    return found


AMOUNT = r"([\d.]+ [kMG]?B)"


def misspoken(answer: Infeasible, budget: int) -> list[str]:
    """Where the words of an answer are not its numbers."""
    text, lasting = str(answer), sum(n_bytes for _, n_bytes in answer.lasting)
    claims: list[tuple[str, object]] = [
        (f"fits in {AMOUNT}:", show_bytes(budget)), (rf"{AMOUNT} \(\d+ bytes\)", show_bytes(answer.smallest_bytes)),
        (f"{AMOUNT} is a proven lower bound", show_bytes(answer.bound_bytes)),
        (r"takes (\d+) bytes", answer.bound_bytes),
        (r"known to work: (\d+) bytes", answer.smallest_bytes), (r"ask for (\d+) bytes", answer.smallest_bytes),
        (f"lasting: {AMOUNT}:", show_bytes(lasting)), (f"alive there: {AMOUNT}", show_bytes(lasting)),
    ]  # fmt: skip
    found = [(re.search(pattern, text), right) for pattern, right in claims]
    if "no plan fits in" in text and not all(match for match, _ in found):
        return [f"something is not said: {text}"]
    return [f"{match[0]}: not {right}" for match, right in found if match is not None and match[1] != str(right)]


def wrong(answer: Infeasible, budget: int, graph: Graph, *, whole: bool) -> list[str]:
    """What is not right about an answer, as text. whole: it is of the graph itself, not of micro-batches."""
    said = misspoken(answer, budget)
    if not answer.bound_bytes <= answer.smallest_bytes:
        said.append(f"bound {answer.bound_bytes} above what works, {answer.smallest_bytes}")
    if budget >= answer.smallest_bytes:
        said.append(f"{budget} was refused, and {answer.smallest_bytes} is said to work")
    sizes = [n_bytes for _, n_bytes in answer.lasting]
    if not sizes or sizes != sorted(sizes, reverse=True):
        said.append(f"lasting: {answer.lasting}")
    if sum(sizes) > answer.bound_bytes:
        said.append("what lasts is above the bound")
    if whole and sum(sizes) != lasting_of(graph):
        said.append(f"{sum(sizes)} bytes last, not {lasting_of(graph)}")
    if whole and answer.bound_bytes < lasting_of(graph) + working_set(graph):
        said.append("the bound is below what one op reads")
    return said


def attempts(net: Drawn, budgets: list[int], **options: Any) -> list[str]:
    """All that is wrong with what is planned or refused; and what is said to work does."""
    graph, said, works = net.graph, list[str](), set[int]()
    moves = options.pop("moves", False)
    whole = options.get("micro_batches") is None and options.get("planner") != "sage"

    def prepared(budget: int) -> None:
        begin = time.monotonic()
        try:
            step = net.prepare((lambda: budget) if moves else budget, **options)
            if step.plan.peak_bytes > budget:
                said.append(f"{budget}: the plan takes {step.plan.peak_bytes}")
        finally:
            if time.monotonic() - begin > PLAN_TIME_S + SLACK_S:
                said.append(f"{budget}: {time.monotonic() - begin:.1f} s")

    for budget in budgets:
        try:
            prepared(budget)
        except Infeasible as answer:
            said += [f"{budget}: {text}" for text in wrong(answer, budget, graph, whole=whole)]
            works.add(answer.smallest_bytes)
            if budget == budgets[0] and answer.bound_bytes - 1 not in budgets:
                budgets.append(answer.bound_bytes - 1)
                budgets.append((answer.bound_bytes + answer.smallest_bytes) // 2)
    for budget in sorted(works):
        try:
            prepared(budget)
        except Infeasible as answer:
            said.append(f"{budget} was said to work: {answer}")
    return said


def over_the_range(graph: Graph) -> list[int]:
    lasting, most = lasting_of(graph), keep_all(graph).peak_bytes
    return [1, *(max(1, int(part * lasting)) for part in PARTS), most - 1, most]


@pytest.mark.parametrize("seed", range(NETS))
@pytest.mark.parametrize("planner", PLANNERS)
def test_every_budget_is_kept_or_refused_with_evidence(planner: str, seed: int) -> None:
    net = drawn(seed)
    budgets = over_the_range(net.graph)
    said = watched(lambda: attempts(net, budgets, planner=planner), len(budgets) * (PLAN_TIME_S + SLACK_S))
    assert not said, "\n".join(said)


@pytest.mark.parametrize("options", [
    {"micro_batches": 2}, {"micro_batches": "auto"}, {"moves": True}, {"moves": True, "micro_batches": "auto"},
    {"moves": True, "planner": "optimal"}, {"page_to": "."}, {"use_cache": False}, {"plan_time_s": 1e-6},
    {"check_finite": True, "clip_norm": 1.0}, {"planner": "dtr", "plan_time_s": 1e-6},
], ids=str)  # fmt: skip
def test_with_every_option(options: dict[str, Any], tmp_path: Any) -> None:
    if "page_to" in options:
        options = {**options, "page_to": str(tmp_path)}
    net = drawn(5)
    budgets = over_the_range(net.graph)[::3]
    said = watched(lambda: attempts(net, budgets, **options), len(budgets) * (PLAN_TIME_S + SLACK_S))
    assert not said, "\n".join(said)


def dropping() -> Drawn:
    """What it draws is copied before the first micro-batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 40), nn.Dropout(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))
    batch = torch.randn(16, 7), torch.randint(2, (16,))
    return Drawn(model, torch.optim.Adam(model.parameters()), batch)


@pytest.mark.parametrize(("count", "moves"), [(2, False), ("auto", True)])
def test_bytes_beside_micro_batches_are_in_every_number_of_an_answer(count: int | str, moves: bool) -> None:
    net, options = dropping(), {"micro_batches": count, "allow_inexact": True, "moves": moves}
    budgets = [lasting_of(net.graph) + 6000]
    said = watched(lambda: attempts(net, budgets, **options), 5 * (PLAN_TIME_S + SLACK_S))
    assert not said, "\n".join(said)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"micro_batches": "auto"}], ids=str)
def test_a_process_that_is_too_small_gets_the_same_evidence(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = dropping()
    options = {**options, "allow_inexact": True, "planner": "fast"}
    monkeypatch.setattr(process, "resident_bytes", lambda: 400_000_000)
    with pytest.raises(Infeasible, match="proven: ") as caught:
        net.prepare(None, process_memory=1, **options)
    answer = caught.value
    assert sum(n_bytes for _, n_bytes in answer.lasting) >= lasting_of(net.graph)
    assert 400_000_000 < answer.bound_bytes < answer.smallest_bytes
    with pytest.raises(Infeasible):
        net.prepare(None, process_memory=answer.bound_bytes - 1, **options)
    net.prepare(None, process_memory=answer.smallest_bytes, **options)


def test_other_ways_to_cut_a_batch_that_is_slow_to_capture_are_looked_at_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capturing, "SLOW_S", 0.0)
    monkeypatch.setattr(making, "AT_ONCE_S", 0.0)
    monkeypatch.setattr(making, "ADVICE_S", 0.0)
    with pytest.raises(Infeasible, match="micro-batches: not looked at"):
        drawn(3).prepare(1)


@pytest.mark.parametrize("memory", [0, -1, 0.5, math.nan, math.inf, "", "MB", "-3MB", "1e400B", [], True])
def test_nonsense_is_a_mistake_and_not_a_budget(memory: object) -> None:
    with pytest.raises(UserError):
        drawn(0).prepare(memory)


@pytest.mark.parametrize("limit", [-1.0, math.nan, math.inf, "10", None, True])
def test_nonsense_is_no_time(limit: Any) -> None:
    graph = drawn(0).graph
    with pytest.raises(UserError):
        et.plan(graph, measure_costs(graph, rounds=1), et.Budget(10**6), time_limit_s=limit)


# ---- nothing is searched, measured or tested for what a bound proves -----------------------------------------------


class Touched(BaseException):
    """What must not run has run."""


def untouchable(*given: object, **named: object) -> Any:
    raise Touched


def convolutions() -> Drawn:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.LazyLinear(2))
    batch = torch.randn(16, 3, 64, 64), torch.randint(2, (16,))
    model(batch[0])
    return Drawn(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batch)


@pytest.mark.parametrize("options", [{}, {"micro_batches": 4}, {"micro_batches": "auto"}, {"moves": True}], ids=str)
def test_the_impossible_is_refused_before_anything_is_measured_or_tested(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, options = convolutions(), dict(options)
    assert unmeasured.is_heavy(net.graph)
    moves = options.pop("moves", False)
    for module, name in (("graph_planner", "measure_costs"), ("require_mean", "why_no_mean")):
        monkeypatch.setattr(f"edgetrain.run.{module}.{name}", untouchable)
    with pytest.raises(Infeasible) as caught:
        net.prepare((lambda: 1000) if moves else 1000, **options)
    answer = caught.value
    assert answer.lasting
    monkeypatch.undo()
    with pytest.raises(Infeasible):
        net.prepare((lambda: answer.bound_bytes - 1) if moves else answer.bound_bytes - 1, **options)
    works = answer.smallest_bytes
    assert net.prepare((lambda: works) if moves else works, **options).plan.peak_bytes <= works


@pytest.mark.parametrize("planner", ["auto", *GREEDY])
def test_a_workspace_that_was_not_measured_is_not_smaller_than_it_is(planner: str) -> None:
    net = convolutions()
    graph = net.graph
    updates = keep_all(graph).updates
    real = problem(graph, measure_costs(graph, rounds=1), updates)
    upper = problem(graph, unmeasured.unmeasured(graph), updates)
    task, bound = unmeasured.looked_at(upper)
    for there in (upper, task):
        for way, workspace in real.costs.workspace_bytes.items():
            assert all(there.costs.workspace_bytes[way].get(op, 0) >= n for op, n in workspace.items())
    assert unmeasured.own_bytes(real).keys() == {n for n, op in enumerate(graph.ops) if not op.view}
    assert bound <= refusal.lower_bound_bytes(real)
    order, peak, _ = planning.known_to_work(task, registry.named(planner), until=math.inf)
    assert real.peak_bytes(order) <= peak


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 4, 513, padding=256), (2, 4, 2000)),
        (nn.Conv1d(16, 16, 129, groups=16), (1, 16, 4000)),
        (nn.Conv2d(4, 8, (5, 33), stride=2), (4, 4, 60, 97)),
        (nn.Conv2d(32, 1, 14), (2, 32, 20, 64)),
        (nn.Conv3d(3, 8, 5), (1, 3, 24, 20, 12)),
        (nn.ConvTranspose3d(3, 3, 5, dilation=3), (2, 3, 24, 20, 12)),
        (nn.ConvTranspose2d(4, 8, 14, groups=4, dilation=3), (2, 4, 60, 49)),
        (nn.Conv2d(8, 16, 9, groups=8).double(), (2, 8, 64, 64)),
    ],
    ids=lambda given: str(given),
)
def test_a_convolution_of_any_kind_takes_no_more_than_it_is_taken_to(layer: nn.Module, shape: tuple[int, ...]) -> None:
    """oneDNN lays out columns where filters are wide or channels few, and takes channels in blocks."""
    model = nn.Sequential(layer)
    dtype = next(layer.parameters()).dtype
    x = torch.randn(shape, dtype=dtype)
    scale = nn.Parameter(torch.ones((), dtype=dtype))
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
    graph = et.capture(model, lambda model, x: model(x * scale).square().mean(), optimizer, (x,))
    taken = unmeasured.unmeasured(graph).workspace_bytes["first"]
    seen = [n for n, op in enumerate(graph.ops) if "convolution" in op.kind]
    assert len(seen) >= 2
    for number in seen:
        assert measure_events(graph, number)["first"].workspace_bytes <= taken[number], graph.ops[number].kind


def made_task() -> Problem:
    graph = drawn(7).graph
    return problem(graph, measure_costs(graph, rounds=1), keep_all(graph).updates)


def test_a_solver_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def forever(*given: object, **named: object) -> Any:
        while True:
            time.sleep(1)

    monkeypatch.setattr(apart, "optimal", forever)
    monkeypatch.setattr(apart, "smallest_order", forever)
    task = made_task()
    for budget in (1, refusal.lower_bound_bytes(task), task.keep_all.peak_bytes - 1):
        begin = time.monotonic()
        with contextlib.suppress(Infeasible):
            made = et.plan(task.graph, task.costs, et.Budget(budget), time_limit_s=0.1, use_cache=False)
            assert made.peak_bytes <= budget
        assert time.monotonic() - begin < 0.1 + 3 * apart.ENDING_S + SLACK_S


@pytest.mark.parametrize("planner", GREEDY)
def test_a_greedy_planner_gives_up_when_its_time_is_over(planner: str) -> None:
    task = made_task()
    request = Request(task, refusal.lower_bound_bytes(task), until=time.monotonic() - 1)
    assert registry.named(planner).find(request).order is None


@pytest.mark.parametrize("high", range(2, 12))
def test_bisection_ends_on_few_bytes(high: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no planner keeps, between a bound and a peak one byte and more apart."""
    task = made_task()
    monkeypatch.setattr(refusal, "lower_bound_bytes", lambda task: 1)
    monkeypatch.setattr(Problem, "peak_bytes", lambda self, order: high)
    tries = list[int]()

    def fails(request: Request) -> Schedule:
        tries.append(request.budget_bytes)
        assert len(tries) <= high, "it goes on for ever"
        return Schedule(None)

    assert refusal.smallest_by(task, fails) == (task.order, high)


def test_all_parts_of_a_search_are_within_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[float]()
    graph = drawn(7).graph
    costs = measure_costs(graph, rounds=1)
    task, begin = problem(graph, costs, keep_all(graph).updates), time.monotonic()
    at_depth = search._at_depth

    def watched_depth(problem: Problem, budget: int, aim: Any, start: Any, end: float, *rest: Any) -> Any:
        limits.append(end)
        return at_depth(problem, budget, aim, start, end, *rest)

    monkeypatch.setattr(search, "_at_depth", watched_depth)
    search.optimal(task, task.keep_all.peak_bytes - 1, aim=Aim(limits={"time": 1e9}), time_limit_s=0.2)
    assert limits
    assert max(limits) <= begin + 0.2 + 0.1


def test_what_is_being_done_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    said = list[str]()
    with shown_by(said.append), pytest.raises(Infeasible):
        drawn(3).prepare(1)
    doing("nobody listens")
    assert said[0] == "capturing the step"
    assert any(words.startswith("planning within 1 B") for words in said)
    assert "nobody listens" not in said


def test_every_planner_is_tried() -> None:
    assert {*PLANNERS, "optimal", "poet", "page-only"} == set(registry.names())
