"""Beside a process that takes the memory away: plain PyTorch is killed, and training with memory="auto" goes on.

limit of the group ────────────────────────────────────────
                     room for the trainer as it is, and SLACK
held   thief  ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▂▂▃▃▄▄▅▅▅▅▅▅▅▅   PIECE every PAUSE_S, SLACK and AWAY in all, after GRACE_S
       plain  ████████████████████ killed
       ours   ██████████████████▇▇▆▆▅▅▅▅▅▅   evicts and plans anew
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.marks import needs_arena
from tests.run.test_adaptive import set_limit, wait_for
from tests.run.test_process_memory import cgroup

pytestmark = needs_arena
MB = 1_000_000
SLACK, AWAY, PIECE = 150 * MB, 120 * MB, 8 * MB
PAUSE_S, GRACE_S = 0.2, 2.0

TRAINER = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from torch.nn import functional as F
import edgetrain as et

how, talk = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(0)
layers = [nn.Conv2d(3, 16, 1)]
for _ in range(20):  # layers of one shape are measured once; they take much memory, and little time
    layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1)]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
batch = torch.randn(16, 3, 96, 96), torch.randint(10, (16,))
loss_of = lambda model, x, y: F.cross_entropy(model(x), y)
if how == "ours":
    step = et.prepare(model, loss_of, optimizer, batch, memory="auto")
else:
    def step(*batch):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss
losses = []
while not (talk / "stop").exists():
    losses.append(float(step(*batch)))
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, files = (1024 * int(status[name].split()[0]) for name in ("VmHWM", "RssFile"))
    plan = step.plan.peak_bytes if how == "ours" else 0
    (talk / "part").write_text(json.dumps({"steps": len(losses), "most": peak - files, "plan": plan}))
    (talk / "part").rename(talk / "state")
switches = [vars(s) for s in step.switches] if how == "ours" else []
print(json.dumps({"losses": losses, "switches": switches}))
"""
THIEF = """
import mmap, sys, time
from pathlib import Path

talk, total, piece, pause_s = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
held = []
while not (talk / "go").exists():
    time.sleep(0.05)
while len(held) * piece < total:
    held.append(mmap.mmap(-1, piece, mmap.MAP_PRIVATE))
    held[-1].write(bytes([1]) * piece)
    time.sleep(pause_s)
(talk / "taken").touch()
while not (talk / "stop").exists():
    time.sleep(0.05)
"""


def own_bytes(folder: Path) -> int:
    """What is charged to the group but for files, which the kernel drops: memory of processes."""
    rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
    found = {name: int(value) for name, value in rows}
    return found["total_rss"] if "total_rss" in found else found["anon"]


def start(folder: Path, program: str, *words: str, cache: Path, goes_first: bool = False) -> subprocess.Popen[str]:
    """goes_first: where the group is out of memory, the kernel kills this process and not another."""

    def enter() -> None:
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        if goes_first:
            Path("/proc/self/oom_score_adj").write_text("1000")

    return subprocess.Popen(
        [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True, preexec_fn=enter,
        env={**os.environ, "EDGETRAIN_CACHE": str(cache)},
    )  # fmt: skip


def until(what: Callable[[], object], *, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while not what() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(what())


@pytest.mark.parametrize("how", ["ours", "plain"])
def test_beside_a_process_that_takes_the_memory_away(how: str, tmp_path: Path, kept: Path) -> None:
    with cgroup(4000 * MB) as folder:
        if folder is None:
            pytest.skip("this process may not make a control group")
        takes = [str(tmp_path), str(SLACK + AWAY), str(PIECE), str(PAUSE_S)]
        trainer = start(folder, TRAINER, how, str(tmp_path), cache=kept, goes_first=True)
        thief = start(folder, THIEF, *takes, cache=kept)
        try:
            before = wait_for(tmp_path, trainer, steps=3)
            thief_bytes = 12 * MB  # an interpreter
            assert set_limit(folder, before["most"] + thief_bytes + SLACK)
            before = wait_for(tmp_path, trainer, steps=before["steps"] + 2)
            assert trainer.poll() is None  # there is room for it
            time.sleep(GRACE_S)
            (tmp_path / "go").touch()
            until(lambda: (tmp_path / "taken").exists() or trainer.poll() is not None, within_s=60)
            after = wait_for(tmp_path, trainer, steps=before["steps"] + 5)
            held = own_bytes(folder)
            (tmp_path / "stop").touch()
            said, _ = trainer.communicate(timeout=60)
        finally:
            for process in (trainer, thief):
                process.kill()
                process.wait()
    if how == "plain":
        assert trainer.returncode == -9
        return
    check_ours(trainer.returncode, said, before, after, held)


def check_ours(code: int, said: str, before: Any, after: Any, held: int) -> None:
    assert code == 0
    assert after["steps"] >= before["steps"] + 5
    assert after["plan"] < before["plan"] - AWAY // 2  # it has let go of what was taken
    assert held <= before["most"] + 12 * MB + SLACK
    result = json.loads(said)
    assert all(value == value for value in result["losses"])
    assert result["switches"][-1]["peak_bytes"] <= result["switches"][-1]["budget_bytes"]
