"""The files of a project that depend on its target alone: main.c, the board, the Makefile, the linker script.

In:  a target, where things lie in its memory, the kernels that are used. Out: file names and their content.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgetrain.firmware.kernels import files_of
from edgetrain.firmware.target import Placed, Target

FOLDER = Path(__file__).parent / "boards"
WARNINGS = "-Wall -Wextra -Werror -Wconversion -Wshadow -Wdouble-promotion -Wstrict-prototypes"
# Results are the same bits everywhere: no fused multiply-adds, no vectors that round otherwise, no reordering.
ARITHMETIC = "-ffp-contract=off -fno-tree-vectorize -fno-math-errno"

_WEIGHTS = """/* The first values of everything that lasts, as they lie in weights.bin. */
    .section .rodata
    .global model_weights
    .balign 8
model_weights:
    .incbin "weights.bin"
    .byte 0
    .section .note.GNU-stack, "", %progbits
"""


def files(target: Target, placed: Placed | None, kernels: Sequence[str]) -> dict[str, str | bytes]:
    found: dict[str, str | bytes] = {
        "main.c": (FOLDER / "main.c").read_text(),
        "weights.S": _WEIGHTS,
        "board/board.h": (FOLDER / "board.h").read_text(),
        "board/linux.c": (FOLDER / "linux.c").read_text(),
        "Makefile": _makefile(target, kernels),
    }
    return found


def _makefile(target: Target, kernels: Sequence[str]) -> str:
    sources = [name for name in files_of(kernels) if name.endswith(".c")]
    objects = ["main", "model", *(f"kernels/{name.removesuffix('.c')}" for name in sources), "board/linux"]
    return f"""# Builds build/firmware for {target.device.name}. CC=clang builds it with another compiler, EXTRA=-g
# for a debugger.
CC := {target.firmware.compiler}
CORE := {" ".join(target.firmware.flags)}
ARITHMETIC := {ARITHMETIC}
WARNINGS := {WARNINGS}
CFLAGS := -std=c11 -O2 -I. $(CORE) $(ARITHMETIC) $(WARNINGS) $(EXTRA)
NAMES := {" ".join(objects)}

all: build/firmware
debug: build/firmware_debug
sanitize: build/firmware_sanitize

build/firmware_debug: CFLAGS += -DDEBUG_TENSORS
build/firmware_sanitize: CFLAGS += -DDEBUG_TENSORS -fsanitize=address,undefined -fno-sanitize-recover=all

define program
$(1): $(addprefix $(1).objects/,$(addsuffix .o,$(NAMES))) $(1).objects/weights.o
	$$(CC) $$(CFLAGS) $$^ -lm -o $$@

$(1).objects/%.o: %.c $(wildcard *.h kernels/*.h board/*.h)
	@mkdir -p $$(dir $$@)
	$$(CC) $$(CFLAGS) -c $$< -o $$@

$(1).objects/weights.o: weights.S weights.bin
	@mkdir -p $$(dir $$@)
	$$(CC) $$(CORE) -c $$< -o $$@
endef

$(eval $(call program,build/firmware))
$(eval $(call program,build/firmware_debug))
$(eval $(call program,build/firmware_sanitize))

clean:
	rm -rf build

.PHONY: all debug sanitize clean
"""
