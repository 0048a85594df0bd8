"""Is a plan right for a graph? An independent and deliberately simple check that every plan passes before it runs.

It shares no code with the planners or with `lifetimes.py` (what a kernel can overwrite and which op can run again it
asks of `ops/`, as the executor does): it plays the schedule through on the graph alone, byte by byte, and believes
nothing that the plan says of itself but the workspace of kernels, which only a measurement can tell.

Each storage has a version: how often it was written in place. An op must find what it reads in the version that it
has in the graph's own order, the first time as any other time; so a recompute that comes after an update of its weight
is refused, and a reader that overtakes a writer too. What is paged in has the version that was paged out.

A store can fail at any time. Where updates stand early, what is lost must be recomputed from the batch and from weights
that are still as they were; so a storage is read back only where that is possible. Where they stand together, the same
holds from the first of them on: a step cannot be taken back any more then.
"""

from __future__ import annotations

from edgetrain.costs.table import Way
from edgetrain.errors import InternalError, UserError
from edgetrain.graph.ir import PERSISTENT, Graph, Op
from edgetrain.ops.call import kernel_of, overwritable
from edgetrain.ops.replay import replay
from edgetrain.plan.plan import RANDOM_STATE_BYTES, Compute, Free, PageIn, PageOut, Plan


def validate(graph: Graph, plan: Plan) -> None:
    """UserError if the plan is for another graph, InternalError if it is not legal or its numbers are wrong."""
    Validator(graph).check(plan)


