"""The vectorised program of Linux boards: its files and its rules in the Makefile.

In:  the kernels that a model calls. Out: files of `kernels/fast`, and rules.

`model.c` is the same for both programs. The scalar program takes all functions from `kernels/`; the fast one takes from
`kernels/fast/` what exists there, and compiles the rest of `kernels/` for vectors.

    firmware         kernels/conv2d.c        kernels/sigmoid.c    the same bits on every core
    firmware_fast    kernels/fast/conv2d.c   kernels/sigmoid.c    vectors and threads, other roundings
"""

from __future__ import annotations

from collections.abc import Sequence

from edgetrain.firmware.kernels import FOLDER, files_of
from edgetrain.firmware.target import Target

FAST = FOLDER / "fast"
# Vectorised sums have another order, and may fuse products; infinities and NaN stay.
ARITHMETIC = "-O3 -ftree-vectorize -ffp-contract=fast -fno-trapping-math"
SANITIZERS = "-DDEBUG_TENSORS -fsanitize=address,undefined -fno-sanitize-recover=all"
# What a kernel includes or calls, besides parallel and vector.
_GEMM = ("convolve", "convolve_backward_weight", "convolve_backward_weight_narrow", "microkernel")
_CONVOLUTIONS = ("convolve_depthwise", *_GEMM)
_NEEDS = {
    "conv2d": _CONVOLUTIONS, "depthwise": ("conv2d", *_CONVOLUTIONS),
    "depthwise3x3": ("convolve_depthwise",), "dense": _GEMM,
    "bias": ("channels",), "norm": ("channels",), "relu": ("elementwise",), "clamp": ("elementwise",),
    "add": ("elementwise",), "sgd": ("elementwise",), "adam": ("elementwise",),
}  # fmt: skip


def _names(kernels: Sequence[str]) -> list[str]:
    """The kernels with a fast source, and what they need."""
    own = [name for name in kernels if (FAST / f"{name}.c").exists()]
    return sorted({*own, *(need for name in own for need in _NEEDS.get(name, ())), "parallel", "vector"})


def fast_files(target: Target, kernels: Sequence[str]) -> dict[str, str | bytes]:
    if target.is_board:
        return {}
    names = [f"{name}{ending}" for name in _names(kernels) for ending in (".c", ".h")]
    return {f"kernels/fast/{name}": (FAST / name).read_text() for name in names if (FAST / name).exists()}


def fast_objects(kernels: Sequence[str]) -> list[str]:
    """The kernels of the fast program, without endings."""
    fast = [name for name in _names(kernels) if (FAST / f"{name}.c").exists()]
    slow = files_of([name for name in kernels if name not in fast])
    return [f"kernels/fast/{name}" for name in fast] + [
        f"kernels/{name.removesuffix('.c')}" for name in slow if name.endswith(".c")
    ]


def fast_rules(target: Target, kernels: Sequence[str], others: Sequence[str]) -> str:
    """The part of a Makefile that builds the fast program. others: its objects besides kernels."""
    if target.is_board:
        return ""
    return f"""
# The same model, vectorised, on all cores. VECTORS=-march=native builds it for this machine alone.
VECTORS := {" ".join(target.firmware.fast_flags)}
FAST := {" ".join([*others, *fast_objects(kernels)])}
PROGRAMS := build/firmware_fast build/firmware_fast_debug build/firmware_fast_sanitize build/firmware_fast_races

fast: build/firmware_fast
$(PROGRAMS): KERNEL := {ARITHMETIC} $(VECTORS)
$(PROGRAMS): LINK := {target.link or "-pthread"}
build/firmware_fast_sanitize build/firmware_fast_races: KERNEL += -O1 -DSMALL_CODE
build/firmware_fast build/firmware_fast_debug: LINK := {target.link or "-static -pthread"}
build/firmware_fast_debug: CFLAGS += -DDEBUG_TENSORS
build/firmware_fast_sanitize: CFLAGS += {SANITIZERS}
build/firmware_fast_races: CFLAGS += -DDEBUG_TENSORS -g -fsanitize=thread
$(foreach variant,$(PROGRAMS),$(eval $(call program,$(variant),$(FAST))))
.PHONY: fast
"""
