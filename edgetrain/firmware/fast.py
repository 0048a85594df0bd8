"""The vectorised program of Linux boards: its files and its rules in the Makefile.

In:  the kernels that a model calls. Out: files of `kernels/fast`, and rules.

`model.c` is the same for both programs. The scalar program takes all functions from `kernels/`; the fast one takes from
`kernels/fast/` what exists there, and compiles the rest of `kernels/` for vectors.

    firmware         kernels/conv2d.c        kernels/sigmoid.c    the same bits on every core
    firmware_fast    kernels/fast/conv2d.c   kernels/sigmoid.c    vectors and threads, other roundings
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgetrain.firmware.kernels import files_of, has_fast
from edgetrain.firmware.target import Target
from edgetrain.ops.c import CSource

# Vectorised sums have another order, and may fuse products; infinities and NaN stay.
ARITHMETIC = "-O3 -ftree-vectorize -ffp-contract=fast -fno-trapping-math"
SANITIZERS = "-DDEBUG_TENSORS -fsanitize=address,undefined -fno-sanitize-recover=all"


def fast_files(target: Target, kernels: Sequence[CSource]) -> dict[str, str | bytes]:
    if target.is_board:
        return {}
    return {f"kernels/fast/{name}": path.read_text() for name, path in _files(kernels).items()}


def _files(kernels: Sequence[CSource]) -> dict[str, Path]:
    return files_of([kernel for kernel in kernels if has_fast(kernel)], fast=True)


def fast_objects(kernels: Sequence[CSource]) -> list[str]:
    """The kernels of the fast program, without endings."""
    names = {
        "kernels/fast": _files(kernels),
        "kernels": files_of([kernel for kernel in kernels if not has_fast(kernel)]),
    }
    return [f"{at}/{Path(name).stem}" for at, files in names.items() for name in files if name.endswith(".c")]


def fast_rules(target: Target, kernels: Sequence[CSource], others: Sequence[str]) -> str:
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
