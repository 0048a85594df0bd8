"""How many kernels oneDNN keeps that it compiled, each for one shape: fewer than the thousands that it keeps by itself.

PyTorch's library and oneDNN below it each keep the last 1024 kernels for the CPU, about 30 kB apiece in either: where
batches come in many shapes that is a hundred megabytes that no step needs. One step has tens to a few hundred. They
read the limit when they compile the first kernel of a process, from the environment; where one was compiled before, or
the environment says something already, that stays.
"""

from __future__ import annotations

import os

MAX_KERNELS = 512
_LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def limit_kernels() -> None:
    """Limit what oneDNN keeps, if it was not used in this process before."""
    for name in _LIMITS:
        os.environ.setdefault(name, str(MAX_KERNELS))
