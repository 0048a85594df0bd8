"""A plan for the memory of a target; or, if none fits, the changes that would help, each with its number.

In:  a lowered graph, a target. Out: a plan whose arena fits, with recomputation if needed; or `Infeasible`.

    RAM of a step     persistent tensors (trained weights, state, the batch) + the arena;  frozen weights: flash
    levers            a batch of one sample │ recomputing │ an optimizer without state │ the last layer alone
    flash             code + initial values + two checkpoints;  levers: no checkpoints │ no state │ the last layer

A lever's number is the predicted RAM of the step with that change alone, or the flash of the program, with an allowance
for its code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from edgetrain.errors import Infeasible
from edgetrain.firmware.arena import arena_of
from edgetrain.firmware.instructions import firmware_costs
from edgetrain.firmware.lowering import WORD_BYTES
from edgetrain.firmware.target import OWN_BYTES, Target, keep, paged_bytes
from edgetrain.graph.ir import PERSISTENT, Graph, Op, Ref
from edgetrain.graph.rewrite.builder import Builder
from edgetrain.graph.rewrite.dead_ops import remove_dead_ops
from edgetrain.plan.budget import Budget, show_bytes
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.lifetimes import persistent_bytes
from edgetrain.plan.plan import Plan
from edgetrain.plan.planners.fast import FAST
from edgetrain.plan.planning import plan as plan_under
from edgetrain.plan.problem import problem
from edgetrain.plan.refusal import lasting, lower_bound_bytes, smallest_by
from edgetrain.plan.registry import named
from edgetrain.plan.time_left import TimeLeft

# Allowance for code, startup and the C library; the linker has the last word.
CODE_BYTES = 32 * 1024
_TRIES = 4  # plans, until the layout of one fits


@dataclass(frozen=True, slots=True)
class Lever:
    """A change of the step, and its RAM or its flash with it."""

    what: str
    n_bytes: int


def plan_for(
    graph: Graph,
    target: Target,
    *,
    memory_bytes: int | None = None,
    arena_bytes: int = 0,
    limits: Budget | None = None,
    planner: str = "auto",
    time_limit_s: float = 10.0,
    left_s: float | None = None,
) -> Plan:
    """The fastest plan that fits the RAM of the target.

    memory_bytes: budget of the step, without stack and variables; by default what the target has.
    arena_bytes:  of the arena for other functions, such as the prediction. limits: of time and energy.
    time_limit_s: for all tries; left_s: what other plans have left of it.
    """
    time_left = TimeLeft(time_limit_s if left_s is None else min(left_s, time_limit_s))
    under = partial(_within, graph, target, limits or Budget(), planner, time_limit_s, time_left)
    room, limit = arena_room(graph, target, memory_bytes), _room_of(graph, target)
    limit = limit if room is None else min(room, limit)
    persistent, left = persistent_bytes(graph), limit
    for _ in range(_TRIES if arena_bytes <= limit else 0):
        try:
            plan = under(persistent + max(left, WORD_BYTES))
        except Infeasible as answer:
            if answer.least_time_s is not None:  # it is not for lack of memory
                raise
            break
        gap = arena_of(graph, plan).height_bytes - limit
        if gap <= 0:
            return plan
        left -= gap  # the layout has gaps
    smallest = _smallest(under)
    height = max(arena_of(graph, smallest).height_bytes, arena_bytes)
    if height <= limit:
        return smallest
    raise infeasible(graph, target, lasting_bytes(graph) + height, memory_bytes, recomputes=named(planner).recompute)


def _within(
    graph: Graph,
    target: Target,
    limits: Budget,
    planner: str,
    time_limit_s: float,
    time_left: TimeLeft,
    memory_bytes: int | None,
) -> Plan:
    costs, budget = firmware_costs(graph, target), replace(limits, memory_bytes=memory_bytes)
    with time_left.planning() as left_s:
        return plan_under(
            graph, costs, budget, updates="final", exact="rounding", page=False, planner=planner,
            time_limit_s=time_limit_s, left_s=left_s,
        )  # fmt: skip


def _smallest(under: Callable[[int | None], Plan]) -> Plan:
    """A plan for the smallest budget that is known to work."""
    try:
        return under(1)
    except Infeasible as answer:
        return under(answer.smallest_bytes)


def arena_room(graph: Graph, target: Target, memory_bytes: int | None = None) -> int | None:
    """The largest arena within one memory besides all persistent tensors; negative if not even these fit. None if
    nothing bounds it."""
    bounds = [] if memory_bytes is None else [memory_bytes - lasting_bytes(graph)]
    if target.is_board:
        bounds.append(_room_of(graph, target))
    return min(bounds) // WORD_BYTES * WORD_BYTES if bounds else None


def _room_of(graph: Graph, target: Target) -> int:
    """By the memory of the target alone. On Linux it is one region."""
    need = lasting_bytes(graph) + own_bytes(target)
    if not target.is_board:
        return target.device.memory.ram_bytes - need
    rooms = [-1]
    for rest in target.ram:
        if need <= rest.n_bytes:
            others = [memory.n_bytes for memory in target.ram if memory != rest]
            rooms.append(max(rest.n_bytes - need, *others, 0) if others else rest.n_bytes - need)
    return max(rooms)


def own_bytes(target: Target) -> int:
    return target.firmware.stack_bytes + OWN_BYTES


def frozen_bytes(graph: Graph) -> int:
    """Of frozen tensors, which lie in flash."""
    return sum(graph.storages[n].n_bytes for n in _frozen(graph))


def _frozen(graph: Graph) -> list[int]:
    """Weights and buffers that no op changes."""
    written = {s for op in graph.ops for s in op.writes}
    return [n for n, s in enumerate(graph.storages) if s.role in ("parameter", "buffer") and n not in written]


def lasting_bytes(graph: Graph) -> int:
    """Persistent RAM: trained weights, state, the batch."""
    return sum(s.n_bytes for s in graph.storages if s.role in PERSISTENT) - frozen_bytes(graph)


def ram_bytes(graph: Graph) -> int:
    """The RAM of the step without recomputation."""
    return keep_all(graph, updates="final").peak_bytes - frozen_bytes(graph)


def _judged(n_bytes: int, limit: int) -> str:
    return f"{n_bytes} bytes" + (", still too many" if n_bytes > limit else "")


def infeasible(
    graph: Graph, target: Target, step_bytes: int, memory_bytes: int | None, *, recomputes: bool = False
) -> Infeasible:
    """step_bytes: of RAM, without stack and variables, which count only against the board's own memory. recomputes:
    that is the least that recomputing reaches."""
    persistent = lasting_bytes(graph)
    by_budget = memory_bytes is not None and memory_bytes - persistent <= _room_of(graph, target)
    own = 0 if by_budget else own_bytes(target)
    roles = graph.bytes_by_role()
    has = ", ".join(f"{memory.n_bytes} ({memory.name})" for memory in target.ram)
    limit, limit_bytes = f"{target.device.name} has {has}", sum(memory.n_bytes for memory in target.ram)
    if by_budget and memory_bytes is not None:
        limit, limit_bytes = f"the budget is {memory_bytes} bytes", memory_bytes
    options = levers(graph, target, recompute=not recomputes)
    tried = "\n".join(f"    {lever.what}: {_judged(lever.n_bytes + own, limit_bytes)}" for lever in options)
    how = ", recomputing as much as possible" if recomputes else ""
    state, batch = show_bytes(roles["state"]), show_bytes(roles["input"])
    stack = f", {own} bytes of stack and variables" if own else ""
    return Infeasible(
        f"this step takes {step_bytes + own} bytes of RAM{how}; {limit}\n"
        f"  it needs: {persistent} bytes of persistent tensors ({state} of them optimizer state, {batch} the batch), "
        f"{step_bytes - persistent} bytes of arena{stack}\n"
        f"  what would help, each by itself:\n{tried}",
        smallest_bytes=step_bytes + own,
        bound_bytes=lower_bound_bytes(problem(graph, firmware_costs(graph, target), "final"))
        - frozen_bytes(graph)
        + own,
        lasting=lasting(graph, _frozen(graph)),
    )


# ---- levers


def levers(graph: Graph, target: Target, *, recompute: bool = True) -> list[Lever]:
    """Smallest RAM first. recompute: with recomputation."""
    return sorted(_levers(graph, target, recompute), key=lambda lever: lever.n_bytes)


def _levers(graph: Graph, target: Target, recompute: bool) -> Iterator[Lever]:
    now = ram_bytes(graph)
    batch = graph.tensors[graph.inputs[0]].shape[0]
    if batch > 1:
        yield Lever("a batch of 1 in place of " + str(batch), ram_bytes(with_one_sample(graph)))
    if recompute:
        _, peak = smallest_by(problem(graph, firmware_costs(graph, target), "final"), FAST.find)
        if peak - frozen_bytes(graph) < now:
            yield Lever("recomputing as much as possible", peak - frozen_bytes(graph))
    if state := graph.bytes_by_role()["state"]:
        yield Lever("SGD without momentum", now - state)
    for what, smaller in _last_layer_alone(graph):
        yield Lever(what, ram_bytes(smaller))


def _last_layer_alone(graph: Graph) -> Iterator[tuple[str, Graph]]:
    """The change in words, and the step with it; nothing if there is but one layer."""
    last = last_layer(graph)
    if len(last) < len(graph.gradients):
        names = sorted({graph.tensors[p].name.rpartition(".")[0] for p in last})
        yield f"training {', '.join(names)} alone", training_only(graph, last)


def with_one_sample(graph: Graph) -> Graph:
    """The step with a batch of one, for its bytes alone: tensors with a row for each sample get one row."""
    batch = graph.tensors[graph.inputs[0]].shape[0]
    fixed = {n for n, s in enumerate(graph.storages) if s.role in PERSISTENT and s.role != "input"}
    fixed |= {graph.tensors[g].storage for g in graph.gradients.values()}
    tensors = list(graph.tensors)
    n_bytes: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        # A vector as long as the batch may have a number for each channel; an input has one for each sample.
        has_rows = tensor.n_elements > batch or graph.storages[tensor.storage].role == "input"
        if tensor.shape[:1] == (batch,) and tensor.storage not in fixed and has_rows:
            tensors[number] = small = replace(tensor, shape=(1, *tensor.shape[1:]))
            n_bytes[tensor.storage] = -(-small.n_bytes // WORD_BYTES) * WORD_BYTES
    storages = (replace(s, n_bytes=n_bytes.get(n, s.n_bytes)) for n, s in enumerate(graph.storages))
    return replace(graph, tensors=tuple(tensors), storages=tuple(storages))


def last_layer(graph: Graph) -> set[int]:
    """The parameters of the module next to the loss, whose gradients come first."""
    creator = {t: number for number, op in enumerate(graph.ops) for t in op.creates}
    first = min(graph.gradients, key=lambda p: creator[graph.gradients[p]])
    module = graph.tensors[first].name.rpartition(".")[0]
    return {p for p in graph.gradients if graph.tensors[p].name.rpartition(".")[0] == module}


def training_only(graph: Graph, parameters: set[int]) -> Graph:
    """The step that trains these parameters alone: no other gradients are computed."""

    def is_needed(op: Op) -> bool:
        first = op.args[0] if op.args else None
        return op.phase != "update" or (isinstance(first, Ref) and first.tensor in parameters)

    builder = Builder(graph)
    builder.ops = [op for op in graph.ops if is_needed(op)]
    builder.gradients = {p: g for p, g in graph.gradients.items() if p in parameters}
    remove_dead_ops(builder)
    read = {graph.tensors[t].storage for op in builder.ops for t in op.reads}
    builder.sources = {
        t: s for t, s in graph.sources.items() if graph.role(t) != "state" or graph.tensors[t].storage in read
    }
    return builder.build(compact=True)


# ---- flash


def require_flash(
    graph: Graph, target: Target, *, weights_bytes: int, copy_bytes: int | None, state_bytes: int = 0
) -> None:
    """Infeasible if a program does not fit the flash of its board.

    weights_bytes: of initial values, state_bytes of them of the optimizer's state. copy_bytes: of a checkpoint; None if
    there are none.
    """
    flash = target.flash
    if flash is None:
        return
    kept = _two_checkpoints(target, copy_bytes)
    need, paged = CODE_BYTES + weights_bytes + kept, paged_bytes(target)
    if need <= flash.n_bytes and kept <= paged:
        return
    checkpoints = f", {kept} of two checkpoints" if kept else ""
    pages = f"; checkpoints can use the last {paged} of them" if kept > paged else ""
    options = sorted(
        _flash_levers(graph, target, weights_bytes, copy_bytes, state_bytes), key=lambda lever: lever.n_bytes
    )
    tried = "".join(f"\n    {lever.what}: {lever.n_bytes} bytes" for lever in options if lever.n_bytes < need)
    raise Infeasible(
        f"this program takes {need} bytes of flash; {target.device.name} has {flash.n_bytes}{pages}\n"
        f"  it needs: {weights_bytes} bytes of initial values{checkpoints}, {CODE_BYTES} allowed for code"
        + (f"\n  what would help, each by itself:{tried}" if tried else "")
        + "\n  next step: use a narrower model (--width); frozen weights take as much flash as trained ones",
        smallest_bytes=need, bound_bytes=CODE_BYTES + weights_bytes,
    )  # fmt: skip


def _flash_levers(
    graph: Graph, target: Target, weights_bytes: int, copy_bytes: int | None, state_bytes: int
) -> Iterator[Lever]:
    now = CODE_BYTES + weights_bytes
    state = graph.bytes_by_role()["state"]
    if state and (copy_bytes is not None or state_bytes):
        checkpoints_bytes = _two_checkpoints(target, None if copy_bytes is None else copy_bytes - state)
        yield Lever("SGD without momentum", now - state_bytes + checkpoints_bytes)
    if copy_bytes is None:
        return
    yield Lever("no checkpoints in flash", now)
    for what, smaller in _last_layer_alone(graph):
        less = _trained_bytes(graph) - _trained_bytes(smaller)
        yield Lever(what, now + _two_checkpoints(target, copy_bytes - less))


def _trained_bytes(graph: Graph) -> int:
    return lasting_bytes(graph) - graph.bytes_by_role()["input"]


def _two_checkpoints(target: Target, copy_bytes: int | None) -> int:
    return 0 if copy_bytes is None else keep(target, copy_bytes).n_bytes
