"""What runs while a step is captured: the Python functions that were called, and what they could have read by name.

In:  `with observed() as seen:` around the model, the loss and the backward pass.
Out: `Observed`: the code that ran, the names in it, the files that it read, and calls that no later step makes: of
     clocks, of the system's randomness, of seeds.

The interpreter's profile hook sees every call. The recorder turns it off inside each kernel call (`paused`), where
only PyTorch's own tracing runs. Another profiler is put aside meanwhile. Where it cannot be, nothing can be observed;
`complete` is then False, and everything that can be reached counts as read.
"""

from __future__ import annotations

import cProfile
import datetime
import dis
import functools
import gc
import importlib
import importlib.util
import inspect
import io
import random
import re
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from edgetrain.graph.capture.files import Opened, Stamp, moves, opened, stop_noting
from edgetrain.graph.capture.installed import installed

_OWN = str(Path(__file__).parent)
_TRACING = ("torch._library", "torch._subclasses", "torch._ops", "torch.utils._python_dispatch")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_IMPORT_NAME = dis.opmap["IMPORT_NAME"]
ANY_MODULE = "*"  # it is looked up by a name that is computed; after the name of a package: within that
_LONGEST_TEXT = 2000  # a longer constant is a text, not a name
# Reads attributes or variables by names that stand nowhere in the code.
_BY_ANY_NAME = {"vars", "globals", "locals", "eval", "exec", "dir"}
_BY_A_NAME = {"getattr", "hasattr"}  # which may be written there
_SIMPLE = {"LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"}
_ATTRIBUTES_BY_ANY_NAME = {
    "__dict__", "__getattribute__", "attrgetter", "getmembers", "__getstate__", "asdict", "astuple", "fields",
    "replace", "deepcopy",
}  # fmt: skip
_READS_STREAMS = {
    "read", "read1", "readall", "readinto", "readinto1", "readline", "readlines", "peek", "seek", "getvalue",
    "getbuffer",
}  # fmt: skip
_LOOKS_AT_FILES = {"stat", "lstat", "access"}
_CLOCKS = {
    "time",
    "time_ns",
    "perf_counter",
    "perf_counter_ns",
    "monotonic",
    "monotonic_ns",
    "process_time",
    "process_time_ns",
    "thread_time",
    "thread_time_ns",
    "clock_gettime",
    "clock_gettime_ns",
    "localtime",
    "gmtime",
    "ctime",
    "strftime",
    "asctime",
}
_OTHER_CLOCKS = {("posix", "times"), ("posix", "getloadavg"), ("resource", "getrusage")}
_CLOCK_METHODS = {"datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
_PASS_THE_TIME = "pass the time in the batch, as a tensor"
_TIMES = (int, float, datetime.date, datetime.time, datetime.timedelta, time.struct_time)
_NO_CLOCKS = ("torch", "numpy", __name__.partition(".")[0])
_GENERATORS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_SYSTEM_RANDOMNESS = {"urandom", "getrandom"}
_SEEDS = {"Generator.manual_seed", "Generator.seed"}

_SEED = random.Random.seed.__code__
_BACKWARD = torch.autograd.backward.__code__
_IMPORT_MODULE = importlib.import_module.__code__

Code = tuple[str, int, str]  # file, first line, qualified name


@dataclass
class Observed:
    """
    complete:    no other profiler was in the way
    codes:       what ran
    names:       the identifiers in it; own_names: in the user's own part of it
    scopes:      the names in the code of each module, by its name
    modules:     what functions of the user's own import
    by_any_name: code of the user's own reads attributes by names that it computes
    once:        calls that a captured step does not make again, in words, and what to do instead
    files:       what was read, and when each was written last
    reads_streams: code reads from an open file, or from a text in memory
    """

    complete: bool = True
    codes: set[Code] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    own_names: set[str] = field(default_factory=set)
    scopes: dict[str, set[str]] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    by_any_name: bool = False
    once: dict[str, str] = field(default_factory=dict)
    files: dict[str, Stamp] = field(default_factory=dict)
    reads_streams: bool = False

    def merge(self, other: Observed) -> None:
        self.complete &= other.complete
        self.codes |= other.codes
        self.names |= other.names
        self.own_names |= other.own_names
        for module, names in other.scopes.items():
            self.scopes.setdefault(module, set()).update(names)
        self.modules |= other.modules
        self.by_any_name |= other.by_any_name
        self.once.update(other.once)
        self.files.update(other.files)
        self.reads_streams |= other.reads_streams

    def note_files(self, opened: Opened) -> None:
        self.files.update(opened.files)
        for what in opened.started:
            self.once[what] = "do it between steps"
        for file in filter(moves, opened.files):
            self.once[f"reads {file}"] = "pass what it says in the batch"

    def to_plain(self) -> dict[str, Any]:
        """Lists, texts and numbers; the inverse of `from_plain`."""
        scopes = {module: sorted(names) for module, names in self.scopes.items()}
        own = {"complete": self.complete, "by_any_name": self.by_any_name, "once": self.once, "files": self.files}
        own |= {"reads_streams": self.reads_streams}
        names = {"names": sorted(self.names), "own_names": sorted(self.own_names), "scopes": scopes}
        names |= {"modules": sorted(self.modules)}
        return {**own, **names, "codes": sorted(self.codes)}

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Observed:
        codes = {(file, line, name) for file, line, name in data["codes"]}
        scopes = {module: set(names) for module, names in data["scopes"].items()}
        files = {file: None if at is None else tuple(at) for file, at in data["files"].items()}
        return cls(
            data["complete"], codes, set(data["names"]), set(data["own_names"]), scopes, set(data["modules"]),
            data["by_any_name"], data["once"], files, data["reads_streams"],
        )  # fmt: skip


def code_of(code: types.CodeType) -> Code:
    return code.co_filename, code.co_firstlineno, code.co_qualname


@cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Every identifier in the code, those within its texts and in the functions that it defines included."""
    names = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_in(constant)
        else:
            names.update(*map(_identifiers, constant if isinstance(constant, tuple | frozenset) else (constant,)))
    return frozenset(names)


def imported_by(code: types.CodeType, scope: dict[str, Any]) -> set[str]:
    """The full names of what functions import, and of what their texts may name; `ANY_MODULE` where a name is
    computed."""
    package = scope.get("__package__") or (
        scope.get("__name__", "") if "__path__" in scope else scope.get("__name__", "").rpartition(".")[0]
    )
    modules = set()
    if _looks_up_modules(names_in(code)):
        modules.add(f"{package.partition('.')[0]}.{ANY_MODULE}" if package else ANY_MODULE)
    for level, name, parts in _imports_in(code):
        above = package.split(".")[: len(package.split(".")) + 1 - level] if level else []
        path = ".".join([*above, *filter(None, [name])])
        modules |= {path[:at] for at in range(len(path)) if path[at] == "."} | {path}
        modules |= {f"{path}.{part}" for part in parts}
    return modules


def _looks_up_modules(names: frozenset[str]) -> bool:
    """In `sys.modules`, and not only itself."""
    return "__import__" in names or ({"sys", "modules"} <= names and "__name__" not in names)


@cache
def _imports_in(code: types.CodeType) -> frozenset[tuple[int, str, tuple[str, ...]]]:
    """Of each import how far above the package it begins, the name, and what is taken from there."""
    imports: set[tuple[int, str, tuple[str, ...]]] = set()
    if _IMPORT_NAME in code.co_code[::2]:
        steps = [step for step in dis.get_instructions(code) if step.opname not in ("EXTENDED_ARG", "CACHE")]
        for level, parts, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opcode == _IMPORT_NAME:
                imports.add((level.argval or 0, step.argval, parts.argval or ()))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            imports |= _imports_in(constant)
        elif isinstance(constant, str) and len(constant) < _LONGEST_TEXT and _DOTTED.fullmatch(constant):
            imports.add((0, constant, ()))
    return frozenset(imports)


@cache
def _name_is_written(code: types.CodeType, at: int) -> bool:
    """`getattr(x, "name")` and not `getattr(x, name)`, at the call at this place."""
    steps = [s for s in dis.get_instructions(code) if s.opname not in ("EXTENDED_ARG", "CACHE", "PRECALL")]
    number = next((n for n, step in enumerate(steps) if step.offset == at), 0)
    count = steps[number].arg if steps[number].opname == "CALL" else 0
    if count not in (2, 3) or number < 4 or any(step.is_jump_target for step in steps[number - count + 2 : number + 1]):
        return False
    name, *default = steps[number - count + 1 : number]
    return name.opname == "LOAD_CONST" and isinstance(name.argval, str) and all(d.opname in _SIMPLE for d in default)


def _identifiers(constant: object) -> list[str]:
    if not isinstance(constant, str) or len(constant) > _LONGEST_TEXT:
        return []
    return _IDENTIFIER.findall(constant)


class _Profile:
    """The profile hook: one call for each Python or C function that begins."""

    def __init__(self) -> None:
        self.seen = Observed()
        self._known: set[types.CodeType] = set()
        self.looked_at: list[object] = []  # files
        self.collecting = False  # garbage, at this moment
        self._clocks: dict[types.FrameType, str] = {}  # calls into packages within which a clock was read

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if frame.f_code is _SEED and frame.f_locals.get("a") is None and _called_by_own(frame):
                self.seen.once["seeds a generator from the system's randomness"] = "give it a seed"
            if frame.f_code is _IMPORT_MODULE:
                name, package = frame.f_locals["name"], frame.f_locals["package"] or ""
                self.seen.modules.add(name if not name.startswith(".") else importlib.util.resolve_name(name, package))
            if frame.f_code not in self._known:
                self._known.add(frame.f_code)
                self._note(frame)
        elif event == "c_call":
            self._note_builtin(frame, argument)
        elif self._clocks and event == "return" and (clock := self._clocks.pop(frame, None)):
            self._note_time(clock, argument)

    def _note(self, frame: types.FrameType) -> None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if _of_the_tracing(code, module):
            return
        names = names_in(code)
        self.seen.codes.add(code_of(code))
        self.seen.names |= names
        if installed(module) != "python":
            self.seen.scopes.setdefault(module, set()).update(names)
        if code is _BACKWARD:
            self.seen.once["calls backward()"] = (
                "return the loss; the step computes the gradients, step.gradients gives them"
            )
        if not installed(module):
            self.seen.own_names |= names
            self.seen.modules |= imported_by(code, frame.f_globals)
            self.seen.by_any_name |= not names.isdisjoint(_ATTRIBUTES_BY_ANY_NAME)
            if "datetime64" in names and not names.isdisjoint(("now", "today")):
                self.seen.once["reads the clock (datetime64)"] = _PASS_THE_TIME

    def _note_builtin(self, frame: types.FrameType, function: Any) -> None:
        name, module = function.__name__, frame.f_globals.get("__name__", "")
        qualified = getattr(function, "__qualname__", name)
        own = not installed(module) and not _of_the_tracing(frame.f_code, module)
        if own and (name in _BY_ANY_NAME or (name in _BY_A_NAME and not _name_is_written(frame.f_code, frame.f_lasti))):
            self.seen.by_any_name = True
        elif (own and _is_clock(function, name, qualified)) or name == "generate_time_safe":  # of uuid
            self.seen.once[f"reads the clock ({name})"] = _PASS_THE_TIME
        elif not own and _is_clock(function, name, qualified):
            if (call := _called_from_own(frame)) is not None:
                self._clocks[call] = name
        elif name in _LOOKS_AT_FILES and function.__module__ == "posix":
            variables = frame.f_locals  # of os.path.exists, Path.stat and their like
            self.looked_at.append(variables.get("path", variables.get("filename", variables.get("self"))))
        elif name in _READS_STREAMS and isinstance(function.__self__, io.IOBase):
            self.seen.reads_streams = True
        elif name in _SYSTEM_RANDOMNESS and function.__module__ in ("posix", "nt"):
            self.seen.once[f"draws from the system's randomness ({name})"] = "draw with torch (torch.rand)"
        elif qualified == "Generator.initial_seed":
            self.seen.once["reads the seed of a generator (initial_seed)"] = "read it before the step"
        elif qualified in _SEEDS:
            self.seen.once["seeds a generator of random numbers"] = "seed before the step, with torch.manual_seed"

    def _note_time(self, clock: str, result: object) -> None:
        """A package read a clock, and gives the user's code what may be a time; a log and a progress bar do not."""
        if isinstance(result, _TIMES) and not isinstance(result, bool):
            self.seen.once[f"reads the clock ({clock})"] = _PASS_THE_TIME


def _called_from_own(frame: types.FrameType) -> types.FrameType | None:
    """The call from the user's own code into packages within which this one is; not of torch, of a generator's items
    and of what we call."""
    call: types.FrameType | None = frame
    while call is not None:
        module, caller = call.f_globals.get("__name__"), call.f_back
        if installed(module).startswith(_NO_CLOCKS) or call.f_code.co_flags & _GENERATORS or caller is None:
            return None
        if not installed(caller.f_globals.get("__name__")):
            return call
        call = caller
    return None


def _is_clock(function: Any, name: str, qualified: str) -> bool:
    of_time = name in _CLOCKS and function.__module__ == "time"
    return of_time or qualified in _CLOCK_METHODS or (function.__module__, name) in _OTHER_CLOCKS


def _called_by_own(frame: types.FrameType) -> bool:
    """A method of a random generator, called there or where the generator is created."""
    caller = frame.f_back
    while caller is not None and caller.f_globals is frame.f_globals:
        caller = caller.f_back
    return caller is not None and not installed(caller.f_globals.get("__name__"))


def _of_the_tracing(code: types.CodeType, module: str) -> bool:
    return code.co_filename.startswith(_OWN) or module.startswith(_TRACING)


class ProfilerWarning(UserWarning):
    """A profiler is in the way of observing a capture."""


_warned: list[Any] = []


def _put_aside(other: Any) -> Callable[[], object] | None:
    """A function that has the profiler go on, which does not see what is observed; None where only it could say how."""
    if isinstance(other, cProfile.Profile):
        other.disable()

        def go_on() -> None:
            sys.setprofile(None)
            other.enable()

        return go_on
    of_python = isinstance(vars(type(other)).get("__call__"), types.FunctionType)
    if other is None or of_python or isinstance(other, types.FunctionType | types.MethodType | functools.partial):
        return lambda: sys.setprofile(other)
    return None


@contextmanager
def observed() -> Iterator[Observed]:
    """Observe the calls of this thread within the block."""
    profile = _Profile()
    put_back = _put_aside(sys.getprofile())
    profile.seen.complete = put_back is not None
    if put_back is None and not _warned:
        _warned.append(sys.getprofile())
        warnings.warn(
            f"a profiler ({type(sys.getprofile()).__name__}) is running, and what the model and the loss call "
            "cannot be observed beside it: clocks that they read are not seen, and a change of anything leads to a new "
            "capture. Stop it for et.prepare and for the first step after a change.",
            ProfilerWarning, stacklevel=2,
        )  # fmt: skip
    with opened() as files:
        collecting = _WhileCollecting(profile, files)
        try:
            gc.callbacks.insert(0, collecting.begins)
            gc.callbacks.append(collecting.ends)
            if profile.seen.complete:
                sys.setprofile(profile)
            yield profile.seen
        finally:
            if put_back is not None:
                put_back()
            collecting.remove()
            for path in profile.looked_at:
                files.note_path(path)
            profile.seen.note_files(files)


def stop_observing() -> None:
    """Where the end of a block was interrupted."""
    stop_noting()
    for callback in list(gc.callbacks):
        if isinstance(collecting := getattr(callback, "__self__", None), _WhileCollecting):
            collecting.remove()
    if isinstance(sys.getprofile(), _Profile):
        sys.setprofile(None)


class _WhileCollecting:
    """Garbage is of anybody's: what its finalizers and the callbacks of others call and read is not of the model or
    the loss."""

    def __init__(self, profile: _Profile, files: Opened) -> None:
        self._profile, self._files, self._thread = profile, files, threading.get_ident()

    def begins(self, phase: str, _info: object) -> None:
        """The first of the callbacks."""
        if phase == "start" and threading.get_ident() == self._thread:
            self._files.paused = True
            if sys.getprofile() is self._profile:
                sys.setprofile(None)
                self._profile.collecting = True

    def ends(self, phase: str, _info: object) -> None:
        """The last of them."""
        if phase == "stop" and threading.get_ident() == self._thread:
            self._files.paused = False
            if self._profile.collecting:
                self._profile.collecting = False
                sys.setprofile(self._profile)

    def remove(self) -> None:
        gc.callbacks[:] = [one for one in gc.callbacks if one not in (self.begins, self.ends)]


class paused:  # noqa: N801 — a context manager, entered once for each kernel call: a class takes a third of the time
    """Not observed within: PyTorch's tracing of one kernel call."""

    def __enter__(self) -> None:
        profile = sys.getprofile()
        self._profile = profile if isinstance(profile, _Profile) else None
        if self._profile is not None:
            sys.setprofile(None)

    def __exit__(self, *_: object) -> None:
        if self._profile is not None:
            sys.setprofile(self._profile)
