"""A step that fails, wherever and for whatever reason, has changed nothing, and the next one works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
import edgetrain.run.compiled as compiled_module
from edgetrain.errors import InternalError, UserError
from edgetrain.plan.plan import Compute, Updates
from edgetrain.run.compile import build
from edgetrain.run.compiled import CompiledStep
from edgetrain.run.program import Program
from tests.helpers.plain import OptimizerMaker, Training, differing, relative_error, training
from tests.run.faulty_kernels import Fault, Faults

ROUNDING = 1e-12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        out: Tensor = self.head(self.drop(x.mean((2, 3))))
        return out


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def batch(n: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 2, 6, 6, generator=generator, dtype=torch.float64), torch.arange(n) % 3


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, amsgrad=True)


def made(optimizer: OptimizerMaker, updates: Updates) -> tuple[Training, CompiledStep]:
    torch.manual_seed(1)
    ours = training(Net().double(), cross_entropy, optimizer)
    graph = et.capture(ours.model, ours.loss, ours.optimizer, batch())
    return ours, et.compile(graph, et.keep_all(graph, updates=updates), ours.model, ours.optimizer)


def everything(ours: Training) -> dict[str, Tensor]:
    """A snapshot that also tells state that is not there from state that is empty."""
    found = ours.snapshot()
    for name, p in ours.model.named_parameters():
        if p in ours.optimizer.state:
            found[f"has state: {name}"] = torch.tensor(True)
    return found


@pytest.mark.parametrize("later", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("updates", ["guarded", "together"])
@pytest.mark.parametrize("optimizer", [momentum, amsgrad])
def test_a_fault_at_any_op_changes_nothing(optimizer: OptimizerMaker, updates: Updates, later: bool) -> None:
    ours, step = made(optimizer, updates)
    if later:
        step(*batch())
    step._checked = True  # so that every call runs the program that has the faults
    faults = Faults(step._program)
    twin = ours.twin()
    before = everything(ours)
    assert any(name.startswith("has state") for name in before) == later
    torch.manual_seed(2)
    before["random"] = torch.get_rng_state()
    n_ops = sum(isinstance(action, Compute) for action in step.plan.schedule)
    tried = 0
    for number in range(n_ops):
        for after in (False, True):
            if updates == "together" and step.graph.ops[_computed(step, number)].phase == "update":
                continue  # these run when nothing can fail any more
            faults.arm(number, after=after)
            with pytest.raises(Fault):
                step(*batch())
            assert faults.calls == number + 1
            assert differing(everything(ours), before) == [], f"op {number}, after={after}"
            tried += 1
    assert tried >= 2 * (n_ops - 6)
    faults.disarm()
    found = step(*batch())
    assert faults.calls == n_ops
    assert sum(faults.is_update) == 6
    torch.manual_seed(2)
    right = twin.plain_step(*batch())
    assert torch.equal(found, right)
    assert relative_error(ours.snapshot(), twin.snapshot(), noise=1e-14) < ROUNDING


def test_an_early_step_says_so_when_the_impossible_happens() -> None:
    """Nothing can fail after the first update of an early step. A fault put there by force is not hidden."""
    ours, step = made(momentum, "early")
    step(*batch())
    faults = Faults(step._program)
    before = everything(ours)
    first_update = [step.graph.ops[op].phase for op in step.plan.order].index("update")
    for number in range(first_update):
        faults.arm(number, after=False)
        with pytest.raises(Fault):
            step(*batch())
        assert differing(everything(ours), before) == []
    faults.arm(first_update, after=True)
    with pytest.raises(InternalError, match="updated in part"):
        step(*batch())


def _computed(step: CompiledStep, position: int) -> int:
    return [action.op for action in step.plan.schedule if isinstance(action, Compute)][position]


@pytest.mark.parametrize("updates", ["early", "guarded", "together"])
def test_a_fault_in_the_first_call_which_looks_at_every_tensor(
    updates: Updates, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, step = made(momentum, updates)
    made_up: list[Faults] = []

    def faulty(*args: Any, **kwargs: Any) -> Program:
        program = build(*args, **kwargs)
        made_up.append(Faults(program))
        made_up[-1].arm(len(step.graph.ops) - 7, after=True)  # the last op, or the last but the updates
        return program

    twin, before = ours.twin(), everything(ours)
    monkeypatch.setattr(compiled_module, "build", faulty)
    with pytest.raises(Fault):
        step(*batch())
    assert len(made_up) == 1
    assert differing(everything(ours), before) == []
    monkeypatch.undo()
    torch.set_rng_state(before["random"])
    found = step(*batch())
    torch.set_rng_state(before["random"])
    assert torch.equal(found, twin.plain_step(*batch()))
    assert differing(ours.snapshot(), twin.snapshot()) == []


def test_gradients_and_traces_that_fail_change_nothing() -> None:
    ours, step = made(amsgrad, "early")
    before = everything(ours)
    faults = Faults(step._gradient_program)
    faults.arm(len(step.graph.ops) - 8, after=True)
    with pytest.raises(Fault):
        step.gradients(*batch())
    assert differing(everything(ours), before) == []


# ---- numbers that are not finite ----------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_refused() -> None:
    torch.manual_seed(1)
    ours = training(Net().double(), cross_entropy, momentum)
    step = et.prepare(ours.model, ours.loss, ours.optimizer, batch(), check_finite=True)
    x, y = batch()
    for checked in range(2):  # in the first call, which is another program, and later
        before = everything(ours)
        spoilt = x.clone()
        spoilt[0, 0, 0, 0] = torch.inf
        with pytest.raises(UserError, match="the loss is not finite"):
            step(spoilt, y)
        assert differing(everything(ours), before) == []
        assert step(x, y).isfinite(), checked


class Root(nn.Module):
    """sqrt(w·x): finite at w = 0, where its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.inner = nn.Parameter(torch.tensor([1.0, 1.0]))
        self.outer = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.inner * x).sqrt().sum() * self.outer + self.norm(x).square().sum()
        return out


