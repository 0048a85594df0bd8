"""What each op of a graph costs: seconds, joules, the memory that its kernel asks for; and what moving bytes to storage
and back costs.

In:  a measurement here (`measured.py`), a model of a device (`model.py`), or numbers of your own.
Out: `Costs`, one `OpCost` for each op of one graph; saved, read back equal, refused for another graph.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from edgetrain import files, saved

SCHEMA = 2
Origin = Literal["measured", "modelled"]
# How an op is run: for the first time, again (without its side effects), or over one of its inputs.
Way = Literal["first", "again", "over"]
WAYS: tuple[Way, ...] = ("first", "again", "over")
# Way → op → the kernel that runs it, by its name; without those that the first kernel of their entry runs.
Kernels = Mapping[Way, Mapping[int, str]]


@dataclass(frozen=True, slots=True)
class Run:
    """One way to run an op.

    events: what the kernel asks of the allocator: each request as its bytes, each return as -1 - the number of the
    request within the op. What is not returned is its results.
    energy_j: above what the device takes when it idles; None where nothing tells.
    kernel: by its name; "" for the first one of the op's entry.
    """

    time_s: float
    events: tuple[int, ...] = ()
    energy_j: float | None = None
    kernel: str = ""

    @property
    def most_bytes(self) -> int:
        """The most that it held at one time, its results included."""
        requests = [event for event in self.events if event >= 0]
        held = most = 0
        for event in self.events:
            held += event if event >= 0 else -requests[-1 - event]
            most = max(most, held)
        return most

    @property
    def workspace_bytes(self) -> int:
        """The most that it held above its results, which are what it did not return."""
        requests = [event for event in self.events if event >= 0]
        left = sum(requests) - sum(requests[-1 - event] for event in self.events if event < 0)
        return max(0, self.most_bytes - left)


@dataclass(frozen=True)
class OpCost:
    """`ways` always holds "first"; the others where they differ from it. others: what other kernels of the op take."""

    ways: Mapping[Way, Run]
    others: Mapping[Way, tuple[Run, ...]] = field(default_factory=dict)

    def runs(self, way: Way) -> tuple[Run, ...]:
        """By each kernel; the one that runs first."""
        return self.ways[way], *self.others.get(way, ())

    def running(self, chosen: Mapping[Way, Run]) -> OpCost:
        """The same where these runs are those that happen."""
        ways = {**self.ways, **chosen}
        others = {way: tuple(run for run in self.runs(way) if run != ways[way]) for way in self.others}
        return OpCost(ways, {way: runs for way, runs in others.items() if runs})

    def run(self, way: Way) -> Run:
        return self.ways.get(way) or self.ways["first"]

    @property
    def time_s(self) -> float:
        return self.ways["first"].time_s

    @property
    def again_s(self) -> float:
        return self.run("again").time_s


@dataclass(frozen=True, slots=True)
class Store:
    """Storage that tensors go to and come back from, one transfer at a time.

    power_w: what a transfer takes above what the device takes when it idles; None where nothing tells.
    n_bytes: what it can hold; None where that is not known.
    """

    in_bytes_s: float
    out_bytes_s: float
    in_latency_s: float = 0.0
    out_latency_s: float = 0.0
    power_w: float | None = None
    n_bytes: float | None = None

    def in_s(self, n_bytes: int) -> float:
        return self.in_latency_s + n_bytes / self.in_bytes_s

    def out_s(self, n_bytes: int) -> float:
        return self.out_latency_s + n_bytes / self.out_bytes_s


@dataclass(frozen=True)
class Costs:
    """
    store:   None where nothing can be paged.
    idle_w:  what the device takes all the while, whatever runs; None where nothing tells.
    uncertainty: of modelled costs: the true time of a step lies within this part of the modelled one, two times of
             three. None for measured ones.
    """

    graph_key: str
    origin: Origin
    ops: tuple[OpCost, ...]
    about: Mapping[str, str] = field(default_factory=dict)  # machine, threads, versions
    store: Store | None = None
    idle_w: float | None = None
    uncertainty: float | None = None

    @cached_property
    def workspace_bytes(self) -> dict[Way, dict[int, int]]:
        """Way → op → bytes that the kernel takes above its results, without the ops that take none."""
        by_way: dict[Way, dict[int, int]] = {}
        for way in WAYS:
            bytes_of = {number: cost.run(way).workspace_bytes for number, cost in enumerate(self.ops)}
            by_way[way] = {number: n_bytes for number, n_bytes in bytes_of.items() if n_bytes}
        return by_way

    @cached_property
    def kernels(self) -> Kernels:
        """Those that run, but for first ones."""
        by_way: dict[Way, dict[int, str]] = {}
        for number, cost in enumerate(self.ops):
            for way in WAYS:
                if name := cost.run(way).kernel:
                    by_way.setdefault(way, {})[number] = name
        return by_way

    def time_s(self, order: Sequence[int]) -> float:
        """The time of a step that runs the ops in this order, one that comes again at the price of a second time."""
        done: set[int] = set()
        total = 0.0
        for op in order:
            total += self.ops[op].again_s if op in done else self.ops[op].time_s
            done.add(op)
        return total

    def save(self, path: str | Path) -> None:
        files.write_text(path, json.dumps(to_json(self)))

    @staticmethod
    def load(path: str | Path) -> Costs:
        return saved.load(path, "cost file", from_json)


def run_to_json(run: Run) -> list[Any]:
    rest = [*([] if run.energy_j is None else [run.energy_j]), *([run.kernel] if run.kernel else [])]
    return [run.time_s, list(run.events), *rest]


def run_from_json(data: Any) -> Run:
    time_s, events, *energy_j = data
    kernel = energy_j.pop() if energy_j and isinstance(energy_j[-1], str) else ""
    if len(energy_j) > 1:
        raise ValueError(f"a run is {data!r}")
    return Run(_number(time_s), tuple(_events(events)), _number(energy_j[0]) if energy_j else None, kernel)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, float | int) or not math.isfinite(value) or value < 0:
        raise ValueError(f"a time, an energy or a rate is {value!r}")
    return float(value)


def _number_or_none(value: Any) -> float | None:
    return None if value is None else _number(value)


def _events(events: Any) -> Iterator[int]:
    requests, returned = 0, set()
    for event in events:
        if type(event) is not int or event < -requests or event in returned:
            raise ValueError(f"an event is {event!r}")
        if event >= 0:
            requests += 1
        else:
            returned.add(event)
        yield event


def to_json(costs: Costs) -> dict[str, Any]:
    return {
        "edgetrain costs": SCHEMA,
        "graph_key": costs.graph_key,
        "origin": costs.origin,
        "about": dict(costs.about),
        "store": None if costs.store is None else asdict(costs.store),
        "idle_w": costs.idle_w,
        "uncertainty": costs.uncertainty,
        "ops": [_op_to_json(cost) for cost in costs.ops],
    }


def _op_to_json(cost: OpCost) -> dict[str, Any]:
    others = {way: [run_to_json(run) for run in runs] for way, runs in cost.others.items()}
    return {way: run_to_json(run) for way, run in cost.ways.items()} | ({"others": others} if others else {})


def _op_from_json(row: Mapping[str, Any]) -> OpCost:
    ways = {way: run_from_json(run) for way, run in row.items() if way != "others"}
    others = {way: tuple(map(run_from_json, runs)) for way, runs in row.get("others", {}).items()}
    if "first" not in ways or not set(ways) <= set(WAYS) or not set(others) <= set(ways):
        raise ValueError(f"ways are {sorted(row)}")
    return OpCost(ways, others)  # type: ignore[arg-type]  # that they are ways was checked


def from_json(data: Mapping[str, Any]) -> Costs:
    if data["edgetrain costs"] != SCHEMA or data["origin"] not in ("measured", "modelled"):
        raise ValueError(f"schema {data['edgetrain costs']!r}, origin {data['origin']!r}")
    return Costs(
        str(data["graph_key"]),
        data["origin"],
        tuple(_op_from_json(row) for row in data["ops"]),
        {str(key): str(value) for key, value in data["about"].items()},
        None if data["store"] is None else store_from_json(data["store"]),
        _number_or_none(data["idle_w"]),
        _number_or_none(data["uncertainty"]),
    )


def store_from_json(data: Mapping[str, Any]) -> Store:
    rates = {name: _number(value) for name, value in data.items() if name not in ("power_w", "n_bytes")}
    store = Store(**rates, power_w=_number_or_none(data["power_w"]), n_bytes=_number_or_none(data.get("n_bytes")))
    if not (store.in_bytes_s > 0 and store.out_bytes_s > 0):
        raise ValueError(f"a store moves nothing: {data!r}")
    return store
