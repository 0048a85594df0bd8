"""`edgetrain plan`: what a training step takes under a budget of memory, before it runs once.

In:  a model and a budget, a plan file, or a list of budgets to try (`--sweep`).
Out: tables and drawings in the terminal; a run folder with the plan, the costs that it was made with and one page.

The step is captured as `et.prepare` captures it, so a plan holds for the step that training runs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import rich.table
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from edgetrain.cli.graph import OPTIMIZERS
from edgetrain.cli.micro_batches import ALLOW_INEXACT, MICRO_BATCHES, number_of_micro_batches
from edgetrain.cli.models_and_data import build_alone, choose, told_of_batch
from edgetrain.cli.output import Json, notes, print_json, results
from edgetrain.costs.measured import measure_costs
from edgetrain.costs.model import model_costs, resident_bytes
from edgetrain.costs.table import Costs
from edgetrain.devices.device import Device
from edgetrain.devices.device import load as load_device
from edgetrain.errors import Infeasible, InternalError, UserError
from edgetrain.graph.accumulate import accumulators
from edgetrain.graph.ir import Graph, Op, Role
from edgetrain.graph.mean_loss import sample_items
from edgetrain.measure.record import RunFolder, Value, default_path, explained, new_record, removed_if_interrupted
from edgetrain.plan.budget import Budget, parse_bytes, show_bytes
from edgetrain.plan.keep_all import keep_all
from edgetrain.plan.lifetimes import timeline
from edgetrain.plan.micro_batches import MicroPlan, TooSmall, least_time
from edgetrain.plan.plan import Exact, Plan, Updates
from edgetrain.plan.planning import PLANNERS, least_bytes, tightest
from edgetrain.plan.planning import plan as make_plan
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.process import in_process, left_for_tensors
from edgetrain.plan.validate import validate
from edgetrain.report.memory import Curve, Frontier, Instant, Picture, Point, Table, blocks, top_bytes, write_page
from edgetrain.report.memory import save as save_picture
from edgetrain.run.micro_batches import LAST, Planned
from edgetrain.run.step import Step, captured_apart, prepare

_MOST_POINTS = 50
_MODULES_SHOWN = 12
_LASTING: tuple[tuple[str, Role], ...] = (
    ("parameters", "parameter"), ("optimizer state", "state"), ("buffers", "buffer"), ("inputs", "input"),
    ("constants", "constant"),
)  # fmt: skip
_EXACT = {
    "bitwise": "bitwise those of plain PyTorch",
    "rounding": "those of plain PyTorch but for rounding",
    "no": "not those of plain PyTorch",
}
_UPDATES = {
    "early": "early: each parameter as soon as its gradient is there",
    "guarded": "guarded: early, with copies to take a failed step back",
    "together": "together: all at the end of the step",
}


def plan(
    model: Annotated[str, typer.Argument(help="A name from the zoo, or file.py:function.")],
    memory: Annotated[str | None, typer.Option(help="Budget for the step's tensors, such as 300MB.")] = None,
    process_memory: Annotated[
        str | None, typer.Option(help="Budget for the process's resident memory, such as 700MB.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="Try many budgets: a number of points, or parts of keep-all's activations as 0.3,0.5,0.8."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Samples in a batch.", min=1)] = 1,
    device: Annotated[
        str | None,
        typer.Option(help="Model the costs for this device (`edgetrain devices`) instead of measuring them here."),
    ] = None,
    planner: Annotated[str, typer.Option(help=f"Who plans: {', '.join(PLANNERS)}.")] = "auto",
    time_limit: Annotated[float, typer.Option(help="Seconds for the search of each plan.", min=0.1)] = 10.0,
    micro_batches: Annotated[str, typer.Option(help=MICRO_BATCHES)] = "1",
    allow_inexact: Annotated[bool, typer.Option("--allow-inexact", help=ALLOW_INEXACT)] = False,
    optimizer: Annotated[str, typer.Option(help="sgd, adam or adamw; sgd has momentum.")] = "sgd",
    input_size: Annotated[int | None, typer.Option(help="Side of an image, or length of a sequence.", min=1)] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes.", min=1)] = None,
    width: Annotated[float | None, typer.Option(help="Width multiplier of the model.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; by default runs/plan-DATE-TIME.")] = None,
    save: Annotated[Path | None, typer.Option(help="Save the plan to this file too.")] = None,
    load: Annotated[Path | None, typer.Option(help="Show the plan in this file instead of making one.")] = None,
    json: Json = False,
) -> None:
    """Plan a training step inside a budget of memory, and show what it holds, recomputes and costs.

    Times are predicted from ops that are measured on this machine or, with --device, modelled for another one.

    Example: edgetrain plan mobilenet_v2 --batch 16 --memory 300MB

    Example: edgetrain plan mobilenet_v2 --batch 16 --memory 300MB --device rpi4
    """
    chosen = choose(model)
    target = None if device is None else load_device(device)
    if optimizer not in OPTIMIZERS:
        raise typer.BadParameter(f"{optimizer} is none of {', '.join(OPTIMIZERS)}", param_hint="--optimizer")
    if planner not in PLANNERS:
        raise typer.BadParameter(f"{planner} is none of {', '.join(PLANNERS)}", param_hint="--planner")
    memory_bytes = _amount(memory, "--memory")
    process_bytes = _amount(process_memory, "--process-memory")
    if target is not None and process_bytes is not None:
        raise typer.BadParameter(
            "what a process holds beside its tensors is known for this machine alone; give --memory with --device",
            param_hint="--process-memory",
        )
    parts = _parts(sweep)
    one = memory is not None or process_memory is not None or load is not None
    one = one or (planner == "keep-all" and not parts)
    if not one and not parts:
        raise _NoBudget("a budget is missing: give --memory, --process-memory or --sweep, or a plan with --load")
    if load is not None and planner != "auto":
        raise typer.BadParameter("a plan that is loaded needs no planner", param_hint="--planner")
    if save is not None and not one:
        raise typer.BadParameter("a sweep alone makes no single plan to save; add --memory", param_hint="--save")
    count = number_of_micro_batches(micro_batches)
    if count != 1 and (parts or load is not None):
        raise typer.BadParameter("a sweep, or a plan that is loaded, is of whole batches", param_hint="--micro-batches")
    loaded = Plan.load(load) if load is not None else None
    with removed_if_interrupted(out) if out is not None else nullcontext():
        folder = RunFolder.create(out) if out is not None else None
        net, task, example = build_alone(chosen, classes=classes, input_size=input_size, width=width, batch=batch)
        net.train()
        settings = {"momentum": 0.9} if optimizer == "sgd" else {}
        updates = OPTIMIZERS[optimizer](net.parameters(), lr=0.01, **settings)
        with told_of_batch(model, "a random batch", example):
            make = partial(prepare, net, task.loss, updates, example)
            step = make() if process_bytes is None else captured_apart(make)
        if loaded is not None:
            _refuse_other(step.graph, loaded, load)
        study = _Study(step.graph, _costs(step.graph, target), step.plan, planner, time_limit, target)
        left = None if process_bytes is None else left_for_tensors(step.graph, process_bytes)
        budget = min((n for n in (left, memory_bytes) if n is not None), default=None)
        made, micro = None, None
        if count != 1:
            try:
                study, made, micro = _in_micro_batches(study, step, example, budget, count, allow_inexact=allow_inexact)
            except Infeasible as answer:
                if process_bytes is None or left is None or budget != left:
                    raise
                raise in_process(answer, left, process_bytes) from None
        elif loaded is not None:
            made = study.judged(loaded, budget)
        elif process_bytes is not None and left is not None and budget == left:
            made = study.plan_for_process(left, process_bytes)
        elif one:
            made = study.plan(budget)
        frontier = study.frontier(parts) if parts else None
        title = f"{model}, batch {batch}, {optimizer}"
        shown = study.picture(title, made, budget, frontier)
        told = {"model": model, "batch": batch, "optimizer": optimizer, **study.told(made, budget, frontier)}
        if micro is not None:
            shown = replace(
                shown, title=f"{title}: the last of {len(micro.plan.sizes)} micro-batches",
                tables=(micro.table(study), *shown.tables),
            )  # fmt: skip
            told["micro_batches"] = micro.told()
        folder = folder or RunFolder.create(default_path("plan"))
        page = _keep(folder, study.costs, made, shown, told, save, whole=None if micro is None else micro.plan)
    if json:
        print_json(told | {"run": str(folder.path), "page": str(page)})
        return
    _print(shown)
    results.print(f"page: {page}", soft_wrap=True)


# ---- from words to numbers


class _NoBudget(typer.BadParameter):
    """Wrong use that no single option is to blame for."""

    def format_message(self) -> str:
        return str(self.message)


def _amount(words: str | None, option: str) -> int | None:
    try:
        return None if words is None else parse_bytes(words)
    except UserError as error:
        raise typer.BadParameter(f"{error.received} is not {error.expected}", param_hint=option) from error


def _parts(sweep: str | None) -> tuple[float, ...]:
    """The parts of keep-all's activations to try, largest first: given, or as many as asked for up to the whole."""
    if sweep is None:
        return ()
    try:
        if sweep.strip().isdecimal():
            number = int(sweep)
            parts = tuple(n / number for n in range(number, 0, -1))
            if not 2 <= number <= _MOST_POINTS:
                raise ValueError
        else:
            parts = tuple(sorted({float(word) for word in sweep.split(",")}, reverse=True))
        if not all(0 < part <= 1 for part in parts) or len(parts) > _MOST_POINTS:
            raise ValueError
    except ValueError as error:
        wanted = f"a number of points from 2 to {_MOST_POINTS}, or parts above 0 and up to 1, such as 0.3,0.5,0.8"
        raise typer.BadParameter(f"{sweep!r} is not {wanted}", param_hint="--sweep") from error
    return parts


