"""A budget that moves: never over it, no step lost or repeated, and the numbers of a budget that does not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from edgetrain.errors import Infeasible, UserError
from edgetrain.measure.sensors.memory import Memory
from edgetrain.native import arena
from edgetrain.plan.process import RESERVE_BYTES
from edgetrain.run import adaptive
from tests.helpers.marks import PLANNED_STEPS
from tests.helpers.moving_budget import (
    BATCH,
    PLENTY,
    Moving,
    Trained,
    ask_before_every_op,
    copied,
    peaks,
    quarter_up,
    same,
)
from tests.helpers.plain import bits
from tests.run.test_process_memory import cgroup

pytestmark = PLANNED_STEPS


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_before_every_op(monkeypatch)


def test_plans_are_made_ahead_over_the_whole_range() -> None:
    found = peaks(Trained(memory=Moving()).step)
    assert len(found) > 3
    assert found == sorted(found, reverse=True)
    assert found[0] == Trained(memory="1TB").step.plan.peak_bytes
    assert found[-1] < 0.6 * found[0]


def test_200_changes_lose_no_step_and_no_bit() -> None:
    budget = Moving()
    ours, constant = Trained(memory=budget), Trained()
    low, high = quarter_up(ours.step)
    chance = random.Random(3)
    changes = 0

    def rule(asked: int) -> int | None:
        nonlocal changes
        if chance.random() > 0.02:
            return None
        changes += 1
        return chance.randint(low, high)

    budget.rule = rule
    steps = 0
    while changes < 200:
        steps += 1
        value = ours()
        assert torch.equal(bits(value), bits(constant()))
        began = [switch for switch in ours.step.switches if not switch.in_step][-1]
        assert began.peak_bytes == ours.step.plan.peak_bytes <= began.budget_bytes
    assert same(ours.state(), constant.state())
    switches = ours.step.switches
    assert all(switch.over_bytes == 0 for switch in switches)
    assert all(switch.peak_bytes <= switch.budget_bytes for switch in switches)
    assert sum(switch.in_step for switch in switches) > 10
    assert {switch.step for switch in switches} <= set(range(steps))


@pytest.mark.parametrize("options", [{"check_finite": True}, {"clip_norm": 1.0}, {"planner": "sage"}])
def test_a_fall_at_every_op_in_turn(options: dict[str, Any]) -> None:
    budget = Moving()
    ours, constant = Trained(memory=budget, **options), Trained(**{**options, "planner": "auto"})
    low, _ = quarter_up(ours.step)
    budget.now, before = PLENTY, budget.asked
    ours(), constant()
    ops = budget.asked - before
    for at in range(1, ops, 3):
        asked = budget.asked
        budget.rule = lambda n, asked=asked, at=at: low if n - asked > at else PLENTY  # type: ignore[misc]
        assert torch.equal(bits(ours()), bits(constant()))
    assert same(ours.state(), constant.state())
    falls = [switch for switch in ours.step.switches if switch.in_step]
    assert len(falls) > 10
    # With all gradients alive until the norm is known, some falls cannot be met in full; that is said.
    assert all(switch.over_bytes == max(0, switch.peak_bytes - low) for switch in falls)
    assert sum(switch.over_bytes == 0 for switch in falls) > len(falls) // 2


def test_what_the_arena_serves_after_a_fall_is_what_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Moving()
    ours = Trained(memory=budget)
    low, _ = quarter_up(ours.step)
    ours()
    asked = budget.asked
    budget.rule = lambda n: low if n > asked + 5 else PLENTY  # early: nearly nothing is alive yet
    ours()
    fall = ours.step.switches[-1]
    recording = ours.step.compiled(*BATCH).arena
    (variant,) = ours.step._variants.values()
    served = variant.steps[0].arena
    assert fall.in_step
    assert recording is not None
    assert served is not None
    assert served.most_bytes + ours.step.plan.persistent_bytes == fall.peak_bytes <= low


def test_under_the_smallest_plan_nothing_happens_until_there_is_more() -> None:
    budget = Moving()
    ours, constant = Trained(memory=budget), Trained()
    ours(), constant()
    budget.now = 1000
    before = copied(ours.state())
    with pytest.raises(Infeasible, match="nothing of this step has happened") as caught:
        ours()
    assert caught.value.smallest_bytes == peaks(ours.step)[-1]
    assert same(ours.state(), before)
    budget.now = caught.value.smallest_bytes
    assert torch.equal(ours(), constant())
    assert same(ours.state(), constant.state())


def test_a_fall_below_what_can_be_is_met_as_far_as_it_can_be() -> None:
    budget = Moving()
    ours, constant = Trained(memory=budget), Trained()
    ours(), constant()
    asked = budget.asked
    budget.rule = lambda n: 1000 if n > asked + 20 else PLENTY
    assert torch.equal(ours(), constant())
    fall = ours.step.switches[-1]
    assert fall.in_step
    assert fall.over_bytes == fall.peak_bytes - 1000 > 0
    assert same(ours.state(), constant.state())


def test_a_function_that_fails_in_a_step_is_told_before_the_next() -> None:
    budget = Moving()
    ours, constant = Trained(memory=budget), Trained()
    ours(), constant()
    asked = budget.asked

    def rule(n: int) -> int:
        if n == asked + 30:
            raise RuntimeError("the sensor is gone")
        return PLENTY

    budget.rule = rule
    assert torch.equal(ours(), constant())
    with pytest.raises(RuntimeError, match="the sensor is gone"):
        ours()
    assert torch.equal(ours(), constant())
    assert same(ours.state(), constant.state())


@pytest.mark.parametrize("amount", [None, -5, "lots", [1]])
def test_a_function_that_gives_no_amount(amount: object) -> None:
    with pytest.raises(UserError, match="amount"):
        Trained(memory=lambda: amount)


def test_amounts_are_as_people_write_them() -> None:
    assert Trained(memory=lambda: "1GB").step.plan.peak_bytes < 10**9


def test_a_bound_on_the_process_does_not_move() -> None:
    with pytest.raises(UserError, match="process_memory"):
        Trained(memory=lambda: PLENTY, process_memory="1GB")


def test_auto_follows_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [Memory(PLENTY, 1, None)]
    monkeypatch.setattr(adaptive, "memory_now", lambda: now[0])
    ours, constant = Trained(memory="auto"), Trained()
    low, high = quarter_up(ours.step)
    lasting = ours.step.plan.persistent_bytes
    for wanted in (high, low, (low + high) // 2, high):
        spare = wanted - lasting - arena.resident_bytes() + RESERVE_BYTES
        now[0] = Memory(spare, 0, None)
        assert torch.equal(ours(), constant())
        assert ours.step.plan.peak_bytes <= wanted
    # Under pressure it takes no more than it has, however much is said to be available.
    now[0] = Memory(PLENTY, 0, 0.5)
    assert adaptive.automatic(lasting)() == lasting + arena.resident_bytes()
    assert same(ours.state(), constant.state())


def test_auto_needs_a_system_that_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "memory_now", lambda: None)
    with pytest.raises(UserError, match="tells what memory is available"):
        Trained(memory="auto")


# ---- for real: the limit of a control group follows the budget

PROGRAM = """
import json, sys, time
import torch
import edgetrain as et
from edgetrain import zoo
from pathlib import Path

