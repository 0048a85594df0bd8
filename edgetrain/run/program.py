"""The program of a step, and where it stopped when something interrupted it.

In:  an error that came out of `Program.run`, with its traceback.
Out: the place in the schedule where the step goes on, and the variables of its frame; or nothing of them any more
     (`free_activations`), so that the activations of a step that is over are freed.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType, TracebackType
from typing import Any

from edgetrain.errors import InternalError
from edgetrain.graph.ir import Op
from edgetrain.pagefile import PageFault
from edgetrain.run.adaptive import BudgetFell

VERSION = "version"  # the variable with the version of a tensor before an op that changes it
PIECE = "piece"  # the variable with the number of the piece that runs, of a program that runs in pieces
STEP_OF = "<step of "  # how the file name of a program begins

# A line of a program. With a number: the line asks the watch, and the number is the place in the schedule.
Line = tuple[int | None, str]


@dataclass(frozen=True)
class How:
    """
    look:     call `look(op number)` before each op, and after it `look(op number, all variables of the step, what it
              made)`.
    rehearse: leave the updates out; everything else happens as it will in the step.
    watched:  call `watch(place in the schedule)` before each op.
    timed:    call `look(place)` before each op and `look(~place)` after it, and the same around each wait for the
              store; views compute nothing and are left out.
    """

    look: bool = False
    rehearse: bool = False
    watched: bool = False
    timed: bool = False


@dataclass(frozen=True)
class Program:
    """
    held:    the persistent tensors that `run` takes in `held`, in order (parameters, buffers, externals, constants).
    updates: the update ops of the graph, in the order of `states` and `fresh`; none where they are left out.
    random:  the step draws random numbers.
    allocates_late: an update needs memory of its own, so it could fail after another one was made.
    taken_up: the variables that `run` takes from `rest`, where it goes on with a step that has begun.
    stops: for each line of the program (of one that goes on with a step: for each piece) where the schedule goes on
    after something interrupted that line.
    """

    run: Callable[..., Any]
    source: str
    held: tuple[int, ...]
    updates: tuple[Op, ...]
    random: bool
    allocates_late: bool
    taken_up: tuple[str, ...] = ()
    how: How = How()
    stops: tuple[Stop, ...] = ()


@dataclass(frozen=True)
class Stop:
    """at: the place in the schedule that comes next. target: a tensor that the action there changes, where it can not
    be run a second time; it has happened if the tensor has another version than the one in `VERSION`."""

    at: int
    target: int | None = None


@dataclass(frozen=True)
class Stopped:
    """Where a program stopped, and what its variables were."""

    stop: Stop
    variables: dict[str, Any]

    @property
    def happened(self) -> bool:
        target = self.stop.target
        return target is not None and self.variables[f"t{target}"]._version != self.variables.get(VERSION)


def is_comment(line: str) -> bool:
    return line.startswith("    #")


def in_pieces(
    table: dict[str, Any], lines: Sequence[Line], code: Callable[[str], str | CodeType]
) -> Callable[..., Any]:
    """As the whole, without compiling what was compiled before. The first line is the head, the last the result.

    table: the globals. code: a line → what runs it: compiled, or as text. Then each line is compiled when it runs and
    dropped: Python takes tens of kilobytes a line to compile a whole step, hundreds of megabytes for a deep net.
    """
    head, *body, (_, result) = lines
    names = head[1].partition("(")[2].rstrip("):").split(", ")
    lines = [(at, line) for at, line in body if not is_comment(line)]
    pieces = [(at, code(line) if at is None else None) for at, line in lines]
    value = code(result.replace("return ", "result = "))

    numbered, n_pieces, number = tuple(enumerate(pieces)), len(pieces), PIECE
    run, as_dict, pairs = exec, dict, zip

    def step(*given: Any) -> Any:
        variables = as_dict(pairs(names, given, strict=True))
        watch, rest = variables["watch"], variables["rest"]
        variables.update(rest)
        rest.clear()
        for variables[number], (at, piece) in numbered:
            if piece is None:
                watch(at)
            else:
                run(piece, table, variables)
        variables[number] = n_pieces
        run(value, table, variables)
        return variables["result"]

    # The kernels are its globals, as they are those of the whole; and its code is its own, so that its frame can be
    # told from those of others.
    return FunctionType(step.__code__.replace(), table, "step", None, step.__closure__)


def taken(error: BaseException, program: Program, names: Sequence[str]) -> dict[str, Any]:
    """The variables of the program that stopped with the error."""
    trace = _frame(error, program)
    if trace is None:
        raise InternalError("a step stopped outside of its program")
    there = _variables(trace)
    return {name: there[name] for name in names}


def _frame(error: BaseException, program: Program) -> TracebackType | None:
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not program.run.__code__:
        trace = trace.tb_next
    return trace


def failed(error: BaseException, program: Program) -> tuple[int, TracebackType] | None:
    """Where in the schedule the error stopped the program, and its traceback from there on."""
    trace = _frame(error, program)
    return None if trace is None else (program.stops[_line(trace)].at, trace)


def _line(trace: TracebackType) -> int:
    """The line of a program that its frame was at, or the piece."""
    in_pieces = trace.tb_frame.f_code.co_filename == __file__
    line: int = _variables(trace).get(PIECE, 0) if in_pieces else trace.tb_lineno - 1
    return line


def _variables(trace: TracebackType) -> dict[str, Any]:
    there = trace.tb_frame.f_locals
    in_pieces = trace.tb_frame.f_code.co_filename == __file__
    values: dict[str, Any] = there.get("variables", {}) if in_pieces else there
    return values


def stopped(error: BaseException | None, program: Program) -> Stopped | None:
    """Where the program stopped, with this error or with one during which it was raised. None where it did not."""
    while error is not None:
        trace = _frame(error, program)
        if trace is not None:
            return Stopped(program.stops[_line(trace)], dict(_variables(trace)))
        error = error.__context__
    return None


def free_activations(error: BaseException) -> None:
    """Of the activations that the frames of a step still hold, which the error has stopped; and those that something
    else had stopped before, to go on."""
    seen: BaseException | None = error
    while seen is error or isinstance(seen, BudgetFell | PageFault):
        trace = seen.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            # Of no other frame: to look at its variables keeps a copy of them there, which nothing clears.
            if code.co_filename == __file__ and "variables" in code.co_varnames:
                trace.tb_frame.f_locals.get("variables", {}).clear()
            trace = trace.tb_next
        traceback.clear_frames(seen.__traceback__)
        for frame, _ in traceback.walk_tb(seen.__traceback__):
            if frame.f_code.co_filename.startswith(STEP_OF):
                _ = frame.f_locals  # which drops what a look at them before has kept
        seen = seen.__context__
