"""Is a plan right for a graph? An independent and deliberately simple check that every plan passes before it runs.

It shares no code with the planners or with `lifetimes.py` (what a kernel can overwrite it asks of `ops/call.py`, as the
executor does): it plays the schedule through on the graph alone, byte by
byte, and believes nothing that the plan says of itself.
"""

from __future__ import annotations

from edgetrain.errors import InternalError, UserError
from edgetrain.graph.ir import PERSISTENT, Graph
from edgetrain.ops.call import overwritable
from edgetrain.plan.plan import Compute, Free, Plan


def validate(graph: Graph, plan: Plan) -> None:
    """UserError if the plan is for another graph, InternalError if it is not legal or its numbers are wrong."""
    if plan.graph_key != graph.key:
        raise UserError(
            "this plan was made for another graph",
            expected=f"graph {graph.key}", received=f"a plan for {plan.graph_key}",
            next_step="plan again for this graph",
        )  # fmt: skip
    _Play(graph, plan).run()


class _Play:
    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.plan = graph, plan
        self.bytes_of: dict[int, int] = {}  # the storages that are there now
        self.made: dict[int, set[int]] = {}  # storage → its tensors that are there now
        self.done: set[int] = set()
        self.first_pending = 0  # every op before this one has run
        self.touched = [{graph.tensors[t].storage for t in (*op.reads, *op.creates)} for op in graph.ops]
        self.undo = 0
        self.peak = 0
        for number, storage in enumerate(graph.storages):
            if storage.role in PERSISTENT:
                self.bytes_of[number] = storage.n_bytes
        for t in graph.sources:
            self.made.setdefault(graph.tensors[t].storage, set()).add(t)
        self.lasting = sum(self.bytes_of.values())

    def run(self) -> None:
        for action in self.plan.schedule:
            if isinstance(action, Free):
                self._free(action.storage)
            else:
                self._compute(action)
        missing = set(range(len(self.graph.ops))) - self.done
        self._require(not missing, f"{len(missing)} ops never run")
        for t in self.graph.outputs:
            self._require(self._is_there(t), f"the output {self.graph.tensors[t].name} is gone at the end")
        wanted = set(self.graph.outputs)
        if not any(op.phase == "update" for op in self.graph.ops):
            wanted |= set(self.graph.gradients.values())  # without updates the gradients are the result
        allowed = {self.graph.tensors[t].storage for t in wanted}
        for storage in self.bytes_of:
            lasts = self.graph.storages[storage].role in PERSISTENT
            self._require(lasts or storage in allowed, f"storage {storage} is never freed")
        said = (self.plan.peak_bytes, self.plan.persistent_bytes, self.plan.undo_bytes)
        found = (self.peak, self.lasting, self.undo)
        self._require(said == found, f"the plan says (peak, persistent, undo) = {said} bytes; it is {found}")

    def _compute(self, action: Compute) -> None:
        self._require(0 <= action.op < len(self.graph.ops), f"there is no op {action.op}")
        op = self.graph.ops[action.op]
        self._require(action.op not in self.done, f"{op.name} runs twice")
        for t in op.reads:
            self._require(self._is_there(t), f"{op.name} reads {self.graph.tensors[t].name}, which is not there")
        for earlier in range(self.first_pending, action.op):
            if earlier not in self.done:
                self._may_overtake(action.op, earlier)
        self.done.add(action.op)
        while self.first_pending in self.done:
            self.first_pending += 1
        for storage in op.writes:
            lasts = self.graph.storages[storage].role in ("parameter", "buffer", "state")
            if lasts and (op.phase != "update" or self.plan.updates == "early"):
                self.undo += self.graph.storages[storage].n_bytes
        if action.into is not None:
            self._overwrite(action)
        for t in op.creates:
            storage = self.graph.tensors[t].storage
            self.bytes_of.setdefault(storage, self.graph.storages[storage].n_bytes)
            self.made.setdefault(storage, set()).add(t)
        self.peak = max(self.peak, sum(self.bytes_of.values()) + self.undo)

    def _may_overtake(self, op: int, earlier: int) -> None:
        """An op may run before one that stands earlier in the graph only if neither changes what the other touches and
        they do not both draw random numbers."""
        a, b = self.graph.ops[op], self.graph.ops[earlier]
        clash = not self.touched[earlier].isdisjoint(a.writes) or not self.touched[op].isdisjoint(b.writes)
        clash = clash or (a.random and b.random)
        self._require(not clash, f"{a.name} overtakes {b.name}, which touches the same storage or random stream")

    def _overwrite(self, action: Compute) -> None:
        op, into = self.graph.ops[action.op], action.into
        (t,) = op.creates
        result, storage = self.graph.tensors[t], self.graph.storages[self.graph.tensors[t].storage]
        held = into is not None and into in self.bytes_of and self.graph.storages[into].role not in PERSISTENT
        self._require(held, f"{op.name} overwrites storage {into}, which it must not")
        assert into is not None
        targets = [self.graph.tensors[t].storage for t in overwritable(self.graph, op)]
        reads = [self.graph.tensors[t].storage for t in op.reads]
        self._require(into in targets and reads.count(into) == 1, f"{op.name} cannot overwrite storage {into}")
        fits = storage.n_bytes == self.graph.storages[into].n_bytes == result.n_bytes
        self._require(fits, f"{op.name} overwrites storage {into} of another size")
        self._free(into)

    def _free(self, storage: int) -> None:
        self._require(storage in self.bytes_of, f"storage {storage} is freed, but is not there")
        self._require(self.graph.storages[storage].role not in PERSISTENT, f"storage {storage} must outlive the step")
        del self.bytes_of[storage]
        self.made.pop(storage, None)

    def _is_there(self, t: int) -> bool:
        return t in self.made.get(self.graph.tensors[t].storage, ())

    def _require(self, holds: object, what: str) -> None:
        if not holds:
            raise InternalError(f"the plan of {self.plan.planner} is not legal: {what}")