def _refuse_other(graph: Graph, loaded: Plan, file: Path | None) -> None:
    try:
        validate(graph, loaded)
    except InternalError as error:  # a file may hold anything: this is not a defect of ours
        raise UserError(f"{file} holds no legal plan", received=str(error).splitlines()[0]) from error


def _costs(graph: Graph, device: Device | None) -> Costs:
    if device is not None:
        return model_costs(graph, device)
    with _bar("measuring ops") as progress:
        return measure_costs(graph, progress=progress)


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn(what), BarColumn(bar_width=32), MofNCompleteColumn())
    with Progress(*columns, console=notes, transient=True) as progress:
        line = progress.add_task("", total=None)
        yield lambda done, total: progress.update(line, completed=done, total=total)


# ---- micro-batches


@dataclass(frozen=True)
class _Micro:
    """A step in micro-batches beside the whole batch that it is cut from."""

    plan: MicroPlan
    whole: Plan

    def table(self, study: _Study) -> Table:
        most, least = self.plan.most, self.plan.least
        of = f"{most}" if most == least else f"{least} to {most}"
        rows = [
            ("peak memory", show_bytes(self.whole.peak_bytes), show_bytes(self.plan.peak_bytes)),
            ("  lasting tensors", show_bytes(self.whole.persistent_bytes), show_bytes(self.plan.persistent_bytes)),
        ]
        if self.whole.time_s is not None and self.plan.time_s is not None:
            times = (_seconds(self.whole.time_s), _seconds(self.plan.time_s))
            rows.append((f"time of a step, {study._time_words}", *times))
        note = "Accumulators count as lasting tensors. What follows is the last micro-batch, which makes the updates."
        header = ("", "whole batch, keep all", f"{len(self.plan.sizes)} micro-batches of {of}")
        return Table("The step in micro-batches", note, header, tuple(rows))

    def told(self) -> dict[str, Any]:
        return {
            "sizes": list(self.plan.sizes),
            "peak_bytes": self.plan.peak_bytes,
            "lasting_bytes": self.plan.persistent_bytes,
            "time_s": self.plan.time_s,
            "exact": self.plan.exact,
            "recomputed_ops": sum(len(part.recomputed) for part in self.plan.parts),
            "whole_batch": {"peak_bytes": self.whole.peak_bytes, "time_s": self.whole.time_s},
        }


