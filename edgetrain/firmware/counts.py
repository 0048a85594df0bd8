"""Instructions of a run, counted by the emulator: by function, and by call of the training step.

In:  a project and its linked program; the file that QEMU's plugin (`boards/count.c`) wrote.
Out: `Counted`. Two runs over the same batches give the same numbers.

    train_step:   …  bl conv2d_forward │ …  bl relu_forward │ …      the code up to a call, and what the call
                  └──── call 1 ────────┘└──── call 2 ───────┘        executes, count as that call's

The calls in the linked program must be those that `export` listed, one by one.
"""

from __future__ import annotations

import bisect
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgetrain.errors import InternalError
from edgetrain.firmware.build import require

FILE = "counts.txt"
_STEP = "train_step"
_CALL_KEYS = ("op", "kind", "module", "function", "multiply_adds")
_CALL = re.compile(r"^\s*([0-9a-f]+):\s.*\bblx?\s+[0-9a-f]+ <([^>+]+)>")


@dataclass(frozen=True)
class CountedCall:
    """A call of the step: its op, and the instructions of all its runs.

    multiply_adds: of one run; 0 where the op is no product. Taps on padding are counted.
    """

    op: str
    kind: str
    module: str
    function: str
    multiply_adds: int
    instructions: int


@dataclass(frozen=True)
class Counted:
    """calls: in the order of the step; empty if it never ran."""

    by_function: Mapping[str, int]
    calls: tuple[CountedCall, ...] = ()


@dataclass(frozen=True)
class _Function:
    name: str
    first: int
    end: int


def plugin(project: dict[str, Any], program: Path, where: Path) -> list[str]:
    """QEMU's arguments for counting; builds the plugin for this machine."""
    require("gcc")
    library = where / "count.so"
    source = Path(__file__).parent / "boards" / "count.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", str(source), "-o", str(library)], check=True)
    functions = {f.name: f for f in _functions(project, program)}
    main = program.parent / f"{program.name}.objects" / "main.o"
    callers = [functions[f.name] for f in _functions(project, main) if f.name in functions]
    step = functions[_STEP]
    ranges = [f"step={step.first:x}-{step.end:x}", *(f"outside={f.first:x}-{f.end:x}" for f in callers)]
    return ["-plugin", ",".join([str(library), f"out={FILE}", *ranges])]


def read(project: dict[str, Any], program: Path, where: Path) -> Counted:
    """The counts of a finished run in this folder; empty if nothing was counted."""
    file = where / FILE
    if not file.exists():
        return Counted({})
    blocks: list[tuple[int, int]] = []
    calls: list[tuple[int, int]] = []
    for line in file.read_text().splitlines():
        what, address, count = line.split()
        (blocks if what == "block" else calls).append((int(address, 16), int(count)))
    return Counted(_by_function(_functions(project, program), blocks), _by_call(project, program, calls))


def _tool(project: dict[str, Any], name: str) -> str:
    return f"{project['compiler'].removesuffix('gcc')}{name}"


def _functions(project: dict[str, Any], program: Path) -> list[_Function]:
    """In the order of their addresses; each ends where the next one starts."""
    command = [_tool(project, "nm"), "-n", str(program)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = [line.split() for line in listed.splitlines()]
    symbols = [(int(w[0], 16) & ~1, w[2]) for w in words if len(w) == 3 and w[1] in "tT" and w[2][0] != "$"]
    ends = [*(first for first, _ in symbols[1:]), 1 << 32]
    return [_Function(name, first, end) for (first, name), end in zip(symbols, ends, strict=True)]


def _by_function(functions: list[_Function], blocks: list[tuple[int, int]]) -> dict[str, int]:
    """Most first."""
    starts = [f.first for f in functions]
    by_name: dict[str, int] = {}
    for address, count in blocks:
        at = bisect.bisect_right(starts, address) - 1
        name = functions[at].name if at >= 0 else "?"
        by_name[name] = by_name.get(name, 0) + count
    return {name: count for name, count in sorted(by_name.items(), key=lambda item: -item[1]) if count}


def _by_call(project: dict[str, Any], program: Path, counts: list[tuple[int, int]]) -> tuple[CountedCall, ...]:
    written: list[dict[str, Any]] = project.get("calls", [])
    if not counts or not written:
        return ()
    known = {call["function"] for call in written}
    sites = [(address, function) for address, function in _sites(project, program) if function in known]
    if [function for _, function in sites] != [call["function"] for call in written]:
        raise InternalError("the calls in the linked train_step are not those of the project")
    ends = [address for address, _ in sites]
    executed = [0] * (len(sites) + 1)  # the last entry: what follows the last call
    for address, count in counts:
        executed[bisect.bisect_left(ends, address)] += count
    return tuple(
        CountedCall(**{key: call[key] for key in _CALL_KEYS}, instructions=count)
        for call, count in zip(written, executed[:-1], strict=True)
    )


def _sites(project: dict[str, Any], program: Path) -> list[tuple[int, str]]:
    """Each instruction of train_step that calls a function: its address, and which one."""
    command = [_tool(project, "objdump"), "-d", "--no-show-raw-insn", f"--disassemble={_STEP}", str(program)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    matches = (_CALL.match(line) for line in listed.splitlines())
    return [(int(match[1], 16), match[2]) for match in matches if match is not None]
