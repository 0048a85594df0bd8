"""What can be said before any op was timed. Of a budget: is it impossible, and what would work? Of a plan that keeps
all, without a budget: what do its kernels take besides?

In:  a graph, a budget in bytes. Out: nothing where a plan may keep it; or what `refusal.py` says, in a second.

Measuring a step takes many times as long as running it. A graph's bytes alone prove most of what is impossible; for the
rest the workspace of a kernel counts. It is measured for the hungriest ops alone, the others are taken to need no
more than `_workspace` allows:

    op         bytes read and made    + workspace
    a          ████████████████       ▒▒▒▒▒▒▒▒       measured: what a takes is a bound on every plan
    b          ███████████            ░░░░░░░░       at most as much: b need not be run
    c          ██████                 ░░░░░░

A plan with these workspaces keeps its budget with the measured ones too, if they are smaller.

Without a budget (`with_workspaces`) it is the same way round: an op is run where its workspace may raise the peak, the
one that may raise it most first, until no other can. Convolutions that lay out their columns are all run, for they ask
for blocks as large as the rest of the step, and the arena has to know beforehand where these will lie.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from edgetrain.costs import calls
from edgetrain.costs.measured import ROUNDS, is_known, measure_events, without_a_trace
from edgetrain.costs.table import Costs, OpCost, Run, Store, Way
from edgetrain.dtypes import dtype_of
from edgetrain.errors import UserError
from edgetrain.graph.ir import Graph, Op
from edgetrain.measure.sensors.room import require_room, room_bytes
from edgetrain.native import arena
from edgetrain.ops.entry import entry_of, work
from edgetrain.ops.update import overwrites_gradient
from edgetrain.ops.work import Work
from edgetrain.plan.budget import Budget, show_bytes
from edgetrain.plan.keep_all import plan_with
from edgetrain.plan.lifetimes import overwrites, persistent_bytes, timeline
from edgetrain.plan.plan import Plan, Updates
from edgetrain.plan.planner import GREEDY_S, Planner
from edgetrain.plan.planning import aim_of, known_to_work
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.process import RESERVE_BYTES, left_for_tensors
from edgetrain.plan.refusal import TooSmall, infeasible, lower_bound_bytes, op_bytes

FLOPS_S, BYTES_S = 5e9, 1e9  # a slow core, to guess how long something takes
QUICK_S = 0.5  # where all ops are measured in less, that is done before anything is said
HUNGRIEST_S = 0.5  # for measuring the hungriest ops
WORKSPACES_S = 3.0  # of one core, for measuring what the kernels of a step take that keeps all
LARGE_BYTES, VERY_LARGE_BYTES = 4_000_000, 16_000_000  # what workspaces are looked for, of convolutions and of others
BESIDE_BYTES = 120_000_000  # less does not matter: a process may take 150 MB more than its plan says
_SMALL_BYTES = 16_384
_BLOCK = 16  # channels that oneDNN's kernels take together, where there are fewer too
_FLOAT_S = (torch.float32, torch.bfloat16, torch.float16)


def is_heavy(graph: Graph) -> bool:
    """Whether measuring all ops takes long."""
    runs = 2 * (ROUNDS + 2)  # most ops can be run in two ways
    return runs * sum(_guessed_s(work(graph, op)) for op in graph.ops) > QUICK_S


def refuse_impossible(
    graph: Graph,
    memory_bytes: int,
    *,
    planner: Planner,
    updates: Updates,
    page: bool,
    use_cache: bool = True,
    at_once: bool = False,
    may_run: Callable[[int], bool] = lambda n_bytes: True,
) -> None:
    """Raise `Infeasible` where a bound says that no plan keeps the budget, if measuring all ops would take long.

    page: to a store, whose speed is not known yet. at_once: a `TooSmall` that knows the bound alone.
    may_run: see `looked_at`.
    """
    store = Store(1.0, 1.0) if page else None
    aim_of(Costs(graph.key, "measured", (), store=store), Budget(), planner, page=page)
    if not is_heavy(graph) or (use_cache and is_known(graph)):
        return
    upper = problem(graph, unmeasured(graph), updates)
    if upper.keep_all.peak_bytes <= memory_bytes or lower_bound_bytes(upper) <= memory_bytes:
        return
    own = own_bytes(upper)
    bound = max(own.values(), default=0) + persistent_bytes(graph)
    if at_once and bound > memory_bytes:
        raise TooSmall.by(bound)
    task, bound = looked_at(upper, may_run=may_run)
    if bound <= memory_bytes:
        return
    until = time.monotonic() + GREEDY_S / 2
    order, peak, name = known_to_work(task, planner, until=until, use_cache=use_cache)
    raise infeasible(task, memory_bytes, order, peak, found_by=f"the {name} planner", bound_bytes=bound)


def refuse_too_large(
    graph: Graph,
    plain: Plan,
    budget_bytes: int | None,
    *,
    planner: Planner,
    state_is_there: bool,
    beside_bytes: int = 0,
) -> None:
    """Refuse a step that is to run here and takes more than this machine has: where all is kept, or under a budget
    that is larger than the machine. budget_bytes: for the tensors, or for the process. beside_bytes: what is held
    beside the graph's tensors."""
    left = here_bytes(graph, state_is_there=state_is_there)
    if left is None:
        return
    left -= beside_bytes
    room = room_bytes() or 0
    # A control group's limit is rounded to pages.
    if plain.peak_bytes <= left or (budget_bytes is not None and budget_bytes <= room + mmap.PAGESIZE):
        return
    upper, until = problem(graph, unmeasured(graph), plain.updates), time.monotonic() + GREEDY_S / 2
    peak = known_to_work(upper, planner, until=until, use_cache=False)[1]
    budget = f"memory={peak + beside_bytes} ({show_bytes(peak + beside_bytes)}) or more, or " if peak <= left else ""
    part = max(0, left - plain.persistent_bytes) / max(1, plain.peak_bytes - plain.persistent_bytes)
    smaller = "a smaller batch" + (f", of about {100 * part:.0f} % of this one" if part >= 0.01 else "")
    process_bytes = max(0, room - left)  # what it takes beside
    require_room("this step", plain.peak_bytes + process_bytes, next_step=f"give {budget}{smaller}")


