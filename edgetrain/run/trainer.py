"""Training from the first step to the last, across anything that stops it.

In: a model, an optimizer, a step that trains them in place, and data. Out: a run folder with metrics and
checkpoints, and a `TrainResult`.

The training data is one endless sequence of samples, each pass over the data in an order of its own:

    ┌── order of epoch 0 ──┬── order of epoch 1 ──┬── …
    │ batch │ batch │ batch │ batch │ batch │ batch │      a batch may reach over the seam, so all are full
                            ▲
                            position = epochs done, samples of the present one

Order and learning rate are functions of the position alone, so both carry on where they were, under another
batch size too. Training ends with the first batch that completes the last epoch.

Promised: a run that was killed, stopped or lost its power, and was resumed, ends with the same bits and the
same metrics as one that ran through. No checkpoint is ever written with a weight that is not finite.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from edgetrain import ranges
from edgetrain.errors import Infeasible, UserError
from edgetrain.files import explained, sync
from edgetrain.machine import process_bytes
from edgetrain.measure.record import Record, RunFolder, Status, Value, new_record
from edgetrain.native.surely import surely
from edgetrain.run import checkpoint as checkpoints
from edgetrain.run import metrics_file
from edgetrain.run.adaptive import Switch
from edgetrain.run.checkpoint import Checkpoint, State, rng_state, set_rng_state
from edgetrain.run.evaluation import Evaluate, Evaluation, Evaluator, Split
from edgetrain.run.learning_rate import Schedule, ScheduleKind, scheduler, set_base_lr
from edgetrain.run.sample_order import sample_numbers, seed_all
from edgetrain.run.stoppable import Stop, stoppable

Phase = Literal["train", "evaluate", "checkpoint"]
Step = Callable[..., Tensor]
_RANGES = {
    "epochs": ranges.EPOCHS, "batch": ranges.BATCH, "seed": ranges.SEED, "warmup_steps": ranges.STEPS_OR_NONE,
    "eval_every": ranges.STEPS_OR_NONE, "checkpoint_every_steps": ranges.STEPS_OR_NONE,
    "log_every_steps": ranges.STEPS, "keep": ranges.STEPS,
}  # fmt: skip
T = TypeVar("T")


@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    lr:                      of every parameter group; None leaves each its own.
    warmup_steps:            steps over which the learning rate rises to its full value.
    eval_every:              epochs from one evaluation to the next; 0: after the last only.
    checkpoint_every_steps:  0: at the end only.
    log_every_steps:         steps from one line of the metrics to the next.
    keep:                    how many checkpoints to keep.
    """

    epochs: int
    batch: int
    lr: float | None = None
    seed: int = 0
    schedule: ScheduleKind = "constant"
    warmup_steps: int = 0
    eval_every: int = 1
    checkpoint_every_steps: int = 200
    log_every_steps: int = 1
    keep: int = 2

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            if getattr(self, name) not in allowed:
                raise _bad_setting(name, f"{allowed.low} or more: {allowed}", getattr(self, name))
        if self.lr is not None and (self.lr not in ranges.LEARNING_RATE or self.lr == 0):
            raise _bad_setting("lr", "a positive number", self.lr)
        if self.schedule not in get_args(ScheduleKind):
            raise _bad_setting("schedule", " or ".join(get_args(ScheduleKind)), self.schedule)


@dataclass(frozen=True)
class Progress:
    """For whoever watches: `done` of `total` samples of this phase. None: not known in this phase."""

    phase: Phase
    step: int
    epoch: int
    epochs: int
    done: int
    total: int
    lr: float
    loss: float | None = None
    accuracy: float | None = None
    samples_per_s: float | None = None
    memory_bytes: int | None = None
    budget_bytes: int | None = None  # where the budget moves: as it was last asked for
    plan_bytes: int | None = None  # what the plan in use takes
    switches: int = 0
    switched_at: int | None = None  # the step of the last switch, from 1


@dataclass(frozen=True)
class TrainResult:
    """How training ended. "stopped": on Ctrl-C, with a checkpoint to resume from."""

    status: Literal["finished", "stopped"]
    step: int
    epoch: int
    samples: int
    loss: float | None
    evaluation: Evaluation | None
    checkpoint: Path
    messages: tuple[str, ...]


