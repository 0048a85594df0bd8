"""Ctrl-C, and exceptions of its kind, at any bytecode: a step has happened whole or not at all, `Step.count` tells
which, and the same objects train on as if nothing had been.

    bytecodes of a call    │ │ │ │ │ │ │ │ │ │ │ │       all of edgetrain's frames and of the step's own program
                             ↑       ↑         ↑
                             one of these exceptions, at a seeded random place

`EDGETRAIN_EXAMPLES` asks for more places.
"""

from __future__ import annotations

import copy
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import edgetrain as et
from edgetrain.costs.measured import measure_costs
from edgetrain.native import arena
from edgetrain.plan.problem import problem
from edgetrain.run import adaptive
from edgetrain.run.compiled import CompiledStep
from edgetrain.run.conditions import Conditions
from edgetrain.run.recapture import Recapture
from edgetrain.run.step import Step
from tests.helpers.marks import PLANNED_STEPS
from tests.helpers.paged import paged_plan, random_gaps, with_store
from tests.helpers.plain import OptimizerMaker, differing, sgd, training

pytestmark = PLANNED_STEPS
PLACES = max(1, int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 6)
OURS = str(Path(et.__file__).parent)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
PLENTY = 10**12


class Stop(BaseException):
    """What handlers raise here."""


def raised() -> None:
    raise Stop


def sent_to_itself() -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(threading.get_ident()), ctypes.py_object(Stop))


def signalled() -> None:
    signal.raise_signal(signal.SIGINT)


def signalled_three_times() -> None:
    for number in SIGNALS:
        signal.raise_signal(number)


WAYS: tuple[Callable[[], None], ...] = (raised, sent_to_itself, signalled, signalled_three_times)


class At:
    """While it is entered, counts the bytecodes (or lines) of edgetrain; at one of them something is done."""

    def __init__(self, place: int | None, way: Callable[[], None] = raised, *, event: str = "opcode") -> None:
        self.place, self.way, self.event, self.count = place, way, event, 0
        self.where = ""

    def __enter__(self) -> At:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, _event: str, _: object) -> Any:
        name = frame.f_code.co_filename
        if not (name.startswith((OURS, "<step of"))) or frame.f_code.co_name in ("<genexpr>", "__del__"):
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        return self._moved

    def _moved(self, frame: FrameType, event: str, _: object) -> Any:
        if event == self.event:
            self.count += 1
            if self.count == self.place:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} +{frame.f_lasti} {frame.f_code.co_name}"
                self.way()
        return self._moved


@contextmanager
def raising_handlers() -> Iterator[None]:
    def handler(_number: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_filename.startswith(OURS):
                raise Stop
            frame = frame.f_back  # what comes late comes into the test itself

    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
        assert all(signal.getsignal(number) is handler for number in SIGNALS)
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if n == 0 else 6, 6, 3, padding=1) for n in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.dropout(F.relu(norm(conv(x))), 0.2, training=self.training)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def dense() -> nn.Module:
    """Samples that are computed alone: for micro-batches."""
    layers = [module for _ in range(3) for module in (nn.Linear(8, 8), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(8, 4))


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, amsgrad=True, weight_decay=0.01)


def nesterov(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, maximize=True, weight_decay=0.01)


