"""Steps that page: bitwise the numbers of keeping all, to the byte the memory of the plan, whatever the disk does."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import edgetrain as et
import edgetrain.run.compiled as compiled_module
from edgetrain.costs.table import Costs
from edgetrain.errors import InternalError, UserError
from edgetrain.graph.ir import Graph
from edgetrain.ops import update
from edgetrain.plan.plan import Action, Free, Item, PageIn, PageOut, Plan, Updates
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.validate import validate
from edgetrain.run import adaptive
from edgetrain.run.adaptive import BudgetWatch
from edgetrain.run.compile import build
from edgetrain.run.compiled import CompiledStep
from edgetrain.run.conditions import Conditions
from edgetrain.run.program import Program
from tests.helpers.paged import Disk, Gap, items, paged_plan, widest_gaps, with_store
from tests.helpers.plain import OptimizerMaker, Snapshot, Training, differing, training

UPDATES: tuple[Updates, ...] = ("early", "guarded", "together")


class Fault(Exception):
    """What the tests raise inside a step."""


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.relu(self.norm(self.conv(x)))
        return y


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(),
        nn.Dropout(0.3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "norm": (convolutions, (2, 3, 8, 8)),
    "residual": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), *(Residual() for _ in range(2))), (2, 3, 8, 8)),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.3), nn.ReLU()),
        (32, 4),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (4, 6, 8)),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.01)


def loss(model: nn.Module, x: Tensor) -> Tensor:
    value: Tensor = model(x).square().mean()
    return value


@dataclass(frozen=True)
class Case:
    """A net and an optimizer, captured and measured once."""

    net: str
    optimizer: OptimizerMaker
    graph: Graph
    costs: Costs

    def fresh(self) -> Training:
        torch.manual_seed(0)
        return training(NETS[self.net][0](), loss, self.optimizer)

    def batch(self, number: int) -> Tensor:
        return torch.randn(NETS[self.net][1], generator=torch.Generator().manual_seed(number))

    def task(self, updates: Updates) -> Problem:
        return problem(self.graph, self.costs, updates)

    def step(
        self, ours: Training, plan: Plan, folder: Path, disk: Disk | None = None, *, check_finite: bool = False
    ) -> CompiledStep:
        return CompiledStep(
            self.graph, plan, ours.model, ours.optimizer, {}, costs=self.costs,
            conditions=Conditions(check_finite, folder, page_calls=None if disk is None else disk.calls),
        )  # fmt: skip


@cache
def case(net: str, optimizer: OptimizerMaker = sgd) -> Case:
    torch.manual_seed(0)
    ours = training(NETS[net][0](), loss, optimizer)
    graph = et.capture(ours.model, loss, ours.optimizer, (torch.randn(NETS[net][1]),), use_cache=False)
    return Case(net, optimizer, graph, with_store(et.measure_costs(graph, use_cache=False)))


@cache
def right(net: str, optimizer: OptimizerMaker, updates: Updates, steps: int = 3) -> tuple[Tensor, Snapshot]:
    """What keeping all gives."""
    given = case(net, optimizer)
    ours = given.fresh()
    step = et.compile(given.graph, given.task(updates).keep_all, ours.model, ours.optimizer)
    return trained(given, step, steps), ours.snapshot()


def trained(given: Case, step: CompiledStep, steps: int) -> Tensor:
    torch.manual_seed(5)
    return torch.stack([step(given.batch(number)) for number in range(steps)])


def above_plan(step: CompiledStep) -> int:
    """The bytes that the last step took above its plan's peak."""
    assert step.arena is not None
    return step.arena.most_bytes + step.plan.persistent_bytes - step.plan.peak_bytes


def choices(task: Problem) -> Iterator[list[Gap]]:
    """All that can be paged; every other; only what the backward pass makes; only the largest."""
    gaps = widest_gaps(task)
    yield gaps
    yield gaps[1::2]
    yield [gap for gap in gaps if task.graph.ops[task.maker[gap.storage]].phase == "backward"]
    yield sorted(gaps, key=lambda gap: task.size[gap.storage])[-1:]


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize(("net", "optimizer"), [*((net, sgd) for net in NETS), ("norm", adam)])
def test_a_step_that_pages_changes_no_bit_and_keeps_to_its_bytes(
    net: str, optimizer: OptimizerMaker, updates: Updates, tmp_path: Path
) -> None:
    given = case(net, optimizer)
    losses, snapshot = right(net, optimizer, updates)
    task = given.task(updates)
    n_paged = 0
    for gaps in choices(task):
        plan = paged_plan(task, gaps)
        if not plan.paged:
            continue
        ours = given.fresh()
        disk = Disk()
        step = given.step(ours, plan, tmp_path, disk)
        assert torch.equal(trained(given, step, 3), losses)
        assert differing(ours.snapshot(), snapshot) == []
        assert (step.page_fault, above_plan(step)) == (None, 0)
        assert step.arena is not None
        assert step.arena.improvised == 0
        assert disk.log.count("w") == 4 * len(plan.paged)  # the rehearsal and three steps
        assert step.plan.peak_bytes <= task.keep_all.peak_bytes
        n_paged += len(plan.paged)
    assert n_paged > 5


