"""Training under a byte budget: the same numbers as keeping everything, bit for bit, in the bytes that were planned."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from nets import CASES, Case, Recurrent
from plain import OptimizerMaker, Snapshot, Training, bits, differing, relative_error, run, sgd, training
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain import child
from edgetrain.costs.table import Costs, OpCost, Run
from edgetrain.errors import Infeasible, UserError
from edgetrain.graph.capture import capture_with_externals
from edgetrain.graph.ir import Graph
from edgetrain.native import arena
from edgetrain.ops import norm
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.plan import Plan, Updates
from edgetrain.plan.planning import PLANNERS, least_bytes
from edgetrain.plan.problem import Problem, problem
from edgetrain.run.compiled import CompiledStep

pytestmark = [
    pytest.mark.skipif(not arena.available(), reason=str(arena.missing())),
    pytest.mark.usefixtures("one_cache", "one_round"),
]
PLAN_TIME_S = 0.25


# ---- nets -----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Convolution, batch norm and ReLU, twice, with the input added before the last ReLU."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm_a, self.norm_b = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))))


def residual() -> nn.Module:
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)]
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU6(), *(Block(6) for _ in range(3)), *head)


def dropout() -> nn.Module:
    layers = [m for _ in range(4) for m in (nn.Linear(12, 12), nn.Tanh(), nn.Dropout(0.4))]
    return nn.Sequential(nn.Linear(8, 12), *layers, nn.Linear(12, 5))


class Tied(nn.Module):
    """The embedding is the output layer too, and one layer is used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 8)
        self.output = nn.Linear(8, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for _ in range(5):
            h = torch.tanh(self.hidden(h)) + h
        out: Tensor = self.output(h).mean(1)
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(x).mean(1))
        return out


