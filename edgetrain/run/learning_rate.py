"""The learning rate from the first sample to the last: warm-up, then constant, cosine or steps.

In:  how many samples were seen. Out: the fraction of the full learning rate, which does not count calls, so that a run
     that is resumed, with another batch size even, goes on where it was.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

ScheduleKind = Literal["constant", "cosine", "step"]


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a fraction of its full value, by samples seen.

    first_batch: the batch size the run began with; a warm-up given in steps means steps of this size.
    """

    kind: ScheduleKind
    warmup_samples: int
    first_batch: int
    total_samples: int

    def factor(self, samples: int) -> float:
        """The fraction for the step that begins after `samples` samples: above 0, at most 1."""
        if samples < self.warmup_samples:
            return min(1.0, (samples + self.first_batch) / self.warmup_samples)
        left = max(1, self.total_samples - self.warmup_samples)
        progress = min(1.0, (samples - self.warmup_samples) / left)
        if self.kind == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        if self.kind == "step":
            return 0.01 if progress >= 0.75 else 0.1 if progress >= 0.5 else 1.0
        return 1.0


def set_base_lr(optimizer: Optimizer, lr: float | None, *, resumed: bool) -> list[str]:
    """Set the full learning rate of each group; give back a message where a resumed run changes it."""
    messages = []
    for group in optimizer.param_groups:
        before = float(group.get("initial_lr", group["lr"]))
        group["initial_lr"] = before if lr is None else lr
        if resumed and group["initial_lr"] != before:
            messages.append(f"The learning rate is {lr:g} from here on; it was {before:g}.")
    return messages[:1]


def scheduler(optimizer: Optimizer, factor: Callable[[int], float]) -> LambdaLR:
    """A scheduler that has set the learning rate of the first step."""
    schedule = LambdaLR(optimizer, factor)
    with warnings.catch_warnings():
        # A captured step updates without optimizer.step(), of which the second call of step() would warn. The
        # factor does not count calls, so one more changes nothing.
        warnings.simplefilter("ignore", UserWarning)
        schedule.step()
    return schedule