def here_bytes(graph: Graph, *, state_is_there: bool) -> int | None:
    """What this machine can have of tensors of this step at most, beside what the process takes; None where it does not
    say, or where they lie elsewhere."""
    room = room_bytes()
    if room is None or any(storage.device != "cpu" for storage in graph.storages):
        return None
    # A step that is refused could never fit: what libraries may take while it runs is no part of that.
    return left_for_tensors(graph, room + RESERVE_BYTES, state_is_there=state_is_there)


def _guessed_s(of: Work) -> float:
    return of.flops / FLOPS_S + of.moved_bytes / BYTES_S


def unmeasured(graph: Graph, known: dict[int, dict[Way, Run]] | None = None, store: Store | None = None) -> Costs:
    """Costs that no op exceeds in bytes; times are guessed. known: what was measured of some ops."""
    ops = []
    for number, op in enumerate(graph.ops):
        of = work(graph, op)
        workspace, results = _workspace(graph, number, of), calls.made_bytes(graph, op)
        run = Run(_guessed_s(of), (workspace, *results, -1) if workspace else results)
        ways: dict[Way, Run] = {
            way: replace(measured, time_s=run.time_s) for way, measured in (known or {}).get(number, {}).items()
        }
        ways.setdefault("first", run)
        ops.append(OpCost(ways))
    return Costs(graph.key, "modelled", tuple(ops), store=store)


