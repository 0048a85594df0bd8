"""The files of a project that depend on its target alone: main.c, board, Makefile, linker script.

In:  a target, the layout of its memory, the kernels that are used. Out: file names and their content.

    board/board.h        what main.c needs of a machine
    board/linux.c        Linux (linux_bare.c: without a C library); or
    board/cortex_m.c     a Cortex-M: startup, MPU, semihosting
    board/link.ld        the board's real RAM and flash; link_emulated.ld with flash where the emulator has it

and with checkpoints in flash:

    checkpoint.c         two slots, of which one is always complete
    board/flash.h        what it needs of flash; flash_layout.h: where the slots lie
    board/flash_file.c   flash in a file, in the emulator and on Linux
    board/flash_board.c  the board's own flash, if there is a driver for it
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgetrain.firmware.fast import fast_files, fast_rules
from edgetrain.firmware.kernels import files_of
from edgetrain.firmware.target import Kept, Memory, Placed, Target, emulated
from edgetrain.ops.c import CSource

FOLDER = Path(__file__).parent / "boards"
WARNINGS = "-Wall -Wextra -Werror -Wconversion -Wshadow -Wdouble-promotion -Wstrict-prototypes"
# For the same bits everywhere: no fused multiply-adds, no vectorised sums, no reordering.
ARITHMETIC = "-ffp-contract=off -fno-tree-vectorize -fno-math-errno"

_WEIGHTS = """/* The initial values of persistent tensors, from weights.bin. */
    .section .rodata
    .global model_weights
    .balign 8
model_weights:
    .incbin "weights.bin"
    .byte 0
    .global model_weights_end
model_weights_end:
    .section .note.GNU-stack, "", %progbits
"""

_NO_DRIVER = """
board/flash_board.c:
	@echo "no driver for the flash of this board: write board/flash_board.c with the functions of board/flash.h"
	@false
"""


def files(
    target: Target, placed: Placed | None, kernels: Sequence[CSource], kept: Kept | None = None, model_key: int = 0
) -> dict[str, str | bytes]:
    """kept: where checkpoints lie in flash. model_key: identifies those of this model."""
    board = f"{target.board}.c"
    files_by_name: dict[str, str | bytes] = {
        "main.c": (FOLDER / "main.c").read_text(),
        "weights.S": _WEIGHTS,
        "board/board.h": (FOLDER / "board.h").read_text(),
        f"board/{board}": (FOLDER / board).read_text(),
        "Makefile": _makefile(target, kernels, kept),
        **fast_files(target, kernels),
    }
    if kept is not None:
        files_by_name |= _flash_files(target, kept, model_key)
    if placed is not None and target.flash is not None:
        emulated_memory = Placed(emulated(target, placed.arena), emulated(target, placed.rest))
        kept_bytes = 0 if kept is None else kept.n_bytes
        files_by_name["board/link.ld"] = _linker_script(target, placed, target.flash, kept_bytes)
        files_by_name["board/link_emulated.ld"] = _linker_script(
            target, emulated_memory, emulated(target, target.flash), kept_bytes
        )
    return files_by_name


def _flash_files(target: Target, kept: Kept, model_key: int) -> dict[str, str | bytes]:
    names = {"checkpoint.c": "checkpoint.c", "checkpoint.h": "checkpoint.h", "flash.h": "board/flash.h"}
    names["flash_file.c"] = "board/flash_file.c"
    if target.firmware.flash_driver is not None:
        names[target.firmware.flash_driver] = "board/flash_board.c"
    files_by_name: dict[str, str | bytes] = {place: (FOLDER / name).read_text() for name, place in names.items()}
    files_by_name[
        "board/flash_layout.h"
    ] = f"""/* {target.device.name}: two slots of {kept.slot_bytes} bytes, in pages of {kept.page_bytes}. */
#ifndef FLASH_LAYOUT_H
#define FLASH_LAYOUT_H

#define FLASH_START {kept.address:#010x}u
#define FLASH_PAGE_BYTES {kept.page_bytes}u
#define FLASH_SLOT_BYTES {kept.slot_bytes}u
#define FLASH_KEPT_BYTES (2u * FLASH_SLOT_BYTES)
/* Of this export: checkpoints of another one are ignored. */
#define MODEL_KEY {model_key:#010x}u

