"""The pages of one step: its tensors on their way to the store and back.

In:  a graph, a plan that pages, a folder. Out: `Pages`, which the straight-line step calls.

A transfer that fails raises `PageFault` where the step waits for it, and nowhere else.
"""

from __future__ import annotations

from pathlib import Path

import torch

from edgetrain.dtypes import dtype_of
from edgetrain.errors import UserError
from edgetrain.graph.ir import Graph
from edgetrain.pagefile import Calls, Moved, PageFault, PageFile
from edgetrain.plan.lifetimes import whole_tensors
from edgetrain.plan.plan import Plan
from edgetrain.run.compile import slots

A_TRANSFER = "a transfer failed"


class Pages:
    def __init__(self, graph: Graph, plan: Plan, folder: str | Path, *, calls: Calls | None = None) -> None:
        whole = whole_tensors(graph)
        self._slots = slots(plan)
        self._tensors = [graph.tensors[whole[s]] for s in self._slots]
        self._file = PageFile(folder, [tensor.n_bytes for tensor in self._tensors], calls=calls)
        self._read: set[int] = set()  # the slots whose last transfer was a read
        self._coming: dict[int, torch.Tensor] = {}  # held while they are written to, whoever else lost them
        self.failed = False  # a transfer failed, in this step

    def out(self, slot: int, tensor: torch.Tensor) -> None:
        self._read.discard(slot)
        self._file.write(slot, tensor.untyped_storage().data_ptr())

    def back(self, slot: int) -> torch.Tensor:
        """The tensor with its memory; its numbers are there after `wait`."""
        like = self._tensors[slot].carrier
        tensor = torch.empty_strided(like.shape, like.stride, dtype=dtype_of(like.dtype))
        self._coming[slot] = tensor
        self._read.add(slot)
        self._file.read(slot, tensor.untyped_storage().data_ptr())
        return tensor

    def wait(self, slot: int, at: int) -> None:
        """at: the place in the schedule, for whoever must go on from there when the transfer has failed."""
        try:
            self._file.wait(slot)
        except PageFault as fault:
            fault.at = at
            raise
        self._coming.pop(slot, None)

    def settle(self) -> frozenset[int]:
        """Until nothing moves any more: before memory is freed. The storages that should have come back, and did
        not; what failed to go out is still in memory."""
        failed = self._file.settle()
        self._coming.clear()
        self.failed |= bool(failed)
        return frozenset(s for s, slot in self._slots.items() if slot in failed & self._read)

    @property
    def moved(self) -> Moved:
        return self._file.moved


def not_back(why: str) -> UserError:
    return UserError(
        "a tensor did not come back from storage, and cannot be recomputed; the step was taken back and the model is "
        "as it was before",
        received=why, next_step="call the step again; if this comes again, page to another folder",
    )  # fmt: skip
