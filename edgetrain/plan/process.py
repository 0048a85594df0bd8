"""From a bound on the process's resident memory to a bound on the bytes of a step's tensors.

    process_memory = what the process holds now       measured (/proc/self/status)
                   + the step's activations …         planned
                   + the waste of the arena           at most LAYOUT_WASTE of the planned bytes
                   + what libraries take while it runs   RESERVE_BYTES

Parameters, state and inputs that exist already are part of what the process holds.
"""

from __future__ import annotations

import os
from pathlib import Path

from edgetrain.errors import UserError
from edgetrain.graph.ir import PERSISTENT, Graph
from edgetrain.native import arena
from edgetrain.plan.budget import show_bytes

# The arena is at most this much higher than what is alive in it at the peak (measured; see docs/design/0004).
LAYOUT_WASTE = 0.02
# What grows beside the arena in the first steps: code of kernels that is read in, oneDNN's scratch, Python's heap.
RESERVE_BYTES = 60_000_000
# Without the arena, malloc's holes: measured up to this part of the planned bytes.
MALLOC_WASTE = 0.75


def resident_bytes() -> int:
    """The resident memory of this process and its children, now."""
    total = _resident(os.getpid())
    for task in Path("/proc/self/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue
        total += sum(_resident(int(child)) for child in children)
    return total


def _resident(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return 0
    return 0


def left_for_tensors(graph: Graph, process_memory_bytes: int) -> int:
    """The budget for the step's tensors, lasting ones included, under a bound on the process."""
    lasting = sum(s.n_bytes for s in graph.storages if s.role in PERSISTENT)
    waste = LAYOUT_WASTE if arena.available() else MALLOC_WASTE
    now = resident_bytes()
    left = (process_memory_bytes - now - RESERVE_BYTES) / (1 + waste)
    if left <= 0:
        raise UserError(
            f"the process holds {show_bytes(now)} already, before the step has any memory",
            expected=f"process_memory above {show_bytes(now + RESERVE_BYTES)}",
            received=show_bytes(process_memory_bytes),
        )
    return int(left) + lasting