@dataclass(frozen=True)
class _Attempt:
    """A plan, in micro-batches or not."""

    plan: Plan
    planned: Planned | None = None


def _in_micro_batches(
    study: _Study,
    step: Step,
    example: Sequence[Any],
    budget: int | None,
    count: int | Literal["auto"],
    *,
    allow_inexact: bool,
) -> tuple[_Study, Plan, _Micro | None]:
    """The study and plan of the last micro-batch, and what the whole step comes to; or, where that is best, of the
    whole batch."""
    quickly = False
    samples = sample_items(example)[0]

    def plan_one(graph: Graph, exact: Exact, updates: Updates | None, beside: int) -> tuple[Plan, Costs | None]:
        costs = _costs(graph, study.device)
        where = updates or keep_all(graph).updates
        if quickly and budget is not None and least_bytes(problem(graph, costs, where)) > budget - beside:
            bound = least_bytes(problem(graph, costs, where))
            raise TooSmall("a bound rules it out", smallest_bytes=bound, bound_bytes=bound)
        left = None if budget is None else max(1, budget - beside)
        made = make_plan(
            graph,
            costs,
            Budget(left),
            planner=study.planner,
            time_limit_s=study.time_limit_s,
            updates=where,
            exact=exact,
        )
        return made, costs

    def attempt(number: int, bounded: bool) -> _Attempt:
        nonlocal quickly
        quickly = bounded
        if number <= 1:
            return _Attempt(study.plan(budget))
        planned = parts.planned(tuple(example), number)
        return _Attempt(planned.plan, planned)

    parts = step.in_micro_batches(plan_one, allow_inexact=allow_inexact)
    if count == "auto":
        made = _Attempt(study.keep_all) if budget is None else least_time(samples, attempt)
    else:
        made = attempt(min(count, samples), False)
    if made.planned is None:
        return study, made.plan, None
    ending, costs = made.planned.plan.ending, made.planned.costs[LAST]
    assert ending is not None
    assert costs is not None
    graph = made.planned.graphs.ending
    last = replace(study, graph=graph, costs=costs, captured=ending)
    return last, ending, _Micro(made.planned.plan, study.keep_all)


