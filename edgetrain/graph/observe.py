"""What runs while a step is captured: the Python functions that were called, and what they could have read by name.

In:  `with observed() as seen:` around the model, the loss and the backward pass.
Out: `Observed`: the code that ran, the names in it, the files that it read, and calls that no later step makes: of
     clocks, of the system's randomness, of seeds.

The interpreter's profile hook sees every call. The recorder turns it off inside each kernel call (`paused`), where
only PyTorch's own tracing runs. Where another profiler is already installed nothing can be observed; `complete` is then
False, and everything that can be reached counts as read.
"""

from __future__ import annotations

import gc
import io
import random
import re
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from edgetrain.graph.files import Opened, Stamp, moves, opened, stop_noting
from edgetrain.graph.installed import installed

_OWN = str(Path(__file__).parent)
_TRACING = ("torch._library", "torch._subclasses", "torch._ops", "torch.utils._python_dispatch")
_IDENTIFIER = re.compile(r"[^\W\d]\w*")
_LONGEST_TEXT = 2000  # a longer constant is a text, not a name
# Reads attributes or variables by names that stand nowhere in the code.
_BY_ANY_NAME = {"getattr", "vars", "globals", "locals", "eval", "exec", "dir"}
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
_OTHER_CLOCKS = {("posix", "times"), ("posix", "getloadavg"), ("resource", "getrusage")}  # fmt: skip
_CLOCK_METHODS = {"datetime.now", "datetime.utcnow", "datetime.today", "date.today"}
_SYSTEM_RANDOMNESS = {"urandom", "getrandom"}
_SEEDS = {"Generator.manual_seed", "Generator.seed"}

_SEED = random.Random.seed.__code__
_BACKWARD = torch.autograd.backward.__code__

Code = tuple[str, int, str]  # file, first line, qualified name


@dataclass
class Observed:
    """
    complete:    no other profiler was in the way
    codes:       what ran
    names:       the identifiers in it; own_names: in the user's own part of it
    scopes:      the names in the code of each module, by its name
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
        return {**own, **names, "codes": sorted(self.codes)}

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Observed:
        codes = {(file, line, name) for file, line, name in data["codes"]}
        scopes = {module: set(names) for module, names in data["scopes"].items()}
        files = {file: None if at is None else tuple(at) for file, at in data["files"].items()}
        return cls(
            data["complete"], codes, set(data["names"]), set(data["own_names"]), scopes, data["by_any_name"],
            data["once"], files, data["reads_streams"],
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

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if frame.f_code is _SEED and frame.f_locals.get("a") is None and _called_by_own(frame):
                self.seen.once["seeds a generator from the system's randomness"] = "give it a seed"
            if frame.f_code not in self._known:
                self._known.add(frame.f_code)
                self._note(frame)
        elif event == "c_call":
            self._note_builtin(frame, argument)

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
            self.seen.by_any_name |= not names.isdisjoint(_ATTRIBUTES_BY_ANY_NAME)
            if "datetime64" in names and not names.isdisjoint(("now", "today")):
                self.seen.once["reads the clock (datetime64)"] = "pass the time in the batch, as a tensor"

    def _note_builtin(self, frame: types.FrameType, function: Any) -> None:
        name, module = function.__name__, frame.f_globals.get("__name__", "")
        qualified = getattr(function, "__qualname__", name)
        own = not installed(module) and not _of_the_tracing(frame.f_code, module)
        if name in _BY_ANY_NAME and own:
            self.seen.by_any_name = True
        elif (own and _is_clock(function, name, qualified)) or name == "generate_time_safe":  # of uuid
            self.seen.once[f"reads the clock ({name})"] = "pass the time in the batch, as a tensor"
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


@contextmanager
def observed() -> Iterator[Observed]:
    """Observe the calls of this thread within the block."""
    profile = _Profile()
    other = sys.getprofile()
    profile.seen.complete = other is None or isinstance(other, types.FunctionType | types.MethodType)
    with opened() as files:
        collecting = _WhileCollecting(profile, files)
        try:
            gc.callbacks.insert(0, collecting.begins)
            gc.callbacks.append(collecting.ends)
            if profile.seen.complete:
                sys.setprofile(profile)
            yield profile.seen
        finally:
            if profile.seen.complete:
                sys.setprofile(other)
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