#endif
"""
    return files_by_name


def _makefile(target: Target, kernels: Sequence[CSource], kept: Kept | None) -> str:
    sources = [name for name in files_of(kernels) if name.endswith(".c")]
    others = ["main", "model", f"board/{target.board}", *([] if kept is None else ["checkpoint", "board/flash_file"])]
    objects = [*others, *(f"kernels/{name.removesuffix('.c')}" for name in sources)]
    own = "build/firmware_board" if target.is_board else "build/firmware_sanitize"
    goal = "board" if target.is_board else "sanitize"
    special = (
        "build/firmware_board: LINK := -nostartfiles -T board/link.ld -Wl,-z,noexecstack"
        if target.is_board
        else "build/firmware_sanitize: CFLAGS += -DDEBUG_TENSORS -fsanitize=address,undefined -fno-sanitize-recover=all"
    )
    own_names, driver = "$(NAMES)", ""
    if kept is not None and target.is_board:
        own_names = "$(subst board/flash_file,board/flash_board,$(NAMES))"
        driver = _NO_DRIVER if target.firmware.flash_driver is None else ""
    note = "firmware and firmware_debug are for the emulator, firmware_board for the board itself."
    return f"""# Builds firmware for {target.device.name}. {note if target.is_board else ""}
# CC=clang uses another compiler, EXTRA=-g adds debug information.
CC := {target.firmware.compiler}
CORE := {" ".join(target.firmware.flags)}
ARITHMETIC := {ARITHMETIC}
WARNINGS := {WARNINGS}
CFLAGS := -std=c11 -O2 -ffunction-sections -I. $(CORE) $(ARITHMETIC) $(WARNINGS) $(EXTRA)
LINK := {target.link}
NAMES := {" ".join(objects)}

all: build/firmware
debug: build/firmware_debug
{goal}: {own}

build/firmware_debug: CFLAGS += -DDEBUG_TENSORS
{special}

define program
$(1): $(addprefix $(1).objects/,$(addsuffix .o,$(2))) $(1).objects/weights.o $(wildcard board/*.ld)
	$$(CC) $$(CFLAGS) $$(LINK) $$(filter %.o,$$^) -Wl,--gc-sections -lm -o $$@

$(1).objects/%.o: %.c $(wildcard *.h kernels/*.h kernels/fast/*.h board/*.h)
	@mkdir -p $$(dir $$@)
	$$(CC) $$(CFLAGS) $$(if $$(filter kernels/%,$$<),$$(KERNEL)) -c $$< -o $$@

$(1).objects/weights.o: weights.S weights.bin
	@mkdir -p $$(dir $$@)
	$$(CC) $$(CORE) -c $$< -o $$@
endef

$(eval $(call program,build/firmware,$(NAMES)))
$(eval $(call program,build/firmware_debug,$(NAMES)))
$(eval $(call program,{own},{own_names}))
{driver}{fast_rules(target, kernels, others)}
clean:
	rm -rf build

.PHONY: all debug {goal} clean
"""


def _linker_script(target: Target, placed: Placed, flash: Memory, kept_bytes: int) -> str:
    """The arena may lie in another memory than the rest. kept_bytes: for checkpoints, at the end of flash."""
    apart = placed.apart
    arena = (
        f"\n    ARENA (rw) : ORIGIN = {placed.arena.address:#010x}, LENGTH = {placed.arena.n_bytes}" if apart else ""
    )
    copies = f" /* and {kept_bytes} for checkpoints */" if kept_bytes else ""
    return f"""/* {target.device.name}: {flash.name}; {placed.rest.name}{f"; {placed.arena.name}" if apart else ""}. */
ENTRY(reset)

MEMORY
{{
    FLASH (rx) : ORIGIN = {flash.address:#010x}, LENGTH = {flash.n_bytes - kept_bytes}{copies}
    RAM (rw) : ORIGIN = {placed.rest.address:#010x}, LENGTH = {placed.rest.n_bytes}{arena}
}}

__flash_start = ORIGIN(FLASH);
__flash_bytes = {flash.n_bytes};
__ram_start = ORIGIN(RAM);
__ram_bytes = LENGTH(RAM);
__arena_ram_start = ORIGIN({"ARENA" if apart else "RAM"});
__arena_ram_bytes = LENGTH({"ARENA" if apart else "RAM"});

SECTIONS
{{
    .vectors : {{ KEEP(*(.vectors)) }} > FLASH
    .text : {{ *(.text .text.*) }} > FLASH
    .rodata : {{ *(.rodata .rodata.*) }} > FLASH
    .ARM.extab : {{ *(.ARM.extab*) }} > FLASH
    .ARM.exidx : {{ *(.ARM.exidx*) }} > FLASH

    /* First in RAM, and grows down: an overflow leaves RAM and faults. */
    .stack (NOLOAD) : {{
        __stack_start = .;
        . = . + {target.firmware.stack_bytes};
        __stack_end = .;
    }} > RAM
    .data : ALIGN(8) {{
        __data_start = .;
        *(.data .data.*)
        . = ALIGN(4);
        __data_end = .;
    }} > RAM AT > FLASH
    __data_load = LOADADDR(.data);
    .arena (NOLOAD) : ALIGN(8) {{ *(.bss.arena) }} > {"ARENA" if apart else "RAM"}
    .bss (NOLOAD) : ALIGN(8) {{
        __bss_start = .;
        *(.bss .bss.*)
        *(COMMON)
        . = ALIGN(4);
        __bss_end = .;
    }} > RAM
}}
"""