def without_frees(plan: Plan) -> list[Action]:
    return [action for action in plan.schedule if not isinstance(action, Free)]


@pytest.mark.parametrize("updates", UPDATES)
def test_a_plan_that_pages_can_be_saved_and_read_back(updates: Updates, tmp_path: Path) -> None:
    given = case("norm")
    task = given.task(updates)
    plan = paged_plan(task, widest_gaps(task))
    assert plan.time_s is not None
    assert plan.energy_j is None  # nothing tells what the ops take
    plan.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan") == plan
    again = task.plan(plan.items, planner="by hand")
    assert again.peak_bytes == plan.peak_bytes
    assert without_frees(again) == without_frees(plan)
    assert f"{len(plan.paged)} storages paged" in str(plan)


def test_a_plan_that_pages_needs_a_folder_and_costs(tmp_path: Path) -> None:
    given = case("norm")
    plan = paged_plan(given.task("early"), widest_gaps(given.task("early")))
    ours = given.fresh()
    for wrong in ({"costs": given.costs}, {"page_to": tmp_path}):
        with pytest.raises(UserError, match="pages tensors to storage"):
            et.compile(given.graph, plan, ours.model, ours.optimizer, **wrong)
    with pytest.raises(UserError, match="no file can be made in"):
        given.step(ours, plan, tmp_path / "missing")


@pytest.mark.parametrize("updates", UPDATES)
def test_what_a_step_can_do_beside_training(updates: Updates, tmp_path: Path) -> None:
    given = case("norm")
    task = given.task(updates)
    ours, plain = given.fresh(), given.fresh()
    step = given.step(ours, paged_plan(task, widest_gaps(task)), tmp_path)
    keeps = et.compile(given.graph, task.keep_all, plain.model, plain.optimizer)
    before = ours.snapshot()
    torch.manual_seed(3)
    found = step.gradients(given.batch(0))
    torch.manual_seed(3)
    assert differing(found, keeps.gradients(given.batch(0))) == []
    torch.manual_seed(3)
    before["random"] = torch.get_rng_state()
    assert step.trace_memory(given.batch(0)).peak_with_workspace_bytes == step.plan.peak_bytes
    assert differing(ours.snapshot(), before) == []


# ---- a disk that fails


def tensors() -> int:
    """How many there are; the garbage collector, which would hide a cycle, is to be off."""
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def forget(step: CompiledStep) -> None:
    step.page_fault = None