@dataclass(frozen=True)
class Trainer:
    """Trains in one run folder. `on_progress` is called after each step, evaluated batch and checkpoint."""

    config: TrainConfig
    folder: RunFolder
    on_progress: Callable[[Progress], None] = lambda progress: None

    def run(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        make_step: Callable[[], Step],
        train: Split,
        test: Split | None = None,
        evaluate: Evaluate | None = None,
        *,
        resume: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> TrainResult:
        """Train to the end, or to Ctrl-C; with `resume` from the newest whole checkpoint in the folder. A run that is
        finished already is left as it is.

        make_step:  called once, after model and optimizer are restored; gives step(*batch) → loss (0-d).
        evaluate:   (model, *batch) → (sum of losses, number correct, number of predictions).
        metadata:   plain JSON about the model, kept in the checkpoints.
        Training flags are the caller's: they stay as they are, and evaluation puts each one back.
        """
        if not len(train) or (test is not None and not len(test)):
            raise UserError("A split of the data is empty.", next_step="Check the folder of the data set.")
        if (test is None) != (evaluate is None):
            raise UserError("Evaluation needs test data and an evaluate function: both, or neither.")
        tested = (test, evaluate) if test is not None and evaluate is not None else None
        with self.folder.locked():
            checkpoint, messages = _find(self.folder, resume)
            loop = _Loop(self, model, optimizer, train, tested, metadata or {}, messages)
            loop.start(checkpoint)
            if loop.finished and self._recorded_as_finished():
                messages.append(f"The run in {self.folder.path} is finished: nothing is left to train.")
                return loop.result()
            record = self._begin(messages)
            loop.open_metrics(resumed=checkpoint is not None)
            try:
                # Capturing a step may draw random numbers; training must not notice.
                state = rng_state()
                step = surely(make_step, lambda: set_rng_state(state))
                result = stoppable(lambda stop: loop.run(step, stop))
            except BaseException as error:
                status: Status = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
                with contextlib.suppress(UserError):  # the first error is the one to tell
                    self.folder.save(replace(record, status=status))
                raise
            self.folder.save(replace(record, status=result.status, summary=loop.summary(record)))
            return result

    def _recorded_as_finished(self) -> bool:
        with contextlib.suppress(UserError):  # one that cannot be read says nothing
            return self.folder.record_file.exists() and self.folder.load().status == "finished"
        return False

    def _begin(self, messages: list[str]) -> Record:
        record = None
        if self.folder.record_file.exists():
            try:
                record = replace(self.folder.load(), status="running")
            except UserError as error:
                messages.append(f"The record of the run was not readable and is written again: {error.what}")
        if record is None:
            record = new_record(sys.argv, metrics="metrics.jsonl", checkpoints="checkpoints")
        self.folder.save(record)
        return record


@dataclass
class _Loop:
    """One run of the trainer in this process: everything that changes from step to step."""

    trainer: Trainer
    model: nn.Module
    optimizer: Optimizer
    train: Split
    test: tuple[Split, Evaluate] | None
    metadata: Mapping[str, Any]
    messages: list[str]
    schedule: Schedule = field(init=False)
    scheduler: LambdaLR = field(init=False)
    stop: Stop = field(default_factory=Stop)
    step: int = 0
    samples: int = 0
    loss: float | None = None
    evaluation: Evaluation | None = None
    saved: Path | None = None
    trained_samples: int = 0
    trained_s: float = 0.0
    room_bytes: int | None = None  # what evaluation may take
    switches: int = 0  # changes of plan that are in the metrics
    switched_at: int | None = None  # the step of the last of them, from 1

    @property
    def config(self) -> TrainConfig:
        return self.trainer.config

    @property
    def total(self) -> int:
        return self.config.epochs * len(self.train)

    @property
    def epoch(self) -> int:
        return self.samples // len(self.train)

    @property
    def lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def start(self, checkpoint: Checkpoint | None) -> None:
        """Bring everything to where the checkpoint stands, or to the beginning. Writes nothing."""
        first_batch = self.config.batch
        if checkpoint is None:
            seed_all(self.config.seed)
        else:
            first_batch = self._resume(checkpoint)
        self.messages += set_base_lr(self.optimizer, self.config.lr, resumed=checkpoint is not None)
        warmup_samples = self.config.warmup_steps * first_batch
        self.schedule = Schedule(self.config.schedule, warmup_samples, first_batch, self.total)
        self.scheduler = scheduler(self.optimizer, lambda _: self.schedule.factor(self.samples))

    def open_metrics(self, *, resumed: bool) -> None:
        """Cut off what is from after the position, so that the file reads as one run."""
        metrics_file.cut(self.trainer.folder.metrics_file, self.step if resumed else -1)
        if resumed:
            self._log("resume")

    def _resume(self, checkpoint: Checkpoint) -> int:
        """Restore everything; give back the batch size that the run began with."""
        state, config = checkpoint.state, self.config
        self._check_same("number of training samples", state.length, len(self.train))
        self._check_same("seed", state.seed, config.seed)
        checkpoints.restore(checkpoint, self.model, self.optimizer)
        self.step, self.samples = state.step, state.epoch * state.length + state.offset
        self.saved = checkpoint.path
        try:
            first_batch = int(state.scheduler["first_batch"])
            self.evaluation = Evaluation(**state.evaluation) if state.evaluation else None
        except (LookupError, TypeError, ValueError) as error:
            raise UserError(f"The checkpoint {checkpoint.path} was not written by the trainer.") from error
        self.messages.append(f"Resumed from step {state.step} ({checkpoint.path}).")
        if state.batch != config.batch:
            self.messages.append(f"The batch size is {config.batch} from here on; it was {state.batch}.")
        return first_batch

    def _check_same(self, what: str, before: int, now: int) -> None:
        if before != now:
            raise UserError(
                f"Cannot resume in {self.trainer.folder.path} with another {what}.",
                expected=f"{before}, as in the run so far",
                received=str(now),
                next_step="Resume with the settings of that run, or start a new run in another folder.",
            )

    def run(self, step: Step, stop: Stop) -> TrainResult:
        """Train until the data is through or a stop is asked for; the last thing written is a checkpoint."""
        self.stop, self.room_bytes = stop, getattr(step, "room_bytes", None)
        self._evaluate_if_due()  # Ctrl-C may have put one off
        while self.samples < self.total and not stop.requested:
            self._train_one(step)
            self._evaluate_if_due()
            every = self.config.checkpoint_every_steps
            if every and self.step % every == 0:
                self._save()
        return self.result()

    @property
    def finished(self) -> bool:
        return self.samples >= self.total and not self._evaluation_due()

    def result(self) -> TrainResult:
        """How things stand, with a checkpoint of it."""
        return TrainResult(
            status="finished" if self.finished else "stopped",
            step=self.step,
            epoch=self.epoch,
            samples=self.samples,
            loss=self.loss,
            evaluation=self.evaluation,
            checkpoint=self.saved or self._save(),
            messages=tuple(self.messages),
        )

    def _train_one(self, step: Step) -> None:
        config, lr, began = self.config, self.lr, time.perf_counter()
        batch = self.train.batch(sample_numbers(config.seed, len(self.train), self.samples, config.batch))
        try:
            loss = float(step(*batch))
        except Infeasible:
            self._save()  # the budget fell under the smallest plan: the run can go on from here when there is more
            raise
        switches = self._log_switches(step)
        if not math.isfinite(loss):
            raise self._diverged(f"The loss became {loss} at step {self.step + 1}.")
        seconds = time.perf_counter() - began
        self.step, self.samples, self.loss, self.saved = self.step + 1, self.samples + config.batch, loss, None
        self.trained_samples, self.trained_s = self.trained_samples + config.batch, self.trained_s + seconds
        self.scheduler.step()
        rate, memory = config.batch / seconds, process_bytes("VmRSS")
        if self.step % config.log_every_steps == 0:
            self._log("train", loss=loss, lr=lr, samples_per_s=rate, memory_bytes=memory)
        self._report(
            "train", self.samples, self.total, loss=loss, lr=lr, samples_per_s=rate, memory_bytes=memory,
            budget_bytes=getattr(step, "budget_bytes", None),
            plan_bytes=switches[-1].peak_bytes if switches else None, switches=len(switches),
            switched_at=self.switched_at,
        )  # fmt: skip

    def _log_switches(self, step: Step) -> list[Switch]:
        """All changes of plan so far; those that are new go into the metrics."""
        switches: list[Switch] = getattr(step, "switches", [])
        for switch in switches[self.switches :]:
            self._log(
                "switch", budget_bytes=switch.budget_bytes, plan_bytes=switch.peak_bytes, in_step=switch.in_step,
                planning_s=switch.planning_s, giving_back_s=switch.giving_back_s, over_bytes=switch.over_bytes,
            )  # fmt: skip
            self.switched_at = self.step + 1
        self.switches = len(switches)
        return switches

    def _evaluation_due(self) -> bool:
        every, last = self.config.eval_every, self.evaluation
        if self.test is None:
            return False
        if self.samples >= self.total:
            return last is None or last.step != self.step
        return every > 0 and self.epoch // every > (last.epoch if last else 0) // every

    def _evaluate_if_due(self) -> None:
        if self.test is None or not self._evaluation_due():
            return
        test, evaluate = self.test
        evaluator = Evaluator(
            self.model, test, evaluate, self.config.batch, self.room_bytes, lambda: self.stop.requested,
            lambda done, accuracy: self._report("evaluate", done, len(test), accuracy=accuracy),
        )  # fmt: skip
        evaluation = evaluator.run(self.step, self.epoch)
        if evaluation is not None:
            self.evaluation, self.saved = evaluation, None
            self._log("eval", loss=evaluation.loss, accuracy=evaluation.accuracy, count=evaluation.count)

    def _save(self) -> Path:
        if not all(_is_finite(parameter) for parameter in self.model.parameters()):
            raise self._diverged(f"A weight is no longer finite after step {self.step}.")
        # First the line, then the checkpoint: whatever a resumed run begins from, its past is in the metrics.
        self._log("checkpoint")
        with explained(self.trainer.folder.metrics_file):
            sync(self.trainer.folder.metrics_file)
        folder, keep = self.trainer.folder.checkpoints, self.config.keep
        self.saved = checkpoints.save(folder, self.model, self.optimizer, self._state(), keep=keep)
        self._report("checkpoint", self.samples, self.total, loss=self.loss)
        return self.saved

    def _state(self) -> State:
        return State(
            step=self.step,
            epoch=self.epoch,
            offset=self.samples % len(self.train),
            length=len(self.train),
            batch=self.config.batch,
            seed=self.config.seed,
            scheduler=asdict(self.schedule),
            evaluation=asdict(self.evaluation) if self.evaluation else None,
            metadata=self.metadata,
        )

    def _diverged(self, what: str) -> UserError:
        checkpoint, _ = checkpoints.latest(self.trainer.folder.checkpoints)
        good = f"resume from the last good checkpoint ({checkpoint.path})" if checkpoint else "start again"
        lower = float(self.optimizer.param_groups[0]["initial_lr"]) / 10
        return UserError(
            what,
            expected="finite numbers",
            received=f"learning rate {self.lr:g}, loss of the last good step {self.loss}",
            next_step=f"Lower the learning rate, to {lower:g} say, and {good}.",
        )

    def _log(self, event: str, **values: float | None) -> None:
        position = {"event": event, "step": self.step, "epoch": self.epoch, "samples": self.samples}
        if "memory_bytes" not in values:
            values["memory_bytes"] = process_bytes("VmRSS")
        metrics_file.append(self.trainer.folder.metrics_file, {**position, "lr": self.lr, **values})

    def _report(self, phase: Phase, done: int, total: int, **values: Any) -> None:
        progress = Progress(phase, self.step, self.epoch, self.config.epochs, min(done, total), total, self.lr)
        self.trainer.on_progress(replace(progress, **values))

    def summary(self, record: Record) -> dict[str, Value]:
        """What goes into the record; what was there stays where this process, resumed, learned nothing new."""
        evaluation = self.evaluation
        rate = self.trained_samples / self.trained_s if self.trained_s else None
        peak = process_bytes("VmHWM") if self.trained_s else None  # of a process that trained
        values = {
            "steps": Value(self.step, "steps", "measured"),
            "samples": Value(self.samples, "samples", "measured"),
            "train_loss": _value(self.loss, "", "measured"),
            "test_loss": _value(evaluation.loss if evaluation else None, "", "measured"),
            "test_accuracy": _value(evaluation.accuracy if evaluation else None, "", "measured"),
            "samples_per_s": _value(rate, "samples/s", "derived"),
            "peak_resident_bytes": _value(peak, "bytes", "measured"),
            "switches": Value(self.switches, "switches", "measured"),
        }
        known = {name: value for name, value in values.items() if value.origin != "unavailable"}
        return {**values, **record.summary, **known}


# Around the loop


def _find(folder: RunFolder, resume: bool) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to begin from, or None for a fresh start, and messages. Never a fresh start over old work."""
    if not resume:
        refuse_old_work(folder)
    checkpoint, messages = checkpoints.latest(folder.checkpoints)
    if resume and checkpoint is None and messages:
        raise UserError(
            f"No checkpoint in {folder.path} is whole.",
            received="\n".join(messages),
            next_step="Start a new run in another folder.",
        )
    if resume and checkpoint is None:
        messages.append(f"No checkpoint in {folder.path} yet: training starts from the beginning.")
    return checkpoint, messages


def refuse_old_work(folder: RunFolder) -> None:
    """A UserError where a run has left checkpoints, whole or not."""
    checkpoint, messages = checkpoints.latest(folder.checkpoints)
    if checkpoint or messages:
        raise UserError(
            f"{folder.path} already holds checkpoints of a run.",
            next_step="Resume that run (--resume), or start a new one in another folder.",
        )


def _is_finite(tensor: Tensor) -> bool:
    """Whether every number is finite, without a second tensor of that size."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    low, high = torch.aminmax(tensor.detach())
    return math.isfinite(float(low)) and math.isfinite(float(high))


def _value(value: float | None, unit: str, origin: Literal["measured", "derived"]) -> Value:
    return Value(value, unit, "unavailable" if value is None else origin)


def _bad_setting(name: str, expected: str, received: object) -> UserError:
    return UserError(f"The setting {name} is out of range.", expected=expected, received=ranges.shown(received))
