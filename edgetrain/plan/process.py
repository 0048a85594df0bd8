"""From a bound on the process's resident memory to a bound on the bytes of a step's tensors.

    process_memory = what the process and its children hold now        measured (/proc)
                   + what is still to come and lasts                   optimizer state
                   + another batch, which is loaded while one trains
                   + the step's activations, gradients, workspace      planned
                   + the waste of the arena                            at most LAYOUT_WASTE of them
                   + what libraries take while they run                RESERVE_BYTES

Parameters, buffers and the batch exist already, so they are part of what the process holds. So is the arena of a step
that was prepared before; it is used again.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from edgetrain.errors import Infeasible
from edgetrain.graph.ir import PERSISTENT, Graph
from edgetrain.machine import process_bytes
from edgetrain.native import arena
from edgetrain.plan.budget import show_bytes

# The arena is at most this much higher than what is alive in it at the peak (docs/design/0004-budgets.md).
LAYOUT_WASTE = 0.02
# Without the arena: the holes that malloc leaves, measured up to this part of the planned bytes.
MALLOC_WASTE = 0.75
# What grows beside the arena in the first steps: code of kernels that is read in, oneDNN's scratch, Python's heap.
RESERVE_BYTES = 60_000_000
# What preparing a step may take above what the step itself takes, processes that work for it included.
PREPARING_BYTES = 150_000_000
# Of it, pages of a process that works for this one which both write to, and code of kernels that is read in.
COPIED_BYTES = 40_000_000
# What an attempt that fails leaves behind in the process, and the next one finds taken.
LEFT_BEHIND_BYTES = 10_000_000


def left_for_tensors(graph: Graph, process_memory_bytes: int, *, state_is_there: bool = False) -> int:
    """The budget for all tensors of the step, lasting ones included, under a bound on the process; below 0 where other
    things take more than that."""
    bytes_of = graph.bytes_by_role()
    lasting = sum(n for role, n in bytes_of.items() if role in PERSISTENT)
    to_come = bytes_of["input"] + (0 if state_is_there else bytes_of["state"])
    taken = resident_bytes() - arena.resident_bytes() + to_come + RESERVE_BYTES
    waste = LAYOUT_WASTE if arena.available() else MALLOC_WASTE
    return int((process_memory_bytes - taken) / (1 + waste)) + lasting


def in_process(answer: Infeasible, left: int, process_memory_bytes: int) -> Infeasible:
    """The same answer in terms of the process, of whose bound `left` remained for tensors."""
    waste = LAYOUT_WASTE if arena.available() else MALLOC_WASTE
    smallest, bound = (
        process_memory_bytes + math.ceil((n_bytes - left) * (1 + waste)) + behind
        for n_bytes, behind in ((answer.smallest_bytes, LEFT_BEHIND_BYTES), (answer.bound_bytes, 0))
    )
    where = [line for line in str(answer).splitlines() if line.startswith(("  tightest", "  alive", "  lasting"))]
    room = show_bytes(left) if left > 0 else "nothing (the process itself takes more than that)"
    return answer.in_words(
        "\n".join((
            f"process_memory={show_bytes(process_memory_bytes)} leaves {room} for the tensors of a step, and the "
            f"smallest known to work is {show_bytes(answer.smallest_bytes)}",
            f"  proven: every plan takes {show_bytes(answer.bound_bytes)} or more, and the process {bound} bytes",
            *where,
            f"  next step: ask for process_memory={smallest} ({show_bytes(smallest)}) or more, or take a smaller batch",
        )),
        smallest_bytes=smallest, bound_bytes=bound,
    )  # fmt: skip


def resident_bytes() -> int:
    """The resident memory of this process and all below it, now."""
    waiting, total = [os.getpid()], 0
    while waiting:
        pid = waiting.pop()
        total += process_bytes("VmRSS", pid) or 0
        waiting += _children(pid)
    return total


def _children(pid: int) -> list[int]:
    children: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += [int(child) for child in (task / "children").read_text().split()]
    except OSError:
        return children
    return children