class Writes(nn.Module):
    """In-place ops and views of every sort between layers, and a buffer that forward changes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10, 10) for _ in range(5))
        self.head = nn.Linear(10, 5)
        self.register_buffer("seen", torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            x[:, number] += 2 * x[:, 9 - number]
            x = x.t().contiguous().t().mul_(1.5).tanh_()
            y = x.view(-1, 5, 2)[:, :, 1].exp()
            x = torch.cat([y, x[:, ::2] * y], 1)
            with torch.no_grad():
                self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
            x = x - self.seen.clone()
        out: Tensor = self.head(x)
        return out


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = Recurrent(nn.LSTM(8, 6, num_layers=2, dropout=0.3, batch_first=True))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.recurrent(x)[:, -1])
        return out


def floats(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda n, generator: torch.randn(n, *shape, generator=generator)


def tokens(n: int, generator: torch.Generator) -> Tensor:
    return torch.randint(11, (n, 6), generator=generator)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Tensor]]] = {
    "residual": (residual, floats(3, 10, 10)),
    "dropout": (dropout, floats(8)),
    "tied": (Tied, tokens),
    "transformer": (Transformer, floats(5, 16)),
    "writes": (Writes, floats(10)),
    "LSTM": (Lstm, floats(5, 8)),
}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def work_of(net: str, optimizer: OptimizerMaker = sgd) -> Training:
    torch.manual_seed(2)
    return training(NETS[net][0](), cross_entropy, optimizer)


def batches_of(net: str, count: int = 3, n: int = 8) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(NETS[net][1](n, generator), torch.randint(5, (n,), generator=generator)) for _ in range(count)]


# ---- what every step under a budget must do -------------------------------------------------------------------


@dataclass(frozen=True)
class Run3:
    """What three steps left behind."""

    plan: Plan
    graph: Graph
    losses: Tensor
    snapshot: Snapshot


def assert_account(step: CompiledStep, *, first: bool = False) -> None:
    """The step asked the arena for exactly the bytes of its plan."""
    found = step.arena
    assert found is not None
    if first:  # an update that sets its state has no use for the few bytes of a factor
        assert -16 <= found.most_bytes + step.plan.persistent_bytes - step.plan.peak_bytes <= 0
        return
    assert found.most_bytes + step.plan.persistent_bytes == step.plan.peak_bytes


def three_steps(net: str, optimizer: OptimizerMaker = sgd, **options: Any) -> Run3:
    work, batches = work_of(net, optimizer), batches_of(net)
    step = et.prepare(work.model, work.loss, work.optimizer, batches[0], plan_time_s=PLAN_TIME_S, **options)
    compiled = step.compiled(*batches[0])
    losses = []
    torch.manual_seed(4)
    for batch in batches:
        losses.append(step(*batch))
        assert step.compiled(*batch) is compiled
        assert_account(compiled, first=len(losses) == 1)
    last = compiled.arena
    assert last is None or (last.improvised, last.unused) == (0, 0)  # what the third step asks for is known
    return Run3(step.plan, step.graph, torch.stack(losses), work.snapshot())


def assert_same(found: Run3, right: Run3) -> None:
    """Losses, parameters, buffers, optimizer state and random state, bit for bit."""
    assert found.graph.key == right.graph.key
    assert torch.equal(bits(found.losses), bits(right.losses))
    assert differing(found.snapshot, right.snapshot) == []


def infeasible(net: str, memory: int, optimizer: OptimizerMaker = sgd, **options: Any) -> Infeasible:
    work = work_of(net, optimizer)
    before = work.snapshot()
    with pytest.raises(Infeasible) as caught:
        et.prepare(
            work.model, work.loss, work.optimizer, batches_of(net)[0],
            memory=memory, plan_time_s=PLAN_TIME_S, **options,
        )  # fmt: skip
    assert differing(work.snapshot(), before) == []
    return caught.value


SWEPT = [
    ("residual", sgd, "preserve"),
    ("residual", sgd, "auto"),
    ("residual", adam, "auto"),
    ("residual", sgd, "channels_last"),
    ("dropout", sgd, "auto"),
    ("tied", adam, "preserve"),
    ("transformer", sgd, "auto"),
    ("writes", adam, "auto"),
    ("LSTM", sgd, "auto"),
]


@pytest.mark.parametrize(("net", "optimizer", "memory_format"), SWEPT)
def test_every_budget_down_to_the_smallest_gives_the_numbers_of_keeping_all(
    net: str, optimizer: OptimizerMaker, memory_format: str
) -> None:
    options = {"memory_format": memory_format}
    right = three_steps(net, optimizer, memory="1GB", **options)
    assert right.plan.recomputed == ()
    most = right.plan.peak_bytes
    answer = infeasible(net, right.plan.persistent_bytes + 1, optimizer, **options)
    assert right.plan.persistent_bytes < answer.bound_bytes <= answer.smallest_bytes < most
    assert answer.op in {op.name for op in right.graph.ops}
    assert answer.alive
    assert set(answer.alive) <= {tensor.name for tensor in right.graph.tensors}
    assert str(answer.smallest_bytes) in str(answer)
    budgets = [most - 1, (2 * most + answer.smallest_bytes) // 3, (most + 3 * answer.smallest_bytes) // 4]
    peaks = [most]
    for budget, planner in zip([*budgets, answer.smallest_bytes], ["auto", "fast", "auto", "auto"], strict=True):
        try:
            found = three_steps(net, optimizer, memory=budget, planner=planner, **options)
        except Infeasible:
            assert planner == "fast"  # does not find everything that there is
            continue
        assert found.plan.peak_bytes <= budget
        assert found.plan.recomputed
        assert_same(found, right)
        peaks.append(found.plan.peak_bytes)
    assert peaks[-1] <= answer.smallest_bytes < peaks[0]
    assert infeasible(net, answer.bound_bytes - 1, optimizer, **options).smallest_bytes == answer.smallest_bytes


# ---- by hand --------------------------------------------------------------------------------------------------


def again_and_again(task: Problem) -> list[int]:
    """Before each op of the backward pass, everything that it reads is made anew, and what that is made from, as far as
    it can be."""
    order: list[int] = []

    def makers(number: int, at: int) -> set[int]:
        found: set[int] = set()
        waiting = [number]
        while waiting:
            new = {task.maker[s] for s in task.reads[waiting.pop()]}
            new = {op for op in new - found if task.deadline[op] > at}
            found |= new
            waiting += new
        return found

    for at, number in enumerate(task.order):
        if task.graph.ops[number].phase != "forward":
            order += sorted(makers(number, at), key=task.position.__getitem__)
        order.append(number)
    return order


def unmeasured(graph: Graph) -> Costs:
    return Costs(graph.key, "modelled", tuple(OpCost({"first": Run(1e-3)}) for _ in graph.ops))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
def test_a_net_of_every_kind_with_everything_recomputed_trains_as_plain_pytorch(case: Case) -> None:
    plain = training(case.model(), case.loss)
    work = plain.twin()
    batches = [case.batch(seed) for seed in range(2)]
    losses = run(plain.plain_step, batches)
    right = plain.snapshot()
    found = capture_with_externals(work.model, work.loss, work.optimizer, batches[0])
    updates: Updates = et.keep_all(found.graph).updates
    task = problem(found.graph, unmeasured(found.graph), updates)
    plan = task.plan(again_and_again(task), planner="again and again")
    step = CompiledStep(found.graph, plan, work.model, work.optimizer, found.externals)
    assert torch.equal(bits(run(step, batches)), bits(losses))
    assert differing(work.snapshot(), right) == []


def by_hand(net: str, updates: Updates) -> tuple[Training, Graph, Problem]:
    work = work_of(net)
    graph = et.capture(work.model, work.loss, work.optimizer, batches_of(net)[0])
    return work, graph, problem(graph, et.measure_costs(graph, rounds=1), updates)


@pytest.mark.parametrize("updates", ["early", "guarded", "together"])
@pytest.mark.parametrize("net", ["residual", "dropout", "writes"])
def test_by_hand_with_every_way_to_update(net: str, updates: Updates) -> None:
    work, graph, task = by_hand(net, updates)
    budget = (task.keep_all.peak_bytes + 3 * task.keep_all.persistent_bytes) // 4
    runs: list[tuple[Tensor, Snapshot]] = []
    plans = [task.keep_all, task.plan(again_and_again(task), planner="test")]
    try:
        planned = et.plan(graph, task.costs, et.Budget(budget), updates=updates, time_limit_s=PLAN_TIME_S)
    except Infeasible as answer:
        budget = answer.smallest_bytes
        planned = et.plan(graph, task.costs, et.Budget(budget), updates=updates, time_limit_s=PLAN_TIME_S)
    assert planned.peak_bytes <= budget
    assert planned.updates == updates
    for plan in [*plans, planned]:
        twin = work.twin()
        step = CompiledStep(graph, plan, twin.model, twin.optimizer, {}, costs=task.costs)
        torch.manual_seed(5)
        before = twin.snapshot()
        step.trace_memory(*batches_of(net)[0])  # holds every byte against the plan
        assert differing(twin.snapshot(), before) == []
        runs.append((run(step, batches_of(net), seed=5), twin.snapshot()))
        if updates == "early":
            assert_account(step)
    for losses, snapshot in runs[1:]:
        assert torch.equal(bits(losses), bits(runs[0][0]))
        assert differing(snapshot, runs[0][1]) == []


def test_dropout_is_drawn_again_from_where_it_was_drawn() -> None:
    work, graph, task = by_hand("dropout", "early")
    plan = task.plan(again_and_again(task), planner="test")
    assert any(graph.ops[number].random for number in plan.recomputed)
    plain = work.twin()
    step = et.compile(graph, plan, work.model, work.optimizer)
    assert torch.equal(run(step, batches_of("dropout")), run(plain.plain_step, batches_of("dropout")))
    assert differing(work.snapshot(), plain.snapshot()) == []


@pytest.mark.parametrize("memory_format", ["preserve", "auto"])
def test_batch_norm_statistics_are_updated_once(memory_format: str) -> None:
    """However often the layer is recomputed; and as plain PyTorch updates them."""
    if memory_format == "auto" and not norm.available():
        pytest.skip(str(norm.missing()))
    budget = infeasible("residual", 10_000, memory_format=memory_format).smallest_bytes
    found = three_steps("residual", memory=budget, memory_format=memory_format)
    kinds = {found.graph.ops[number].kind for number in found.plan.recomputed}
    assert kinds & {"aten.native_batch_norm.default", "edgetrain.norm.apply"}
    plain = work_of("residual")
    run(plain.plain_step, batches_of("residual"), seed=4)
    right = plain.snapshot()
    assert {int(v) for name, v in found.snapshot.items() if name.endswith("num_batches_tracked")} == {3}
    if memory_format == "preserve":
        assert differing(found.snapshot, right) == []
    assert relative_error(found.snapshot, right, noise=1e-6) < 1e-4


# ---- other batches, files, graphs -----------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["residual", "transformer"])
def test_another_batch_size_under_the_same_memory(net: str) -> None:
    """The last batch of an epoch is smaller; it gets a plan of its own, within the same budget."""
    keep_all = three_steps(net, memory="1GB").plan
    memory = (keep_all.peak_bytes + 3 * keep_all.persistent_bytes) // 4
    memory = max(memory, infeasible(net, keep_all.persistent_bytes + 1).smallest_bytes)
    batches = [*batches_of(net, 2), *batches_of(net, 1, n=3), *batches_of(net, 1)]
    runs = []
    for amount in (10**9, memory):
        work = work_of(net)
        step = et.prepare(work.model, work.loss, work.optimizer, batches[0], memory=amount, plan_time_s=PLAN_TIME_S)
        losses = []
        torch.manual_seed(4)
        for batch in batches:
            losses.append(step(*batch))
            assert step.plan.peak_bytes <= amount
            assert_account(step.compiled(*batch))
        runs.append((torch.stack(losses), work.snapshot()))
    assert torch.equal(bits(runs[0][0]), bits(runs[1][0]))
    assert differing(runs[0][1], runs[1][1]) == []


def test_a_plan_is_saved_loaded_equal_and_refused_for_another_graph(tmp_path: Path) -> None:
    work, graph, task = by_hand("residual", "early")
    answer = infeasible("residual", 10_000, memory_format="preserve")
    budget = (task.keep_all.peak_bytes + answer.smallest_bytes) // 2
    plan = et.plan(graph, task.costs, et.Budget(budget), time_limit_s=PLAN_TIME_S)
    assert plan.recomputed
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    twin = work.twin()
    losses = run(et.compile(graph, plan, work.model, work.optimizer), batches_of("residual"))
    assert torch.equal(run(et.compile(graph, loaded, twin.model, twin.optimizer), batches_of("residual")), losses)
    assert differing(work.snapshot(), twin.snapshot()) == []
    other, other_graph, _ = by_hand("dropout", "early")
    with pytest.raises(UserError, match="another graph"):
        et.compile(other_graph, loaded, other.model, other.optimizer)
    smaller = et.capture(twin.model, twin.loss, twin.optimizer, batches_of("residual", n=3)[0])
    with pytest.raises(UserError, match="another graph"):
        et.compile(smaller, loaded, twin.model, twin.optimizer)
    with pytest.raises(UserError, match="another graph"):
        et.plan(other_graph, task.costs, et.Budget(budget))


def test_a_budget_just_below_the_smallest_is_refused_and_the_bound_is_proven() -> None:
    _, graph, task = by_hand("dropout", "early")
    answer = infeasible("dropout", task.keep_all.persistent_bytes + 1)
    assert answer.bound_bytes == least_bytes(task)
    for order in (task.order, again_and_again(task)):
        assert task.peak_bytes(order) >= answer.bound_bytes
    with pytest.raises(Infeasible):
        et.plan(graph, task.costs, et.Budget(answer.bound_bytes - 1), time_limit_s=PLAN_TIME_S)


@pytest.mark.parametrize("planner", [p for p in PLANNERS if p not in ("poet", "page-only")])  # these need more
def test_what_an_infeasible_names_works_for_the_planner_that_was_asked(planner: str) -> None:
    """For every planner, not for the best of them alone."""
    _, graph, task = by_hand("residual", "early")
    low = et.Budget(task.keep_all.persistent_bytes + 1)
    with pytest.raises(Infeasible) as caught:
        et.plan(graph, task.costs, low, planner=planner, time_limit_s=PLAN_TIME_S)
    budget = et.Budget(caught.value.smallest_bytes)
    made = et.plan(graph, task.costs, budget, planner=planner, time_limit_s=PLAN_TIME_S)
    assert made.peak_bytes <= caught.value.smallest_bytes


def test_what_was_found_once_is_not_searched_for_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = three_steps("dropout", memory="1GB")
    monkeypatch.setenv("EDGETRAIN_CACHE", str(tmp_path))
    memory = (right.plan.peak_bytes * 2 + right.plan.persistent_bytes) // 3
    found = three_steps("dropout", memory=memory)
    assert found.plan.recomputed
    assert_same(found, right)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["costs", "graphs", "plans"]
    monkeypatch.setattr(child, "forked", None)
    monkeypatch.setattr("edgetrain.costs.measured.measure", None)
    again = three_steps("dropout", memory=memory)
    assert again.plan == found.plan
    assert_same(again, right)
    # A file that holds something else is as good as none.
    monkeypatch.undo()
    monkeypatch.setenv("EDGETRAIN_CACHE", str(tmp_path))
    files = list((tmp_path / "plans").glob("*/*.json"))
    assert files
    for file in files:
        file.write_text("{}")
    assert_same(three_steps("dropout", memory=memory), right)


def test_a_solver_that_is_killed_leaves_the_plan_that_was_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where there is too little memory for the solver: the greedy plan, or an answer."""
    right = three_steps("dropout", memory="1GB")
    monkeypatch.setenv("EDGETRAIN_CACHE", str(tmp_path))
    forked = child.forked
    with monkeypatch.context() as patch:
        patch.setattr(child, "forked", lambda work, **_: forked(lambda: os.kill(os.getpid(), signal.SIGKILL)))
        found = three_steps("dropout", memory=right.plan.peak_bytes - 1)
    assert found.plan.planner == "fast"
    assert found.plan.recomputed
    assert_same(found, right)
    assert (
        three_steps("dropout", memory=right.plan.peak_bytes - 1).plan.planner == "optimal"
    )  # the next time it is well
    monkeypatch.setattr(child, "forked", lambda work, **_: forked(lambda: os.kill(os.getpid(), signal.SIGKILL)))
    answer = infeasible("dropout", right.plan.persistent_bytes + 1)
    assert three_steps("dropout", memory=answer.smallest_bytes).plan.peak_bytes <= answer.smallest_bytes


