"""What `edgetrain plan` finds out of a captured step: plans and the frontier, and how they are told and drawn.

In:  a graph, what its ops cost here or on a device, a planner. Out: plans, a `Picture`, and the same as plain data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from edgetrain.cli import plan_firmware
from edgetrain.costs.measured import measure_costs
from edgetrain.costs.model import model_costs, resident_bytes
from edgetrain.costs.table import Costs
from edgetrain.devices.device import Device
from edgetrain.errors import Infeasible, UserError
from edgetrain.firmware.planned import FirmwareStep
from edgetrain.graph.ir import Graph, Op, Role
from edgetrain.graph.rewrite.accumulate import accumulators
from edgetrain.measure.picture import Curve, Frontier, Instant, Picture, Point, Table
from edgetrain.names import short_name
from edgetrain.plan.budget import Budget, show_bytes
from edgetrain.plan.lifetimes import timeline
from edgetrain.plan.plan import Plan
from edgetrain.plan.planner import Planner
from edgetrain.plan.planning import plan as make_plan
from edgetrain.plan.problem import Problem, problem
from edgetrain.plan.refusal import tightest
from edgetrain.plan.time_left import TimeLeft
from edgetrain.plan.timing import play
from edgetrain.run.activity import doing

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
    "final": "final: early, and a step is never taken back",
}


def costs_of(graph: Graph, device: Device | None, page_to: Path | None = None, page: bool = False) -> Costs:
    """Modelled for the device, or measured here; page: its storage may be paged to, as the folder page_to may."""
    if device is not None:
        modelled = model_costs(graph, device)
        return modelled if page else replace(modelled, store=None)

    def progress(done: int, total: int) -> None:
        doing(f"measuring what the ops cost, {done} of {total}")

    doing("measuring what the ops cost")
    return measure_costs(graph, progress=progress, page_to=page_to)


@dataclass(frozen=True)
class Study:
    """A captured step, what its ops cost here or on a device, and the plan that keeps all of it.

    limits: those of time and energy, and what is to be least; memory is given with each question.
    firmware: the step as firmware runs it, where that is what is planned.
    """

    graph: Graph
    costs: Costs
    captured: Plan
    planner: Planner
    time_limit_s: float
    device: Device | None = None
    limits: Budget = field(default_factory=Budget)
    firmware: FirmwareStep | None = None

    @cached_property
    def task(self) -> Problem:
        return problem(self.graph, self.costs, self.captured.updates)

    @cached_property
    def keep_all(self) -> Plan:
        return self.task.plan(self.task.order, planner="keep-all", exact=self.captured.exact)

    def plan(self, memory_bytes: int | None, left_s: float | None = None) -> Plan:
        within = "" if memory_bytes is None else f" within {show_bytes(memory_bytes)}"
        doing(f"planning{within}, {self.time_limit_s:g} s of search at most")
        return self._plan(memory_bytes, left_s)

    def _plan(self, memory_bytes: int | None, left_s: float | None = None) -> Plan:
        if self.firmware is not None:
            return self.firmware.plan(
                memory_bytes,
                limits=self.limits,
                planner=self.planner.name,
                time_limit_s=self.time_limit_s,
                left_s=left_s,
            )
        return make_plan(
            self.graph, self.costs, replace(self.limits, memory_bytes=memory_bytes),
            planner=self.planner.name, time_limit_s=self.time_limit_s,
            updates=self.captured.updates, exact=self.captured.exact, left_s=left_s,
        )  # fmt: skip

    def judged(self, loaded: Plan, memory_bytes: int | None) -> Plan:
        """The plan with the times of this machine. A bound holds only for the costs that it was found with."""
        if memory_bytes is not None and loaded.peak_bytes > memory_bytes:
            raise UserError(
                "the plan that was loaded does not keep the budget",
                expected=f"a peak of at most {show_bytes(memory_bytes)}", received=show_bytes(loaded.peak_bytes),
                next_step="plan again without --load",
            )  # fmt: skip
        if loaded.paged and self.costs.store is None:
            raise UserError(
                "the plan that was loaded pages to storage", next_step="add --page-to FOLDER, or --device NAME --page"
            )
        timing = play(self.graph, loaded.schedule, self.costs)
        time_s = timing.time_s
        bound = loaded.bound if loaded.time_s == time_s else None
        return replace(
            loaded, time_s=time_s, energy_j=timing.energy_j, keep_all_time_s=self.task.keep_all_time_s, bound=bound
        )

    def frontier(self, parts: Sequence[float]) -> Frontier:
        """A plan for each part of what keep-all holds, and one for the smallest budget where some are too small."""
        keep_all = self.keep_all
        lasting, above_bytes = keep_all.persistent_bytes, keep_all.peak_bytes - keep_all.persistent_bytes
        points: list[Point] = []
        bounds: dict[str, float] = {}
        failed: Infeasible | None = None
        time_left = TimeLeft(self.time_limit_s)
        for done, part in enumerate(parts):
            doing(f"planning budget {done + 1} of {len(parts)}")
            time_left.part = 1 / (len(parts) - done)
            point = Point(lasting + round(part * above_bytes), part)
            if failed is None or point.memory_bytes >= failed.smallest_bytes:
                try:
                    point = self._point(point, bounds, time_left)
                except Infeasible as answer:
                    failed = answer
            points.append(point)
        if failed is None:
            return Frontier(tuple(points))
        if failed.smallest_bytes not in {point.memory_bytes for point in points}:
            with suppress(Infeasible):  # another planner than this one may have found it
                part = (failed.smallest_bytes - lasting) / max(1, above_bytes)
                points.append(self._point(Point(failed.smallest_bytes, part), bounds, time_left))
        points.sort(key=lambda point: -point.memory_bytes)
        return Frontier(tuple(points), failed.smallest_bytes, failed.bound_bytes)

    def _point(self, point: Point, bounds: dict[str, float], time_left: TimeLeft) -> Point:
        """bounds: class of schedules → the highest bound so far. Budgets come from large to small, and what no schedule
        can do in more memory none can do in less."""
        with time_left.planning() as left_s:
            plan = self._plan(point.memory_bytes, left_s)
        if plan.bound is not None and plan.bound.time_s is not None:
            kind = plan.bound.schedules
            bounds[kind] = max(plan.bound.time_s, bounds.get(kind, 0.0))
            plan = replace(plan, bound=replace(plan.bound, time_s=bounds[kind]))
        return replace(
            point, extra=_extra(plan), recomputed=len(self.recomputed(plan)), planner=plan.planner, gap=plan.gap
        )

    def recomputed(self, plan: Plan) -> list[int]:
        """The ops that run again; views do too, and cost nothing."""
        return [op for op in plan.recomputed if not self.graph.ops[op].view]

    def curve(self, plan: Plan, name: str) -> Curve:
        seen: set[int] = set()
        instants = []
        for moment in timeline(self.graph, plan.schedule, updates=plan.updates, workspace=plan.workspace_bytes):
            op = self.graph.ops[moment.op]
            if not op.view:
                instants.append(Instant(op.name, op.module, op.phase, moment.most_bytes, moment.op in seen))
            seen.add(moment.op)
        return Curve(name, plan.persistent_bytes, tuple(instants))

    def blocks_again(self, plan: Plan) -> list[tuple[str, Counter[str], float]]:
        """Block of modules → which ops of it run again, how often, and for how long; most time first."""
        kinds: dict[str, Counter[str]] = {}
        times: dict[str, float] = {}
        for number in self.recomputed(plan):
            op = self.graph.ops[number]
            block = _block(op.module)
            kinds.setdefault(block, Counter())[short_name(op.kind)] += 1
            times[block] = times.get(block, 0.0) + self.costs.ops[number].again_s
        return sorted(((block, kinds[block], times[block]) for block in kinds), key=lambda row: -row[2])

    # ---- as data

    def told(self, plan: Plan | None, budget: int | None, frontier: Frontier | None) -> dict[str, Any]:
        """What `--json` prints."""
        keep_all = self.keep_all
        data: dict[str, Any] = {
            "graph": self.graph.key,
            "ops": sum(not op.view for op in self.graph.ops),
            "budget_bytes": budget,
            "lasting_bytes": {name: n for name, n in self._lasting() if n},
            "keep_all": {"peak_bytes": keep_all.peak_bytes, "time_s": keep_all.time_s},
            "costs": self._costs_told(),
        }
        if plan is not None:
            data["plan"] = self._plan_told(plan)
            if self.firmware is not None:
                data["firmware"] = plan_firmware.as_data(self.firmware.project(plan))
        if frontier is not None:
            data["sweep"] = asdict(frontier)
        return data

    def _costs_told(self) -> dict[str, Any]:
        """Where the times come from, and what else is known of a device."""
        data: dict[str, Any] = {"origin": self.costs.origin, **self.costs.about}
        if self.device is not None:
            data |= {
                "device_key": self.device.key,
                "uncertainty": self.costs.uncertainty,
                "ram_bytes": self.device.memory.ram_bytes,
                "library_bytes": resident_bytes(self.graph, self.device),
            }
        return data

    def _plan_told(self, plan: Plan) -> dict[str, Any]:
        op, alive, workspace = self._peak(plan)
        again = self.recomputed(plan)
        return {
            "planner": plan.planner,
            "peak_bytes": plan.peak_bytes,
            "time_s": plan.time_s,
            "energy_j": self._energy_j(plan),
            "extra": _extra(plan),
            "bound": None if plan.bound is None else asdict(plan.bound),
            "gap": plan.gap,
            "exact": plan.exact,
            "updates": plan.updates,
            "recomputed_ops": len(again),
            "recomputed_s": sum((self.costs.ops[n].again_s for n in again), 0.0),
            "recomputed": [
                {"module": block, "ops": dict(kinds), "time_s": time_s}
                for block, kinds, time_s in self.blocks_again(plan)
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

    def picture(self, title: str, plan: Plan | None, budget: int | None, frontier: Frontier | None) -> Picture:
        keep_all = self.keep_all
        curves = [self.curve(keep_all, "keep all")]
        tables = []
        if plan is not None:
            if plan.items != keep_all.items:
                curves.append(self.curve(plan, f"plan ({plan.planner})"))
            tables = [self._before_after(keep_all, plan), self._facts(plan)]
            tables += [self._modules(plan)] if self.recomputed(plan) else []
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
        return f"times modelled for {device.name} ({how}), not measured: ±{within:.0f} % (about 68 % confidence)"

    @property
    def time_words(self) -> str:
        """How a time is called, wherever one is told."""
        return "predicted" if self.device is None else f"modelled for {self.device.name}"

    @property
    def _modelled(self) -> str:
        return "" if self.device is None else f", {self.time_words}"

    def _energy_j(self, plan: Plan) -> float | None:
        """Above what the device takes when it idles; transfers count."""
        if plan.energy_j is None or plan.time_s is None or self.costs.idle_w is None:
            return None
        return plan.energy_j - self.costs.idle_w * plan.time_s

    def _before_after(self, keep_all: Plan, plan: Plan) -> Table:
        lasting = keep_all.persistent_bytes
        pairs = [("peak memory", keep_all.peak_bytes, plan.peak_bytes)]
        pairs += [(f"  {name}", n, n) for name, n in self._lasting() if n]
        pairs.append(("  activations, gradients, workspace", keep_all.peak_bytes - lasting, plan.peak_bytes - lasting))
        rows = [(name, show_bytes(a), show_bytes(b), _change(a, b)) for name, a, b in pairs]
        assert keep_all.time_s is not None
        assert plan.time_s is not None
        times = (seconds(keep_all.time_s), seconds(plan.time_s), _change(keep_all.time_s, plan.time_s))
        rows.append((f"time of a step, {self.time_words}", *times))
        joules = (self._energy_j(keep_all), self._energy_j(plan))
        if joules[0] is not None and joules[1] is not None:
            cells = (f"{joules[0]:.3g} J", f"{joules[1]:.3g} J", _change(joules[0], joules[1]))
            rows.append((f"energy above idle, {self.time_words}", *cells))
        if plan.items == keep_all.items:
            note = "All of it fits: nothing is computed twice."
            return Table("What a step takes", note, ("", "keep all"), tuple(row[:2] for row in rows))
        return Table("What a step takes", "", ("", "keep all", plan.planner, ""), tuple(rows))

    def _facts(self, plan: Plan) -> Table:
        rows = [] if self.device is None else self._device_facts(self.device, plan)
        again = self.recomputed(plan)
        if again:
            time_s = sum(self.costs.ops[n].again_s for n in again)
            rows.append(("recomputed", f"{_count(len(again), 'op')}, {seconds(time_s)}{self._modelled}"))
        if plan.bound is not None and plan.gap is not None:
            bound = "" if plan.bound.time_s is None else seconds(plan.bound.time_s)
            bound = bound or f"{plan.bound.energy_j:.4g} J"
            best = f"{bound}{self._modelled}, {100 * plan.gap:.1f} % less"
            rows.append(("least possible", f"{best} (proven for {plan.bound.schedules})"))
        op, alive, workspace = self._peak(plan)
        rows.append(("peak at", f"{op.name}{f' of {op.module}' if op.module else ''} ({op.phase})"))
        names = [f"{name} {show_bytes(n)}" for name, n in alive]
        text = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        text += f"; workspace of its kernel {show_bytes(workspace)}" if workspace else ""
        rows.append(("alive there", f"{text}; lasting tensors {show_bytes(plan.persistent_bytes)}"))
        if plan.paged:
            moved = sum(self.graph.storages[s].n_bytes for s in plan.paged)
            rows.append(("paged", f"{_count(len(plan.paged), 'tensor')}, {show_bytes(moved)} to the store"))
        rows += [("store", plan.note)] if plan.note else []
        rows += [("numbers", _EXACT[plan.exact]), ("updates", _UPDATES[plan.updates])]
        return Table("The plan", "", ("", ""), tuple(rows))

    def _device_facts(self, device: Device, plan: Plan) -> list[tuple[str, str]]:
        rows = [(f"RAM of {device.name}", show_bytes(device.memory.ram_bytes))]
        if self.firmware is not None:
            return rows + plan_firmware.facts(self.firmware.project(plan), self.firmware.target)
        alone = resident_bytes(self.graph, device)
        if alone is not None:
            rows.append(
                (f"{device.library.name} alone", f"would hold {show_bytes(alone)}, its whole process (modelled)")
            )
        return rows

    def _peak(self, plan: Plan) -> tuple[Op, list[tuple[str, int]], int]:
        """The op that holds most, what is alive there that does not last, and what its kernel takes above that."""
        moment, alive = tightest(problem(self.graph, self.costs, plan.updates), plan.items)
        known = plan.persistent_bytes + moment.undo_bytes + sum(n for _, n in alive)
        return self.graph.ops[moment.op], alive, moment.most_bytes - known

    def _modules(self, plan: Plan) -> Table:
        rows = tuple(
            (
                block or "(top level)",
                ", ".join(f"{k} ×{n}" if n > 1 else k for k, n in kinds.most_common()),
                seconds(s),
            )
            for block, kinds, s in self.blocks_again(plan)
        )
        return Table("Recomputed", "", ("module", "ops", "time" + self._modelled), rows)


def _count(number: object, what: str) -> str:
    return f"{number} {what}{'' if str(number) == '1' else 's'}"


def _extra(plan: Plan) -> float:
    assert plan.time_s is not None
    return plan.time_s / plan.keep_all_time_s - 1 if plan.keep_all_time_s else 0.0


def _block(module: str) -> str:
    """features.2.conv.0.1 → features.2: up to the first number, which is where nets repeat themselves."""
    words = module.split(".")
    first = next((at for at, word in enumerate(words) if word.isdecimal()), len(words))
    return ".".join(words[: first + 1])


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
            f"bytes); {show_bytes(frontier.bound_bytes)} is a proven lower bound."
        )
    header = ("memory", "of keep-all's activations", "extra time", "recomputed ops", "planner", "gap")
    return Table(f"Memory against time{modelled}", note, header, tuple(rows))


def _change(before: float, after: float) -> str:
    if before == after or not before:
        return ""
    return f"{100 * (after / before - 1):+.1f} %".replace("-", "−")


def seconds(time_s: float) -> str:
    return (
        f"{time_s:.2f} s" if time_s >= 1 else f"{1e3 * time_s:.3g} ms" if time_s >= 1e-3 else f"{1e6 * time_s:.0f} µs"
    )
