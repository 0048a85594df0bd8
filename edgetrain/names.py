"""Names: short ones of kinds of op, and new ones that are not taken yet."""

from __future__ import annotations


def short_name(kind: str) -> str:
    """aten.convolution.default → convolution; edgetrain.norm.apply → norm.apply."""
    space, _, name = kind.partition(".")
    return name if space == "edgetrain" else name.partition(".")[0]


def take_free_name(name: str, taken: set[str]) -> str:
    """The name itself, or name_2, name_3, … where it is taken; from now on it is."""
    free, count = name, 1
    while free in taken:
        count += 1
        free = f"{name}_{count}"
    taken.add(free)
    return free