# ---- where bytes hide -----------------------------------------------------------------------------------------


class TwoBiases(nn.Module):
    """Two parameters have the very same gradient; a third has one that is a number spread over it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 400, bias=False)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(400)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x) + (self.a + self.b) + self.c.sum()
        return out


def squares(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().mean()
    return out


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_gradients_that_updates_may_not_overwrite_are_in_the_account(optimizer: OptimizerMaker) -> None:
    torch.manual_seed(0)
    work = training(TwoBiases(), squares, optimizer)
    plain = work.twin()
    x = torch.randn(2, 8)
    step = et.prepare(work.model, work.loss, work.optimizer, (x,), memory="1GB")
    for _ in range(3):
        assert torch.equal(step(x), plain.plain_step(x))
        assert_account(step.compiled(x))
    assert differing(work.snapshot(), plain.snapshot()) == []


@pytest.mark.parametrize("net", ["residual", "dropout"])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_checking_and_copying_are_in_the_account(
    net: str, optimizer: OptimizerMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert three_steps(net, optimizer, memory="1GB", check_finite=True).plan.updates != "early"
    for updates in ("guarded", "together"):
        monkeypatch.setattr("edgetrain.run.step.keep_all", functools.partial(keep_all, updates=updates))
        assert three_steps(net, optimizer, memory="1GB").plan.updates == updates


def test_gradients_take_no_more_than_a_step_and_themselves() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())))
    work = training(net, squares)
    x = torch.randn(512, 16)
    whole = et.prepare(work.model, work.loss, work.optimizer, (x,), memory="1GB")
    right, kept = whole.gradients(x), whole.plan.peak_bytes
    step = et.prepare(work.model, work.loss, work.optimizer, (x,), memory=kept * 2 // 3, plan_time_s=PLAN_TIME_S)
    found = step.gradients(x)
    assert step.plan.recomputed
    assert all(torch.equal(bits(found[name]), bits(right[name])) for name in right)
    compiled = step.compiled(x)
    assert compiled._arenas is not None
    taken = compiled._arenas[0].last.most_bytes + step.plan.persistent_bytes
    assert taken <= step.plan.peak_bytes + sum(g.nbytes for g in right.values())
    assert taken < kept


def doubled(model: nn.Module, x: Tensor) -> Tensor:
    x.mul_(2)
    return squares(model, x)


@pytest.mark.parametrize("options", [{}, {"memory": "1GB"}, {"check_finite": True}], ids=str)
def test_a_batch_that_the_loss_changes_is_changed_once(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    work = training(nn.Linear(8, 4), doubled)
    plain = work.twin()
    ours, theirs = torch.ones(3, 8), torch.ones(3, 8)
    step = et.prepare(work.model, work.loss, work.optimizer, (ours,), **options)
    step.gradients(ours)
    step.trace_memory(ours)
    assert torch.equal(ours, torch.ones(3, 8))
    for _ in range(3):
        assert torch.equal(step(ours), plain.plain_step(theirs))
        assert torch.equal(ours, theirs)
        assert_account(step.compiled(ours)) if "memory" in options else None


def test_two_models_train_in_two_threads() -> None:
    def trained(alone: bool) -> list[Tensor]:
        torch.manual_seed(0)
        works = [training(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)), squares) for _ in range(2)]
        x = torch.randn(64, 16)
        steps = [et.prepare(work.model, work.loss, work.optimizer, (x,), memory="1GB") for work in works]
        threads = [Thread(target=lambda step=step: [step(x) for _ in range(30)]) for step in steps]
        for thread in threads:
            thread.start()
            if alone:
                thread.join()
        for thread in threads:
            thread.join()
        return [parameter.detach() for work in works for parameter in work.model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(trained(True), trained(False), strict=True))


def variants() -> Sequence[tuple[str, OptimizerMaker]]:
    found: list[tuple[str, OptimizerMaker]] = [
        ("SGD", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("nesterov", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
        ("maximize", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, maximize=True)),
        ("amsgrad", lambda p: torch.optim.Adam(p, amsgrad=True)),
        ("AdamW", torch.optim.AdamW),
    ]
    return found


@pytest.mark.parametrize(("name", "optimizer"), variants(), ids=lambda v: v if isinstance(v, str) else "")
def test_every_optimizer_keeps_the_account(name: str, optimizer: OptimizerMaker) -> None:
    right = three_steps("dropout", optimizer, memory="1GB")
    memory = infeasible("dropout", right.plan.persistent_bytes + 1, optimizer).smallest_bytes
    assert_same(three_steps("dropout", optimizer, memory=memory), right)


def test_a_step_that_fails_under_a_budget_changes_nothing() -> None:
    """An index that is out of range, after dropout was drawn and statistics were updated."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.5), nn.Linear(12, 5))
    work = training(net, cross_entropy)
    x, y = torch.randn(16, 8), torch.randint(5, (16,))
    peak = et.prepare(work.model, work.loss, work.optimizer, (x, y), memory="1GB").plan.peak_bytes
    step = et.prepare(work.model, work.loss, work.optimizer, (x, y), memory=peak - 1, plan_time_s=PLAN_TIME_S)
    step(x, y)
    twin = work.twin()
    state = torch.get_rng_state()
    before = work.snapshot()
    with pytest.raises(IndexError):
        step(x, torch.full_like(y, 99))
    assert differing(work.snapshot(), before) == []
    value = step(x, y)
    torch.set_rng_state(state)
    other = et.prepare(twin.model, twin.loss, twin.optimizer, (x, y), memory="1GB")
    torch.set_rng_state(state)
    assert torch.equal(other(x, y), value)
    assert differing(twin.snapshot(), work.snapshot()) == []