# ---- what is found out


@dataclass(frozen=True)
class _Study:
    """A captured step, what its ops cost here or on a device, and the plan that keeps all of it."""

    graph: Graph
    costs: Costs
    captured: Plan
    planner: str
    time_limit_s: float
    device: Device | None = None

    @cached_property
    def task(self) -> Problem:
        return problem(self.graph, self.costs, self.captured.updates)

    @cached_property
    def keep_all(self) -> Plan:
        return self.task.plan(self.task.order, planner="keep-all", exact=self.captured.exact)

    def plan(self, memory_bytes: int | None) -> Plan:
        with notes.status(f"planning, {self.time_limit_s:g} s of search at most"):
            return self._plan(memory_bytes)

    def plan_for_process(self, memory_bytes: int, process_bytes: int) -> Plan:
        """As `plan`, where a bound on the process leaves this much; an Infeasible speaks of the process then."""
        try:
            return self.plan(memory_bytes)
        except Infeasible as answer:
            raise in_process(answer, memory_bytes, process_bytes) from None

    def _plan(self, memory_bytes: int | None) -> Plan:
        return make_plan(
            self.graph, self.costs, Budget(memory_bytes), planner=self.planner, time_limit_s=self.time_limit_s,
            updates=self.captured.updates, exact=self.captured.exact,
        )  # fmt: skip

    def judged(self, loaded: Plan, memory_bytes: int | None) -> Plan:
        """The plan with the times of this machine. A bound holds only for the costs that it was found with."""
        if memory_bytes is not None and loaded.peak_bytes > memory_bytes:
            raise UserError(
                "the plan that was loaded does not keep the budget",
                expected=f"a peak of at most {show_bytes(memory_bytes)}", received=show_bytes(loaded.peak_bytes),
                next_step="plan again without --load",
            )  # fmt: skip
        time_s = self.costs.time_s(loaded.order)
        bound = loaded.bound if loaded.time_s == time_s else None
        return replace(loaded, time_s=time_s, keep_all_time_s=self.task.keep_all_time_s, bound=bound)

    def frontier(self, parts: Sequence[float]) -> Frontier:
        """A plan for each part of what keep-all holds, and one for the smallest budget where some are too small."""
        keep_all = self.keep_all
        lasting, most = keep_all.persistent_bytes, keep_all.peak_bytes - keep_all.persistent_bytes
        points: list[Point] = []
        bounds: dict[str, float] = {}
        failed: Infeasible | None = None
        with _bar("planning") as progress:
            for done, part in enumerate(parts):
                progress(done, len(parts))
                point = Point(lasting + round(part * most), part)
                if failed is None or point.memory_bytes >= failed.smallest_bytes:
                    try:
                        point = self._point(point, bounds)
                    except Infeasible as answer:
                        failed = answer
                points.append(point)
        if failed is None:
            return Frontier(tuple(points))
        if failed.smallest_bytes not in {point.memory_bytes for point in points}:
            with suppress(Infeasible):  # another planner than this one may have found it
                part = (failed.smallest_bytes - lasting) / max(1, most)
                points.append(self._point(Point(failed.smallest_bytes, part), bounds))
        points.sort(key=lambda point: -point.memory_bytes)
        return Frontier(tuple(points), failed.smallest_bytes, failed.bound_bytes)

    def _point(self, point: Point, bounds: dict[str, float]) -> Point:
        """bounds: class of schedules → the highest bound so far. Budgets come from large to small, and what no schedule
        can do in more memory none can do in less."""
        made = self._plan(point.memory_bytes)
        if made.bound is not None and made.bound.time_s is not None:
            kind = made.bound.schedules
            bounds[kind] = max(made.bound.time_s, bounds.get(kind, 0.0))
            made = replace(made, bound=replace(made.bound, time_s=bounds[kind]))
        return replace(
            point, extra=_extra(made), recomputed=len(self.recomputed(made)), planner=made.planner, gap=made.gap
        )

    def recomputed(self, made: Plan) -> list[int]:
        """The ops that run again; views do too, and cost nothing."""
        return [op for op in made.recomputed if not self.graph.ops[op].view]

    def curve(self, made: Plan, name: str) -> Curve:
        seen: set[int] = set()
        instants = []
        copies = made.updates == "guarded"
        for moment in timeline(self.graph, made.schedule, copies=copies, workspace=made.workspace_bytes):
            op = self.graph.ops[moment.op]
            if not op.view:
                instants.append(Instant(op.name, op.module, op.phase, moment.during_bytes, moment.op in seen))
            seen.add(moment.op)
        return Curve(name, made.persistent_bytes, tuple(instants))

    def blocks_again(self, made: Plan) -> list[tuple[str, Counter[str], float]]:
        """Block of modules → which ops of it run again, how often, and for how long; most time first."""
        kinds: dict[str, Counter[str]] = {}
        times: dict[str, float] = {}
        for number in self.recomputed(made):
            op = self.graph.ops[number]
            block = _block(op.module)
            kinds.setdefault(block, Counter())[_short(op.kind)] += 1
            times[block] = times.get(block, 0.0) + self.costs.ops[number].again_s
        return sorted(((block, kinds[block], times[block]) for block in kinds), key=lambda row: -row[2])

    # ---- as data

    def told(self, made: Plan | None, budget: int | None, frontier: Frontier | None) -> dict[str, Any]:
        """What `--json` prints."""
        keep_all = self.keep_all
        found: dict[str, Any] = {
            "graph": self.graph.key,
            "ops": sum(not op.view for op in self.graph.ops),
            "budget_bytes": budget,
            "lasting_bytes": {name: n for name, n in self._lasting() if n},
            "keep_all": {"peak_bytes": keep_all.peak_bytes, "time_s": keep_all.time_s},
            "costs": self._costs_told(),
        }
        if made is not None:
            found["plan"] = self._plan_told(made)
        if frontier is not None:
            found["sweep"] = asdict(frontier)
        return found

    def _costs_told(self) -> dict[str, Any]:
        """Where the times come from, and what else is known of a device."""
        told: dict[str, Any] = {"origin": self.costs.origin, **self.costs.about}
        if self.device is not None:
            told |= {
                "device_key": self.device.key,
                "uncertainty": self.costs.uncertainty,
                "ram_bytes": self.device.memory.ram_bytes,
                "library_bytes": resident_bytes(self.graph, self.device),
            }
        return told

    def _plan_told(self, made: Plan) -> dict[str, Any]:
        op, alive, workspace = self._peak(made)
        again = self.recomputed(made)
        return {
            "planner": made.planner,
            "peak_bytes": made.peak_bytes,
            "time_s": made.time_s,
            "energy_j": self._energy_j(made),
            "extra": _extra(made),
            "bound": None if made.bound is None else asdict(made.bound),
            "gap": made.gap,
            "exact": made.exact,
            "updates": made.updates,
            "recomputed_ops": len(again),
            "recomputed_s": sum((self.costs.ops[n].again_s for n in again), 0.0),
            "recomputed": [
                {"module": block, "ops": dict(kinds), "time_s": time_s}
                for block, kinds, time_s in self.blocks_again(made)
            ],
            "peak_at": {
                "op": op.name, "module": op.module, "phase": op.phase,
                "alive": [{"tensor": name, "bytes": n} for name, n in alive], "workspace_bytes": workspace,
            },
        }  # fmt: skip

    def _lasting(self) -> list[tuple[str, int]]:
        by_role = self.graph.bytes_by_role()
        more = " and accumulators" if accumulators(self.graph) else ""
        return [(f"{name}{more}" if role == "state" else name, by_role[role]) for name, role in _LASTING]

    # ---- as text and drawings

    def picture(self, title: str, made: Plan | None, budget: int | None, frontier: Frontier | None) -> Picture:
        keep_all = self.keep_all
        curves = [self.curve(keep_all, "keep all")]
        tables = []
        if made is not None:
            if made.recomputed or made.order != keep_all.order:
                curves.append(self.curve(made, f"plan ({made.planner})"))
            tables = [self._before_after(keep_all, made), self._facts(made)]
            tables += [self._modules(made)] if self.recomputed(made) else []
        note = f"{sum(not op.view for op in self.graph.ops)} ops, graph {self.graph.key}; {self._origin()}"
        table = None if frontier is None else _frontier_table(frontier, self._modelled)
        return Picture(title, note, budget, tuple(curves), frontier, tuple(tables), table)

    def _origin(self) -> str:
        about = self.costs.about
        if self.device is None:
            threads = _count(about.get("threads", "?"), "thread")
            return f"costs {self.costs.origin} on {about.get('processor', 'this machine')}, {threads}"
        device, within = self.device, 100 * (self.costs.uncertainty or 0.0)
        how = f"{about['processor']}, {about['library']}"
        return f"times modelled for {device.name} ({how}), not measured: within {within:.0f} %, two times of three"

    @property
    def _time_words(self) -> str:
        """How a time is called, wherever one is told."""
        return "predicted" if self.device is None else f"modelled for {self.device.name}"

    @property
    def _modelled(self) -> str:
        return "" if self.device is None else f", {self._time_words}"

    def _energy_j(self, made: Plan) -> float | None:
        """Above what the device takes when it idles."""
        found, done = 0.0, set[int]()
        for op in made.order:
            energy_j = self.costs.ops[op].run("again" if op in done else "first").energy_j
            if energy_j is None:
                return None
            found += energy_j
            done.add(op)
        return found

    def _before_after(self, keep_all: Plan, made: Plan) -> Table:
        lasting = keep_all.persistent_bytes
        pairs = [("peak memory", keep_all.peak_bytes, made.peak_bytes)]
        pairs += [(f"  {name}", n, n) for name, n in self._lasting() if n]
        pairs.append(("  activations, gradients, workspace", keep_all.peak_bytes - lasting, made.peak_bytes - lasting))
        rows = [(name, show_bytes(a), show_bytes(b), _change(a, b)) for name, a, b in pairs]
        assert keep_all.time_s is not None
        assert made.time_s is not None
        times = (_seconds(keep_all.time_s), _seconds(made.time_s), _change(keep_all.time_s, made.time_s))
        rows.append((f"time of a step, {self._time_words}", *times))
        joules = (self._energy_j(keep_all), self._energy_j(made))
        if joules[0] is not None and joules[1] is not None:
            told = (f"{joules[0]:.3g} J", f"{joules[1]:.3g} J", _change(joules[0], joules[1]))
            rows.append((f"energy above idle, {self._time_words}", *told))
        if made.items == keep_all.items:
            note = "All of it fits: nothing is computed twice."
            return Table("What a step takes", note, ("", "keep all"), tuple(row[:2] for row in rows))
        return Table("What a step takes", "", ("", "keep all", made.planner, ""), tuple(rows))

    def _facts(self, made: Plan) -> Table:
        rows = [] if self.device is None else self._device_facts(self.device, made)
        again = self.recomputed(made)
        if again:
            time_s = sum(self.costs.ops[n].again_s for n in again)
            rows.append(("recomputed", f"{_count(len(again), 'op')}, {_seconds(time_s)}{self._modelled}"))
        if made.bound is not None and made.gap is not None:
            least = "" if made.bound.time_s is None else _seconds(made.bound.time_s)
            least = least or f"{made.bound.energy_j:.4g} J"
            best = f"{least}{self._modelled}, {100 * made.gap:.1f} % less"
            rows.append(("least possible", f"{best} (proven for {made.bound.schedules})"))
        op, alive, workspace = self._peak(made)
        rows.append(("peak at", f"{op.name}{f' of {op.module}' if op.module else ''} ({op.phase})"))
        names = [f"{name} {show_bytes(n)}" for name, n in alive]
        text = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        text += f"; workspace of its kernel {show_bytes(workspace)}" if workspace else ""
        rows.append(("alive there", f"{text}; lasting tensors {show_bytes(made.persistent_bytes)}"))
        if made.paged:
            moved = sum(self.graph.storages[s].n_bytes for s in made.paged)
            rows.append(("paged", f"{_count(len(made.paged), 'tensor')}, {show_bytes(moved)} to the store"))
        rows += [("store", made.note)] if made.note else []
        rows += [("numbers", _EXACT[made.exact]), ("updates", _UPDATES[made.updates])]
        return Table("The plan", "", ("", ""), tuple(rows))

    def _device_facts(self, device: Device, made: Plan) -> list[tuple[str, str]]:
        ram = device.memory.ram_bytes
        fits = "" if made.peak_bytes <= ram else ": this plan does not fit"
        rows = [(f"RAM of {device.name}", f"{show_bytes(ram)}{fits}")]
        alone = resident_bytes(self.graph, device)
        if alone is not None:
            rows.append(
                (f"{device.library.name} alone", f"would hold {show_bytes(alone)}, its whole process (modelled)")
            )
        return rows

    def _peak(self, made: Plan) -> tuple[Op, list[tuple[str, int]], int]:
        """The op that holds most, what is alive there that does not last, and what its kernel takes above that."""
        moment, alive = tightest(problem(self.graph, self.costs, made.updates), made.order)
        known = made.persistent_bytes + moment.undo_bytes + sum(n for _, n in alive)
        return self.graph.ops[moment.op], alive, moment.during_bytes - known

    def _modules(self, made: Plan) -> Table:
        rows = tuple(
            (
                block or "(top level)",
                ", ".join(f"{k} ×{n}" if n > 1 else k for k, n in kinds.most_common()),
                _seconds(s),
            )
            for block, kinds, s in self.blocks_again(made)
        )
        return Table("Recomputed", "", ("module", "ops", "time" + self._modelled), rows)