def images(n: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(n) % 4


def rows(n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 8, generator=torch.Generator().manual_seed(0)), torch.arange(n) % 4


@dataclass
class Moving:
    """Falls in the middle of each step, once it is armed."""

    now: int = PLENTY
    low: int = PLENTY
    asked: int = 0
    at: int = 25

    def __call__(self) -> int:
        self.asked += 1
        return self.low if self.low < PLENTY and self.asked > self.at else self.now


@dataclass(frozen=True)
class Kind:
    name: str
    optimizer: OptimizerMaker = sgd
    model: Callable[[], nn.Module] = Net
    batch: Callable[[], tuple[Tensor, Tensor]] = images
    options: tuple[tuple[str, Any], ...] = ()
    part: float | None = None  # of what keeping all takes, as a budget
    moves: bool = False
    updates: Any = None
    pages: bool = False


KINDS = (
    Kind("early"),
    Kind("early adam", adam),
    Kind("early nesterov", nesterov),
    Kind("plain layouts", options=(("memory_format", "preserve"),)),
    Kind("check_finite", options=(("check_finite", True),)),
    Kind("clipped", adam, options=(("clip_norm", 0.1),)),
    Kind("budget", part=0.7),
    Kind("budget plain", options=(("memory_format", "preserve"),), part=0.85),
    Kind("micro-batches", adam, dense, rows, (("micro_batches", 3),)),
    Kind("clipped micro-batches", sgd, dense, rows, (("micro_batches", 2), ("clip_norm", 0.1))),
    Kind("moving", moves=True),
    Kind("moving adam checked", adam, options=(("check_finite", True),), moves=True),
    Kind("guarded", adam, updates="guarded"),
    Kind("together", updates="together"),
    Kind("paged early", updates="early", pages=True),
    Kind("paged together", adam, updates="together", pages=True),
)


class Subject:
    """A training, its step, and what it looks like before and after one step from the same start."""

    def __init__(self, kind: Kind, *, stepped: bool = True) -> None:
        torch.manual_seed(1)
        self.kind, self.batch = kind, kind.batch()
        self.ours = training(kind.model(), cross_entropy, kind.optimizer)
        self.budget = Moving()
        self.step: Any = self._step()
        if stepped:
            self.step(*self.batch)
        self.parameters = list(self.ours.model.parameters())
        torch.manual_seed(3)
        self.start = copy.deepcopy((self.ours.model.state_dict(), self.ours.optimizer.state_dict()))
        self.before = self.look()

    def _step(self) -> Any:
        ours, kind = self.ours, self.kind
        if kind.updates is not None:
            graph = et.capture(ours.model, ours.loss, ours.optimizer, self.batch)
            if kind.pages:
                return self._paged(graph)
            return et.compile(graph, et.keep_all(graph, updates=kind.updates), ours.model, ours.optimizer)
        options = dict(kind.options)
        if kind.part is not None:
            plain = et.prepare(ours.model, ours.loss, ours.optimizer, self.batch, **options)
            options["memory"] = int(plain.plan.peak_bytes * kind.part)
        if kind.moves:
            options["memory"] = self.budget
        return et.prepare(ours.model, ours.loss, ours.optimizer, self.batch, **options)

    def _paged(self, graph: et.Graph) -> CompiledStep:
        costs = with_store(measure_costs(graph, rounds=1))
        plan = paged_plan(
            problem(graph, costs, self.kind.updates),
            random_gaps(problem(graph, costs, self.kind.updates), random.Random(4), 0.5),
        )
        assert plan.paged
        self.folder = tempfile.TemporaryDirectory()
        return CompiledStep(
            graph,
            plan,
            self.ours.model,
            self.ours.optimizer,
            {},
            costs=costs,
            conditions=Conditions(page_to=self.folder.name),
        )

    @property
    def count(self) -> int:
        return int(self.step.count if isinstance(self.step, Step) else self.step.completed)

    def look(self) -> dict[str, Tensor]:
        found = self.ours.snapshot()
        for n, p in enumerate(self.parameters):
            found[f"has state {n}"] = torch.tensor(p in self.ours.optimizer.state)
            found[f"has gradient {n}"] = torch.tensor(p.grad is not None)
        return found

    def back(self) -> None:
        self.ours.model.load_state_dict(self.start[0])
        self.ours.optimizer.load_state_dict(copy.deepcopy(self.start[1]))
        for p in self.parameters:
            p.grad = None
        torch.manual_seed(3)
        self.budget.asked = 0

    def fall(self) -> None:
        """From now on the budget falls in the middle of a step."""
        (variant,) = self.step._variants.values()
        peaks = [plan.peak_bytes for plan in variant.ladder.plans]
        self.budget.low = peaks[-1] + (peaks[0] - peaks[-1]) // 4


def surroundings() -> dict[str, Any]:
    """What an interrupted call must leave as it was in the process."""
    return {
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "cudnn": torch._C._get_cudnn_enabled(),
        "nnpack": torch._C._get_nnpack_enabled(),
        "threads": torch.get_num_threads(),
        "hooks": (len(nn.modules.module._global_forward_pre_hooks), len(nn.modules.module._global_forward_hooks)),
        "modes": len(_get_current_dispatch_mode_stack()),
        "watching": arena.watching(),
        "numpy": str(torch.ones(1)),
    }


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "PERIOD_S", 0.0)
    monkeypatch.setattr(adaptive, "ASKING_PART", float("inf"))
    # Captures come at some steps and not at others; `prepare` is interrupted in the middle of them below.
    monkeypatch.setattr(Recapture, "require_same", lambda *_: None)


