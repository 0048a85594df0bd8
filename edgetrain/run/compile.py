"""Turn a plan into straight-line Python: one line for each kernel call, one `del` where a tensor dies.

In:  a graph, and a plan that is valid for it: whoever made the plan, or took it in, has validated it.
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
the local variables of the function, and the program for the rest takes them up by name (`start`, `rest`). That one
runs once, so it is not compiled as a whole: its lines are, each once for all programs of a step (`Words`), and its
variables are a dictionary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CodeType
from typing import Any

import torch

from edgetrain.dtypes import dtype_of
from edgetrain.graph.ir import Graph, Op, Ref, Value
from edgetrain.native import arena
from edgetrain.ops import call, update
from edgetrain.ops.replay import generator, replay
from edgetrain.plan.lifetimes import whole_tensors
from edgetrain.plan.plan import Action, Compute, Free, PageIn, PageOut, Plan
from edgetrain.plan.unmeasured import beside_bytes
from edgetrain.run.program import STEP_OF, VERSION, How, Line, Program, Stop, in_pieces, is_comment

# What a timed program tells beside places in the schedule: it waits for storage s; the next micro-batch begins.
WAITING = 1 << 40
PART = 1 << 41


def build(
    graph: Graph,
    plan: Plan,
    how: How = How(),  # noqa: B008  # frozen
    *,
    check_finite: bool = False,
    outputs: Sequence[int] | None = None,
    start: int = 0,
    resumable: bool = False,
    words: Words | None = None,
) -> Program:
    """check_finite: refuse a loss or gradient that is not finite, before anything is updated by it.
    outputs: what to return, where it is not the loss alone.
    start: the number of actions that have been taken already. resumable: whatever can be recomputed may have to be.
    words: of this graph, where several programs are built; the same `check_finite` and `resumable` each time.
    """
    words = words or Words(graph, check_finite=check_finite, resumable=resumable)
    writer = _Writer(words, plan, how)
    lines = list(writer.lines(outputs, start))
    split = bool(start or how.look)
    run = in_pieces(words.table, lines, str.strip if how.look else words.compiled) if split else _whole(words, lines)
    pieces = [n for n, (_, line) in enumerate(lines) if not split or (n and not is_comment(line))]
    return Program(
        run=run,
        source="".join(f"{line}\n" for _, line in lines),
        held=words.held,
        updates=() if how.rehearse else words.updates,
        random=words.random,
        allocates_late=writer.allocates_late,
        taken_up=writer.taken_up,
        how=how,
        stops=tuple(writer.stops[n] for n in pieces),
    )


def _whole(words: Words, lines: Sequence[Line]) -> Callable[..., Any]:
    source = "\n".join(line for _, line in lines)
    exec(compile(source, words.file, "exec"), words.table)
    step: Callable[..., Any] = words.table.pop("step")
    return step


def slots(plan: Plan) -> dict[int, int]:
    """The storages that the plan pages, each with its place in the file."""
    return {s: slot for slot, s in enumerate(dict.fromkeys(plan.paged))}


class Words:
    """What all programs of one graph share: names for its functions and values, and the lines of its ops, each written
    and compiled once."""

    def __init__(self, graph: Graph, *, check_finite: bool = False, resumable: bool = False) -> None:
        self.graph, self.check_finite, self.resumable = graph, check_finite, resumable
        self.file = f"{STEP_OF}{graph.about.get('model', 'a model')}>"
        self.norm = Norm()
        self.table: dict[str, Any] = {"__builtins__": {}, "generator": generator, "locals": locals}
        self.table |= {"check": self.norm.check, "note_norm": self.norm.note}
        self.functions: dict[str, str] = {}
        self.values: dict[Value, str] = {}
        self.calls: dict[tuple[Compute, bool, bool, str], tuple[str, ...]] = {}
        self.codes: dict[str, CodeType] = {}
        self.whole = whole_tensors(graph)
        self.storage = [tensor.storage for tensor in graph.tensors]
        read = _readers(graph)
        self.held = tuple(
            t for t, source in graph.sources.items() if source.sort not in ("input", "state") and t in read
        )
        self.noted: dict[int, list[int]] = {}  # storage → the tensors of it that a step is given
        for t in (*graph.inputs, *self.held):
            self.noted.setdefault(graph.tensors[t].storage, []).append(t)
        self.gradient_of = {g: p for p, g in graph.gradients.items()}
        numbers = [number for number, op in enumerate(graph.ops) if op.phase == "update"]
        self.updates = tuple(graph.ops[number] for number in numbers)
        self.slot = {number: slot for slot, number in enumerate(numbers)}
        self.scratch = update.overwrites_gradient(graph)
        self.random = any(op.random for op in graph.ops)
        self.replayable = {n for n, op in enumerate(graph.ops) if replay(op) is not None}

    def compiled(self, line: str) -> CodeType:
        """A line on its own."""
        code = self.codes.get(line)
        if code is None:
            code = self.codes[line] = compile(line.strip(), self.file, "exec")
        return code

    def get_ready(self, plan: Plan) -> None:
        """Compile, before a step runs, what the rest of one may be made of: the ops as they come in the plan, and those
        that can run again."""
        for number in self.replayable:
            self._ready(plan, Compute(number), again=True)
        done: set[int] = set()
        for action in plan.schedule:
            if isinstance(action, Compute):
                self._ready(plan, action, again=action.op in done)
                done.add(action.op)

    def _ready(self, plan: Plan, action: Compute, *, again: bool) -> None:
        op = self.graph.ops[action.op]
        draws = not again and op.random and action.op in self.replayable
        for line in self.call(plan, action, again=again, draws=draws) if op.phase != "update" else ():
            self.compiled(line)

    def call(self, plan: Plan, action: Compute, *, again: bool, draws: bool) -> tuple[str, ...]:
        """The lines that run an op other than an update. draws: it keeps the generator's state, to draw again."""
        key = (action, again, draws, plan.kernel_of(action, again=again))
        if key not in self.calls:
            self.calls[key] = tuple(self._call_lines(*key))
        return self.calls[key]

    def _call_lines(self, action: Compute, again: bool, draws: bool, kernel: str) -> Iterator[str]:
        op = self.graph.ops[action.op]
        note = self._note(op, (" again" if again else "") + (f" by {_comment(kernel)}" if kernel else ""))
        if again:
            op = _again(op)
        elif draws:
            yield f"    g{action.op} = generator({self._constant(self._device(op))})"
        for storage in op.writes:
            # All of it: the op may change any part of it, through a view.
            yield from (f"    undo.note(t{t})" for t in self.noted.get(storage, ()))
        extra = f", generator=g{action.op}.clone_state()" if again and op.random else ""
        yield f"    {self._assign(op)}{self._call(action, op, kernel, extra)}{note}"
        if None in op.outputs and op.creates:
            yield "    del _"  # a result that nobody reads

    def update(self, number: int, *, guarded: bool) -> str:
        op = self.graph.ops[number]
        function = self._function(op.kind, lambda: call.resolve(op.kind))
        p, g = op.reads[:2]
        slot, scratch, undo = self.slot[number], number in self.scratch, "undo" if guarded else "None"
        group = int(dict(op.kwargs)["group"])  # type: ignore[arg-type]  # verify has seen that it is a number
        given = f"t{p}, t{g}, states[{slot}], given[{group}], fresh[{slot}], {scratch}, {undo}"
        return f"    {function}({given}){self._note(op)}"

    def checks(self, op: Op) -> Iterator[str]:
        for t in op.creates:
            if t in self.graph.outputs[1:]:
                yield f"    note_norm(t{t})"
            if not self.check_finite:
                continue
            if t == self.graph.loss:
                yield f"    check(t{t}, 'the loss', {self._room(t)})"
            elif t in self.gradient_of:
                name = self.graph.tensors[self.gradient_of[t]].name
                yield f"    check(t{t}, {self._constant('the gradient of ' + name)}, {self._room(t)}, True)"

    def _note(self, op: Op, how: str = "") -> str:
        return f"  # {_comment(op.name)}{how}" + (f", {_comment(op.module)}" if op.module else "")

    def _room(self, t: int) -> str:
        """A tensor for one number of the type, which is there before the step."""
        tensor = self.graph.tensors[t]
        dtype = dtype_of(tensor.dtype)
        name = f"room_{tensor.dtype}"
        if name not in self.table:
            self.table[name] = torch.empty((), dtype=dtype.to_real(), device=self.graph.storages[tensor.storage].device)
        return name

    def _assign(self, op: Op) -> str:
        if not op.creates:
            return ""
        names = [f"t{t}" if t is not None else "_" for t in op.outputs]
        # A kernel that returns a sequence is told from one that returns a tensor by its schema, not by the count.
        return f"{names[0]} = " if call.returns_one(op.kind) else f"{', '.join(names)}, = "

    def _device(self, op: Op) -> str:
        return self.graph.storages[self.graph.tensors[op.creates[0]].storage].device

    def _call(self, action: Compute, op: Op, kernel: str, extra: str) -> str:
        target = None if action.into is None else overwritten(self.graph, action)
        find, run = call.kernel_and_op(op, target, kernel)
        tight = beside_bytes(self.graph, op) > 0
        function = self._function(f"{tight} {run.kind} {kernel}", lambda: _tight(find) if tight else find)
        given = [self._text(a) for a in run.args] + [f"{key}={self._text(value)}" for key, value in run.kwargs]
        return f"{function}({', '.join(given)}{extra})"

    def _function(self, kind: str, find: Callable[[], Any]) -> str:
        if kind not in self.functions:
            # In this order: a name without its value would be met later, should anything fail between.
            self.table[f"f{len(self.functions)}"] = find()
            self.functions[kind] = f"f{len(self.functions)}"
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
        key = ("complex", repr(value)) if isinstance(value, complex) else value  # 1 + 0j equals 1
        if key not in self.values:
            self.table[f"c{len(self.values)}"] = call.constant(value)
            self.values[key] = f"c{len(self.values)}"
        return self.values[key]


