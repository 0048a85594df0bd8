"""A bound on the process, held by the kernel: the same training run in a cgroup with exactly that limit."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import edgetrain as et
from edgetrain.native import arena
from edgetrain.plan import process

LIMIT = 700_000_000
PROGRAM = """
import json, sys
import torch
import edgetrain as et
from edgetrain import zoo

how, limit = sys.argv[1], int(sys.argv[2])
entry = zoo.get("mobilenet_v2")
torch.manual_seed(0)
model = zoo.build("mobilenet_v2")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
x, y = entry.example(16)
losses = []
if how == "ours":
    step = et.prepare(model, entry.task.loss, optimizer, (x, y), process_memory=limit)
    for _ in range(3):
        losses.append(float(step(x, y)))
else:
    for _ in range(3):
        optimizer.zero_grad()
        loss = entry.task.loss(model, x, y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(json.dumps({"losses": losses, "peak": int(status["VmHWM"].split()[0]) * 1024}))
"""


NET = """
from torch import nn

def build(classes):
    layers = [nn.Upsample(scale_factor=6), nn.Conv2d(1, 16, 3, padding=1)]
    for _ in range(4):
        layers += [nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))
"""


@contextmanager
def cgroup(limit: int) -> Iterator[Path | None]:
    """A child cgroup with a hard limit on memory, v1 or v2; None where this process may not make one."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = {controllers: path.lstrip("/") for _, controllers, path in lines}
    name = f"edgetrain-{os.getpid()}"
    if "memory" in own:
        folder, file = Path("/sys/fs/cgroup/memory") / own["memory"] / name, "memory.limit_in_bytes"
    else:
        folder, file = Path("/sys/fs/cgroup") / own.get("", "") / name, "memory.max"
    try:
        folder.mkdir()
        (folder / file).write_text(str(limit))
    except OSError:
        yield None
        return
    try:
        yield folder
    finally:
        for _ in range(50):  # the kernel may still be clearing up after a process that it killed
            try:
                folder.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def within(folder: Path | None, command: list[str], cache: Path) -> subprocess.CompletedProcess[str]:
    def enter() -> None:
        if folder is not None:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    return subprocess.run(
        [sys.executable, *command], check=False, capture_output=True, text=True, preexec_fn=enter,
        env={**os.environ, "EDGETRAIN_CACHE": str(cache)}, timeout=600,
    )  # fmt: skip


def run(how: str, folder: Path | None, cache: Path) -> tuple[int, Any]:
    done = within(folder, ["-c", PROGRAM, how, str(LIMIT)], cache)
    if done.returncode not in (0, -9):
        raise AssertionError(done.stderr[-2000:])
    return done.returncode, json.loads(done.stdout) if done.returncode == 0 else None


def test_mobilenet_trains_where_plain_pytorch_is_killed(tmp_path: Path) -> None:
    """From a cold start: capture, measuring and planning are inside the limit too."""
    with cgroup(LIMIT) as folder:
        code, ours = run("ours", folder, tmp_path)
        assert code == 0
        assert ours["peak"] <= LIMIT
        code, plain = run("plain", folder, tmp_path)
    if folder is None:
        assert plain["peak"] > LIMIT  # nobody may be killed here; the peak says the same
    else:
        assert code == -9


def test_a_whole_run_stays_within_its_bound(tmp_path: Path) -> None:
    """Loading, evaluation and checkpoints included."""
    limit, out = 480_000_000, tmp_path / "run"
    (tmp_path / "net.py").write_text(NET)
    command = ["-m", "edgetrain", "train", f"{tmp_path / 'net.py'}:build", "--data", "digits", "--batch", "64"]
    command += ["--epochs", "1", "--checkpoint-every", "8", "--process-memory", str(limit), "--out", str(out)]
    with cgroup(limit) as folder:
        done = within(folder, command, tmp_path / "cache")
    assert done.returncode == 0, done.stderr[-2000:]
    assert " recomputed, peak" in done.stderr  # it did not fit without recomputing
    record = json.loads((out / "record.json").read_text())
    assert record["summary"]["peak_resident_bytes"]["value"] <= limit
    assert record["summary"]["test_accuracy"]["value"] > 0
    assert list((out / "checkpoints").iterdir())


def test_what_the_process_holds_is_taken_off() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 8)
    graph = et.capture(model, lambda m, x: m(x).sum(), optimizer, (x,))
    # The arena of steps in other tests is used again, so it does not count.
    limit = process.resident_bytes() - arena.resident_bytes() + process.RESERVE_BYTES + 50_000_000
    left = process.left_for_tensors(graph, limit)
    assert 30_000_000 < left < 50_000_000
    with mmap.mmap(-1, 20_000_000) as held:  # fresh pages: malloc might hand out some that it kept
        held.write(bytes(20_000_000))
        assert left - process.left_for_tensors(graph, limit) == pytest.approx(20_000_000, rel=0.2)


def test_an_impossible_bound_names_the_smallest_process() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.Tanh())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4096, 2048)

    def prepare(bound: int) -> et.Step:
        return et.prepare(model, lambda m, x: m(x).sum(), optimizer, (x,), process_memory=bound)

    with pytest.raises(et.Infeasible, match="process_memory") as caught:
        prepare(process.resident_bytes() + process.RESERVE_BYTES + 60_000_000)
    step = prepare(caught.value.smallest_bytes + 20_000_000)  # what the process holds varies by a little
    assert step.plan.recomputed or step.plan.peak_bytes < caught.value.smallest_bytes
    assert torch.isfinite(step(x))


def test_a_plan_for_a_process_speaks_of_the_process() -> None:
    model = nn.Linear(2048, 2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = et.capture(model, lambda m, x: m(x).sum(), optimizer, (torch.randn(4096, 2048),))
    costs = et.measure_costs(graph, rounds=1)
    bound = process.resident_bytes() - arena.resident_bytes() + process.RESERVE_BYTES + 45_000_000
    with pytest.raises(et.Infeasible, match=r"next step: ask for process_memory=\d+") as caught:
        et.plan(graph, costs, et.Budget(process_memory_bytes=bound))
    assert caught.value.smallest_bytes > bound
