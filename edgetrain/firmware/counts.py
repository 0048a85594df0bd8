"""Instructions that a program executed, as the emulator counted them: by function, and by call of the training step.

In:  a project and its linked program; the file that QEMU's plugin (`boards/count.c`) wrote.
Out: `Counted`. Two runs over the same batches give the same numbers.

    train_step:   …  bl conv2d_forward │ …  bl relu_forward │ …      each stretch of code up to a call, and all that
                  └──── call 1 ────────┘└──── call 2 ───────┘        the call executes, is that call's

The calls are found in the linked program, and must be those that `export` wrote down, one by one.
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
    """A call of the step: of which op, and the instructions of all its runs together.

    multiply_adds: of one run; 0 where the op is no product. Taps that lie on padding count, as they do everywhere.
    """

    op: str
    kind: str
    module: str
    function: str
    multiply_adds: int
    instructions: int


@dataclass(frozen=True)
class Counted:
    """calls: in the order of the step; empty where it never ran."""

    by_function: Mapping[str, int]
    calls: tuple[CountedCall, ...] = ()


@dataclass(frozen=True)
class _Function:
    name: str
    first: int
    end: int


def plugin(project: dict[str, Any], program: Path, where: Path) -> list[str]:
    """What QEMU is started with so that it counts; the plugin is built for this machine."""
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
    """The counts of a run that has ended in this folder; none where nothing counted."""
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
    """In the order of their addresses; each lasts until the next one starts."""
    command = [_tool(project, "nm"), "-n", str(program)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = [line.split() for line in listed.splitlines()]
    found = [(int(w[0], 16) & ~1, w[2]) for w in words if len(w) == 3 and w[1] in "tT" and w[2][0] != "$"]
    ends = [*(first for first, _ in found[1:]), 1 << 32]
    return [_Function(name, first, end) for (first, name), end in zip(found, ends, strict=True)]


def _by_function(functions: list[_Function], blocks: list[tuple[int, int]]) -> dict[str, int]:
    """Most first."""
    starts = [f.first for f in functions]
    found: dict[str, int] = {}
    for address, count in blocks:
        at = bisect.bisect_right(starts, address) - 1
        name = functions[at].name if at >= 0 else "?"
        found[name] = found.get(name, 0) + count
    return {name: count for name, count in sorted(found.items(), key=lambda item: -item[1]) if count}


def _by_call(project: dict[str, Any], program: Path, counts: list[tuple[int, int]]) -> tuple[CountedCall, ...]:
    written: list[dict[str, Any]] = project.get("calls", [])
    if not counts or not written:
        return ()
    known = {call["function"] for call in written}
    sites = [(address, function) for address, function in _sites(project, program) if function in known]
    if [function for _, function in sites] != [call["function"] for call in written]:
        raise InternalError("the calls in the linked train_step are not those of the project")
    ends = [address for address, _ in sites]
    executed = [0] * (len(sites) + 1)  # the last: what follows the last call
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
    found = (_CALL.match(line) for line in listed.splitlines())
    return [(int(match[1], 16), match[2]) for match in found if match is not None]
