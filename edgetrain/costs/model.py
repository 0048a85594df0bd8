"""What every op of a graph would cost on a device that is not here: a roofline model.

In:  a graph and a device (`edgetrain devices` lists those known).
Out: `Costs` whose origin is "modelled": seconds and joules of each op, what paging costs there, and how uncertain the
     time of a step is. Planners take them as they take measured ones.

    operations a second
        │      ┌───────────  rate of the op's kind: conv, depthwise, dense, elementwise
        │     ╱
        │    ╱  bandwidth     time = max(operations ÷ rate, bytes ÷ bandwidth) + overhead of an op
        │   ╱                 time =     operations ÷ rate + bytes ÷ bandwidth + overhead, where the library lays its
        └──╱──────────────           data out by ops of their own (`Library.overlaps` is false)
           operations a byte  energy = power of the processor at full load × time
                                     + power of memory × bytes ÷ bandwidth, where it is known apart

What is modelled: one processor at full load, float32, data that comes from memory each time. What is not: caches,
frequencies that fall when it gets warm, memory that is swapped, other programs. No workspace of kernels is claimed; the
results of an op are its only requests for memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgetrain.arguments import checked
from edgetrain.costs import calls
from edgetrain.costs.table import Costs, OpCost, Run, Store, Way
from edgetrain.devices.device import Device, Processor, Quantity, load
from edgetrain.errors import UserError
from edgetrain.graph.ir import Graph, Op
from edgetrain.ops.entry import work
from edgetrain.ops.work import Kind, Work


@checked()
def model_costs(graph: Graph, device: str | Device, *, processor: str | None = None) -> Costs:
    """What the ops of the graph would cost on the device.

    device: a name, the path of a device file, or a `Device`. processor: another one than the device trains on.
    """
    found = load(device) if isinstance(device, str) else device
    chosen = _processor(found, processor)
    rates = Rates.of(found, chosen)
    ops, total_s, doubt_s = [], 0.0, 0.0
    for number, op in enumerate(graph.ops):
        done = work(graph, op)
        time_s, doubt = (0.0, 0.0) if op.view else rates.time_and_doubt_s(done)
        ops.append(_cost(graph, number, time_s, _energy_j(found, chosen, done, time_s)))
        total_s, doubt_s = total_s + time_s, doubt_s + doubt
    about = {
        "device": found.name,
        "processor": f"{chosen.cores} × {chosen.core}",
        "library": found.library.name,
    }
    idle_w = None if found.idle_w is None else found.idle_w.value
    uncertainty = doubt_s / total_s if total_s else 0.0
    return Costs(graph.key, "modelled", tuple(ops), about, store(found), idle_w, uncertainty)


def _processor(device: Device, name: str | None) -> Processor:
    training = {key: p for key, p in device.processors.items() if p.trains}
    if name is not None and name not in training:
        raise UserError(
            f"{device.name} has no processor {name!r} whose rates are all known", expected=" or ".join(training)
        )
    return training[name or device.runs_on]


def _energy_j(device: Device, processor: Processor, done: Work, time_s: float) -> float | None:
    if processor.power_w is None:
        return None
    memory = device.memory
    moving_w = 0.0 if memory.power_w is None else memory.power_w.value
    return processor.power_w.value * time_s + moving_w * done.moved_bytes / memory.bandwidth_bytes_s.value


def _cost(graph: Graph, number: int, time_s: float, energy_j: float | None) -> OpCost:
    """Each way to run the op takes as long; over one of its inputs it makes one storage less."""
    ways: dict[Way, Run] = {}
    for way, call in calls.calls(graph, number).items():
        without = call.op.outputs[0] if way == "over" else None
        ways[way] = Run(time_s, calls.made_bytes(graph, call.op, without=without), energy_j)
    return OpCost(ways)


@dataclass(frozen=True)
class Rates:
    """What decides the time of an op on one processor of one device."""

    flop_s: Mapping[Kind, Quantity]
    bandwidth_bytes_s: Quantity
    overhead_s: Quantity
    overlaps: bool

    @staticmethod
    def of(device: Device, processor: Processor) -> Rates:
        assert processor.conv_flop_s is not None
        assert processor.depthwise_flop_s is not None
        assert processor.dense_flop_s is not None
        assert processor.elementwise_flop_s is not None
        flop_s: dict[Kind, Quantity] = {
            "conv": processor.conv_flop_s, "depthwise": processor.depthwise_flop_s, "dense": processor.dense_flop_s,
            "elementwise": processor.elementwise_flop_s,
        }  # fmt: skip
        library = device.library
        return Rates(flop_s, device.memory.bandwidth_bytes_s, library.overhead_s, library.overlaps)

    def time_s(self, done: Work) -> float:
        return self.time_and_doubt_s(done)[0]

    def time_and_doubt_s(self, done: Work) -> tuple[float, float]:
        """The time, and how far off it is if every number that decides it is off by its `plus_minus`."""
        rate = self.flop_s.get(done.kind)
        computing = (done.flops / rate.value, rate.plus_minus) if rate is not None else (0.0, 0.0)
        moving = (done.moved_bytes / self.bandwidth_bytes_s.value, self.bandwidth_bytes_s.plus_minus)
        # Elementwise ops compute while they move data in every library: there is nothing to lay out.
        apart = not self.overlaps and done.kind != "elementwise"
        parts = [computing, moving] if apart else [max(computing, moving)]
        parts.append((self.overhead_s.value, self.overhead_s.plus_minus))
        return sum(time_s for time_s, _ in parts), sum(time_s * doubt for time_s, doubt in parts)


def store(device: Device) -> Store | None:
    """The device's storage as planners see it."""
    found = device.storage
    if found is None:
        return None
    return Store(
        found.in_bytes_s.value, found.out_bytes_s.value, found.in_latency_s.value, found.out_latency_s.value,
        None if found.power_w is None else found.power_w.value, None if found.n_bytes is None else found.n_bytes.value,
    )  # fmt: skip


# ---- memory of a process


@dataclass(frozen=True, slots=True)
class Held:
    """What the memory of a library's process is made of, in bytes of one step that keeps all.

    parameters: as the model has them. forward: all floating-point results of the forward pass.
    columns: what all convolutions of the step lay out as matrices.
    """

    parameters: int
    forward: int
    columns: int


def held(graph: Graph) -> Held:
    made = {graph.tensors[t].storage for op in graph.ops if _forward(op) for t in op.creates}
    floating = {t.storage for t in graph.tensors if t.dtype.startswith(("float", "bfloat"))}
    forward = sum(graph.storages[s].n_bytes for s in made & floating if graph.storages[s].role == "activation")
    columns = sum(work(graph, op).columns_bytes for op in graph.ops)
    return Held(graph.bytes_by_role()["parameter"], forward, columns)


def _forward(op: Op) -> bool:
    return op.phase == "forward" and not op.view


def resident_bytes(graph: Graph, device: str | Device) -> int | None:
    """The most that a process of the device's own library would hold, which plans nothing and keeps all; None where
    that is not known. (What a plan of ours holds, the plan says.)"""
    library = (load(device) if isinstance(device, str) else device).library
    if library.base_bytes is None or library.lasting is None or library.held is None or library.columns is None:
        return None
    parts = held(graph)
    return int(
        library.base_bytes.value
        + library.lasting.value * parts.parameters
        + library.held.value * parts.forward
        + library.columns.value * parts.columns
    )