def test_plan_of_another_exactness_is_not_taken_from_the_disk() -> None:
    """`exact` is what the caller knows of the graph; a plan kept by one caller does not speak for another."""
    _, graph, task = by_hand("residual", "early")
    answer = infeasible("residual", 10_000, memory_format="preserve")
    budget = et.Budget((task.keep_all.peak_bytes + answer.smallest_bytes) // 2)
    for exact in ("rounding", "bitwise"):
        made = et.plan(graph, task.costs, budget, time_limit_s=PLAN_TIME_S, exact=exact)
        assert made.exact == exact


def test_time_is_the_time_of_the_order_and_never_below_the_bound() -> None:
    _, graph, task = by_hand("residual", "early")
    answer = infeasible("residual", 10_000, memory_format="preserve")
    for budget in (task.keep_all.peak_bytes - 1, (task.keep_all.peak_bytes + answer.smallest_bytes) // 2):
        made = et.plan(graph, task.costs, et.Budget(budget), time_limit_s=PLAN_TIME_S)
        assert made.time_s == pytest.approx(task.costs.time_s(made.order))
        assert made.keep_all_time_s == pytest.approx(task.keep_all_time_s)
        assert made.bound is not None
        assert made.bound.time_s is not None
        assert made.time_s is not None
        assert task.keep_all_time_s <= made.bound.time_s <= made.time_s * (1 + 1e-9)
        assert replace(made, bound=None, exact="bitwise") == task.plan(made.order, planner="optimal")


class Shared(nn.Module):
    """Two parameters with one gradient, and one whose gradient is a single number spread out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(1000)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a + self.b) * x + self.c.sum()


@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_an_update_that_may_not_overwrite_its_gradient_is_planned_with_its_copy(optimizer: OptimizerMaker) -> None:
    work = training(Shared(), lambda model, x: model(x).square().mean(), optimizer)
    plain, x = work.twin(), torch.randn(1000)
    graph = et.capture(work.model, work.loss, work.optimizer, (x,))
    costs = et.measure_costs(graph, rounds=1)
    plan = et.plan(graph, costs, et.Budget(), updates="early")
    step = CompiledStep(graph, plan, work.model, work.optimizer, {}, costs=costs)
    for _ in range(3):
        assert torch.equal(step(x), plain.plain_step(x))
        assert differing(work.snapshot(), plain.snapshot()) == []
    assert step.arena is not None
    assert step.arena.most_bytes == plan.peak_bytes - plan.persistent_bytes