class Validator:
    """Checks plans of one graph. What does not change with the plan is looked up once: in the middle of a step there is
    little time."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.expected = _versions(graph)
        self.storage = [tensor.storage for tensor in graph.tensors]
        self.touched = [{graph.tensors[t].storage for t in (*op.reads, *op.creates)} for op in graph.ops]
        self.again = [replay(op) for op in graph.ops]
        self.maker = {t: number for number, op in enumerate(graph.ops) for t in op.creates}
        touching: dict[int, list[int]] = {}  # storage → the ops that touch it
        writing: dict[int, list[int]] = {}  # storage → the ops that change it in place
        for number, touched in enumerate(self.touched):
            for s in touched:
                touching.setdefault(s, []).append(number)
            for s in graph.ops[number].writes:
                writing.setdefault(s, []).append(number)
        drawing = [number for number, op in enumerate(graph.ops) if op.random]
        self.before: list[set[int]] = []  # for each op, those that must have run when it does
        for number, op in enumerate(graph.ops):
            # They may not change places: one of the two changes what the other touches, or both draw random numbers.
            others = {other for s in op.writes for other in touching.get(s, ())}
            others |= {other for s in self.touched[number] for other in writing.get(s, ())}
            others |= set(drawing) if op.random else set()
            self.before.append({other for other in others if other < number})

    def check(self, plan: Plan) -> None:
        if plan.graph_key != self.graph.key:
            raise UserError(
                "this plan was made for another graph",
                expected=f"graph {self.graph.key}", received=f"a plan for {plan.graph_key}",
                next_step="plan again for this graph",
            )  # fmt: skip
        for way, names in plan.kernels.items():
            for number, name in names.items():
                self._check_kernel(plan, way, number, name)
        _Play(self, plan).run()

    def _check_kernel(self, plan: Plan, way: Way, number: int, name: str) -> None:
        if not 0 <= number < len(self.graph.ops):
            raise InternalError(f"not a legal plan: it names a kernel for op {number}, which is not there")
        op, tensors = self.graph.ops[number], self.graph.tensors
        kernel, read = kernel_of(op.kind, name), tuple(tensors[t] for t in op.reads)
        if kernel is None or not kernel.takes(read) or (way == "over" and not kernel.over):
            raise UserError(
                f"this plan runs {op.name} ({op.kind}) by the kernel {name}, which is not there for its tensors",
                next_step="plan again, with the modules imported that register it",
            )
        if plan.exact == "bitwise" and kernel.exact != "bitwise":
            raise InternalError(f"not a legal plan: the kernel {name} of {op.name} rounds, and the plan is bitwise")


class _Play:
    def __init__(self, known: Validator, plan: Plan) -> None:
        graph = known.graph
        self.graph, self.plan, self.known = graph, plan, known
        self.expected, self.storage, self.maker = known.expected, known.storage, known.maker
        self.bytes_of: dict[int, int] = {}  # the storages that are there now
        self.made: dict[int, set[int]] = {}  # storage → its tensors that are there now
        self.done: set[int] = set()
        self.version: dict[int, int] = {}
        self.stored: dict[int, int] = {}  # the storages that are in the store, and the version there
        self.coming: set[int] = set()  # paged in, and read by nobody so far
        self.going: set[int] = set()  # paged out, and not freed so far: only then is it certain that all of it has gone
        self.updating = False
        draws = any(op.random for op in graph.ops)
        self.undo = RANDOM_STATE_BYTES if draws and plan.updates != "final" else 0
        self.peak = 0
        for number, storage in enumerate(graph.storages):
            if storage.role in PERSISTENT:
                self.bytes_of[number] = storage.n_bytes
        for t in graph.sources:
            self.made.setdefault(graph.tensors[t].storage, set()).add(t)
        self.lasting = self.held = sum(self.bytes_of.values())

    def run(self) -> None:
        for action in self.plan.schedule:
            if isinstance(action, Free):
                self._free(action.storage)
            elif isinstance(action, Compute):
                self._compute(action)
            else:
                self._page(action)
        missing = set(range(len(self.graph.ops))) - self.done
        self._require(not missing, f"{len(missing)} ops never run")
        for t in self.graph.outputs:
            self._require(self._is_there(t), f"the output {self.graph.tensors[t].name} is gone at the end")
            if self.graph.tensors[t].storage in self.coming:
                self._require_safe(t)
        wanted = set(self.graph.outputs)
        if not any(op.phase == "update" for op in self.graph.ops):
            wanted |= set(self.graph.gradients.values())  # without updates the gradients are the result
        allowed = {self.graph.tensors[t].storage for t in wanted}
        for storage in self.bytes_of:
            lasts = self.graph.storages[storage].role in PERSISTENT
            self._require(lasts or storage in allowed, f"storage {storage} is never freed")
        said = (self.plan.peak_bytes, self.plan.persistent_bytes, self.plan.undo_bytes)
        amounts = (self.peak, self.lasting, self.undo)
        self._require(said == amounts, f"the plan says (peak, persistent, undo) = {said} bytes; it is {amounts}")

    def _compute(self, action: Compute) -> None:
        if not 0 <= action.op < len(self.graph.ops):
            self._require(False, f"there is no op {action.op}")
        op = self.graph.ops[action.op]
        way: Way = "over" if action.into is not None else "again" if action.op in self.done else "first"
        if action.op in self.done:
            again = self.known.again[action.op]
            self._require(again is not None, f"{op.name} runs twice")
            assert again is not None
            op = again
        else:
            self._first_time(action.op)
        expected = self.expected[action.op]
        for t in op.reads:
            storage = self.storage[t]
            if t not in self.made.get(storage, ()):
                self._require(False, f"{op.name} reads {self.graph.tensors[t].name}, which is not there")
            if self.version.get(storage, 0) != expected.get(storage, 0):
                self._require(False, f"{op.name} reads {self.graph.tensors[t].name}, which was changed since")
            if storage in self.coming:
                self._require_safe(t)
        for storage in op.writes:
            if storage in self.going:
                self._require(False, f"{op.name} changes storage {storage} while it is paged out")
            self.version[storage] = self.version.get(storage, 0) + 1
        if action.into is not None:
            self._overwrite(action)
        workspace = self.plan.workspace_bytes.get(way, {}).get(action.op, 0)
        self._make(op)
        self.peak = max(self.peak, self.held + self.undo + workspace)

    def _first_time(self, number: int) -> None:
        op = self.graph.ops[number]
        self.updating |= op.phase == "update"
        if self.updating and self.plan.updates == "together" and op.phase != "update":
            self._require(False, f"{op.name} runs after an update, and the updates are to run together")
        overtaken = self.known.before[number] - self.done
        if overtaken:
            earlier = self.graph.ops[min(overtaken)].name
            self._require(False, f"{op.name} overtakes {earlier}, which touches the same storage or random stream")
        self.done.add(number)
        for storage in op.writes:
            lasts = self.graph.storages[storage].role in PERSISTENT
            copied = self.plan.updates == "guarded" or (op.phase != "update" and self.plan.updates != "final")
            if lasts and copied:
                self.undo += self.graph.storages[storage].n_bytes

    def _make(self, op: Op) -> None:
        read = [self.storage[t] for t in op.reads]
        for t in op.creates:
            storage = self.storage[t]
            if not op.view and storage not in read and t in self.made.get(storage, ()):
                self._require(False, f"{op.name} makes {self.graph.tensors[t].name}, which is there")
            if storage not in self.bytes_of:
                self._take(storage)
                self.version[storage] = 0
            self.made.setdefault(storage, set()).add(t)

    def _page(self, action: PageOut | PageIn) -> None:
        s = action.storage
        self._require(0 <= s < len(self.graph.storages), f"there is no storage {s}")
        whole = [t for t, op in self.maker.items() if self._is_whole(t, s) and not self.graph.ops[op].view]
        on_cpu = self.graph.storages[s].device == "cpu"
        self._require(len(whole) == 1 and on_cpu, f"storage {s} is not one tensor on the CPU")
        if isinstance(action, PageOut):
            self._require(self._is_there(whole[0]) and s not in self.coming, f"storage {s} is paged out, but not there")
            self.stored[s] = self.version.get(s, 0)
            self.going.add(s)
            return
        self._require(s in self.stored and s not in self.bytes_of, f"storage {s} is paged in: not stored, or there")
        self._take(s)
        self.made[s], self.version[s] = {whole[0]}, self.stored[s]
        self.coming.add(s)
        self.peak = max(self.peak, self.held + self.undo)

    def _take(self, storage: int) -> None:
        self.bytes_of[storage] = self.graph.storages[storage].n_bytes
        self.held += self.bytes_of[storage]

    def _is_whole(self, t: int, storage: int) -> bool:
        tensor = self.graph.tensors[t]
        return tensor.storage == storage and tensor.n_bytes == self.graph.storages[storage].n_bytes

    def _require_safe(self, t: int) -> None:
        """What was paged in is read now: if it did not come back, it could be recomputed, or the step taken back."""
        storage = self.graph.tensors[t].storage
        self.coming.discard(storage)
        if self.plan.updates in ("early", "final") or (self.plan.updates == "together" and self.updating):
            why = self._why_lost(t, {storage, *self.coming})
            self._require(why is None, f"storage {storage} is paged in, and could not be recomputed: {why}")

    def _why_lost(self, wanted: int, gone: set[int]) -> str | None:
        """Why a tensor cannot be made now, when these storages are gone; or None."""
        waiting, seen = [wanted], {wanted}
        while waiting:
            t = waiting.pop()
            number = self.maker.get(t)
            op = None if number is None else self.known.again[number]
            if number is None or op is None:
                return f"{self.graph.tensors[t].name} cannot be made twice"
            for read in op.reads:
                s = self.graph.tensors[read].storage
                there = s not in gone and self._is_there(read)
                lasts = self.graph.storages[s].role in PERSISTENT
                version = self.version.get(s, 0) if there or lasts else 0
                if version != self.expected[number].get(s, 0):
                    return f"{op.name} reads {self.graph.tensors[read].name}, which was changed since"
                if not there and read not in seen:
                    seen.add(read)
                    waiting.append(read)
        return None

    def _overwrite(self, action: Compute) -> None:
        op, into = self.graph.ops[action.op], action.into
        t = op.creates[0]
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
        if storage not in self.bytes_of:
            self._require(False, f"storage {storage} is freed, but is not there")
        if self.graph.storages[storage].role in PERSISTENT:
            self._require(False, f"storage {storage} must outlive the step")
        self.held -= self.bytes_of.pop(storage)
        self.made.pop(storage, None)
        self.coming.discard(storage)
        self.going.discard(storage)

    def _is_there(self, t: int) -> bool:
        return t in self.made.get(self.graph.tensors[t].storage, ())

    def _require(self, holds: object, what: str) -> None:
        if not holds:
            raise InternalError(f"the plan of {self.plan.planner} is not legal: {what}")


def _versions(graph: Graph) -> list[dict[int, int]]:
    """For each op, how often what it reads was written before it in the graph's own order."""
    written: dict[int, int] = {}
    versions = []
    for op in graph.ops:
        read = (graph.tensors[t].storage for t in op.reads)
        versions.append({s: written[s] for s in read if s in written})
        for s in op.writes:
            written[s] = written.get(s, 0) + 1
    return versions
