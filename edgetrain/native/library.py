"""The libraries that setup.py builds, loaded if they are there and fit the PyTorch that runs."""

from __future__ import annotations

import ctypes
import functools
import importlib.util

import torch


@functools.cache
def load(name: str) -> ctypes.CDLL | str:
    """The library `edgetrain/native/_NAME`, or why it cannot be used."""
    spec = importlib.util.find_spec(f"edgetrain.native._{name}")
    if spec is None or spec.origin is None:
        return "edgetrain was installed before PyTorch, or without a C++ compiler; install it again (see README)"
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError as error:
        return f"its library cannot be loaded: {error}"
    library.et_torch_version.restype = ctypes.c_char_p
    built = library.et_torch_version().decode()
    if built != torch.__version__:
        return f"it was built for PyTorch {built}, and this is {torch.__version__}; install edgetrain again"
    return library