def test_a_step_that_checks_its_gradients_does_not_update_early() -> None:
    ours = training(Root(), lambda model, x: model(x), momentum)
    graph = et.capture(ours.model, ours.loss, ours.optimizer, (torch.ones(2, 2),))
    with pytest.raises(UserError, match="cannot update early"):
        et.compile(graph, et.keep_all(graph, updates="early"), ours.model, ours.optimizer, check_finite=True)


@pytest.mark.parametrize("updates", ["guarded", "together"])
def test_a_gradient_that_is_not_finite_is_refused(updates: Updates) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return out

    ours = training(Root(), loss, momentum)
    good, bad = torch.tensor([[1.0, 2.0], [3.0, 1.0]]), torch.tensor([[0.0, 2.0], [3.0, 1.0]])
    graph = et.capture(ours.model, loss, ours.optimizer, (good,))
    plan = et.keep_all(graph, updates=updates)
    step = et.compile(graph, plan, ours.model, ours.optimizer, check_finite=True)
    assert loss(ours.twin().model, bad).isfinite()
    for _ in range(2):
        before = everything(ours)
        with pytest.raises(UserError, match="the gradient of inner is not finite"):
            step(bad)
        assert differing(everything(ours), before) == []
        assert step(good).isfinite()
        assert differing(everything(ours), before) != []


def test_without_the_check_such_numbers_pass_as_in_plain_pytorch() -> None:
    torch.manual_seed(1)
    ours = training(Net().double(), cross_entropy, momentum)
    step = et.prepare(ours.model, ours.loss, ours.optimizer, batch())
    x, y = batch()
    x[0, 0, 0, 0] = torch.inf
    assert not step(x, y).isfinite()


# ---- in a process of its own: Ctrl-C, and no memory left ----------------------------------------------------------

ROOT = Path(__file__).parents[2]


def child(script: str) -> dict[str, Any]:
    """The JSON that the script prints on its last line."""
    head = f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        [sys.executable, "-c", head + script], capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