def _count(number: object, what: str) -> str:
    return f"{number} {what}{'' if str(number) == '1' else 's'}"


def _extra(made: Plan) -> float:
    assert made.time_s is not None
    return made.time_s / made.keep_all_time_s - 1 if made.keep_all_time_s else 0.0


def _block(module: str) -> str:
    """features.2.conv.0.1 → features.2: up to the first number, which is where nets repeat themselves."""
    words = module.split(".")
    first = next((at for at, word in enumerate(words) if word.isdecimal()), len(words))
    return ".".join(words[: first + 1])


def _short(kind: str) -> str:
    """aten.convolution.default → convolution; edgetrain.norm.apply → norm.apply."""
    space, _, name = kind.partition(".")
    return name if space == "edgetrain" else name.partition(".")[0]


def _frontier_table(frontier: Frontier, modelled: str = "") -> Table:
    rows = []
    for p in frontier.points:
        first = (show_bytes(p.memory_bytes), f"{100 * p.part:.0f} %")
        if p.extra is None:
            rows.append((*first, "no plan found", "", "", ""))
        else:
            gap = "" if p.gap is None else f"{100 * p.gap:.1f} %"
            rows.append((*first, f"{100 * p.extra:+.1f} %", str(p.recomputed), str(p.planner), gap))
    note = ""
    if frontier.smallest_bytes is not None and frontier.bound_bytes is not None:
        note = (
            f"The smallest budget known to work is {show_bytes(frontier.smallest_bytes)} ({frontier.smallest_bytes} "
            f"bytes); none below {show_bytes(frontier.bound_bytes)} can."
        )
    header = ("memory", "of keep-all's activations", "extra time", "recomputed ops", "planner", "gap")
    return Table(f"Memory against time{modelled}", note, header, tuple(rows))


