"""What a model is trained to do: its loss, and how its predictions are scored.

In: a model and one batch. Out: a scalar to minimise, or a number of correct predictions.

A batch is what a data set yields and what `ZooModel.example` makes:

    classify          x [B, …], y int64 [B]              one prediction a sample
    next-character    x int64 [B, T], y int64 [B, T]     T predictions a sample
    reconstruct       x [B, …], y ignored                no predictions

So the share of correct predictions is `accuracy(model(x), x, y) / y.numel()`. The functions are plain
functions of this module: they can be captured, pickled and sent to another process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Task:
    """A loss and, where there is something to predict, a count of correct predictions.

    loss:     loss(model, *batch) → a scalar, the mean over the batch.
    accuracy: accuracy(output, *batch) → how many predictions are right (0-d); None where there are none.
    """

    name: str
    loss: Callable[..., torch.Tensor]
    accuracy: Callable[..., torch.Tensor] | None


def classify_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the scores [B, classes] against the labels."""
    return F.cross_entropy(model(x), y)


def next_character_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the scores [B, T, classes] against the character that follows each of x."""
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def reconstruct_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """Mean squared error of the output against the input; the labels that come with the data are ignored."""
    return F.mse_loss(model(x), x)


def correct(output: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """How many of the best-scored classes, along the last dimension of the output, are the labels."""
    return (output.argmax(-1) == y).sum()


CLASSIFY = Task("classify", classify_loss, correct)
NEXT_CHARACTER = Task("next-character", next_character_loss, correct)
RECONSTRUCT = Task("reconstruct", reconstruct_loss, None)

TASKS: Mapping[str, Task] = {task.name: task for task in (CLASSIFY, NEXT_CHARACTER, RECONSTRUCT)}
