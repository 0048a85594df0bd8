"""What the builders have in common: checking their arguments, and scaling a layer by `width`.

In: the arguments as the caller gave them. Out: nothing, or a UserError that names the model, the argument and
what would have been accepted. Nothing here builds a layer.
"""

from __future__ import annotations

from edgetrain.errors import UserError
from edgetrain.ranges import CLASSES, SIDE, WIDTH, shown


def check_classes(model: str, classes: int) -> None:
    """Refuse what is no number of classes."""
    if classes not in CLASSES:
        raise UserError(
            f"{model} cannot tell {shown(classes)} classes apart",
            expected=f"classes of 1 or more: {CLASSES}",
            received=f"classes={shown(classes)}",
            next_step="pass the number of different labels in the data",
        )


def check_width(model: str, width: float) -> None:
    """Refuse a width multiplier that is no positive number, or makes a net that no machine holds."""
    if width not in WIDTH:
        raise UserError(
            f"{model} cannot be built {shown(width)} times as wide",
            expected=f"a positive number: {WIDTH}; 1.0 is the network of the paper",
            received=f"width={shown(width)}",
            next_step="try width=0.5 for half as many channels in each layer",
        )


def check_size(model: str, input_size: int, *, smallest: int, largest: int | None = None) -> None:
    """Refuse an input below the smallest side (or length) the network works on, or above the largest."""
    end = SIDE.high if largest is None else largest
    if input_size in SIDE and smallest <= input_size <= end:
        return
    raise UserError(
        f"{model} does not work on inputs of size {shown(input_size)}",
        expected=f"input_size of {smallest} to {end}; the smallest input size is {smallest}",
        received=f"input_size={shown(input_size)}",
        next_step="resize the inputs, or choose another model for inputs of this size",
    )


def refuse_classes(model: str, classes: int | None) -> None:
    """Refuse any number of classes, for a network that predicts none."""
    if classes is not None:
        raise UserError(
            f"{model} has no classes: its output has the shape of its input",
            expected="no classes argument",
            received=f"classes={shown(classes)}",
            next_step="leave classes out",
        )


def scaled(channels: int, width: float) -> int:
    """`channels` times `width`, to the nearest whole number, and at least 1."""
    return max(1, round(channels * width))
