"""Data sets by name or path: `load(spec)` gives a `Data` with a training and a test `Split`."""

from edgetrain.zoo.datasets.base import Data, Split
from edgetrain.zoo.datasets.recognise import load

__all__ = ["Data", "Split", "load"]
