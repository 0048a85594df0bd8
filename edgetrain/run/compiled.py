"""One graph under one plan, bound to a model and an optimizer: the innermost step.

In:  a graph, a plan that is valid for it, the model, the optimizer, and tensors that only the loss knows (`externals`).
Out: `CompiledStep`: call it with a batch of exactly the captured shapes. It changes the model and the optimizer's
     state in place, or, if anything raises, changes nothing.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from edgetrain.arguments import checked
from edgetrain.costs.kernels import running
from edgetrain.costs.table import Costs
from edgetrain.errors import InternalError, UserError
from edgetrain.graph.capture import optimizers
from edgetrain.graph.capture.batches import other_type
from edgetrain.graph.ir import Graph, Op
from edgetrain.graph.rewrite.accumulate import accumulates_only
from edgetrain.measure.sensors.room import require_room
from edgetrain.native import arena
from edgetrain.native.surely import surely
from edgetrain.ops import norm, update
from edgetrain.pagefile import PageFault
from edgetrain.plan.keep_all import plan_of
from edgetrain.plan.plan import Compute, Plan
from edgetrain.plan.rest import bytes_from, least_rest
from edgetrain.plan.unmeasured import beside_bytes
from edgetrain.plan.validate import validate
from edgetrain.run.adaptive import BudgetFell, Fall
from edgetrain.run.arena import StepArena, predict
from edgetrain.run.attempt import Attempt, Now, Rest
from edgetrain.run.binding import Binding, laid_out, place_of_update, require_apart
from edgetrain.run.compile import NotFinite, build
from edgetrain.run.conditions import Conditions, Known
from edgetrain.run.habits import note_dropped
from edgetrain.run.layouts import check_layouts
from edgetrain.run.memory import MemoryTrace, trace
from edgetrain.run.paging import A_TRANSFER, Pages, not_back
from edgetrain.run.program import How, Program, Stopped, failed, free_activations, stopped, taken
from edgetrain.run.refused import OF_KERNELS, by_kernel, refused
from edgetrain.run.undo import Undo

_ATTEMPT = 6  # where it is among what a program is given: there it is what holds signals back


@checked()
def compile_step(
    graph: Graph,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    externals: Mapping[str, torch.Tensor] | None = None,
    check_finite: bool = False,
    costs: Costs | None = None,
    page_to: str | Path | None = None,
) -> CompiledStep:
    """A step for exactly the shapes that the graph was captured with.

    externals: the tensors that neither the model nor the optimizer holds, by the names in `graph.sources`; `et.prepare`
    finds them by itself.
    check_finite: refuse a loss or a gradient that is not finite; the step is then taken back.
    costs: what the plan was made with; the arena is then laid out before the first step.
    page_to: a folder on the device's storage, for a plan that pages; it needs the costs too.
    """
    validate(graph, plan)
    conditions = Conditions(check_finite, page_to)
    return CompiledStep(graph, plan, model, optimizer, externals or {}, costs=costs, conditions=conditions)


class CompiledStep:
    """
    falls:        of the budget, in the last step.
    beside_bytes: what the step is part of holds beside its tensors, of the same budget.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        externals: Mapping[str, torch.Tensor],
        *,
        costs: Costs | None = None,
        conditions: Conditions = Conditions(),  # noqa: B008  # frozen
        known: Known | None = None,
    ) -> None:
        if plan.updates == "final":
            raise UserError(
                'this plan keeps nothing to take a failed step back with (updates="final"): it is for firmware',
                next_step='plan with updates="early", "guarded" or "together", or give it to et.export',
            )
        self.graph, self.plan = graph, plan
        self.costs = costs = costs and running(costs, plan.kernels)
        self._watch = conditions.watch
        self.falls: list[Fall] = []
        self.beside_bytes = 0
        self._optimizer = optimizer
        self._check_finite = conditions.check_finite
        self.weight, self.starts = 1.0, True  # of a micro-batch: its part of the samples; it is the first of its step
        # Kernels take much memory from malloc, which had better not be kept: the arena's pages stay beside it.
        self.takes_beside = any(beside_bytes(graph, op) for op in graph.ops)
        self._accumulates_only = accumulates_only(graph)
        self._updated = {place_of_update(op) for op in graph.ops if op.phase == "update"}
        written = {s for op in graph.ops for s in op.writes}
        self._written_inputs = [t for t in graph.inputs if graph.tensors[t].storage in written]
        self._binding = Binding(graph, optimizers.kind_of(optimizer), model, optimizer, externals)
        self._pages = self._new_pages(conditions)
        watched = conditions.watch is not None
        resumable = self._pages is not None or watched
        self.known = known or Known(graph, costs, plan.updates, check_finite=self._check_finite, resumable=resumable)
        self._program = self._build(plan, How(watched=watched))
        self._checked, self.completed = False, 0  # completed: how often the step was run to its end
        self.page_fault: str | None = None  # why the last transfer failed that did
        self._arenas = self._new_arenas(costs)
        self._binding.require_same_optimizer(self._program.updates)
        self._binders = [self._binding.binder(t) for t in self._program.held]

    @property
    def source(self) -> str:
        """The step as Python text."""
        return self._program.source

    def __call__(self, *batch: Any) -> torch.Tensor:
        return self._step(self._program, batch)

    def timed(self, mark: Callable[[int], None], *batch: Any) -> torch.Tensor:
        """The same step; it tells `mark` when each op begins and ends (`build`, timed)."""
        return self._step(self._timed_program, batch, mark)

    @cached_property
    def _timed_program(self) -> Program:
        return self._build(self.plan, How(watched=self._watch is not None, timed=True))

    def _step(self, program: Program, batch: tuple[Any, ...], look: Callable[..., None] | None = None) -> torch.Tensor:
        if not self._checked:
            self._first(batch)
        result: torch.Tensor = self._execute(program, batch, look=look)
        return result.clone()  # it lies in the arena, which the next overwrites

    def _first(self, batch: tuple[Any, ...]) -> None:
        """The first time the step is rehearsed: all of it but the updates, taken back.

        Every tensor that a kernel makes is held against the graph, so that a layout that capture predicted wrongly is
        found before anything is updated by it; and every kernel has then run once with the memory that it needs.
        """
        if all(storage.device == "cpu" for storage in self.graph.storages):
            require_room("this step", self.plan.peak_bytes, next_step="give a smaller batch, or a budget of memory")
        program = self._build(self.plan, How(look=True, rehearse=True))
        self._execute(program, batch, keep=False, look=partial(check_layouts, self.graph))
        self._checked = True

    def _build(self, plan: Plan, how: How, *, start: int = 0) -> Program:
        return build(self.graph, plan, how, start=start, words=self.known.words)

    def get_ready(self) -> None:
        """For a change in the middle of a step: what can be made ahead is made now."""
        _ = self.known.task.tables, self.known.validator, self._needs
        self.known.words.get_ready(self.plan)

    def take_over(self, other: object) -> None:
        """From the step that was used before: what was rehearsed there, of the same graph, need not be here."""
        self._checked |= isinstance(other, CompiledStep) and other.known is self.known and other._checked

    def shrink(self) -> None:
        """Hand memory of the arena back that this plan does not need."""
        if self._arenas is not None:
            arena.trim(self.height_bytes)

    @property
    def height_bytes(self) -> int:
        """Of the arena, as far as it is known before the first step."""
        return 0 if self._arenas is None else self._arenas[1].height_bytes

    def _new_pages(self, conditions: Conditions) -> Pages | None:
        if not self.plan.paged:
            return None
        folder = conditions.page_to
        if folder is None or self.costs is None:
            raise UserError(
                "this plan pages tensors to storage", expected="a folder to page to, and the costs of the graph",
                next_step="give page_to and costs, or plan without a store",
            )  # fmt: skip
        return Pages(self.graph, self.plan, folder, calls=conditions.page_calls)

    def _new_arenas(self, costs: Costs | None) -> tuple[StepArena, StepArena] | None:
        """For the rehearsal and for the step itself; None where there is no arena."""
        why = arena.missing()
        if self._accumulates_only:
            pass  # nothing that would have to be taken back
        elif self.plan.updates == "early" and self._check_finite:
            raise UserError(
                "a step that checks its gradients cannot update early: what is updated could not be taken back",
                next_step='plan with updates="guarded" or "together"',
            )
        elif self.plan.updates == "early" and why is not None:
            raise UserError(f"this plan updates early, which needs the arena; {why}", next_step='updates="guarded"')
        if why is not None or any(storage.device != "cpu" for storage in self.graph.storages):
            return None
        if costs is None:
            return StepArena(), StepArena()
        held = self._program.held
        rehearsal, step = (predict(self.graph, self.plan, costs, held, rehearse=which) for which in (True, False))
        return StepArena(rehearsal), StepArena(step)

    @property
    def grad_norm(self) -> float | None:
        """Of the gradients of the last step, where it clips or checks them."""
        return self.known.words.norm.last

    @property
    def arena(self) -> arena.Recording | None:
        """What the last step asked of the arena; None where it does not use one."""
        return None if self._arenas is None else self._arenas[1].last

    def _arena_of(self, program: Program) -> StepArena | None:
        return None if self._arenas is None else self._arenas[0 if not program.updates else 1]

    def gradients(self, *batch: Any) -> dict[str, torch.Tensor]:
        """The gradient of each trained parameter, by name. Nothing is changed, running statistics included."""
        names = [self.graph.tensors[p].name for p in self.graph.gradients]
        values = self._execute(self._gradient_program, batch, keep=False)
        return {name: value.clone() for name, value in zip(names, values, strict=True)}

    def trace_memory(self, *batch: Any) -> MemoryTrace:
        """Run one step under observation and take it back: the bytes held at each op, and what is alive at the peak."""
        program = self._build(self.plan, How(look=True))
        with trace(self.graph, self.plan) as watch:
            self._execute(program, batch, keep=False, look=watch.look)
        return watch.result()

    @cached_property
    def _gradient_program(self) -> Program:
        """What the plan does before the updates. It ends with all gradients there, which a step never has."""
        first = next((n for n, op in enumerate(self.graph.ops) if op.phase == "update"), len(self.graph.ops))
        graph = dataclasses.replace(self.graph, ops=self.graph.ops[:first])
        order = [number for number in self.plan.order if number < first]
        plan = plan_of(graph, order, planner=self.plan.planner, updates="together", exact=self.plan.exact, workspace={})
        validate(graph, plan)
        return build(graph, plan, check_finite=self._check_finite, outputs=tuple(graph.gradients.values()))

    def _execute(
        self, program: Program, batch: tuple[Any, ...], *, keep: bool = True, look: Callable[..., None] | None = None
    ) -> Any:
        inputs = [laid_out(batch, int(self.graph.sources[t].path), self.graph.tensors[t]) for t in self.graph.inputs]
        if self._written_inputs:
            require_apart(self.graph, self._written_inputs, batch)
        bound = self.bound()
        given = [update.settings(self._binding.kind, g, n) for n, g in enumerate(self._optimizer.param_groups)]
        memory = self._arena_of(program)
        attempt = Attempt(
            program, keep, self.completed, Now(self.plan, program, [] if self._watch is None else self._needs),
            Undo(), None if memory is None else memory.watch(),
        )  # fmt: skip
        work = partial(self._attempted, attempt, inputs, [bound[t] for t in program.held], given, look)
        try:
            return surely(work, partial(self._ended, attempt))
        except NotFinite as error:
            raise UserError(
                f"{error} is not finite; the step was taken back and the model is as it was before",
                next_step="lower the learning rate, or look at this batch",
            ) from None
        except BaseException as error:
            if attempt.torn:
                raise InternalError(
                    "an op failed after the first update of a step, where none can; the model is updated in part: "
                    "load the last checkpoint"
                ) from error
            if attempt.refusing is None:
                raise
            given_in = dict(zip(self.graph.inputs, inputs, strict=True))
            types = other_type(self._binding.model, batch)
            raise refused(self.graph, attempt.refusing, error, given_in, next_step=types) from error

    def _attempted(
        self,
        attempt: Attempt,
        inputs: list[torch.Tensor],
        held: list[torch.Tensor],
        given: list[update.Settings],
        look: Callable[..., None] | None,
    ) -> Any:
        program, memory = attempt.program, self._arena_of(attempt.program)
        attempt.interrupt.start()
        states, fresh = self._binding.states(
            program.updates, given, attempt.before, weight=self.weight, starts=self.starts
        )
        late = self.plan.updates == "together" and program.allocates_late and self._arenas is None
        if program.updates and self.plan.updates != "guarded" and (late or not attempt.keep):
            self._binding.note_updated(program.updates, attempt.undo)  # such a plan makes no copies of its own for them
            attempt.noted = True
        attempt.enter()
        if program.random:
            attempt.undo.note_random()  # a block of the arena, as the plan counts it
        attempt.given = (inputs, held, states, given, fresh, attempt.undo, attempt, look)
        self.falls = []
        if self._pages is not None:
            self._pages.failed = False
        result = self._run(program, attempt.given)
        if attempt.watch is not None and memory is not None:
            attempt.watch.end()
            memory.learn(attempt.watch.recording)
        attempt.done = attempt.keep
        return result

    def _ended(self, attempt: Attempt) -> None:
        """All of it has happened, or nothing. May be called again where something interrupted it."""
        attempt.interrupt.open = False
        if attempt.over:
            attempt.interrupt.release()
            return
        error = attempt.error
        if error is not None and attempt.keep and attempt.interrupt.holding and not attempt.noted and not attempt.done:
            attempt.torn = isinstance(error, Exception)
            if not attempt.torn:
                self._go_through(attempt, error)
        if attempt.done:
            self.completed = attempt.completed + 1
            self._optimizer._opt_called = True  # type: ignore[attr-defined]  # learning-rate schedulers look for it
            there, groups = [], self._optimizer.param_groups
            for group, index in () if self._accumulates_only else self._updated:
                parameter = groups[group]["params"][index]
                if (gradient := parameter.grad) is not None:
                    there.append(gradient)
                    parameter.grad = None
            if there:
                note_dropped(self._optimizer, there)
        else:
            self._take_back(attempt, error)
        attempt.leave()
        attempt.interrupt.release()

    def _take_back(self, attempt: Attempt, error: BaseException | None) -> None:
        self._settle()
        if error is not None:
            attempt.refusing = attempt.refusing or self._refusing(attempt.now, error)
            free_activations(error)
        attempt.undo.take_back()
        self._binding.put_back_states(attempt.before)

    def _refusing(self, now: Now, error: BaseException) -> Op | None:
        """The op whose kernel raised the error for the values that it was given."""
        if not isinstance(error, OF_KERNELS):
            return None
        where = failed(error, now.program)
        action = None if where is None or where[0] == len(now.plan.schedule) else now.plan.schedule[where[0]]
        if where is None or not isinstance(action, Compute):
            return None
        op = self.graph.ops[action.op]
        return op if by_kernel(error, where[1], op) else None

    def _go_through(self, attempt: Attempt, error: BaseException) -> None:
        """To the end of a step that was interrupted where it cannot be taken back any more: from the op at which it
        stopped."""
        where = stopped(error, attempt.now.program)
        if where is not None:
            attempt.now = self._from_there(attempt.now, where, error)
            free_activations(error)
        if where is not None or attempt.now.rest:  # otherwise it was through
            memory = self._arena_of(attempt.program)
            if memory is not None:
                memory.disturbed = True
            self._run(attempt.now.program, attempt.given)
        attempt.done = True

    def _from_there(self, now: Now, where: Stopped, error: BaseException) -> Now:
        lost = frozenset() if self._pages is None else self._pages.settle()
        variables, at = {**now.rest, **where.variables}, where.stop.at
        if where.happened:
            action = now.plan.schedule[at]
            creates = self.graph.ops[action.op].creates if isinstance(action, Compute) else ()
            results = norm.results(error) or (variables[f"t{where.stop.target}"],)
            variables = {**{f"t{t}": result for t, result in zip(creates, results, strict=False)}, **variables}
            at += 1
        plan = now.plan if not lost else self._rest(now.plan, at, now.plan.peak_bytes, lost)
        if plan is None:
            raise not_back(A_TRANSFER)
        program = self._go_on(plan, now.program, at)
        rest = {name: variables[name] for name in program.taken_up}
        return Now(plan, program, self._needs_of(plan) if now.needs else [], now.met, rest)

    def bound(self) -> dict[int, torch.Tensor]:
        """The lasting tensors that the step reads, as they are now: parameters, buffers, externals, constants."""
        return dict(zip(self._program.held, (bind() for bind in self._binders), strict=True))

    def _settle(self) -> None:
        """Before the memory goes that is read from, or written to."""
        if self._pages is not None:
            self._pages.settle()

    def _run(self, program: Program, given: tuple[Any, ...]) -> Any:
        """Run the program, or as much of it as can be, and then another one for the rest."""
        attempt: Attempt = given[_ATTEMPT]
        while True:
            now = attempt.now
            if self._watch is not None and now.program.how.watched:
                self._watch.follow(now.needs, partial(self._with_less, now.plan, now.program), met=now.met)
            try:
                attempt.interrupt.open = True
                return now.program.run(*given, self._pages, self._watch, now.rest)
            except PageFault as fault:
                attempt.now = self._without_store(now, fault)
                self._give_back(attempt.program)
            except BudgetFell as fell:
                rest: Rest = fell.following
                begin = time.perf_counter()
                variables = taken(fell, now.program, rest.program.taken_up)
                attempt.now = Now(rest.plan, rest.program, rest.needs, rest.budget_bytes, variables)
                self._note(rest, fell.at, begin)
            finally:
                if self._watch is not None:
                    self._watch.done()

    def _note(self, now: Rest, at: int, begin: float) -> None:
        """Hand back what the rest does not need, and write down what the fall took."""
        middle = time.perf_counter()
        self._give_back(now.program)
        end = time.perf_counter()
        self.falls.append(
            Fall(now.budget_bytes, now.needs[at], now.planning_s + middle - begin, giving_back_s=end - middle)
        )

    def _give_back(self, program: Program) -> None:
        memory = self._arena_of(program)
        if memory is not None:
            memory.disturbed = True
            arena.release()

    def _without_store(self, now: Now, fault: PageFault) -> Now:
        """After a transfer failed: the plan without the store from there on, its program, and the tensors alive. A
        budget that fell in this step holds for it too, unless it needs more than that."""
        assert self._pages is not None
        assert fault.at is not None
        lost = self._pages.settle()
        self.page_fault = fault.why  # its text alone: the exception holds every tensor of the step
        limit_bytes = now.plan.peak_bytes if now.met is None else now.met - self.beside_bytes
        plan = self._rest(now.plan, fault.at, limit_bytes, lost)
        if plan is None:
            raise not_back(fault.why)
        if plan.peak_bytes > now.plan.peak_bytes:
            more = plan.peak_bytes - now.plan.peak_bytes
            self.page_fault += f"; without the store the rest of the step takes {more} bytes more than planned"
        program, needs = self._go_on(plan, now.program, fault.at), self._needs_of(plan)
        over = now.met is not None and needs[fault.at] > now.met
        return Now(plan, program, needs, now.met if over else None, taken(fault, now.program, program.taken_up))

    def _with_less(self, plan: Plan, program: Program, at: int, budget_bytes: int) -> Rest | None:
        """When the budget has fallen: the plan that holds no more from there on, or as little more as was found; None
        where the step goes on as it is."""
        begin = time.perf_counter()
        lost = frozenset() if self._pages is None else self._pages.settle()
        if self._pages is not None and self._pages.failed:
            self.page_fault = self.page_fault or A_TRANSFER
        try:
            now = self._rest(plan, at, budget_bytes - self.beside_bytes, lost)
            if now is not None:
                following, needs = self._go_on(now, program, at), self._needs_of(now)
                return Rest(now, following, needs, budget_bytes, time.perf_counter() - begin)
        except Exception as error:
            if lost:
                raise
            # Nothing is lost, and updates may have been made: the step goes on as it was.
            why = f"{type(error).__name__}: {error}"
            needs_bytes = self._needs_of(plan)[at]
            self.falls.append(Fall(budget_bytes, needs_bytes, time.perf_counter() - begin, failed=why))
            return None
        raise not_back(A_TRANSFER)

    def _rest(self, plan: Plan, at: int, limit_bytes: int, lost: frozenset[int]) -> Plan | None:
        """The rest of the step. Once a transfer has failed, without the store if that can be; what cannot be recomputed
        may still be whole there."""
        failed = self._pages is not None and self._pages.failed
        for use_store in (False, True) if failed else (True,):
            now = least_rest(self.known.task, plan, at, limit_bytes, lost=lost, use_store=use_store)
            if now is not None:
                self.known.validator.check(now)
                return now
        return None

    def _go_on(self, plan: Plan, program: Program, at: int) -> Program:
        """The program for the rest of a plan, built as the one that stops there."""
        return self._build(plan, program.how, start=at)

    def _needs_of(self, plan: Plan) -> list[int]:
        return [n_bytes + self.beside_bytes for n_bytes in bytes_from(self.graph, plan)]

    @cached_property
    def _needs(self) -> list[int]:
        return self._needs_of(self.plan)
