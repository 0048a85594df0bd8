"""The ticks of the sampler in C (ticks.c), from Python. Loaded by the sampler's process, so without PyTorch."""

from __future__ import annotations

import ctypes
import functools
import importlib.util

NOTHING = -(2**63)


class Lane(ctypes.Structure):
    """A clock or an open file, read in the slots that, with `shift` more, `every` divides."""

    _fields_ = (
        ("is_clock", ctypes.c_int32),
        ("handle", ctypes.c_int32),
        ("every", ctypes.c_int64),
        ("shift", ctypes.c_int64),
    )


class Reading(ctypes.Structure):
    """value: of a clock its nanoseconds, of a file how many bytes it held; start: where these are."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("before_ns", "after_ns", "value", "start"))


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, or None where edgetrain was installed without a compiler, or not again since it changed."""
    spec = importlib.util.find_spec("edgetrain.native._ticks")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError:
        return None
    if not hasattr(library, "et_sample_ticks"):
        return None
    library.et_sample_ticks.restype = ctypes.c_int
    return library
