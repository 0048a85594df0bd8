"""What others have printed about these networks, and why it differs from ours where it does.

The counts stand in published.toml, as printed: 3_400_000 for "3.4M". Torchvision's multiply-adds are the `_ops` of its
weights, in thousandths of a giga; it calls them GFLOPS but counts one multiplication with its addition as one.

Two of the measurement papers count in ways of their own:
- EMDL'21 names five CNNs with their counts. The code its authors released
  (github.com/UbiquitousLearning/Benchmark-On-Device-Training) builds other networks for at least four of
  them.
- The TX2 paper's column "#Parameters" agrees for several networks with the *megabytes* of float32 parameters
  in a public table (github.com/albanie/convnet-burden), and its column "#Flops" with the multiply-adds there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Published:
    """One printed count. `note` is empty where it agrees with ours, up to the digits that were printed."""

    source: str
    parameters: int
    multiply_adds: int | None = None
    note: str = ""


def published() -> Mapping[str, tuple[Published, ...]]:
    """By the name of the network; those without a printed count are not in it."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {name: tuple(Published(**entry) for entry in entries) for name, entries in tables.items()}
