"""A plan for the memory of a target; and where there is none, what would help, each with its number.

In:  a lowered graph, a target. Out: a plan whose arena fits, recomputing where it must; or `Infeasible`.

    RAM of a step     what lasts and changes (weights, state, the batch) + the arena;  weights that are frozen: flash
    levers            a batch of one sample │ recomputing │ an optimizer without state │ the last layer alone
    flash             code + first values + two copies of what changes;  levers: no copies │ no state │ the last layer

A lever's number is the RAM of the step with that change alone, predicted from the graph as a plan's peak is; or the
flash of the program, with an allowance for its code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from edgetrain.errors import Infeasible
from edgetrain.firmware.arena import arena_of
from edgetrain.firmware.instructions import firmware_costs
from edgetrain.firmware.lowering import WORD_BYTES, live_ops
from edgetrain.firmware.target import OWN_BYTES, Target, keep, paged_bytes
from edgetrain.graph.ir import PERSISTENT, Graph, Op, Ref
from edgetrain.graph.rewrite.fuse import compact
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

# Allowed for code, startup and the C library; the linker judges what there is.
CODE_BYTES = 32 * 1024
_TRIES = 4  # plans that are tried until the layout of one fits


@dataclass(frozen=True, slots=True)
class Lever:
    """A change of the step, and the RAM that it would take then."""

    what: str
    ram_bytes: int


@dataclass(frozen=True, slots=True)
class FlashLever:
    """A change of the program, and the flash that it would take then."""

    what: str
    flash_bytes: int


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
    """The plan of least time whose RAM the target has.

    memory_bytes: RAM that the step may take, without stack and variables, where that is less than the target has.
    arena_bytes: what else the program uses the arena for, such as its prediction. limits: of time and energy.
    time_limit_s: for all that is tried; left_s: what other plans have left of it.
    """
    time_left = TimeLeft(time_limit_s if left_s is None else min(left_s, time_limit_s))
    under = partial(_within, graph, target, limits or Budget(), planner, time_limit_s, time_left)
    room, most = arena_room(graph, target, memory_bytes), _room_of(graph, target)
    most = most if room is None else min(room, most)
    persistent, left = persistent_bytes(graph), most
    for _ in range(_TRIES if arena_bytes <= most else 0):
        try:
            made = under(persistent + max(left, WORD_BYTES))
        except Infeasible as answer:
            if answer.least_time_s is not None:  # memory is not what stands in the way
                raise
            break
        gap = arena_of(graph, made).height_bytes - most
        if gap <= 0:
            return made
        left -= gap  # the layout has gaps: what lies in it must be so much less
    smallest = _smallest(under)
    height = max(arena_of(graph, smallest).height_bytes, arena_bytes)
    if height <= most:
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
    """A plan of as few bytes as were found to work."""
    try:
        return under(1)
    except Infeasible as answer:
        return under(answer.smallest_bytes)


def arena_room(graph: Graph, target: Target, memory_bytes: int | None = None) -> int | None:
    """The largest arena that lies within one memory beside all that lasts; below 0 where not even that fits. None where
    nothing bounds it."""
    bounds = [] if memory_bytes is None else [memory_bytes - lasting_bytes(graph)]
    if target.is_board:
        bounds.append(_room_of(graph, target))
    return min(bounds) // WORD_BYTES * WORD_BYTES if bounds else None


def _room_of(graph: Graph, target: Target) -> int:
    """By the memory of the target alone. Linux maps all that it has as one."""
    need = lasting_bytes(graph) + own_bytes(target)
    if not target.is_board:
        return target.device.memory.ram_bytes - need
    found = [-1]
    for rest in target.ram:
        if need <= rest.n_bytes:
            others = [memory.n_bytes for memory in target.ram if memory != rest]
            found.append(max(rest.n_bytes - need, *others, 0) if others else rest.n_bytes - need)
    return max(found)


def own_bytes(target: Target) -> int:
    return target.firmware.stack_bytes + OWN_BYTES


def frozen_bytes(graph: Graph) -> int:
    """Of what lies in flash."""
    return sum(graph.storages[n].n_bytes for n in _frozen(graph))


def _frozen(graph: Graph) -> list[int]:
    """Weights and buffers that no op changes."""
    written = {s for op in graph.ops for s in op.writes}
    return [n for n, s in enumerate(graph.storages) if s.role in ("parameter", "buffer") and n not in written]


def lasting_bytes(graph: Graph) -> int:
    """What lasts in RAM: trained weights, state, the batch."""
    return sum(s.n_bytes for s in graph.storages if s.role in PERSISTENT) - frozen_bytes(graph)


def ram_bytes(graph: Graph) -> int:
    """The RAM of the step when nothing is computed twice."""
    return keep_all(graph, updates="final").peak_bytes - frozen_bytes(graph)


def _weighed(n_bytes: int, most: int) -> str:
    return f"{n_bytes} bytes" + (", still too many" if n_bytes > most else "")


def infeasible(
    graph: Graph, target: Target, step_bytes: int, memory_bytes: int | None, *, recomputes: bool = False
) -> Infeasible:
    """step_bytes: of RAM, without the stack and the program's own variables, which count where the board's memory is
    the limit. recomputes: that is with all that recomputing helps."""
    changing = lasting_bytes(graph)
    asked = memory_bytes is not None and memory_bytes - changing <= _room_of(graph, target)
    own = 0 if asked else own_bytes(target)
    roles = graph.bytes_by_role()
    has = ", ".join(f"{memory.n_bytes} ({memory.name})" for memory in target.ram)
    limit, most = f"{target.device.name} has {has}", sum(memory.n_bytes for memory in target.ram)
    if asked and memory_bytes is not None:
        limit, most = f"{memory_bytes} bytes were asked for", memory_bytes
    found = levers(graph, target, recompute=not recomputes)
    tried = "\n".join(f"    {lever.what}: {_weighed(lever.ram_bytes + own, most)}" for lever in found)
    how = ", recomputing as much as can be" if recomputes else ""
    state, batch = show_bytes(roles["state"]), show_bytes(roles["input"])
    beside = f", {own} bytes of stack and variables" if own else ""
    return Infeasible(
        f"this step takes {step_bytes + own} bytes of RAM{how}; {limit}\n"
        f"  what stands in the way: {changing} bytes that last ({state} of them optimizer state, {batch} the batch), "
        f"{step_bytes - changing} bytes of arena{beside}\n"
        f"  what would help, each by itself:\n{tried}",
        smallest_bytes=step_bytes + own,
        bound_bytes=lower_bound_bytes(problem(graph, firmware_costs(graph, target), "final"))
        - frozen_bytes(graph)
        + own,
        lasting=lasting(graph, _frozen(graph)),
    )


# ---- levers


def levers(graph: Graph, target: Target, *, recompute: bool = True) -> list[Lever]:
    """Least RAM first. recompute: it is one of them."""
    return sorted(_levers(graph, target, recompute), key=lambda lever: lever.ram_bytes)


def _levers(graph: Graph, target: Target, recompute: bool) -> Iterator[Lever]:
    now = ram_bytes(graph)
    batch = graph.tensors[graph.inputs[0]].shape[0]
    if batch > 1:
        yield Lever("a batch of 1 in place of " + str(batch), ram_bytes(with_one_sample(graph)))
    if recompute:
        _, peak = smallest_by(problem(graph, firmware_costs(graph, target), "final"), FAST.find)
        if peak - frozen_bytes(graph) < now:
            yield Lever("recomputing as much as can be", peak - frozen_bytes(graph))
    state = graph.bytes_by_role()["state"]
    if state:
        yield Lever("SGD without momentum", now - state)
    last = last_layer(graph)
    if len(last) < len(graph.gradients):
        names = sorted({graph.tensors[p].name.rpartition(".")[0] for p in last})
        yield Lever(f"training {', '.join(names)} alone", ram_bytes(training_only(graph, last)))


def with_one_sample(graph: Graph) -> Graph:
    """The step with a batch of one, for its bytes alone: tensors that have one row a sample get one row."""
    batch = graph.tensors[graph.inputs[0]].shape[0]
    lasts = {n for n, s in enumerate(graph.storages) if s.role in PERSISTENT and s.role != "input"}
    lasts |= {graph.tensors[g].storage for g in graph.gradients.values()}
    tensors = list(graph.tensors)
    n_bytes: dict[int, int] = {}
    for number, tensor in enumerate(tensors):
        # A vector as long as the batch may be one number a channel; the batch's own are one a sample.
        a_row_each = tensor.n_elements > batch or graph.storages[tensor.storage].role == "input"
        if tensor.shape[:1] == (batch,) and tensor.storage not in lasts and a_row_each:
            tensors[number] = small = replace(tensor, shape=(1, *tensor.shape[1:]))
            n_bytes[tensor.storage] = -(-small.n_bytes // WORD_BYTES) * WORD_BYTES
    storages = (replace(s, n_bytes=n_bytes.get(n, s.n_bytes)) for n, s in enumerate(graph.storages))
    return replace(graph, tensors=tuple(tensors), storages=tuple(storages))


def last_layer(graph: Graph) -> set[int]:
    """The parameters of the module whose gradients come first: the one next to the loss."""
    maker = {t: number for number, op in enumerate(graph.ops) for t in op.creates}
    first = min(graph.gradients, key=lambda p: maker[graph.gradients[p]])
    module = graph.tensors[first].name.rpartition(".")[0]
    return {p for p in graph.gradients if graph.tensors[p].name.rpartition(".")[0] == module}


def training_only(graph: Graph, parameters: set[int]) -> Graph:
    """The step that trains these parameters, and leaves the others as they are: their gradients are not computed."""

    def wanted(op: Op) -> bool:
        first = op.args[0] if op.args else None
        return op.phase != "update" or (isinstance(first, Ref) and first.tensor in parameters)

    smaller = replace(
        graph,
        ops=tuple(op for op in graph.ops if wanted(op)),
        gradients={p: g for p, g in graph.gradients.items() if p in parameters},
    )
    smaller = replace(smaller, ops=live_ops(smaller))
    read = {graph.tensors[t].storage for op in smaller.ops for t in op.reads}
    sources = {t: s for t, s in graph.sources.items() if graph.role(t) != "state" or graph.tensors[t].storage in read}
    return compact(replace(smaller, sources=sources))


# ---- flash


def require_flash(
    graph: Graph, target: Target, *, weights_bytes: int, copy_bytes: int | None, state_bytes: int = 0
) -> None:
    """Infeasible where a program does not fit the flash of its board.

    weights_bytes: of first values, state_bytes of them of the optimizer's state. copy_bytes: what a copy in flash
    holds; None where none are kept.
    """
    flash = target.flash
    if flash is None:
        return
    kept = _two_copies(target, copy_bytes)
    need, paged = CODE_BYTES + weights_bytes + kept, paged_bytes(target)
    if need <= flash.n_bytes and kept <= paged:
        return
    copies = f", {kept} of two copies of what changes" if kept else ""
    pages = f"; copies can take the last {paged} of them" if kept > paged else ""
    found = flash_levers(graph, target, weights_bytes=weights_bytes, copy_bytes=copy_bytes, state_bytes=state_bytes)
    tried = "".join(f"\n    {lever.what}: {lever.flash_bytes} bytes" for lever in found if lever.flash_bytes < need)
    raise Infeasible(
        f"this program takes {need} bytes of flash; {target.device.name} has {flash.n_bytes}{pages}\n"
        f"  what stands in the way: {weights_bytes} bytes of first values{copies}, {CODE_BYTES} allowed for code"
        + (f"\n  what would help, each by itself:{tried}" if tried else "")
        + "\n  next step: a narrower model (--width) has fewer weights; one that is frozen takes as much of flash",
        smallest_bytes=need, bound_bytes=CODE_BYTES + weights_bytes,
    )  # fmt: skip


def flash_levers(
    graph: Graph, target: Target, *, weights_bytes: int, copy_bytes: int | None, state_bytes: int = 0
) -> list[FlashLever]:
    """Least flash first."""
    found = _flash_levers(graph, target, weights_bytes, copy_bytes, state_bytes)
    return sorted(found, key=lambda lever: lever.flash_bytes)


def _flash_levers(
    graph: Graph, target: Target, weights_bytes: int, copy_bytes: int | None, state_bytes: int
) -> Iterator[FlashLever]:
    now = CODE_BYTES + weights_bytes
    state = graph.bytes_by_role()["state"]
    if state and (copy_bytes is not None or state_bytes):
        copies = _two_copies(target, None if copy_bytes is None else copy_bytes - state)
        yield FlashLever("SGD without momentum", now - state_bytes + copies)
    if copy_bytes is None:
        return
    yield FlashLever("no copies in flash", now)
    last = last_layer(graph)
    if len(last) < len(graph.gradients):
        names = sorted({graph.tensors[p].name.rpartition(".")[0] for p in last})
        less = _changing_bytes(graph) - _changing_bytes(training_only(graph, last))
        yield FlashLever(f"training {', '.join(names)} alone", now + _two_copies(target, copy_bytes - less))


def _changing_bytes(graph: Graph) -> int:
    return lasting_bytes(graph) - graph.bytes_by_role()["input"]


def _two_copies(target: Target, copy_bytes: int | None) -> int:
    return 0 if copy_bytes is None else keep(target, copy_bytes).n_bytes
