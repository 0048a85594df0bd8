"""A process killed at any moment resumes from a whole checkpoint and ends as one that was never killed.

Each attempt is a fork of a server that has torch loaded, so that fifty of them take seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from edgetrain.measure.record import RunFolder
from edgetrain.run.checkpoint import latest
from edgetrain.run.trainer import TrainConfig, Trainer

KILLS = int(os.environ.get("EDGETRAIN_KILLS", "50"))  # `make soak` asks for more
CONFIG = TrainConfig(
    epochs=10, batch=4, lr=0.01, schedule="cosine", warmup_steps=20, eval_every=2, checkpoint_every_steps=3
)
STEPS = 100
TIMED = ("samples_per_s", "memory_bytes")
FILES = ("tensors.safetensors", "state.json")


class Points:
    def __len__(self) -> int:
        return 40

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        angle = indices.float()
        noise = 0.1 * torch.randn(len(indices)) + 0.1 * random.random()
        return torch.stack([angle.sin() + noise, angle.cos()], 1), indices % 2


def train(folder: str, started: Connection, suicide: int | None = None) -> None:
    """Train in `folder` as far as it goes. `suicide`: die at this call that changes the disk."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters())

    def step(points: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def scored(model: nn.Module, points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
        scores = model(points)
        return F.cross_entropy(scores, labels), (scores.argmax(1) == labels).sum(), len(labels)

    if suicide is not None:
        _die_at(suicide)
    started.send(None)
    trainer = Trainer(CONFIG, RunFolder.create(folder))
    result = trainer.run(model, optimizer, lambda: step, Points(), Points(), scored, resume=True)
    started.send(result.messages)


def _die_at(call: int) -> None:
    """Replace what writes through, renames and removes by the same, but the call with this number kills."""
    left = iter(range(call))

    def deadly(name: str) -> Callable[..., Any]:
        original: Callable[..., Any] = getattr(os, name)

        def patched(*arguments: Any, **named: Any) -> Any:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        return patched

    for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir"):
        setattr(os, name, deadly(name))


@dataclass
class Attempt:
    """One process that trains; `start` returns when it is about to."""

    process: BaseProcess
    parent: Connection

    @staticmethod
    def start(folder: Path, suicide: int | None = None) -> Attempt:
        context = multiprocessing.get_context("forkserver")
        # An optimizer imports torch._dynamo when it is made, which takes longer than all the rest.
        context.set_forkserver_preload(["pytest", "torch._dynamo", "edgetrain.run.trainer"])
        parent, child = context.Pipe(duplex=False)
        process = context.Process(target=train, args=(str(folder), child, suicide), daemon=True)
        process.start()
        child.close()
        assert parent.poll(60)
        parent.recv()
        return Attempt(process, parent)

    def ended(self, timeout_s: float = 60) -> int:
        """The exit code; a process that has not ended by then is killed. It must not end in any other way."""
        self.process.join(timeout_s)
        self.process.kill()
        self.process.join()
        assert self.process.exitcode in (0, -signal.SIGKILL)
        return self.process.exitcode


@dataclass(frozen=True)
class Reference:
    """A run that was never killed, and how long it took."""

    folder: Path
    time_s: float


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder = tmp_path_factory.mktemp("reference")
    attempt = Attempt.start(folder)
    began = time.perf_counter()
    assert attempt.ended() == 0
    return Reference(folder, time.perf_counter() - began)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of the metrics, without what was timed and without the notes of resuming."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if line["event"] != "resume"]
    return [{key: value for key, value in line.items() if key not in TIMED} for line in kept]


def assert_ends_like(folder: Path, reference: Reference) -> None:
    """Weights, buffers, optimizer, random generators, position and metrics: all the same bits."""
    for name in FILES:
        file = Path("checkpoints") / f"step-{STEPS:08d}" / name
        assert (folder / file).read_bytes() == (reference.folder / file).read_bytes()
    assert metrics(folder) == metrics(reference.folder)
    assert RunFolder(folder).load().status == "finished"


def whole_step(folder: Path) -> int:
    """The step of the newest checkpoint, 0 without one; none may be refused."""
    found, refused = latest(folder / "checkpoints")
    assert refused == []
    return found.state.step if found else 0


def half_written(folder: Path) -> bool:
    return any((folder / "checkpoints").glob(".tmp-step-*"))


def test_killed_fifty_times_at_random(tmp_path: Path, reference: Reference) -> None:
    """Kill, resume, kill, resume … to the end; a run that ends before the fiftieth kill is followed by another."""
    moments = random.Random(20)
    kills, runs = 0, 0
    longest_s = (
        reference.time_s / 12
    )  # an attempt gets through a few checkpoints, and a run through some dozen attempts
    steps: set[int] = set()
    while kills < KILLS:
        folder, before, code, runs = tmp_path / str(runs), 0, -signal.SIGKILL, runs + 1
        while code != 0:
            delay_s = moments.uniform(0, longest_s) if kills < KILLS else 60
            code = Attempt.start(folder).ended(delay_s)
            kills += code != 0
            now = whole_step(folder)
            assert now >= before
            longest_s *= 1.2 if now == before else 0.9  # however long a start takes here
            before = now
            steps.add(now)
        assert_ends_like(folder, reference)
    assert kills == KILLS
    assert len(steps) > 5


def test_killed_at_every_call_that_changes_the_disk(tmp_path: Path, reference: Reference) -> None:
    """The n-th attempt dies at the n-th such call: each place of a checkpoint's way to the disk is met."""
    kills, before, seen_half = 0, 0, False
    while Attempt.start(tmp_path, suicide=kills).ended() != 0:
        now = whole_step(tmp_path)
        assert now >= before
        kills, before, seen_half = kills + 1, now, seen_half or half_written(tmp_path)
    assert_ends_like(tmp_path, reference)
    assert kills > 20
    assert seen_half