def safe_gaps(task: Problem) -> list[Gap]:
    """Of what the forward pass makes, which can be made again until the updates come."""
    return [gap for gap in widest_gaps(task) if task.graph.ops[task.maker[gap.storage]].phase == "forward"]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("net", "optimizer", "updates", "kind", "every"),
    [
        ("norm", sgd, "early", "flip", 1),
        ("norm", adam, "together", "error", 2),
        ("residual", sgd, "early", "error", 6),
        ("dropout", adam, "early", "short", 2),
        ("attention", sgd, "early", "flip", 8),
    ],
)
def test_a_fault_at_any_transfer_costs_time_alone(
    net: str, optimizer: OptimizerMaker, updates: Updates, kind: str, every: int, tmp_path: Path
) -> None:
    """One step object, a fault at another transfer each time, and a step without one now and then; keeping all, beside,
    has the same numbers after each."""
    given = case(net, optimizer)
    task = given.task(updates)
    plan = paged_plan(task, [g for g in safe_gaps(task) if updates == "early" or task.deadline[task.maker[g.storage]]])
    disk = Disk()
    ours, plain = given.fresh(), given.fresh()
    step = given.step(ours, plan, tmp_path, disk)
    keeps = et.compile(given.graph, task.keep_all, plain.model, plain.optimizer)
    both = (step, keeps)
    for one in both:
        torch.manual_seed(0)
        for _ in range(3):  # until the arena is laid out for what the step asks for
            one(given.batch(0))
    assert step.arena is not None
    held, n_calls = step.arena.held_bytes, len(disk.log) // 4
    log = disk.log[:n_calls]
    alive = tensors()
    for number, at in enumerate(range(0, n_calls, every)):
        disk.arm(at, kind)
        forget(step)
        losses = []
        for one in both:
            torch.manual_seed(number)
            losses.append(one(given.batch(number)))
        assert torch.equal(*losses), at
        why = str(step.page_fault)
        said = "system says: Input" if log[at] == "w" or kind == "error" else "came back" if kind == "flip" else "ends"
        assert said in why
        more = re.search(r"(\d+) bytes more than planned", why)
        assert above_plan(step) <= (int(more[1]) if more else 0)
        assert step.arena.held_bytes == held
        assert not disk.moving
        if number % 3 == 0:  # the next one pages as before
            disk.disarm()
            assert torch.equal(*(one(given.batch(0)) for one in both if torch.manual_seed(1)))
            assert (len(disk.log), above_plan(step), step.arena.improvised) == (n_calls, 0, 0)
        del losses
        assert number % 4 or tensors() == alive
    assert differing(ours.snapshot(), plain.snapshot()) == []


@pytest.mark.parametrize(("updates", "kind"), [("early", "flip"), ("guarded", "error"), ("together", "short")])
def test_a_fault_in_the_rehearsal(updates: Updates, kind: str, tmp_path: Path) -> None:
    given = case("norm")
    task = given.task(updates)
    losses, snapshot = right("norm", sgd, updates)
    plan = paged_plan(task, safe_gaps(task)[::3])
    taken_back = 0
    for at in range(2 * len(plan.paged)):
        ours = given.fresh()
        step = given.step(ours, plan, tmp_path, Disk(at, kind))
        before = ours.snapshot()
        torch.manual_seed(5)
        try:
            found = [step(given.batch(0))]
        except UserError:
            taken_back += 1
            assert differing(ours.snapshot(), {**before, "random": torch.get_rng_state()}) == []
            found = [step(given.batch(0))]
        assert step.page_fault is not None
        found += [step(given.batch(number)) for number in (1, 2)]
        assert torch.equal(torch.stack(found), losses), at
        assert differing(ours.snapshot(), snapshot) == []
    assert taken_back == 0 if updates == "early" else taken_back < len(plan.paged)


@pytest.mark.parametrize("updates", ["guarded", "together"])
def test_what_cannot_be_made_again_takes_the_step_back(updates: Updates, tmp_path: Path) -> None:
    """Gradients, where the step can still be taken back."""
    given = case("norm")
    task = given.task(updates)
    gaps = [gap for gap in widest_gaps(task) if task.graph.ops[task.maker[gap.storage]].phase == "backward"]
    plan = paged_plan(task, gaps)
    disk = Disk()
    ours = given.fresh()
    step = given.step(ours, plan, tmp_path, disk)
    step(given.batch(0))
    n_calls = len(disk.log) // 2
    log, went_on, said = disk.log[:n_calls], 0, ""
    for at in range(0, n_calls, 3):
        twin = ours.twin()
        torch.manual_seed(1)
        before = ours.snapshot()
        disk.arm(at, "flip")
        try:
            step(given.batch(1))
            went_on += log[at] == "w"
        except UserError as told:
            said = str(told)
            assert differing(ours.snapshot(), before) == []
            disk.disarm()
            step(given.batch(1))
        else:
            assert log[at] == "w"  # then it is still in memory
        assert not disk.moving
        keeps = et.compile(given.graph, task.keep_all, twin.model, twin.optimizer)
        torch.manual_seed(1)
        keeps(given.batch(1))
        assert differing(ours.snapshot(), twin.snapshot()) == []
    assert went_on  # at least where nothing was in the store before
    assert "cannot be recomputed; the step was taken back" in said