def require_one_of(subject: Subject, states: list[dict[str, Tensor]], expected: int, where: str) -> None:
    now = subject.look()
    assert differing(now, states[expected]) == [], (where, expected, [len(differing(now, s)) for s in states])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_step_interrupted_at_any_bytecode(kind: Kind) -> None:
    draw = random.Random(kind.name)
    subject = Subject(kind)
    if kind.moves:
        subject.fall()
    subject.back()
    subject.step(*subject.batch)
    after = subject.look()
    subject.back()
    assert differing(subject.look(), subject.before) == []
    with At(None) as counted:
        subject.step(*subject.batch)
    assert differing(subject.look(), after) == []
    assert counted.count > 500
    around, happened = surroundings(), [0, 0]
    for trial in range(max(1, PLACES // 5) if kind.moves else PLACES):
        place, way = draw.randrange(1, counted.count), WAYS[trial % len(WAYS)]
        subject.back()
        count, at = subject.count, At(place, way)
        with raising_handlers(), suppress(Stop), at:
            subject.step(*subject.batch)
        where = f"{way.__name__} at {place} of {counted.count}: {at.where}"
        assert at.where, where
        require_one_of(subject, [subject.before, after], subject.count - count, where)
        assert surroundings() == around, where
        happened[subject.count - count] += 1
        subject.back()
        subject.step(*subject.batch)
        require_one_of(subject, [subject.before, after], 1, f"the step after {where}")
    print(kind.name, counted.count, happened)


FIRST = [kind for kind in KINDS if kind.name in ("early adam", "budget", "micro-batches", "check_finite")]


@pytest.mark.parametrize("kind", FIRST, ids=lambda kind: kind.name)
def test_a_first_step_interrupted_at_any_line(kind: Kind) -> None:
    draw = random.Random(kind.name)
    subject = Subject(kind, stepped=False)
    with At(None, event="line") as counted:
        subject.step(*subject.batch)
    after, around = subject.look(), surroundings()
    for trial in range(max(2, PLACES // 4)):
        subject = Subject(kind, stepped=False)
        place, way = draw.randrange(1, counted.count), WAYS[trial % len(WAYS)]
        at = At(place, way, event="line")
        with raising_handlers(), suppress(Stop), at:
            subject.step(*subject.batch)
        where = f"{way.__name__} at {place} of {counted.count}: {at.where}"
        require_one_of(subject, [subject.before, after], subject.count, where)
        assert surroundings() == around, where
        subject.back()
        subject.step(*subject.batch)
        require_one_of(subject, [subject.before, after], 1, f"the step after {where}")


@pytest.mark.parametrize("what", ["gradients", "trace_memory", "evaluate"])
@pytest.mark.parametrize("name", ["early adam", "micro-batches"])
def test_what_changes_nothing_changes_nothing_interrupted(what: str, name: str) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    draw, subject = random.Random(what + name), Subject(kind)
    subject.back()
    call = getattr(subject.step, what)
    call(*subject.batch)
    assert differing(subject.look(), subject.before) == []
    with At(None, event="line") as counted:
        call(*subject.batch)
    around, flags = surroundings(), [m.training for m in subject.ours.model.modules()]
    for trial in range(max(4, PLACES // 2)):
        place, way = draw.randrange(1, counted.count), WAYS[trial % len(WAYS)]
        at = At(place, way, event="line")
        with raising_handlers(), suppress(Stop), at:
            call(*subject.batch)
        where = f"{way.__name__} at {place} of {counted.count}: {at.where}"
        assert differing(subject.look(), subject.before) == [], where
        assert surroundings() == around, where
        assert [m.training for m in subject.ours.model.modules()] == flags, where
        subject.back()
    subject.step(*subject.batch)
    assert subject.count == 2


@pytest.mark.parametrize("kind", FIRST, ids=lambda kind: kind.name)
def test_prepare_interrupted_at_any_line(kind: Kind) -> None:
    draw, subject = random.Random(kind.name), Subject(kind, stepped=False)
    subject.ours.model.head.train(False) if isinstance(subject.ours.model, Net) else None
    flags, around = [m.training for m in subject.ours.model.modules()], surroundings()
    attributes = {name: set(vars(m)) for name, m in subject.ours.model.named_modules()}
    with At(None, event="line") as counted:
        subject.step = subject._step()
    reference = None
    for trial in range(max(2, PLACES // 4)):
        place, way = draw.randrange(1, counted.count), WAYS[trial % len(WAYS)]
        at = At(place, way, event="line")
        torch.manual_seed(3)
        with raising_handlers(), suppress(Stop), at:
            subject._step()
        where = f"{way.__name__} at {place} of {counted.count}: {at.where}"
        assert differing(subject.look(), subject.before) == [], where
        assert surroundings() == around, where
        assert [m.training for m in subject.ours.model.modules()] == flags, where
        assert {name: set(vars(m)) for name, m in subject.ours.model.named_modules()} == attributes, where
        reference = where
    subject.step = subject._step()
    subject.back()
    subject.step(*subject.batch)
    assert subject.count == 1, reference


@pytest.mark.parametrize(
    "kind",
    [k for k in KINDS if k.name in ("early", "check_finite", "micro-batches", "moving")],
    ids=lambda kind: kind.name,
)
def test_signals_from_outside_at_any_moment(kind: Kind) -> None:
    """Ctrl-C, once or hammered, at random moments of a step."""
    draw, subject = random.Random(kind.name), Subject(kind)
    if kind.moves:
        subject.fall()
    subject.back()
    began = time.perf_counter()
    subject.step(*subject.batch)
    took, after, around = time.perf_counter() - began, subject.look(), surroundings()
    switched = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for trial in range(PLACES):
            subject.back()
            moments = [draw.random() * took for _ in range(1 + trial % 4)]

            def send(moments: list[float] = moments) -> None:
                for moment in moments:
                    time.sleep(moment / len(moments))
                    os.kill(os.getpid(), signal.SIGINT)

            count, sender = subject.count, threading.Thread(target=send)
            with raising_handlers():
                try:
                    sender.start()
                    subject.step(*subject.batch)
                except Stop:
                    pass
                sender.join()
                time.sleep(0.001)
            require_one_of(subject, [subject.before, after], subject.count - count, f"{trial}: {moments}")
            assert surroundings() == around
    finally:
        sys.setswitchinterval(switched)
    subject.back()
    subject.step(*subject.batch)
    require_one_of(subject, [subject.before, after], 1, "the step after")


PRESSED = """
import random, signal, sys, threading, time
import torch
from torch import nn
import edgetrain as et

class Alarm(Exception):
    pass

def alarm(number, frame):
    raise Alarm

signal.signal(signal.SIGALRM, alarm)
torch.set_num_threads(1)
model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Dropout(), nn.Tanh())])
optimizer, x, draw = torch.optim.Adam(model.parameters()), torch.randn(8, 16), random.Random(int(sys.argv[1]))

def prepared():
    et.prepare(model, lambda model, x: model(x).square().mean(), optimizer, (x,))

prepared()
begin = time.perf_counter()
prepared()
took, met = time.perf_counter() - begin, 0
for number in range(int(sys.argv[2])):
    kind = (KeyboardInterrupt, Alarm)[number % 2]
    try:
        if kind is KeyboardInterrupt:
            at = threading.Timer(draw.random() * took * 0.8, signal.raise_signal, (signal.SIGINT,))
            at.start()
        else:
            signal.setitimer(signal.ITIMER_REAL, draw.random() * took * 0.8)
        prepared()
        time.sleep(3 * took)
        raise SystemExit(f"press {number} was lost")
    except kind:
        met += 1
print(met)
"""


def test_presses_while_a_step_is_captured() -> None:
    """In code of PyTorch that may not throw too, where an exception would end the process or be lost."""
    presses = max(40, PLACES)
    words = [sys.executable, "-c", PRESSED, "7", str(presses)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (0, f"{presses}\n"), done.stderr[-2000:]


@pytest.mark.parametrize("name", ["early", "guarded", "micro-batches"])
def test_a_step_in_another_thread_that_is_sent_an_exception(name: str) -> None:
    """The steps of this one, in turn with them, do not notice."""
    kind = next(kind for kind in KINDS if kind.name == name)
    draw, theirs, mine = random.Random(name), Subject(kind), Subject(KINDS[0])
    theirs.back()
    theirs.step(*theirs.batch)
    after = theirs.look()
    for _ in range(max(3, PLACES // 3)):
        theirs.back()
        count = theirs.count

        def work() -> None:
            with suppress(Stop):
                theirs.step(*theirs.batch)

        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(draw.random() * 0.01)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Stop))
        thread.join(30)
        assert not thread.is_alive()
        require_one_of(theirs, [theirs.before, after], theirs.count - count, "another thread")
        mine.back()
        mine.step(*mine.batch)
    theirs.back()
    theirs.step(*theirs.batch)
    require_one_of(theirs, [theirs.before, after], 1, "the step after")