INTERRUPTED = """
import copy, json, os, random, signal, sys, threading, time
import torch
from torch import nn
import edgetrain as et
from tests.helpers.plain import differing, towards_ramp, training
from tests.run.test_failure import everything, momentum

def interrupted(number, frame):
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, interrupted)
sys.setswitchinterval(1e-5)
random.seed(7)
torch.manual_seed(0)
layers = [m for _ in range(40) for m in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1))]
ours = training(nn.Sequential(*layers).double(), towards_ramp, momentum)
x = (torch.randn(32, 16, dtype=torch.float64),)
graph = et.capture(ours.model, ours.loss, ours.optimizer, x)
found = {}
for updates in ("early", "guarded", "together"):
    step = et.compile(graph, et.keep_all(graph, updates=updates), ours.model, ours.optimizer)
    step(*x)
    start = copy.deepcopy((ours.model.state_dict(), ours.optimizer.state_dict()))

    def back():
        ours.model.load_state_dict(start[0])
        ours.optimizer.load_state_dict(copy.deepcopy(start[1]))
        torch.manual_seed(3)

    back()
    old = everything(ours)
    took = 1.0
    for _ in range(5):
        back()
        began = time.perf_counter()
        step(*x)
        took = min(took, time.perf_counter() - began)
    new = everything(ours)
    count = {"old": 0, "new": 0, "torn": 0, "inside": 0, "missed": 0}
    for trial in range(300):
        if trial >= 15 and count["inside"] >= 5 and count["old"] >= 1:
            break  # on a busy machine most signals come late
        back()
        inside = True
        timer = threading.Timer(random.random() * took, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            step(*x)
            inside = False
            timer.join()
            time.sleep(0.05)
            count["missed"] += 1
        except KeyboardInterrupt:
            count["inside"] += inside
        timer.join()
        now = everything(ours)
        count["old" if not differing(now, old) else "new" if not differing(now, new) else "torn"] += 1
    assert signal.getsignal(signal.SIGINT) is interrupted
    back()
    step(*x)
    count["works"] = not differing(everything(ours), new)
    found[updates] = count
print(json.dumps(found))
"""


@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_signal_at_any_moment_leaves_all_old_or_all_new(number: str) -> None:
    """Whose handler raises, as Ctrl-C's does."""
    for updates, count in child(INTERRUPTED.replace("SIGINT", number)).items():
        assert count["torn"] == count["missed"] == 0, (updates, count)
        assert count["inside"] >= 5, (updates, count)  # most came while the step ran
        assert count["old"] >= 1, (updates, count)
        assert count["works"]


NO_MEMORY = """
import json, resource
import torch
from torch import nn
import edgetrain as et
from edgetrain.native import arena
from tests.helpers.plain import differing, towards_ramp, training
from tests.run.faulty_kernels import Faults
from tests.run.test_failure import amsgrad, everything

arena.missing = lambda: "it is not wanted"
# Blocks of 41 MB: malloc maps each of them on its own and gives it back, so none is left over to be used again.
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()]
ours = training(nn.Sequential(*layers).double(), towards_ramp, amsgrad)
x = (torch.randn(640_000, 8, dtype=torch.float64),)
graph = et.capture(ours.model, ours.loss, ours.optimizer, x)
step = et.compile(graph, et.keep_all(graph, updates="guarded"), ours.model, ours.optimizer)
step(*x)
faults = Faults(step._program)  # only counts
pages = int(open("/proc/self/statm").read().split()[0])
found = []
for spare in (100, 160, 230, 290):
    before = everything(ours)
    faults.disarm()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + spare * 10**6, hard))
    try:
        step(*x)
        error = None
    except RuntimeError as raised:
        error = str(raised)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    reached, same = faults.calls, differing(everything(ours), before) == []
    step(*x)
    found.append([error, reached, same, differing(everything(ours), before) != []])
print(json.dumps({"ops": len(graph.ops), "found": found}))
"""


def test_no_memory_in_the_middle_of_a_step() -> None:
    result = child(NO_MEMORY)
    reached = []
    for error, calls, unchanged, trains_on in result["found"]:
        assert error is not None
        assert "allocate memory" in error
        assert unchanged
        assert trains_on
        reached.append(calls)
    assert reached == sorted(set(reached))  # each time a little further
    assert reached[0] > 1
    assert reached[-1] < result["ops"]