def overwritten(graph: Graph, action: Compute) -> int:
    """The tensor whose memory the result takes."""
    return next(t for t in graph.ops[action.op].reads if graph.tensors[t].storage == action.into)


class _Writer:
    def __init__(self, words: Words, plan: Plan, how: How) -> None:
        self.words, self.graph, self.plan = words, words.graph, plan
        self.how = how
        self.done: set[int] = set()
        again = words.replayable if words.resumable else set(plan.recomputed)
        self.drawn_again = {number for number in again if self.graph.ops[number].random}
        self.taken_up: tuple[str, ...] = ()
        self.allocates_late = False
        self.held_back = False
        self.stops: list[Stop] = []  # of the lines so far
        self.stop = Stop(0)  # of the next one
        self.names: dict[int, list[int]] = {}  # storage → tensors that have a name now
        self.slots = slots(plan)
        self.moving: set[int] = set()  # storages that are being paged out
        self.coming: set[int] = set()  # or in

    def lines(self, outputs: Sequence[int] | None, start: int) -> Iterator[Line]:
        """The program; `stops` grows with it."""
        for line in self._lines(outputs, start):
            self.stops.append(self.stop)
            yield line

    def _lines(self, outputs: Sequence[int] | None, start: int) -> Iterator[Line]:
        self.stop = Stop(start)
        yield None, "def step(batch, held, states, given, fresh, undo, interrupt, look, pages, watch, rest):"
        for name, group in (("batch", self.graph.inputs), ("held", self.words.held)):
            if group:
                yield None, f"    {', '.join(f't{t}' for t in group)}, = {name}"
        for action in self.plan.schedule[:start]:
            self._pass(action)
        if start:
            live = (t for names in self.names.values() for t in names)
            drawn = sorted(self.done & self.drawn_again)
            self.taken_up = (*(f"t{t}" for t in live), *(f"g{number}" for number in drawn))
            yield None, f"    # as they are: {', '.join(self.taken_up)}"
        for at, action in enumerate(self.plan.schedule[start:], start):
            self.stop = Stop(at)
            yield from self._act(action, at)
        self.stop = Stop(len(self.plan.schedule))
        left = self._wait(self.moving | self.coming, len(self.plan.schedule))  # results that no op has waited for
        yield from ((None, line) for line in left)
        wanted = self.graph.outputs[:1] if outputs is None else outputs
        result = ", ".join(f"t{t}" for t in wanted)
        yield None, f"    return {result if outputs is None else f'({result},)'}"

    def _pass(self, action: Action) -> None:
        """Something that has happened already. What was on its way to the store or back has arrived."""
        if isinstance(action, Free):
            self.names.pop(action.storage, None)
        elif isinstance(action, PageIn):
            self.names[action.storage] = [self.words.whole[action.storage]]
        elif isinstance(action, Compute):
            op = self.graph.ops[action.op]
            if op.phase != "update":
                self._ran(action, op)
            elif op.kind != update.ACCUMULATE:
                self.held_back = self.plan.updates != "guarded"

    def _ran(self, action: Compute, op: Op) -> None:
        """The names that there are after an op that is no update."""
        self.done.add(action.op)
        if action.into is not None:
            self.names.pop(action.into, None)
        for t in op.creates:
            self.names.setdefault(self.words.storage[t], []).append(t)

    def _act(self, action: Action, at: int) -> Iterator[Line]:
        if isinstance(action, Free):
            yield from ((None, line) for line in self._wait([action.storage], at))
            self.stop = Stop(at + 1)
            yield from ((None, line) for line in self._free(action.storage))
        elif isinstance(action, Compute):
            op = self.graph.ops[action.op]
            if op.phase == "update" and self.how.rehearse:
                return
            changes = op.phase == "update" and op.kind != update.ACCUMULATE
            if changes and self.plan.updates != "guarded" and not self.held_back:
                self.held_back = True
                yield None, "    interrupt.hold()"
            if self.how.watched and not op.view:
                yield at, f"    watch({at})"
            yield from ((None, line) for line in self._run(action, op, at))
        else:
            yield from ((None, line) for line in self._page(action))

    def _run(self, action: Compute, op: Op, at: int) -> Iterator[str]:
        if self.coming or self.moving:
            read = {self.graph.tensors[t].storage for t in op.reads}
            yield from self._wait([s for s in read if s in self.coming or s == action.into], at)
        timed = self.how.timed and not op.view
        if timed:
            yield f"    look({at})"
        if self.how.look:
            yield f"    look({action.op})"
        yield from self._compute(action, op, at)
        if timed:
            yield f"    look({~at})"
        if self.how.look:
            results = "".join(f"t{t}, " for t in op.creates)
            yield f"    look({action.op}, locals(), ({results}))"  # in pieces: the variables, and no copy of them

    def _page(self, action: PageOut | PageIn) -> Iterator[str]:
        slot, t = self.slots[action.storage], self.words.whole[action.storage]
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
                wait, place = f"    pages.wait({self.slots[s]}, {at})", WAITING + s
                yield from (f"    look({place})", wait, f"    look({~place})") if self.how.timed else (wait,)

    def _compute(self, action: Compute, op: Op, at: int) -> Iterator[str]:
        again = action.op in self.done
        if op.phase == "update":
            self.allocates_late |= action.op not in self.words.scratch
            yield from self._noting(op.reads[0], at)
            yield self.words.update(action.op, guarded=self.plan.updates == "guarded")
            self.stop = Stop(at + 1)
            return
        if action.into is not None:
            yield from self._noting(overwritten(self.graph, action), at)
        yield from self.words.call(self.plan, action, again=again, draws=not again and action.op in self.drawn_again)
        if action.into is not None:
            self.stop = Stop(at + 1)
            yield from self._free(action.into)
        self._ran(action, op)
        self.stop = Stop(at + 1)
        yield from self.words.checks(op)

    def _noting(self, target: int, at: int) -> Iterator[str]:
        """The version of what the action at this place changes, once the step cannot be taken back any more."""
        if self.held_back:
            yield f"    {VERSION} = t{target}._version"
            self.stop = Stop(at, target)

    def _free(self, storage: int) -> Iterator[str]:
        names = self.names.pop(storage, [])
        if names:
            yield f"    del {', '.join(f't{t}' for t in names)}"