def _change(before: float, after: float) -> str:
    if before == after or not before:
        return ""
    return f"{100 * (after / before - 1):+.1f} %".replace("-", "−")


def _seconds(time_s: float) -> str:
    return (
        f"{time_s:.2f} s" if time_s >= 1 else f"{1e3 * time_s:.3g} ms" if time_s >= 1e-3 else f"{1e6 * time_s:.0f} µs"
    )


# ---- what is kept and printed


def _keep(
    folder: RunFolder, costs: Costs, made: Plan | None, shown: Picture, told: dict[str, Any], to: Path | None,
    *, whole: MicroPlan | None = None,
) -> Path:  # fmt: skip
    """whole: the step in micro-batches of which `made` is the last."""
    files = {"memory": "memory.json", "costs": "costs.json", "page": "plan.html"}
    with explained(folder.path):
        costs.save(folder.path / files["costs"])
        if made is not None:
            files["plan"] = "plan.json"
            (whole or made).save(folder.path / files["plan"])
    if made is not None and to is not None:
        with explained(to):
            (whole or made).save(to)
        notes.print(f"saved to {to}")
    save_picture(shown, folder.path)
    times: Literal["derived", "modelled"] = "modelled" if costs.origin == "modelled" else "derived"
    summary = {"keep-all peak": Value(told["keep_all"]["peak_bytes"], "bytes", "derived")}
    summary["keep-all time"] = Value(told["keep_all"]["time_s"], "s", times)
    if made is not None:
        step = whole or made
        summary |= {"peak": Value(step.peak_bytes, "bytes", "derived"), "time": Value(step.time_s, "s", times)}
        summary["recomputed ops"] = Value(told["plan"]["recomputed_ops"], "", "derived")
    folder.save(replace(new_record(sys.argv, **files), status="finished", summary=summary))
    return write_page(folder, folder.path / files["page"])


