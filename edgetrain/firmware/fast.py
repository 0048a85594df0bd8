"""The vectorised program of Linux boards: which files it is built from, and how.

In:  the kernels that a model calls. Out: files of `kernels/fast`, and what the Makefile says of them.

`model.c` is the same for both programs and calls the same functions. The scalar program takes all of them from
`kernels/`; the fast one takes those from `kernels/fast/` that are there, and builds the rest for vectors as it is.

    firmware         kernels/conv2d.c        kernels/sigmoid.c    the same bits on every core
    firmware_fast    kernels/fast/conv2d.c   kernels/sigmoid.c    vectors and threads, other roundings
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgetrain.firmware.kernels import files_of, has_fast
from edgetrain.firmware.target import Target
from edgetrain.ops.c import CSource

# A sum in vectors is another order of additions, and may fuse. Nothing else is given up: infinities and NaN stay.
ARITHMETIC = "-O3 -ftree-vectorize -ffp-contract=fast -fno-trapping-math"
SANITIZERS = "-DDEBUG_TENSORS -fsanitize=address,undefined -fno-sanitize-recover=all"


def fast_files(target: Target, kernels: Sequence[CSource]) -> dict[str, str | bytes]:
    if target.is_board:
        return {}
    return {f"kernels/fast/{name}": path.read_text() for name, path in _files(kernels).items()}


def _files(kernels: Sequence[CSource]) -> dict[str, Path]:
    return files_of([kernel for kernel in kernels if has_fast(kernel)], fast=True)


def fast_objects(kernels: Sequence[CSource]) -> list[str]:
    """The kernels that the fast program is linked from, without endings."""
    names = {
        "kernels/fast": _files(kernels),
        "kernels": files_of([kernel for kernel in kernels if not has_fast(kernel)]),
    }
    return [f"{at}/{Path(name).stem}" for at, files in names.items() for name in files if name.endswith(".c")]


def fast_rules(target: Target, kernels: Sequence[CSource], others: Sequence[str]) -> str:
    """The part of a Makefile that builds the fast program. others: what it is linked from beside kernels."""
    if target.is_board:
        return ""
    return f"""
# The same model on all cores, in vectors. VECTORS=-march=native builds it for this machine alone.
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
$(foreach made,$(PROGRAMS),$(eval $(call program,$(made),$(FAST))))
.PHONY: fast
"""