def _workspace(graph: Graph, number: int, of: Work) -> int:
    """More than any kernel was seen to take: convolutions reorder what they read and make, with channels in blocks,
    and lay out their columns, those that oneDNN runs of one group of a sample in each thread (wide filters and few
    channels have none of its other kernels); what works element by element, or by our own kernels, takes little; others
    copy what they touch at most."""
    op = graph.ops[number]
    if op.view or of.kind == "nothing":
        return 0
    touched = sum(graph.storages[s].n_bytes for s in {graph.tensors[t].storage for t in (*op.reads, *op.creates)})
    entry = entry_of(op.kind)
    if len(entry.kernels) < 2 and (entry.frugal or overwrites(graph, number)):
        return touched // 4 + _SMALL_BYTES
    if of.kind not in ("conv", "depthwise"):
        return touched + _SMALL_BYTES
    if not _by_onednn(graph, op):
        samples = graph.tensors[op.reads[0]].shape[0]  # grouped ones run group by group
        return 2 * touched + max(of.columns_bytes, samples * of.group_columns_bytes) + _SMALL_BYTES
    tensors = [graph.tensors[t] for t in (*op.reads, *op.creates)]
    blocked = sum(t.n_bytes * -(-t.shape[1] // _BLOCK) * _BLOCK // t.shape[1] for t in tensors if len(t.shape) > 2)
    return 2 * max(touched, blocked) + _threads(graph, op, of.groups) * of.group_columns_bytes + _SMALL_BYTES


def _threads(graph: Graph, op: Op, groups: int) -> int:
    """Those that lay out columns of their own in a convolution: one for each group of a sample at most."""
    samples = graph.tensors[op.reads[0]].shape[0]
    return min(torch.get_num_threads(), samples * groups)


def _by_onednn(graph: Graph, op: Op) -> bool:
    types = {dtype_of(graph.tensors[t].dtype) for t in op.reads}
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled) and types.issubset(_FLOAT_S)


def with_workspaces(graph: Graph, plan: Plan) -> tuple[Plan, Costs | None]:
    """The plan, which keeps all, with what kernels take at its peak; where convolutions lay out their columns, costs
    too, by which the arena can be laid out before the first step."""
    if not arena.available() or any(storage.device != "cpu" for storage in graph.storages):
        return plan, None
    workspaces = _Workspaces(graph, plan)
    if not workspaces.most:
        return plan, None
    costs = without_a_trace(workspaces.measured)
    beside = {number: beside_bytes(graph, graph.ops[number]) for number in workspaces.laid_out}
    workspace = {
        way: {number: taken.get(number, 0) + beside.get(number, 0) for number in taken.keys() | beside.keys()}
        for way, taken in costs.workspace_bytes.items()
    }
    plan = plan_with(graph, replace(plan, workspace_bytes=workspace), plan.schedule)
    return plan, costs if workspaces.laid_out else None


def beside_bytes(graph: Graph, op: Op) -> int:
    """What a kernel takes from malloc and not from PyTorch's allocator, so that no arena serves it: the gradient of a
    convolution's input lays out the columns of one sample, and of one group, in each thread. 0 where it is little."""
    if not entry_of(op.kind).columns or op.outputs[0] is None or _by_onednn(graph, op):
        return 0
    samples = graph.tensors[op.reads[0]].shape[0]
    n_bytes = work(graph, op).group_columns_bytes * min(samples, torch.get_num_threads())
    return n_bytes if n_bytes >= BESIDE_BYTES else 0


class _Workspaces:
    """
    most:     each op whose workspace may count → the most that it can be.
    laid_out: the convolutions that lay out their columns.
    """

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self._graph, self._plan = graph, plan
        self.most: dict[int, int] = {}
        self.laid_out: set[int] = set()
        for number, op in enumerate(graph.ops):
            of = work(graph, op)
            convolution = of.kind in ("conv", "depthwise")
            if not (convolution or of.kind == "elementwise") or (not convolution and overwrites(graph, number)):
                continue
            n_bytes = _workspace(graph, number, of)
            if n_bytes >= (LARGE_BYTES if convolution else VERY_LARGE_BYTES) and not entry_of(op.kind).frugal:
                self.most[number] = n_bytes
                if of.columns_bytes >= LARGE_BYTES and not _by_onednn(graph, op):
                    self.laid_out.add(number)

    def measured(self) -> Costs:
        """Without times."""
        graph, end, scratch = self._graph, time.thread_time() + WORKSPACES_S, overwrites_gradient(self._graph)
        held = self._held()
        peak, known = max(held.values()), {}
        ways_of: dict[str, dict[Way, Run]] = {}
        for number in sorted(held, key=lambda n: -held[n] - self.most.get(n, 0)):
            if not self.laid_out and (number not in self.most or held[number] + self.most[number] <= peak):
                continue
            key = "".join(calls.key(graph, call) for call in calls.calls(graph, number, scratch).values())
            if key not in ways_of:
                ways_of[key] = self._ways(number, may_run=time.thread_time() < end)
            known[number] = ways_of[key]
            peak = max(peak, held[number] + known[number]["first"].workspace_bytes)
        costs = tuple(OpCost(known.get(number) or self._guessed(number, 0)) for number in range(len(graph.ops)))
        return Costs(graph.key, "modelled", costs)

    def _held(self) -> dict[int, int]:
        """Op → the bytes that are held when it runs, without workspaces."""
        plan = self._plan
        moments = timeline(self._graph, plan.schedule, updates=plan.updates, workspace={})
        return {moment.op: moment.during_bytes for moment in moments if not self._graph.ops[moment.op].view}

    def _ways(self, number: int, *, may_run: bool) -> dict[Way, Run]:
        """What may not be run, because of the time or because it cannot be, takes what it may ask for."""
        with contextlib.suppress(UserError):
            if may_run:
                return measure_events(self._graph, number, ("first", "over"), self._plan.kernels)
        columns_bytes = work(self._graph, self._graph.ops[number]).columns_bytes
        return self._guessed(number, columns_bytes if number in self.laid_out else self.most.get(number, 0))

    def _guessed(self, number: int, workspace: int) -> dict[Way, Run]:
        op = self._graph.ops[number]
        results = calls.made_bytes(self._graph, op)
        ways: dict[Way, Run] = {"first": Run(0.0, (workspace, *results, -1) if workspace else results)}
        if overwrites(self._graph, number):
            ways["over"] = Run(0.0, calls.made_bytes(self._graph, op, without=op.creates[0]))
        return ways


def own_bytes(task: Problem) -> dict[int, int]:
    """Op → what it reads and makes, without any workspace."""
    nothing = OpCost({"first": Run(0.0)})
    return {number: op_bytes(task, number, nothing) for number, op in enumerate(task.graph.ops) if not op.view}


def looked_at(upper: Problem, *, may_run: Callable[[int], bool] = lambda n_bytes: True) -> tuple[Problem, int]:
    """The problem with the workspaces of its hungriest ops as they are, and a proven bound on every plan.

    may_run: whether an op that takes so many bytes by its arguments and results may be run here.
    """
    graph, own = upper.graph, own_bytes(upper)
    upper_bytes = {number: op_bytes(upper, number) for number in own}
    known: dict[int, dict[Way, Run]] = {}
    bound, end = max(own.values(), default=0), time.monotonic() + HUNGRIEST_S

    def run_hungriest() -> None:
        nonlocal bound
        for number in sorted(upper_bytes, key=lambda n: -upper_bytes[n]) if arena.available() else ():
            if upper_bytes[number] <= bound or not may_run(own[number]):
                break
            if time.monotonic() + _guessed_s(work(graph, graph.ops[number])) > end:
                continue
            try:
                known[number] = measure_events(graph, number)
            except UserError:
                break  # it is said when all are measured
            bound = max(bound, op_bytes(upper, number, OpCost(known[number])))

    without_a_trace(run_hungriest)
    return replace(upper, costs=unmeasured(graph, known)), persistent_bytes(graph) + bound
