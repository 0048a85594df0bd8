"""The trainer: one run, however often it was stopped, gives the same bits.

Run as a program (folder, mode) it trains there, for the tests that need a process of their own.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from edgetrain.errors import UserError
from edgetrain.measure.record import RunFolder, Status, Value, new_record
from edgetrain.run.checkpoint import State, latest, save
from edgetrain.run.learning_rate import Schedule
from edgetrain.run.sample_order import sample_numbers
from edgetrain.run.trainer import Progress, Step, TrainConfig, Trainer, TrainResult
from tests.helpers.marks import needs_arena

CONFIG = TrainConfig(epochs=3, batch=8, lr=0.01, schedule="cosine", warmup_steps=4, checkpoint_every_steps=4)
TIMED = {"samples_per_s", "memory_bytes"}


class Blobs:
    """Points of three classes, each time with fresh noise from all three random generators."""

    def __init__(self, length: int, noise: float = 0.1) -> None:
        made = torch.Generator().manual_seed(length)
        self.labels = torch.arange(length) % 3
        self.points = torch.randn(length, 4, generator=made) + F.one_hot(self.labels, 4)
        self.noise = noise
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor) -> tuple[Tensor, ...]:
        self.asked += indices.tolist()
        noise = torch.randn(len(indices), 4) + random.random() + float(np.random.rand())
        return self.points[indices] + self.noise * noise, self.labels[indices]


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adam": lambda model: torch.optim.Adam(model.parameters()),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), momentum=0.9),
}


def eager(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(points: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def scored(model: nn.Module, points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
    assert not model.training
    assert not torch.is_grad_enabled()
    scores = model(points)
    return F.cross_entropy(scores, labels, reduction="sum"), (scores.argmax(1) == labels).sum(), len(labels)


class Run:
    """One call of the trainer, with what it left behind."""

    def __init__(
        self,
        folder: Path,
        config: TrainConfig = CONFIG,
        optimizer: str = "adam",
        on_progress: Callable[[Progress], None] = lambda progress: None,
        wrap: Callable[[Step], Step] = lambda step: step,
        resume: bool = False,
    ) -> None:
        self.folder = RunFolder.create(folder)
        self.model = network()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.train = Blobs(50)
        self.trainer = Trainer(config, self.folder, on_progress)
        self.wrap, self.resume = wrap, resume

    def __call__(self) -> TrainResult:
        def make_step() -> Step:
            torch.rand(3)  # a capture may draw random numbers
            return self.wrap(eager(self.model, self.optimizer))

        return self.trainer.run(
            self.model, self.optimizer, make_step, self.train, Blobs(20), scored, resume=self.resume
        )

    def metrics(self, *, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.folder.metrics_file.read_text().splitlines()]
        return [
            {key: value for key, value in line.items() if key not in TIMED}
            for line in lines
            if line["event"] not in without
        ]


def assert_same(one: Run, other: Run) -> None:
    for left, right in zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(left, right)
    assert _plain(one.optimizer.state_dict()) == _plain(other.optimizer.state_dict())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, Tensor) else value


def stop_at(step: int, phase: str = "train") -> Callable[[Progress], None]:
    """Ctrl-C while this step is reported."""

    def watch(progress: Progress) -> None:
        if (progress.step, progress.phase) == (step, phase):
            signal.raise_signal(signal.SIGINT)

    return watch


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("through"))
    assert run().status == "finished"
    return run


def test_a_run_through(through: Run) -> None:
    lines = through.metrics()
    steps = math.ceil(3 * 50 / 8)
    assert [line["step"] for line in lines if line["event"] == "train"] == list(range(1, steps + 1))
    assert [line["step"] for line in lines if line["event"] == "eval"] == [7, 13, 19]
    assert [line["step"] for line in lines if line["event"] == "checkpoint"] == [4, 8, 12, 16, 19]
    assert [path.name for path in sorted(through.folder.checkpoints.iterdir())] == ["step-00000016", "step-00000019"]
    record = through.folder.load()
    assert record.status == "finished"
    assert record.summary["steps"] == Value(steps, "steps", "measured")
    assert record.summary["test_accuracy"].origin == "measured"
    first = json.loads(through.folder.metrics_file.read_text().splitlines()[0])
    assert first["memory_bytes"] > 1e6
    assert first["samples_per_s"] > 0


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("step", [1, 7, 12, 18])
def test_stopped_and_resumed_is_the_same(tmp_path: Path, optimizer: str, step: int) -> None:
    through = Run(tmp_path / "through", optimizer=optimizer)
    through()
    stopped = Run(tmp_path / "run", optimizer=optimizer, on_progress=stop_at(step))
    result = stopped()
    assert (result.status, result.step) == ("stopped", step)
    assert stopped.folder.load().status == "stopped"
    torch.manual_seed(99)
    random.seed(99)
    resumed = Run(tmp_path / "run", optimizer=optimizer, resume=True)
    result = resumed()
    assert result.status == "finished"
    assert f"Resumed from step {step}" in result.messages[0]
    assert_same(through, resumed)
    events = ("resume", "checkpoint")
    assert resumed.metrics(without=events) == through.metrics(without=events)


def test_an_evaluation_cut_off_is_made_up_for(tmp_path: Path, through: Run) -> None:
    for step in (13, 19):
        folder = tmp_path / str(step)
        result = Run(folder, on_progress=stop_at(step, "evaluate"))()
        assert (result.status, result.step) == ("stopped", step)
        resumed = Run(folder, resume=True)
        assert resumed().evaluation is not None
        assert_same(through, resumed)
        assert resumed.metrics(without=("resume", "checkpoint")) == through.metrics(without=("resume", "checkpoint"))


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path, through: Run) -> None:
    first = Run(tmp_path)
    result = first()
    again = Run(tmp_path, resume=True)
    second = again()
    assert second.status == "finished"
    assert second.evaluation == result.evaluation
    assert_same(first, again)
    assert again.metrics(without=("resume",)) == through.metrics()
    assert again.folder.load().summary["train_loss"] == Value(result.loss, "", "measured")


@pytest.mark.parametrize("status", ["finished", "running"])
def test_a_resume_without_a_step_keeps_what_was_measured(tmp_path: Path, status: Status) -> None:
    """Finished, or killed between its last checkpoint and its record: what trained is what the memory is of."""
    first = Run(tmp_path)
    first()
    record = first.folder.load()
    measured = replace(record, summary={**record.summary, "peak_resident_bytes": Value(1, "bytes", "measured")})
    first.folder.save(replace(measured, status=status))
    metrics = first.folder.metrics_file.read_bytes()
    messages = Run(tmp_path, resume=True)().messages
    assert first.folder.load() == measured
    if status == "finished":
        assert first.folder.metrics_file.read_bytes() == metrics
        assert "is finished: nothing is left to train" in messages[-1]


def test_a_crash_loses_only_what_came_after_the_checkpoint(tmp_path: Path, through: Run) -> None:
    def crash(progress: Progress) -> None:
        if progress.step == 10:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Run(tmp_path, on_progress=crash)()
    assert RunFolder(tmp_path).load().status == "failed"
    with open(tmp_path / "metrics.jsonl", "ab") as torn:
        torn.write(b'{"event": "tr')
    resumed = Run(tmp_path, resume=True)
    assert "Resumed from step 8" in resumed().messages[0]
    assert_same(through, resumed)
    assert resumed.metrics(without=("resume",)) == through.metrics()


def test_a_damaged_checkpoint_is_passed_over_and_told(tmp_path: Path, through: Run) -> None:
    Run(tmp_path, on_progress=stop_at(10))()
    (tmp_path / "checkpoints" / "step-00000010" / "tensors.safetensors").write_bytes(b"")
    resumed = Run(tmp_path, resume=True)
    messages = resumed().messages
    assert "step-00000010 was refused" in messages[0]
    assert "Resumed from step 8" in messages[1]
    assert_same(through, resumed)
    assert resumed.metrics(without=("resume",)) == through.metrics()


def test_only_damaged_checkpoints_are_no_reason_to_start_over(tmp_path: Path) -> None:
    Run(tmp_path, on_progress=stop_at(2))()
    (tmp_path / "checkpoints" / "step-00000002" / "state.json").unlink()
    with pytest.raises(UserError, match=r"No checkpoint in .* is whole"):
        Run(tmp_path, resume=True)()
    assert RunFolder(tmp_path).load().status == "stopped"


def test_resume_without_a_checkpoint_starts(tmp_path: Path, through: Run) -> None:
    run = Run(tmp_path, resume=True)
    assert "from the beginning" in run().messages[0]
    assert_same(through, run)


def test_never_a_fresh_start_over_old_work(tmp_path: Path) -> None:
    Run(tmp_path, on_progress=stop_at(2))()
    with pytest.raises(UserError, match="already holds checkpoints") as caught:
        Run(tmp_path)()
    assert "--resume" in (caught.value.next_step or "")
    assert RunFolder(tmp_path).load().status == "stopped"


def test_another_batch_size_goes_on_at_the_same_sample(tmp_path: Path) -> None:
    first = Run(tmp_path, on_progress=stop_at(5))
    first()
    second = Run(tmp_path, replace(CONFIG, batch=3), resume=True)
    result = second()
    assert "The batch size is 3 from here on; it was 8." in result.messages
    seen = first.train.asked + second.train.asked
    assert result.samples == len(seen)
    assert 150 <= len(seen) < 153
    for epoch in range(3):
        assert sorted(seen[epoch * 50 : epoch * 50 + 50]) == list(range(50))
    schedule = Schedule("cosine", 32, 8, 150)
    for line in second.metrics():
        if line["event"] == "train":
            began = line["samples"] - (8 if line["step"] <= 5 else 3)
            assert line["lr"] == 0.01 * schedule.factor(began)


def test_other_settings_are_refused_or_told(tmp_path: Path) -> None:
    Run(tmp_path, on_progress=stop_at(5))()
    with pytest.raises(UserError, match="another seed"):
        Run(tmp_path, replace(CONFIG, seed=1), resume=True)()
    with pytest.raises(UserError, match="does not fit"):
        Run(tmp_path, optimizer="momentum", resume=True)()
    other = Run(tmp_path, resume=True)
    other.train = Blobs(40)
    with pytest.raises(UserError, match="another number of training samples"):
        other()
    result = Run(tmp_path, replace(CONFIG, lr=0.005, epochs=4), resume=True)()
    assert "The learning rate is 0.005 from here on; it was 0.01." in result.messages
    assert result.epoch == 4


def test_a_checkpoint_of_somebody_else_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, resume=True)
    state = State(1, 0, 8, 50, 8, 0, scheduler={}, evaluation=None, metadata={})
    save(run.folder.checkpoints, run.model, run.optimizer, state)
    with pytest.raises(UserError, match="not written by the trainer"):
        run()


@pytest.mark.parametrize("kind", ["loss", "weight"])
def test_a_loss_that_is_not_finite_stops_and_spares_the_checkpoint(tmp_path: Path, kind: str) -> None:
    def spoilt(step: Step) -> Step:
        def spoil(*batch: Tensor) -> Tensor:
            loss = step(*batch)
            if run.train.asked[88:]:  # from step 12 on
                with torch.no_grad():
                    next(run.model.parameters())[0, 0] = math.inf
                return loss * math.nan if kind == "loss" else loss
            return loss

        return spoil

    run = Run(tmp_path, wrap=spoilt)
    with pytest.raises(UserError) as caught:
        run()
    assert "step 12" in str(caught.value)
    assert "Lower the learning rate, to 0.001 say" in str(caught.value)
    assert "step-00000008" in str(caught.value)
    assert run.folder.load().status == "failed"
    found, messages = latest(run.folder.checkpoints)
    assert found is not None
    assert (found.state.step, messages) == (8, [])
    resumed = Run(tmp_path, replace(CONFIG, lr=0.001), resume=True)
    assert resumed().status == "finished"


def test_evaluation_leaves_no_trace(tmp_path: Path, through: Run) -> None:
    often, never = Run(tmp_path / "often"), Run(tmp_path / "never", replace(CONFIG, eval_every=0))
    for run in (often, never):
        run.model[1].eval()  # type: ignore[index] # a norm frozen by the caller
        run()
        assert [module.training for module in run.model.modules()] == [True, True, False, True, True, True]
    assert_same(often, never)
    assert [line["step"] for line in never.metrics() if line["event"] == "eval"] == [19]


def test_without_test_data(tmp_path: Path) -> None:
    run = Run(tmp_path)
    result = run.trainer.run(run.model, run.optimizer, lambda: eager(run.model, run.optimizer), run.train)
    assert result.evaluation is None
    assert run.folder.load().summary["test_accuracy"] == Value(None, "", "unavailable")
    with pytest.raises(UserError, match="both, or neither"):
        run.trainer.run(run.model, run.optimizer, lambda: eager(run.model, run.optimizer), run.train, Blobs(3))
    with pytest.raises(UserError, match="empty"):
        run.trainer.run(run.model, run.optimizer, lambda: eager(run.model, run.optimizer), Blobs(0))


def test_a_record_made_before_is_kept(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path)
    before = replace(new_record(["mine"]), summary={"budget_bytes": Value(5, "bytes", "derived")})
    folder.save(before)
    Run(tmp_path)()
    after = folder.load()
    assert (after.command, after.created) == (before.command, before.created)
    assert {"budget_bytes", "steps"} <= after.summary.keys()


def test_progress_tells_every_phase(tmp_path: Path) -> None:
    seen: list[Progress] = []
    Run(tmp_path, on_progress=seen.append)()
    train = [progress for progress in seen if progress.phase == "train"]
    assert [progress.step for progress in train] == list(range(1, 20))
    assert (train[-1].done, train[-1].total, train[-1].epochs) == (150, 150, 3)
    assert {progress.total for progress in seen if progress.phase == "evaluate"} == {20}
    assert sum(progress.phase == "checkpoint" for progress in seen) == 5


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.folder.locked(), pytest.raises(UserError, match="another process"):
        run()


def test_ctrl_c_is_left_alone_outside_the_main_thread(tmp_path: Path) -> None:
    results: list[TrainResult] = []
    thread = threading.Thread(target=lambda: results.append(Run(tmp_path)()))
    thread.start()
    thread.join()
    assert results[0].status == "finished"


def test_no_warning_from_the_scheduler_for_a_captured_step(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(TrainConfig(epochs=1, batch=25, schedule="step"), RunFolder.create(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.run(model, optimizer, lambda: lambda *batch: torch.tensor(1.0), Blobs(50))


def test_a_full_disk_while_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **named: object) -> Path:
        raise UserError("The disk is full")

    def fill(progress: Progress) -> None:
        if progress.step == 5:
            monkeypatch.setattr("edgetrain.run.checkpoint.save", full)

    with pytest.raises(UserError, match="disk is full"):
        Run(tmp_path, on_progress=fill)()
    found, _ = latest(tmp_path / "checkpoints")
    assert found is not None
    assert found.state.step == 4


# Order and schedule


def test_the_order_is_a_function_of_seed_and_position() -> None:
    order = sample_numbers(0, 10, 0, 40).tolist()
    assert all(sorted(order[at : at + 10]) == list(range(10)) for at in range(0, 40, 10))
    assert len({tuple(order[at : at + 10]) for at in range(0, 40, 10)}) == 4
    pieces = torch.cat([sample_numbers(0, 10, at, 7) for at in range(0, 35, 7)])
    assert pieces.tolist() == order[:35]
    assert sample_numbers(1, 10, 0, 40).tolist() != order
    assert sample_numbers(1, 10, 0, 10).tolist() != order[10:20]


def test_schedules() -> None:
    cosine = Schedule("cosine", 40, 10, 140)
    assert [cosine.factor(samples) for samples in (0, 10, 20, 30, 40)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert cosine.factor(90) == pytest.approx(0.5)
    assert cosine.factor(139) > 0
    steps = Schedule("step", 0, 10, 100)
    assert [steps.factor(samples) for samples in (0, 49, 50, 75, 100)] == [1.0, 1.0, 0.1, 0.01, 0.01]
    assert Schedule("constant", 0, 10, 100).factor(1000) == 1.0
    assert Schedule("cosine", 40, 10, 20).factor(15) == pytest.approx(0.625)


@pytest.mark.parametrize(
    "setting",
    [{"epochs": 0}, {"batch": 0}, {"lr": 0.0}, {"lr": math.nan}, {"seed": -1}, {"keep": 0}, {"schedule": "linear"}],
)
def test_settings_out_of_range(setting: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"setting {next(iter(setting))} "):
        TrainConfig(**{"epochs": 1, "batch": 1, **setting})


# Ctrl-C, in a process of its own


def start(folder: Path, mode: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", __name__, str(folder), mode]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths})


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == text:
            return
    raise AssertionError(f"the process ended without {text!r}")


def test_ctrl_c_stops_after_the_step_and_resumes(tmp_path: Path, through: Run) -> None:
    process = start(tmp_path, "fresh")
    wait_for(process, "step 9")
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "stopped" in rest
    resumed = Run(tmp_path, resume=True)
    assert resumed().status == "finished"
    assert_same(through, resumed)
    assert resumed.metrics(without=("resume", "checkpoint")) == through.metrics(without=("resume", "checkpoint"))


def test_the_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, "stuck")
    wait_for(process, "stuck")
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) != 0
    assert RunFolder(tmp_path).load().status == "stopped"
    found, messages = latest(tmp_path / "checkpoints")
    assert found is not None
    assert (found.state.step, messages) == (4, [])


def main(folder: Path, mode: str) -> None:
    torch.set_num_threads(1)

    def stuck(step: Step) -> Step:
        def stick(*batch: Tensor) -> Tensor:
            if run.train.asked[40:]:
                print("stuck", flush=True)
                for _ in range(600):
                    time.sleep(0.1)
            return step(*batch)

        return stick

    def watch(progress: Progress) -> None:
        if progress.phase == "train":
            print("step", progress.step, flush=True)
            time.sleep(0.05)

    run = Run(folder, on_progress=watch, wrap=stuck if mode == "stuck" else lambda step: step)
    print(run().status)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])


class Bounded:
    """A step under a budget."""

    def __init__(self, step: Step, room_bytes: int) -> None:
        self.step, self.room_bytes = step, room_bytes

    def __call__(self, *batch: Tensor) -> Tensor:
        return self.step(*batch)


@needs_arena
def test_evaluation_takes_no_more_than_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    plainly = scored

    def hungry(model: nn.Module, points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, int]:
        taken.append(torch.empty(len(points), 10_000).nbytes)
        return plainly(model, points, labels)

    monkeypatch.setattr(sys.modules[__name__], "scored", hungry)
    bounded = Run(tmp_path / "bounded", wrap=lambda step: Bounded(step, 130_000))()
    assert max(taken) == 3 * 40_000
    assert sum(taken) == 40_000 * (20 + 1) * CONFIG.epochs  # one sample tells what each takes
    assert bounded.evaluation is not None
    assert bounded.evaluation.count == 20
