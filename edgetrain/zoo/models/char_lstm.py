"""A next-character model: embedding, two LSTM layers, a linear layer.

In: character numbers, int64 [B, T]. Out: scores of the character that follows each, [B, T, classes].

The sizes are those of the Shakespeare model of McMahan et al. 2017 ("Communication-efficient learning",
FedAvg): characters embedded in 8 numbers, 2 × 256 LSTM units, sequences of 80. The state starts at zero with
each sequence.
"""

from __future__ import annotations

import torch
from torch import nn

from edgetrain.zoo.models.arguments import check_classes, check_size, check_width, scaled

EMBEDDING = 8
UNITS = 256
LAYERS = 2


class CharLSTM(nn.Module):
    """`embedding`, `lstm`, `output`; any sequence length."""

    def __init__(self, *, classes: int, width: float) -> None:
        super().__init__()
        units = scaled(UNITS, width)
        self.embedding = nn.Embedding(classes, EMBEDDING)
        self.lstm = nn.LSTM(EMBEDDING, units, num_layers=LAYERS, batch_first=True)
        self.output = nn.Linear(units, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(self.embedding(x))
        scores: torch.Tensor = self.output(states)
        return scores


def char_lstm(*, classes: int = 65, input_size: int = 80, width: float = 1.0) -> nn.Module:
    """A character LSTM over `classes` different characters; `width` scales the LSTM layers.

    `input_size` is the length of the sequences. It changes the work of a step, not the network.
    """
    check_classes("char_lstm", classes)
    check_size("char_lstm", input_size, smallest=1)
    check_width("char_lstm", width)
    return CharLSTM(classes=classes, width=width)