class Failing:
    """In place of `build`: the programs for the rest of a step fail at their k-th kernel."""

    def __init__(self) -> None:
        self.at, self.calls = -1, 0

    def build(self, graph: Graph, plan: Plan, *given: Any, **named: Any) -> Program:
        program = build(graph, plan, *given, **named)
        table = named["words"].table  # which the whole step shares, where kernels do not fail

        def run(*given: Any) -> Any:
            kernels = {name: kernel for name, kernel in table.items() if re.fullmatch(r"f\d+", name)}
            table.update({name: self._around(kernel) for name, kernel in kernels.items()})
            try:
                return program.run(*given)
            finally:
                table.update(kernels)

        return replace(program, run=run) if named.get("start") else program

    def _around(self, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += kernel not in (update.sgd, update.adam, update.accumulate)  # which nothing may interrupt
            if self.calls - 1 == self.at:
                raise Fault
            return kernel(*args, **kwargs)

        return counted


@pytest.mark.parametrize("updates", ["guarded", "together"])
def test_a_kernel_that_fails_after_a_transfer_did(
    updates: Updates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = case("norm")
    task = given.task(updates)
    plan = paged_plan(task, safe_gaps(task))
    disk, failing = Disk(), Failing()
    monkeypatch.setattr(compiled_module, "build", failing.build)
    ours = given.fresh()
    step = given.step(ours, plan, tmp_path, disk)
    step(given.batch(0))
    tried = 0
    for at in (0, len(plan.paged) - 1, len(plan.paged)):
        failing.at = 0
        while True:
            before = ours.snapshot()
            disk.arm(at, "error")
            failing.calls = 0
            try:
                step(given.batch(1))
            except Fault:
                tried += 1
            else:
                break
            assert not disk.moving
            assert differing(ours.snapshot(), before) == []
            failing.at += 7
    assert tried > 5
    failing.at = -1
    disk.disarm()
    twin = ours.twin()
    torch.manual_seed(1)
    step(given.batch(1))
    keeps = et.compile(given.graph, task.keep_all, twin.model, twin.optimizer)
    torch.manual_seed(1)
    keeps(given.batch(1))
    assert differing(ours.snapshot(), twin.snapshot()) == []


@pytest.mark.parametrize("updates", UPDATES)
def test_ctrl_c_with_transfers_under_way(updates: Updates, tmp_path: Path) -> None:
    """It comes while a thread moves bytes; when it is told, nothing moves any more, and the step is done or not."""
    given = case("norm")
    task = given.task(updates)
    disk = Disk(slow_s=0.001)
    ours = given.fresh()
    step = given.step(ours, paged_plan(task, safe_gaps(task)), tmp_path, disk)
    step(given.batch(0))
    n_calls = len(disk.log) // 2
    undone = 0
    for at in range(0, n_calls, 3):
        twin = ours.twin()
        torch.manual_seed(1)
        before = ours.snapshot()
        disk.arm(at, "interrupt")
        with pytest.raises(KeyboardInterrupt):
            step(given.batch(1))
        assert not disk.moving
        if differing(ours.snapshot(), before) == []:
            undone += 1
            disk.disarm()
            step(given.batch(1))
        keeps = et.compile(given.graph, task.keep_all, twin.model, twin.optimizer)
        torch.manual_seed(1)
        keeps(given.batch(1))
        assert differing(ours.snapshot(), twin.snapshot()) == []
    assert undone >= n_calls // 6


@pytest.mark.parametrize("updates", ["guarded", "together"])
def test_a_loss_that_is_not_finite_with_transfers_under_way(updates: Updates, tmp_path: Path) -> None:
    given = case("norm")
    task = given.task(updates)
    plan = task.plan(items(task, safe_gaps(task)), planner="by hand")
    disk = Disk()
    ours = given.fresh()
    step = given.step(ours, plan, tmp_path, disk, check_finite=True)
    step(given.batch(0))
    before = ours.snapshot()
    disk.slow_s = 0.02
    for _ in range(3):
        with pytest.raises(UserError, match="not finite"):
            step(given.batch(1) * float("nan"))
        assert not disk.moving
        done = len(disk.log)
        assert step._pages is not None
        step._pages.settle()
        assert len(disk.log) == done  # nothing was left to move
    assert differing({**ours.snapshot(), "random": before["random"]}, before) == []


def test_a_step_that_goes_takes_its_thread_and_its_file_along(tmp_path: Path) -> None:
    given = case("dropout")
    task = given.task("early")
    ours = given.fresh()
    before = set(threading.enumerate())
    step = given.step(ours, paged_plan(task, safe_gaps(task)), tmp_path)
    step(given.batch(0))
    assert set(threading.enumerate()) - before
    del step
    gc.collect()
    assert not set(threading.enumerate()) - before


def test_a_storage_can_come_back_more_than_once(tmp_path: Path) -> None:
    """It is written once; each time that it is not needed for a while its memory goes."""
    given = case("residual")
    task = given.task("together")
    reads: dict[int, list[int]] = {}
    for at, op in enumerate(task.order):
        for s in dict.fromkeys((*task.makes[op], *task.reads[op])):
            reads.setdefault(s, []).append(at)
    s, used = next((s, at) for s, at in reads.items() if s in task.pageable and len(at) > 2)
    later = (Gap(a, a, b, s, stores=False) for a, b in pairwise(used[1:]))
    gaps = [Gap(used[0], used[0], used[1], s), *later]
    plan = task.plan(items(task, gaps), planner="by hand")
    assert (len(plan.paged), plan.schedule.count(PageIn(s))) == (1, len(used) - 1)
    ours = given.fresh()
    step = given.step(ours, plan, tmp_path)
    losses, snapshot = right("residual", sgd, "together")
    assert torch.equal(trained(given, step, 3), losses)
    assert differing(ours.snapshot(), snapshot) == []


def test_a_loss_that_no_op_reads_any_more_is_waited_for(tmp_path: Path) -> None:
    """It comes back at the very end; if it does not, the step is taken back."""
    given = case("norm")
    task = given.task("guarded")
    s = given.graph.tensors[given.graph.outputs[0]].storage
    made = task.position[task.maker[s]]
    order = list(task.order)
    late: list[Item] = [*order[: made + 1], PageOut(s), *order[made + 1 :], PageIn(s)]
    plan = task.plan(late, planner="by hand")
    assert plan.schedule[-1] == PageIn(s)
    disk = Disk(slow_s=0.01)
    ours = given.fresh()
    step = given.step(ours, plan, tmp_path, disk)
    losses, snapshot = right("norm", sgd, "guarded")
    assert torch.equal(trained(given, step, 3), losses)
    assert differing(ours.snapshot(), snapshot) == []
    disk.arm(1, "flip")
    with pytest.raises(UserError, match="cannot be recomputed"):
        step(given.batch(3))
    assert differing(ours.snapshot(), snapshot) == []


@pytest.mark.parametrize("updates", ["early", "together"])
def test_a_loss_is_not_paged_where_it_could_be_lost(updates: Updates) -> None:
    task = case("norm").task(updates)
    s = task.graph.tensors[task.graph.outputs[0]].storage
    made = task.position[task.maker[s]]
    late: list[Item] = [*task.order[: made + 1], PageOut(s), *task.order[made + 1 :], PageIn(s)]
    with pytest.raises(InternalError, match="could not be recomputed"):
        validate(task.graph, task.plan(late, planner="by hand"))


# ---- a budget that falls while the disk fails


@pytest.mark.parametrize("kind", ["error", "flip"])
def test_a_fault_and_a_fall_in_one_step(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In either order: the rest that follows the one is watched, and planned anew, as the step itself is."""
    monkeypatch.setattr(adaptive, "PERIOD_S", 0.0)
    given = case("norm")
    task = given.task("early")
    plan = paged_plan(task, safe_gaps(task))
    asked = fall_at = 0

    def budget() -> int:
        nonlocal asked
        asked += 1
        return plan.peak_bytes if asked < fall_at else small

    small = task.keep_all.persistent_bytes + (plan.peak_bytes - task.keep_all.persistent_bytes) * 3 // 4
    disk, ours, plain = Disk(), given.fresh(), given.fresh()
    step = CompiledStep(
        given.graph, plan, ours.model, ours.optimizer, {}, costs=given.costs,
        conditions=Conditions(page_to=tmp_path, page_calls=disk.calls, watch=BudgetWatch(budget)),
    )  # fmt: skip
    keeps = et.compile(given.graph, task.keep_all, plain.model, plain.optimizer)
    fall_at = 10**9
    for one in (step, keeps):
        torch.manual_seed(0)
        one(given.batch(0))
    n_calls, n_asked = len(disk.log) // 2, asked
    both = 0
    for number, (fault, fall_at) in enumerate((f, a) for f in range(1, n_calls, 7) for a in range(2, n_asked, 14)):
        asked = 0
        disk.arm(fault, kind)
        forget(step)
        losses = []
        for one in (step, keeps):
            torch.manual_seed(number)
            losses.append(one(given.batch(number)))
        assert torch.equal(*losses), (fault, fall_at)
        both += bool(step.falls) and step.page_fault is not None
    assert differing(ours.snapshot(), plain.snapshot()) == []
    assert both > 3
