"""What the builders have in common: checking their arguments, and scaling a layer by `width`.

In: the arguments as the caller gave them. Out: nothing, or a UserError that names the model, the argument and
what would have been accepted. Nothing here builds a layer.
"""

from __future__ import annotations

import math

from edgetrain.errors import UserError


def check_classes(model: str, classes: int) -> None:
    """Refuse a number of classes below 1."""
    if classes < 1:
        raise UserError(
            f"{model} cannot tell {classes} classes apart.",
            expected="classes of 1 or more",
            received=f"classes={classes}",
            next_step="Pass the number of different labels in the data.",
        )


def check_width(model: str, width: float) -> None:
    """Refuse a width multiplier that is not a positive, finite number."""
    if not (math.isfinite(width) and width > 0):
        raise UserError(
            f"{model} cannot be built {width} times as wide.",
            expected="a positive number; 1.0 is the network of the paper",
            received=f"width={width}",
            next_step="Try width=0.5 for half as many channels in each layer.",
        )


def check_size(model: str, input_size: int, *, smallest: int, largest: int | None = None) -> None:
    """Refuse an input below the smallest side (or length) the network works on, or above the largest."""
    if smallest <= input_size and (largest is None or input_size <= largest):
        return
    limit = f"{smallest} or more" if largest is None else f"{smallest} to {largest}"
    raise UserError(
        f"{model} does not work on inputs of size {input_size}.",
        expected=f"input_size of {limit}; the smallest input size is {smallest}",
        received=f"input_size={input_size}",
        next_step="Resize the inputs, or choose another model for inputs of this size.",
    )


def refuse_classes(model: str, classes: int | None) -> None:
    """Refuse any number of classes, for a network that predicts none."""
    if classes is not None:
        raise UserError(
            f"{model} has no classes: its output has the shape of its input.",
            expected="no classes argument",
            received=f"classes={classes}",
            next_step="Leave classes out.",
        )


def scaled(channels: int, width: float) -> int:
    """`channels` times `width`, to the nearest whole number, and at least 1."""
    return max(1, round(channels * width))