def _print(shown: Picture) -> None:
    results.print(f"{shown.title}: {shown.note}", style="bold", soft_wrap=True)
    for table in shown.tables:
        _print_table(table, most=_MODULES_SHOWN)
    if shown.tables:
        _print_curves(shown.curves, shown.budget_bytes)
    if shown.frontier_table is not None:
        _print_table(shown.frontier_table)


def _print_table(table: Table, most: int | None = None) -> None:
    drawn = rich.table.Table(
        *table.header, box=None, show_header=any(table.header), header_style="bold", pad_edge=False
    )
    for row in table.rows[:most]:
        drawn.add_row(*map(Text, row))
    results.print()
    if table.title:
        results.print(table.title, style="bold")
    results.print(drawn)
    hidden = len(table.rows) - len(table.rows[:most])
    if hidden:
        results.print(f"and {hidden} more modules, on the page")
    if table.note:
        results.print(table.note, soft_wrap=True)


def _print_curves(curves: Sequence[Curve], budget_bytes: int | None) -> None:
    top = top_bytes(curves, budget_bytes)
    longest = max(len(curve.instants) for curve in curves)
    for curve in curves:
        results.print(f"\n{curve.name}: bytes held over {len(curve.instants)} ops", style="bold")
        for row in blocks(curve, budget_bytes, top=top, longest=longest, width=max(20, results.width - 10)):
            results.print(
                Text(f"{row.label:>8} ") + Text(row.text, style="red" if row.above else "cyan"), soft_wrap=True
            )
