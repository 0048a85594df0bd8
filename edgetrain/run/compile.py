"""Turn a plan into straight-line Python: one line for each kernel call, one `del` where a tensor dies.

In:  a graph, and a plan that is valid for it.
Out: `Program`, whose `run` is a function without branches or look-ups; its text is kept in `source`.

    def step(batch, held, states, given, fresh, undo, interrupt, look, pages, watch, rest):
        t0, t1 = batch
        t2, t3, … = held
        t10 = f0(t0, t2, None, (1, 1), …)       # convolution_1, features.0
        undo.note(t8)
        t11, t12, t13 = f1(t10, t3, …)          # native_batch_norm_1, features.1
        t14 = f2(t11, 0.0, 6.0)                 # hardtanh_1 over its input
        del t11
        pages.out(0, t14)                       # begins to go to the store
        …
        pages.wait(0, 31); del t14              # has gone
        …
        t14 = pages.back(0)                     # begins to come back
        …
        pages.wait(0, 74)                       # has come
        t11, t12, t13 = f1(t10, t3, …)          # native_batch_norm_1 again, features.1
        …
        f9(t2, t47, states[0], given[0], fresh[0], True, undo)   # sgd_1
        del t47
        return t27

Text that comes from a graph file never becomes code: names are numbers, values are looked up in a table.

A step that stops between two ops (a transfer failed, the budget fell) goes on in another program: its live tensors are
the local variables of the function, and the program for the rest takes them up by name (`start`, `rest`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from edgetrain.errors import InternalError
from edgetrain.graph.accumulate import ACCUMULATE
from edgetrain.graph.ir import PERSISTENT, Atom, Graph, Op, Ref, Value
from edgetrain.ops import call, update
from edgetrain.ops.replay import generator, replay
from edgetrain.plan.lifetimes import whole_tensors
from edgetrain.plan.plan import Action, Compute, Free, PageIn, PageOut, Plan
from edgetrain.plan.validate import validate

# What a timed program tells beside places in the schedule: it waits for storage s; the next micro-batch begins.
WAITING = 1 << 40
PART = 1 << 41


@dataclass(frozen=True)
class Program:
    """
    held:    the persistent tensors that `run` takes in `held`, in order (parameters, buffers, externals, constants).
    updates: the update ops, in the order of `states` and `fresh`.
    random:  the step draws random numbers.
    allocates_late: an update needs memory of its own, so it could fail after another one was made.
    taken_up: the variables that `run` takes from `rest`, where it goes on with a step that has begun.
    looks, rehearses, watched, timed: how it was built.
    """

    run: Callable[..., Any]
    source: str
    held: tuple[int, ...]
    updates: tuple[Op, ...]
    random: bool
    allocates_late: bool
    taken_up: tuple[str, ...] = ()
    looks: bool = False
    rehearses: bool = False
    watched: bool = False
    timed: bool = False


def build(
    graph: Graph,
    plan: Plan,
    *,
    check_finite: bool = False,
    look: bool = False,
    rehearse: bool = False,
    outputs: Sequence[int] | None = None,
    start: int = 0,
    resumable: bool = False,
    watched: bool = False,
    timed: bool = False,
    rooms: dict[str, torch.Tensor] | None = None,
) -> Program:
    """check_finite: refuse a loss or gradient that is not finite, before anything is updated by it.
    rehearse: leave the updates out; everything else happens as it will in the step.
    look: call `look(op number)` before each op and `look(op number, one tensor of each live storage, what it made)`
    after. outputs: what to return, where it is not the loss alone.
    start: the number of actions that have been taken already. resumable: whatever can be made again may have to be.
    watched: call `watch(place in the schedule)` before each op.
    timed: call `look(place)` before each op and `look(~place)` after it, and the same around each wait for the store;
    views compute nothing and are left out.
    rooms: what the checks of one program work in, for the next one: a program for the rest of a step is built in the
    middle of it, where every byte is spoken for.
    """
    validate(graph, plan)
    writer = _Writer(
        graph, plan, check_finite=check_finite, look=look, rehearse=rehearse, resumable=resumable, watched=watched,
        timed=timed, rooms={} if rooms is None else rooms,
    )  # fmt: skip
    lines = list(writer.lines(outputs, start))
    source = "\n".join(lines) + "\n"
    code = compile(source, f"<step of {graph.about.get('model', 'a model')}>", "exec")
    exec(code, writer.table)
    return Program(
        run=writer.table["step"],
        source=source,
        held=writer.held,
        updates=tuple(writer.updates),
        random=any(op.random for op in graph.ops),
        allocates_late=writer.allocates_late,
        taken_up=writer.taken_up,
        looks=look,
        rehearses=rehearse,
        watched=watched,
        timed=timed,
    )


def slots(plan: Plan) -> dict[int, int]:
    """The storages that the plan pages, each with its place in the file."""
    return {s: slot for slot, s in enumerate(dict.fromkeys(plan.paged))}


class _Writer:
    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        *,
        check_finite: bool,
        look: bool,
        rehearse: bool,
        resumable: bool,
        watched: bool,
        timed: bool,
        rooms: dict[str, torch.Tensor],
    ) -> None:
        self.watched, self.timed, self.rooms = watched, timed, rooms
        self.graph, self.plan = graph, plan
        self.check_finite, self.look, self.rehearse = check_finite, look, rehearse
        self.table: dict[str, Any] = {"__builtins__": {}, "check": _check, "generator": generator}
        self.done: set[int] = set()
        again = [n for n, op in enumerate(graph.ops) if replay(op) is not None] if resumable else plan.recomputed
        self.drawn_again = {number for number in again if graph.ops[number].random}
        self.taken_up: tuple[str, ...] = ()
        self.functions: dict[str, str] = {}
        self.values: dict[Value, str] = {}
        self.updates: list[Op] = []
        self.allocates_late = False
        self.held_back = False
        self.scratch = update.overwrites_gradient(graph)
        self.names: dict[int, list[int]] = {}  # storage → tensors that have a name now
        self.readers = _readers(graph)
        self.held = tuple(
            t for t, source in graph.sources.items() if source.sort not in ("input", "state") and t in self.readers
        )
        self.noted = (*self.graph.inputs, *self.held)
        self.gradient_of = {g: p for p, g in graph.gradients.items()}
        self.slots = slots(plan)
        self.whole = whole_tensors(graph) if self.slots else {}
        self.moving: set[int] = set()  # storages that are being paged out
        self.coming: set[int] = set()  # or in

    def lines(self, outputs: Sequence[int] | None, start: int) -> Iterator[str]:
        yield "def step(batch, held, states, given, fresh, undo, interrupt, look, pages, watch, rest):"
        for name, group in (("batch", self.graph.inputs), ("held", self.held)):
            if group:
                yield f"    {', '.join(f't{t}' for t in group)}, = {name}"
        for at, action in enumerate(self.plan.schedule[:start]):
            for _ in self._act(action, at):
                pass
        if start:
            live = (t for names in self.names.values() for t in names)
            drawn = sorted(self.done & self.drawn_again)
            self.taken_up = (*(f"t{t}" for t in live), *(f"g{number}" for number in drawn))
            yield from (f"    {name} = rest.pop({name!r})" for name in self.taken_up)
            self.moving.clear()
            self.coming.clear()
        for at, action in enumerate(self.plan.schedule[start:], start):
            yield from self._act(action, at)
        yield from self._wait(self.moving | self.coming, len(self.plan.schedule))  # results that no op has waited for
        wanted = self.graph.outputs[:1] if outputs is None else outputs
        result = ", ".join(f"t{t}" for t in wanted)
        yield f"    return {result if outputs is None else f'({result},)'}"

    def _act(self, action: Action, at: int) -> Iterator[str]:
        if isinstance(action, Free):
            yield from self._wait([action.storage], at)
            yield from self._free(action.storage)
        elif isinstance(action, Compute):
            yield from self._run(action, at)
        else:
            yield from self._page(action)

    def _run(self, action: Compute, at: int) -> Iterator[str]:
        op = self.graph.ops[action.op]
        if op.phase == "update" and self.rehearse:
            return
        changes = op.phase == "update" and op.kind != ACCUMULATE
        if changes and self.plan.updates != "guarded" and not self.held_back:
            self.held_back = True
            yield "    interrupt.hold()"
        if self.watched and not op.view:
            yield f"    watch({at})"
        read = {self.graph.tensors[t].storage for t in op.reads}
        yield from self._wait([s for s in read if s in self.coming or s == action.into], at)
        timed = self.timed and not op.view
        if timed:
            yield f"    look({at})"
        if self.look:
            yield f"    look({action.op})"
        yield from self._compute(action, op)
        if timed:
            yield f"    look({~at})"
        if self.look:
            made = "".join(f"t{t}, " for t in op.creates)
            yield f"    look({action.op}, {self._live()}, ({made}))"

    def _page(self, action: PageOut | PageIn) -> Iterator[str]:
        slot, t = self.slots[action.storage], self.whole[action.storage]
        if isinstance(action, PageOut):
            self.moving.add(action.storage)
            yield f"    pages.out({slot}, t{t})"
        else:
            self.coming.add(action.storage)
            self.names[action.storage] = [t]
            yield f"    t{t} = pages.back({slot})"

    def _wait(self, storages: Iterable[int], at: int) -> Iterator[str]:
        """Until the storages are where they are to be; `at`: the place in the schedule."""
        for s in sorted(storages):
            if s in self.moving or s in self.coming:
                self.moving.discard(s)
                self.coming.discard(s)
                wait = f"    pages.wait({self.slots[s]}, {at})"
                place = WAITING + s
                yield from (f"    look({place})", wait, f"    look({~place})") if self.timed else (wait,)

    def _live(self) -> str:
        made = [names for s, names in self.names.items() if self.graph.storages[s].role not in PERSISTENT]
        return "(" + "".join(f"t{names[0]}, " for names in made) + ")"

    def _compute(self, action: Compute, op: Op) -> Iterator[str]:
        again = action.op in self.done
        note = (
            f"  # {_comment(op.name)}" + (" again" if again else "") + (f", {_comment(op.module)}" if op.module else "")
        )
        if op.phase == "update":
            yield from self._update(action.op, op, note)
            return
        if again:
            op = _again(op)
        elif action.op in self.drawn_again:
            yield f"    g{action.op} = generator({self._constant(self._device(op))})"
        self.done.add(action.op)
        for storage in op.writes:
            # All of it: the op may change any part of it, through a view.
            yield from (f"    undo.note(t{t})" for t in self.noted if self.graph.tensors[t].storage == storage)
        extra = f", generator=g{action.op}.clone_state()" if again and op.random else ""
        yield f"    {self._assign(op)}{self._call(action, op, extra)}{note}"
        if None in op.outputs and op.creates:
            yield "    del _"  # a result that nobody reads
        if action.into is not None:
            yield from self._free(action.into)
        for t in op.creates:
            self.names.setdefault(self.graph.tensors[t].storage, []).append(t)
        if self.check_finite:
            yield from self._checks(op)

    def _checks(self, op: Op) -> Iterator[str]:
        for t in op.creates:
            if t == self.graph.loss:
                yield f"    check(t{t}, 'the loss', {self._room(t)})"
            elif t in self.gradient_of:
                name = self.graph.tensors[self.gradient_of[t]].name
                yield f"    check(t{t}, {self._constant('the gradient of ' + name)}, {self._room(t)})"

    def _room(self, t: int) -> str:
        """A tensor for one number of the type, which is there before the step."""
        tensor = self.graph.tensors[t]
        dtype: torch.dtype = getattr(torch, tensor.dtype)
        name = f"room_{tensor.dtype}"
        if name not in self.rooms:
            self.rooms[name] = torch.empty((), dtype=dtype.to_real(), device=self.graph.storages[tensor.storage].device)
        self.table[name] = self.rooms[name]
        return name

    def _assign(self, op: Op) -> str:
        if not op.creates:
            return ""
        names = [f"t{t}" if t is not None else "_" for t in op.outputs]
        # A kernel that returns a sequence is told from one that returns a tensor by its schema, not by the count.
        return f"{names[0]} = " if call.returns_one(op.kind) else f"{', '.join(names)}, = "

    def _device(self, op: Op) -> str:
        return self.graph.storages[self.graph.tensors[op.creates[0]].storage].device

    def _call(self, action: Compute, op: Op, extra: str) -> str:
        kind, args, kwargs = op.kind, list(op.args), dict(op.kwargs)
        if action.into is not None:
            target = next(t for t in op.reads if self.graph.tensors[t].storage == action.into)
            kind, swap = call.in_place(op, target)
            if swap:
                args[0], args[1] = args[1], args[0]
            keyword = call.keyword_of(kind)
            if keyword is not None:
                extra += f", {keyword}=t{target}"
        function = self._function(kind, lambda: call.resolve(kind))
        given = [self._text(a) for a in args] + [f"{key}={self._text(value)}" for key, value in kwargs.items()]
        return f"{function}({', '.join(given)}{extra})"

    def _update(self, number: int, op: Op, note: str) -> Iterator[str]:
        name = op.kind.split(".")[1]
        function = self._function(op.kind, lambda: update.KERNELS[name])
        p, g = op.reads[:2]
        slot = len(self.updates)
        self.updates.append(op)
        scratch = number in self.scratch
        self.allocates_late |= not scratch
        undo = "undo" if self.plan.updates == "guarded" else "None"
        group = int(dict(op.kwargs)["group"])  # type: ignore[arg-type]  # verify has seen that it is a number
        yield f"    {function}(t{p}, t{g}, states[{slot}], given[{group}], fresh[{slot}], {scratch}, {undo}){note}"

    def _free(self, storage: int) -> Iterator[str]:
        names = self.names.pop(storage, [])
        if names:
            yield f"    del {', '.join(f't{t}' for t in names)}"

    def _function(self, kind: str, find: Callable[[], Any]) -> str:
        if kind not in self.functions:
            name = self.functions[kind] = f"f{len(self.functions)}"
            self.table[name] = find()
        return self.functions[kind]

    def _text(self, value: Value) -> str:
        if isinstance(value, Ref):
            return f"t{value.tensor}"
        if isinstance(value, tuple):
            return f"({''.join(self._text(item) + ', ' for item in value)})"
        if value is None or isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value)
        return self._constant(value)

    def _constant(self, value: Value) -> str:
        if value not in self.values:
            name = self.values[value] = f"c{len(self.values)}"
            self.table[name] = _torch_value(value)
        return self.values[value]


def _again(op: Op) -> Op:
    found = replay(op)
    assert found is not None  # the validator has seen that it can run again
    return found


def _comment(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-[]" else "?" for c in text)


def _torch_value(value: Value) -> Any:
    if isinstance(value, Atom):
        found = torch.device(value.name) if value.sort == "device" else getattr(torch, value.name, None)
        kinds = {
            "dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout, "device": torch.device,
        }  # fmt: skip
        if not isinstance(found, kinds[value.sort]):
            raise InternalError(f"{value} is nothing that torch knows")
        return found
    return value


def _readers(graph: Graph) -> set[int]:
    return {t for op in graph.ops for t in op.reads} | set(graph.outputs) | set(graph.gradients.values())


def _check(tensor: torch.Tensor, what: str, room: torch.Tensor) -> None:
    # The largest magnitude tells, and takes no memory.
    if tensor.numel() and not math.isfinite(float(torch.linalg.vector_norm(tensor, math.inf, out=room))):
        raise NotFinite(what)


class NotFinite(Exception):
    """Raised inside a step that was asked to check; `CompiledStep` takes the step back and tells the user."""
