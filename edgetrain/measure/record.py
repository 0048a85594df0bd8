"""The run folder: one folder, and one record, for every command that runs something.

    runs/train-20260131-235959/
      record.json      what ran, where and how it went (`Record`)
      metrics.jsonl    one JSON object a line, in the order of the events
      checkpoints/     what a training run resumes from

In: the command and what it measured. Out: `record.json`, written whole or not at all.

Promised: `RunFolder.load` gives back a record equal to the one saved; a value says whether it was measured,
derived or modelled, and one that could not be had stays missing. What is read may come from anywhere: it is
plain JSON, every field is checked, and a bad one is a `UserError` that names the file and the field.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Literal, cast, get_args

import torch

from edgetrain.errors import Infeasible, UserError
from edgetrain.files import TEMPORARY, checked_path, explained, refuse_links, writable, write_text
from edgetrain.machine import processor_name, usable_cores
from edgetrain.saved import Fields, is_finite, read_object

SCHEMA = 2  # 1 had no intervals and no notes
Origin = Literal["measured", "derived", "modelled", "unavailable"]
Status = Literal["running", "finished", "stopped", "failed"]
Scalar = int | float | str | bool

_LOCK = ".lock"
_BARE = {_LOCK, "config.json", "record.json", "metrics.jsonl"}  # what a run has written before its first step


@dataclass(frozen=True)
class Value:
    """One number or text of a summary, with its unit and where it came from.

    low, high: the interval that holds the true value (95 % unless the name says otherwise), where one is known.

    Promised: `value` is None exactly when `origin` is "unavailable"; a number is finite; of an interval both ends are
    there or none is, and the value lies in it.
    """

    value: Scalar | None
    unit: str
    origin: Origin
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if not is_finite(self.value) or self.origin not in get_args(Origin) or self._is_missing_wrongly():
            raise UserError(
                "a value of a summary does not say where it came from",
                expected=f"a finite value that is {', '.join(get_args(Origin)[:3])}, or None that is unavailable",
                received=f"{self.value!r:.60} that is {self.origin}",
            )
        if not self._is_in_its_interval():
            raise UserError(
                "a value of a summary has an impossible interval",
                expected="two finite numbers and a value between them, or no interval",
                received=f"{self.value!r:.60} from {self.low!r:.60} to {self.high!r:.60}",
            )

    def _is_missing_wrongly(self) -> bool:
        return (self.value is None) != (self.origin == "unavailable")

    def _is_in_its_interval(self) -> bool:
        if self.low is None or self.high is None:
            return self.low is None and self.high is None
        if isinstance(self.value, bool | str) or self.value is None:
            return False
        return is_finite(self.low) and is_finite(self.high) and self.low <= self.value <= self.high


@dataclass(frozen=True)
class Machine:
    """Where a run happened. None: this machine does not say."""

    cpu: str | None
    cores: int | None
    usable_cores: int | None
    memory_bytes: int | None
    os: str
    architecture: str
    torch_threads: int
    accelerator: str | None


@dataclass(frozen=True)
class Versions:
    """What a run was made with."""

    edgetrain: str
    python: str
    torch: str
    numpy: str


@dataclass(frozen=True)
class Record:
    """What a run was and how it went.

    created:  UTC, ISO 8601.
    commit:   of the checkout the package runs from; None outside a checkout. `dirty`: it had local changes.
    summary:  name → Value.
    files:    what it is → its path inside the run folder, with forward slashes.
    notes:    what a reader of the summary must know, as sentences.
    """

    created: str
    command: tuple[str, ...]
    versions: Versions
    commit: str | None
    dirty: bool | None
    machine: Machine
    status: Status = "running"
    summary: Mapping[str, Value] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for name in self.files.values():
            checked_name(name)


class Taken(UserError):
    """Another process works in the folder."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. Holds a path and nothing else: every state is in the files."""

    path: Path

    @staticmethod
    def create(path: Path | str, *, begun: bool = False) -> RunFolder:
        """Make the folder, or take an empty one or one that is a run folder already; refuse any other.

        begun: take one too in which a training run was killed before it had a record.
        """
        folder = RunFolder(checked_path(path, "folder"))
        folder.refuse_links()
        with explained(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            foreign = [entry.name for entry in folder.path.iterdir() if not _ours(entry.name)]
        if foreign and not folder.record_file.exists() and not (begun and folder.is_begun):
            raise UserError(
                f"{folder.path} is not a run folder and is not empty",
                expected="a new or empty folder, or one with a record.json",
                received=f"a folder with {foreign[0]}" + (f" and {len(foreign) - 1} more" if foreign[1:] else ""),
                next_step="name another folder, or leave the name out to get a new one under runs/",
            )
        return folder

    @property
    def record_file(self) -> Path:
        return self.path / "record.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def refuse_links(self) -> None:
        """Nothing of a run is written through a link that lies in its folder."""
        for folder in (self.path, self.checkpoints):
            refuse_links(folder)

    @property
    def is_begun(self) -> bool:
        """There is a folder, and nothing in it but what a training run writes; perhaps nothing at all."""
        with contextlib.suppress(OSError, UserError):
            names = {entry.name for entry in self.path.iterdir()}
            config = self.path / "config.json"
            ours = config.name not in names or not config.stat().st_size or "model" in read_object(config).values
            return ours and all(name in _BARE | {self.checkpoints.name} or _ours(name) for name in names)
        return False

    def save(self, record: Record) -> None:
        """Write the record: after a crash the file holds the old record or this one, never a part."""
        text = json.dumps(asdict(record), indent=2, allow_nan=False) + "\n"
        write_text(self.record_file, text)

    def load(self) -> Record:
        """Read the record back; a missing, damaged or foreign one is a UserError."""
        return _record(read_object(self.record_file))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder: a second process that asks for it meanwhile gets a UserError.

        The lock belongs to the process, so a killed one leaves nothing behind that has to be cleared.
        """
        self.refuse_links()
        with explained(self.path):
            file = writable(self.path / _LOCK, "ab")
        with file:
            if not _flock(file.fileno()):
                raise Taken(
                    f"another process is running in {self.path}",
                    next_step="wait for it, stop it, or name another folder",
                )
            yield


@contextlib.contextmanager
def removed_if_interrupted(path: Path) -> Iterator[None]:
    """Remove the run folder that the block created on Ctrl-C or an error, unless the run has results by then."""
    missing = [folder for folder in (path, path.parent) if not folder.exists()]
    try:
        yield
    except Taken:
        raise  # what is there is the other's
    except (KeyboardInterrupt, UserError, Infeasible, MemoryError, RuntimeError):  # PyTorch's for want of memory too
        if path in missing and _is_bare(path):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty
                missing[-1].rmdir()
        raise


def default_path(command: str, *, root: Path | str = "runs", now: datetime | None = None) -> Path:
    """A path that does not exist yet: runs/<command>-<YYYYmmdd-HHMMSS>, then …-2, …-3 within one second."""
    name = f"{command}-{now or datetime.now():%Y%m%d-%H%M%S}"
    path, count = Path(root) / name, 1
    while path.exists():
        count += 1
        path = Path(root) / f"{name}-{count}"
    return path


def new_record(command: Sequence[str], **files: str) -> Record:
    """A record of a run that begins now, on this machine; `files` as in Record.files."""
    commit, dirty = _commit()
    created = datetime.now(UTC).isoformat(timespec="seconds")
    return Record(created, tuple(command), _versions(), commit, dirty, this_machine(), files=files)


def this_machine() -> Machine:
    """Describe the machine this process runs on."""
    memory = None
    with contextlib.suppress(ValueError, OSError, AttributeError):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu=processor_name(),
        cores=os.cpu_count(),
        usable_cores=usable_cores(),
        memory_bytes=memory,
        os=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        torch_threads=torch.get_num_threads(),
        accelerator=torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    )


def checked_name(name: str) -> str:
    """Give back a file name that stays inside its folder; any other is a UserError."""
    path, foreign = PurePosixPath(name), PureWindowsPath(name)
    leaves = path.is_absolute() or foreign.is_absolute() or foreign.drive or ".." in foreign.parts
    if leaves or not path.parts or "\\" in name or not name.isprintable():
        raise UserError(
            "a file name in a record leaves its folder",
            expected="a relative path with forward slashes and without ..",
            received=repr(name),
        )
    return name


# Reading what is not trusted


def _record(data: Fields) -> Record:
    data.schema(SCHEMA)
    return Record(
        created=data.get("created", str),
        command=data.texts("command"),
        versions=_versions_from(data.inside("versions")),
        commit=data.maybe("commit", str),
        dirty=data.maybe("dirty", bool),
        machine=_machine_from(data.inside("machine")),
        status=cast(Status, data.choice("status", get_args(Status))),
        summary=_summary(data.inside("summary")),
        files=_files(data.inside("files")),
        notes=data.texts("notes") if "notes" in data.values else (),
    )


def _versions_from(data: Fields) -> Versions:
    return Versions(*(data.get(name, str) for name in ("edgetrain", "python", "torch", "numpy")))


def _machine_from(data: Fields) -> Machine:
    return Machine(
        cpu=data.maybe("cpu", str),
        cores=data.maybe("cores", int),
        usable_cores=data.maybe("usable_cores", int),
        memory_bytes=data.maybe("memory_bytes", int),
        os=data.get("os", str),
        architecture=data.get("architecture", str),
        torch_threads=data.get("torch_threads", int),
        accelerator=data.maybe("accelerator", str),
    )


def _summary(data: Fields) -> dict[str, Value]:
    return {name: _value(data.inside(name)) for name in data.values}


def _value(data: Fields) -> Value:
    value = data.values.get("value", ...)
    if value is not None and not isinstance(value, Scalar):
        raise data.wrong("value", "a number, text, true, false or null")
    unit, origin = data.get("unit", str), cast(Origin, data.choice("origin", get_args(Origin)))
    low, high = (data.maybe(name, float) if name in data.values else None for name in ("low", "high"))
    try:
        return Value(value, unit, origin, low, high)
    except UserError as error:
        raise data.wrong("value", error.expected or "", error.received or "") from error


def _files(data: Fields) -> dict[str, str]:
    names = {name: data.get(name, str) for name in data.values}
    for name, path in names.items():
        try:
            checked_name(path)
        except UserError as error:
            raise data.wrong(name, error.expected or "", repr(path)[:200]) from error
    return names


# The machine


def _versions() -> Versions:
    def version(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    return Versions(version("edgetrain"), platform.python_version(), version("torch"), version("numpy"))


def _commit() -> tuple[str | None, bool | None]:
    """The commit of the checkout that holds this package, and whether the package was changed since."""
    # An installed copy can lie in somebody else's checkout (in a virtual environment): being tracked decides.
    if _git("ls-files", "--error-unmatch", "errors.py") is None:
        return None, None
    commit, changes = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--", ".")
    return commit, None if changes is None else changes != ""


def _git(*arguments: str) -> str | None:
    # Variables such as GIT_DIR, set inside a git hook, would point at another checkout.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(Path(__file__).resolve().parent.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


def _is_bare(path: Path) -> bool:
    with contextlib.suppress(OSError):
        sizes = {entry.name: entry.stat().st_size for entry in path.iterdir()}
        return all(name in _BARE or _ours(name) for name in sizes) and not sizes.get("metrics.jsonl")
    return False


def _ours(name: str) -> bool:
    return name.startswith(TEMPORARY) or name == _LOCK


def _flock(handle: int) -> bool:
    """Lock an open file for this process; False when another one has it. Without file locks: True."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks (some network mounts)
        return True
    return True