def _tight(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """For a kernel that takes much memory elsewhere: where the arena holds nothing, its pages make room for that."""

    def call(*args: Any, **kwargs: Any) -> Any:
        arena.release()
        return kernel(*args, **kwargs)

    return call


def _again(op: Op) -> Op:
    again = replay(op)
    assert again is not None  # the validator has seen that it can run again
    return again


@functools.lru_cache(maxsize=10_000)
def _comment(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._-[]" else "?" for c in text)


def _readers(graph: Graph) -> set[int]:
    return {t for op in graph.ops for t in op.reads} | set(graph.outputs) | set(graph.gradients.values())


class Norm:
    """Of the gradients, all of them together, as the last step computed it: where it clips, before it did; or else
    where it checks that they are finite."""

    def __init__(self) -> None:
        self._whole: float | None = None
        self._parts: dict[str, float] = {}

    @property
    def last(self) -> float | None:
        if self._whole is None and self._parts:
            return math.hypot(*self._parts.values())
        return self._whole

    def note(self, norm: torch.Tensor) -> None:
        self._whole = float(norm)

    def check(self, tensor: torch.Tensor, what: str, room: torch.Tensor, gradient: bool = False) -> None:
        """A norm tells, and takes no memory. That of large values may be infinite; the largest magnitude is not."""
        norm = float(torch.linalg.vector_norm(tensor, out=room)) if tensor.numel() else 0.0
        finite = math.isfinite(norm) or math.isfinite(float(torch.linalg.vector_norm(tensor, math.inf, out=room)))
        if not finite:
            raise NotFinite(what)
        if gradient:
            self._parts[what] = norm


class NotFinite(Exception):
    """Raised inside a step that was asked to check; `CompiledStep` takes the step back and tells the user."""