def most_of_its_own():
    # The peak since the last call, without pages of files: those are charged to whoever read them first.
    rows = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, files = (1024 * int(rows[name].split()[0]) for name in ("VmHWM", "RssFile"))
    Path("/proc/self/clear_refs").write_text("5")
    return peak - files

how, talk = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
entry = zoo.get("mobilenet_v2")
model = zoo.build("mobilenet_v2")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
batch = entry.example(8, input_size=160)
file = talk / "budget"
if how == "ours":
    step = et.prepare(model, entry.task.loss, optimizer, batch, memory=lambda: int(file.read_text()))
else:
    def step(*batch):
        optimizer.zero_grad()
        loss = entry.task.loss(model, *batch)
        loss.backward()
        optimizer.step()
        return loss
losses = []
while not (talk / "stop").exists():
    losses.append(float(step(*batch)))
    (talk / "part").write_text(json.dumps({"steps": len(losses), "most": most_of_its_own()}))
    (talk / "part").rename(talk / "state")
switches = [vars(s) for s in step.switches] if how == "ours" else []
print(json.dumps({"losses": losses, "switches": switches}))
"""
GRACE_S = 3.0


@pytest.mark.parametrize("how", ["ours", "plain"])
def test_a_limit_that_follows_the_budget(how: str, tmp_path: Path, kept: Path) -> None:
    """The budget falls, and after GRACE_S the hard limit of the control group with it: plain PyTorch cannot go on (the
    kernel kills it, or the limit cannot be set while it holds more), and our training does."""
    file = tmp_path / "budget"
    file.write_text(str(PLENTY))
    with cgroup(4 * 10**9) as folder:
        if folder is None:
            pytest.skip("this process may not make a control group")
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how, str(tmp_path)], stdout=subprocess.PIPE, text=True,
            preexec_fn=lambda: (folder / "cgroup.procs").write_text(str(os.getpid())),
            env={**os.environ, "EDGETRAIN_CACHE": str(kept)},
        )  # fmt: skip
        try:
            before = wait_for(tmp_path, child, steps=3)
            small = 130_000_000
            file.write_text(str(small))
            time.sleep(GRACE_S)
            limit = before["most"] - 90_000_000
            refused = not set_limit(folder, limit)
            after = wait_for(tmp_path, child, steps=before["steps"] + 4) if not refused else None
            (tmp_path / "stop").touch()
            said, _ = child.communicate(timeout=60)
        finally:
            child.kill()
            child.wait()
    if how == "plain":
        assert refused or child.returncode == -9
        return
    assert not refused
    assert child.returncode == 0
    assert after is not None
    assert after["most"] <= limit
    result = json.loads(said)
    assert all(value == value for value in result["losses"])
    assert [switch["peak_bytes"] for switch in result["switches"]][-1] <= small


def wait_for(talk: Path, child: subprocess.Popen[str], *, steps: int) -> Any:
    """What the child says after so many steps; what it said last where it ends before."""
    end = time.monotonic() + 120
    found: Any = {"steps": 0, "most": 0}
    while found["steps"] < steps and child.poll() is None and time.monotonic() < end:
        if (talk / "state").exists():
            found = json.loads((talk / "state").read_text())
        time.sleep(0.05)
    return found


def set_limit(folder: Path, limit: int) -> bool:
    """False where the kernel refuses a limit under what is in use (version 1)."""
    for name in ("memory.limit_in_bytes", "memory.max"):
        if (folder / name).exists():
            try:
                (folder / name).write_text(str(limit))
            except OSError:
                return False
            return True
    raise AssertionError("no limit of memory in this group")
