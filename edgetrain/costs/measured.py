"""Measure what every op of a graph costs on this machine.

In:  a graph. Out: `Costs` with seconds and requests for memory of each op, as they are here and now.

The ops run one by one, in the arena, so that it takes no more memory than the hungriest of them and keeps none; where
there is no arena, in a process of its own. Each different call is timed once a round, over several rounds, so that a
disturbance of the machine meets all of them alike; the median over the rounds counts. Results are kept on disk by call
and machine (`$EDGETRAIN_CACHE/costs`), so that the next model with the same layers is quick.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from edgetrain import cache, child, files, ranges
from edgetrain.arguments import checked
from edgetrain.costs import calls
from edgetrain.costs.kernels import fastest
from edgetrain.costs.store import measure_store
from edgetrain.costs.table import WAYS, Costs, Kernels, OpCost, Run, Way, run_from_json, run_to_json
from edgetrain.errors import UserError
from edgetrain.graph.capture.modes import Surroundings
from edgetrain.graph.ir import Graph, Op, from_json, to_json
from edgetrain.measure.sensors.room import require_room
from edgetrain.native import arena, malloc, reports
from edgetrain.native.signals import raised_by_handler
from edgetrain.native.surely import surely
from edgetrain.ops.call import without_autocast
from edgetrain.ops.entry import TRUSTED, entry_of
from edgetrain.ops.update import overwrites_gradient

T = TypeVar("T")
ROUNDS = 7
LEAST_TIMED_S = 100e-6  # a shorter call is repeated within a round
MOST_REPEATS = 20
MAX_KEPT = 20_000  # calls in the file of one machine: it is read whole


@checked()
def measure_costs(
    graph: Graph,
    *,
    rounds: int = ROUNDS,
    use_cache: bool = True,
    progress: child.Progress | None = None,
    most_bytes: int | None = None,
    page_to: str | Path | None = None,
    live: calls.Live | None = None,
) -> Costs:
    """What the ops of the graph cost on this machine. `progress` is told how many of how many measurements are done.

    page_to: a folder on the storage that tensors may be paged to; what that costs is measured too.

    most_bytes: what measuring may take. An op that takes more by its arguments and results alone is not run; no plan
    within as many bytes can run it so either, and its time is that of another way to run it, or 0.

    live: parameters and buffers by their storages in the graph: no copies of them are made to measure what reads them.
    """
    if rounds not in ranges.ROUNDS or rounds < 1:
        raise UserError(
            "costs are measured over at least one round", expected=str(replace(ranges.ROUNDS, low=1)),
            received=ranges.shown(rounds),
        )  # fmt: skip
    rows = _rows(graph, range(len(graph.ops)))
    about = machine()
    known = _known(graph, rows, rounds, use_cache=use_cache, progress=progress, most_bytes=most_bytes, live=live or {})
    ops = tuple(_cost(graph, op, row, known) for op, row in zip(graph.ops, rows.values(), strict=True))
    store = None if page_to is None else measure_store(files.checked_path(page_to, "folder"), use_cache=use_cache)
    return Costs(graph.key, "measured", ops, about, store)


def measure_kernels(graph: Graph, exact: Literal["bitwise", "rounding", "no"], *, use_cache: bool = True) -> Kernels:
    """The fastest kernels of the ops that have several; no other op is measured."""
    several = [n for n, op in enumerate(graph.ops) if len(entry_of(op.kind).kernels) > 1]
    rows = _rows(graph, several)
    if not any(call.kernel for row in rows.values() for _, call, _ in row):
        return {}
    known = _known(graph, rows, ROUNDS, use_cache=use_cache, progress=None, most_bytes=None, live={})
    nothing = OpCost({"first": Run(0.0)})
    ops = (_cost(graph, op, rows[n], known) if n in rows else nothing for n, op in enumerate(graph.ops))
    return fastest(graph, Costs(graph.key, "measured", tuple(ops)), exact).kernels


_Row = list[tuple[Way, calls.Call, str]]  # way, call, key


def _rows(graph: Graph, numbers: Iterable[int]) -> dict[int, _Row]:
    """Each op in each way, by each kernel."""
    scratch = overwrites_gradient(graph)
    return {
        n: [(way, call, calls.key(graph, call)) for way, call in calls.by_all_kernels(graph, n, scratch)]
        for n in numbers
    }


def _known(
    graph: Graph, rows: Mapping[int, _Row], rounds: int, *, use_cache: bool, progress: child.Progress | None,
    most_bytes: int | None, live: calls.Live,
) -> dict[str, Run]:  # fmt: skip
    """What these calls take, as far as they may be run; measured where it is not known."""
    file = _file(machine()) if use_cache else None
    known = _read(file)
    wanted = {key: call for row in rows.values() for _, call, key in row}
    missing = {
        key
        for key, call in wanted.items()
        if key not in known and (most_bytes is None or _needs(graph, call, live, most_bytes) <= most_bytes)
    }
    if missing:
        # Another process does not know what was registered here from outside.
        here = arena.available() or any(op.kind.partition(".")[0] not in TRUSTED for op in graph.ops)
        known |= (_here if here else _in_child)(graph, missing, rounds, progress, most_bytes, live)
        _write(file, known)
    return known


def is_known(graph: Graph) -> bool:
    """Whether all ops were measured here before, so that `measure_costs` runs none."""
    known = _read(_file(machine()))
    return all(key in known for row in _rows(graph, range(len(graph.ops))).values() for _, _, key in row)


def _needs(graph: Graph, call: calls.Call, live: calls.Live, most_bytes: int | None) -> int:
    """What a call takes at least: its arguments and, unless it overwrites one of them, its results."""
    return calls.read_bytes(graph, call, live, most_bytes) + (
        0 if call.over is not None else sum(calls.made_bytes(graph, call.op))
    )


def _cost(graph: Graph, op: Op, row: _Row, known: Mapping[str, Run]) -> OpCost:
    ways: dict[Way, Run] = {}
    others: dict[Way, tuple[Run, ...]] = {}
    for way, call, key in row:
        run = known.get(key)
        if run is not None and not call.kernel:
            ways[way] = run
        elif run is not None:
            others[way] = (*others.get(way, ()), replace(run, kernel=call.kernel))
    if "first" not in ways:
        time_s = max((run.time_s for run in ways.values()), default=0.0)
        ways["first"] = Run(time_s, calls.made_bytes(graph, op))
        return OpCost(ways)
    return OpCost(ways, {way: runs for way, runs in others.items() if way in ways})


def machine() -> dict[str, str]:
    """What the costs hold for."""
    return {
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "onednn": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "arena": str(arena.available()),
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# ---- kept on disk


def _file(about: Mapping[str, str]) -> Path | None:
    folder = cache.folder()
    if folder is None:
        return None
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return folder / "costs" / f"{digest}.json"


def _read(file: Path | None) -> dict[str, Run]:
    """What is known; a file that cannot be read is as good as none."""
    if file is None:
        return {}
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return {key: run_from_json(run) for key, run in data.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(file: Path | None, known: Mapping[str, Run]) -> None:
    if file is None:
        return
    merged = dict(list({**_read(file), **known}.items())[-MAX_KEPT:])
    files.write_cache(file, json.dumps({key: run_to_json(run) for key, run in merged.items()}))


# ---- the measurement


def _here(
    graph: Graph,
    keys: set[str],
    rounds: int,
    progress: child.Progress | None,
    most_bytes: int | None,
    live: calls.Live,
) -> dict[str, Run]:
    return without_a_trace(
        lambda: measure(graph, keys, rounds, progress or (lambda _done, _total: None), most_bytes, live)
    )


def without_a_trace(work: Callable[[], T]) -> T:
    """What `work` returns. Random numbers go on as if nothing had run in between, and the arena keeps nothing of it."""
    surroundings = Surroundings()

    def end() -> None:
        surroundings.put_back()
        arena.trim(0)

    return surely(work, end)


def _in_child(
    graph: Graph,
    keys: set[str],
    rounds: int,
    progress: child.Progress | None,
    most_bytes: int | None,
    _live: calls.Live,
) -> dict[str, Run]:
    """What is live here is not there in another process: all arguments come from its pool."""
    data = {"graph": to_json(graph), "keys": sorted(keys), "rounds": rounds, "most_bytes": most_bytes}
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    found = child.run("edgetrain.costs.measured:measured_in_child", data, progress=progress, environment=threads)
    return {key: run_from_json(run) for key, run in found.items()}


def measured_in_child(data: Any, progress: child.Progress) -> Any:
    found = measure(from_json(data["graph"]), set(data["keys"]), data["rounds"], progress, data["most_bytes"])
    return {key: run_to_json(run) for key, run in found.items()}


def measure(
    graph: Graph,
    keys: set[str],
    rounds: int,
    progress: child.Progress,
    most_bytes: int | None,
    live: calls.Live | None = None,
) -> dict[str, Run]:
    """Time the calls with these keys in this process, those with the largest arguments first."""
    rows = _rows(graph, range(len(graph.ops)))
    todo: dict[str, calls.Call] = {}
    for row in rows.values():
        for _, call, key in row:
            if key in keys:
                todo.setdefault(key, call)
    live = live or {}
    reads = {key: calls.read_bytes(graph, call, live, most_bytes) for key, call in todo.items()}
    needs = {key: _needs(graph, call, live, most_bytes) for key, call in todo.items()}
    largest_bytes = max((n for n in needs.values() if most_bytes is None or n <= most_bytes), default=0)
    require_room("the largest op of this step", largest_bytes, next_step="give a smaller batch")
    todo = dict(sorted(todo.items(), key=lambda item: -reads[item[0]]))
    room = {key: None if most_bytes is None else most_bytes - needs[key] + reads[key] for key in todo}
    cuda = _on_cuda(graph)
    events, times = {}, {key: list[float]() for key in todo}
    total, done = len(todo) * (rounds + 1), 0
    if not arena.available():
        malloc.keep_freed_memory()
    with torch.no_grad(), without_autocast():
        pool = calls.Pool(graph, live)
        for key, call in todo.items():
            events[key] = _events_of(graph, call, pool, room[key], cuda=cuda)
            progress(done := done + 1, total)
        for _ in range(rounds):
            for key, call in todo.items():
                with _memory():
                    times[key].append(_time(calls.function(graph, call, pool.tensors(call, room[key]), live)))
                progress(done := done + 1, total)
    return {key: Run(statistics.median(times[key]), events[key]) for key in todo}


def measure_events(
    graph: Graph, number: int, ways: Container[Way] = WAYS, kernels: Kernels | None = None
) -> dict[Way, Run]:
    """What the kernel of one op asks of the allocator, in each of these ways to run it; times are not measured, and are
    0. It runs here: see `without_a_trace`. kernels: those that run, where they are not the first."""
    names = {way: (kernels or {}).get(way, {}).get(number, "") for way in WAYS}
    ways_to_run, pool = calls.calls(graph, number, overwrites_gradient(graph)), calls.Pool(graph)
    with torch.no_grad(), without_autocast():
        return {
            way: Run(
                0.0,
                _events_of(graph, replace(call, kernel=names[way]), pool, None, cuda=_on_cuda(graph)),
                kernel=names[way],
            )
            for way, call in ways_to_run.items()
            if way in ways
        }


def _on_cuda(graph: Graph) -> bool:
    return any(storage.device.startswith("cuda") for storage in graph.storages)


def _events_of(graph: Graph, call: calls.Call, pool: calls.Pool, room: int | None, *, cuda: bool) -> tuple[int, ...]:
    with _memory():
        work = calls.function(graph, call, pool.tensors(call, room), pool.live)
    kept = [position for position, t in enumerate(call.op.outputs) if t is not None]
    try:
        return _events(work, kept, cuda=cuda)
    except Exception as error:
        if raised_by_handler(error):
            raise
        raise UserError(
            f"{call.op.name} ({call.op.kind}) cannot be measured on its own: {str(error).splitlines()[0]}",
            next_step="train without a budget, or write this part of the model otherwise",
        ) from error


def _memory() -> AbstractContextManager[object]:
    """From the arena, if there is one: its pages are there from one call to the next, as they are in a step."""
    return arena.served(None) if arena.available() else nullcontext()


def _time(work: Callable[[], object]) -> float:
    first = _clocked(work, 1)
    repeats = min(MOST_REPEATS, int(LEAST_TIMED_S / max(first, 1e-9)))
    return _clocked(work, repeats) / repeats if repeats > 1 else first


def _clocked(work: Callable[[], object], times: int) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def _events(work: Callable[[], object], kept: list[int], *, cuda: bool) -> tuple[int, ...]:
    """What the call asks of the allocator, when only the results at these positions are kept. The first call of a
    kernel may ask for more than later ones, so the second counts."""

    def once() -> list[object]:
        result = work()
        return [result[n] for n in kept] if isinstance(result, tuple | list) else [result]

    with _memory():
        once()
    if cuda:
        return _events_cuda(once)
    if not arena.available():
        return _events_reported(once)
    with arena.served(None) as recording:
        result = once()
    del result
    return recording.events


def _events_reported(work: Callable[[], object]) -> tuple[int, ...]:
    """PyTorch's report says how much is returned, and not what: the last request of that size, it is taken to be."""
    with reports.allocations() as reported:
        result = work()
    del result
    events: list[int] = []
    open_: list[tuple[int, int]] = []
    n = 0
    for _, n_bytes in reported:
        if n_bytes > 0:
            open_.append((n_bytes, n))
            events.append(n_bytes)
            n += 1
            continue
        match = next((entry for entry in reversed(open_) if entry[0] == -n_bytes), None)
        if match is not None:
            open_.remove(match)
            events.append(-1 - match[1])
    return tuple(events)


def _events_cuda(work: Callable[[], object]) -> tuple[int, ...]:
    """A GPU's allocator tells only the most and what is left: one request and return for the workspace, one for all
    results."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    most, left = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del result
    return (most - left, -1, left) if most > left else (left,) if left else ()
