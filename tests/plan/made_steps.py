"""Training steps made up op by op, for tests that need small graphs of any shape, with numbers of any size.

    chain        x ─ f0 ─ f1 ─ f2 ─ loss       every op reads the one before
    branching    x ─ f0 ─ f1 ─ f3 ─ loss       an op may read two earlier ones, at any distance
                      └── f2 ──┘

The backward pass runs in the opposite order: the op for fi reads the gradients that the readers of fi have left, and
some of what fi read and made. With weights, an op for each weight's gradient and its update come beside. No kernel
takes a workspace or overwrites an input, an op costs the second time what it costs the first, and idling costs nothing:
what POET's program as published takes for granted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Literal

from edgetrain.costs.table import Costs, OpCost, Run, Store
from edgetrain.graph.ir import Graph, Op, Phase, Ref, Role, Source, Storage, Tensor
from edgetrain.graph.verify import verify
from edgetrain.plan.plan import Updates
from edgetrain.plan.problem import Problem, problem

Shape = Literal["chain", "branching"]
KIND = "aten.convolution.default"  # one that overwrites nothing
SIZES = (1, 2, 3, 4, 6, 8, 12)


@dataclass
class _Building:
    draw: Random
    scale_bytes: int
    storages: list[Storage] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    sources: dict[int, Source] = field(default_factory=dict)
    gradients: dict[int, int] = field(default_factory=dict)

    def size(self) -> int:
        return self.scale_bytes * self.draw.choice(SIZES) + self.draw.choice((0, 0, self.draw.randrange(100)))

    def tensor(self, n_bytes: int, role: Role) -> int:
        number = len(self.tensors)
        self.storages.append(Storage(n_bytes, role))
        self.tensors.append(Tensor(f"t{number}", number, (n_bytes,), (1,), "uint8"))
        return number

    def lasting(self, n_bytes: int, role: Role, source: Source) -> int:
        found = self.tensor(n_bytes, role)
        self.sources[found] = source
        return found

    def op(self, phase: Phase, reads: list[int], n_bytes: int) -> int:
        made = self.tensor(n_bytes, "activation" if phase == "forward" else "gradient")
        args = tuple(Ref(t) for t in dict.fromkeys(reads))
        self.ops.append(Op(f"{phase}{len(self.ops)}", KIND, args, (), (made,), phase))
        return made

    def update(self, weight: int, gradient: int, index: int) -> None:
        self.gradients[weight] = gradient
        place = (("group", 0), ("index", index))
        args = (Ref(weight), Ref(gradient))
        self.ops.append(Op(f"update{index}", "edgetrain.sgd.update", args, place, (), "update", writes=(weight,)))


def made_graph(draw: Random, n_forward: int, shape: Shape, *, weights: bool, scale_bytes: int = 1000) -> Graph:
    build = _Building(draw, scale_bytes)
    batch = build.lasting(build.size(), "input", Source("input", "0"))
    weight: dict[int, int] = {}
    made: list[int] = []
    read: list[list[int]] = []  # of each forward op, the forward ops whose results it reads
    for i in range(n_forward):
        ways = [i - 1] if shape == "chain" or i < 2 else _two(draw, i)
        read.append([j for j in ways if j >= 0])
        if weights and draw.random() < 0.6:
            weight[i] = build.lasting(build.size(), "parameter", Source("optimizer", f"0.{len(weight)}"))
        reads = [made[j] for j in read[i]] or [batch]
        made.append(build.op("forward", [*reads, *([weight[i]] if i in weight else [])], build.size()))
    _read_all(build, made, read)
    _backward(build, batch, made, read, weight)
    graph = Graph(
        tuple(build.storages), tuple(build.tensors), tuple(build.ops), build.sources, (made[-1],), build.gradients
    )
    verify(graph)
    return graph


def _two(draw: Random, i: int) -> list[int]:
    return sorted({i - 1 if draw.random() < 0.7 else draw.randrange(i), draw.randrange(i)})


def _read_all(build: _Building, made: list[int], read: list[list[int]]) -> None:
    """The loss reads what nobody else does."""
    left = set(range(len(made))) - {j for ways in read for j in ways}
    read.append(sorted(left))
    made.append(build.op("forward", [made[j] for j in sorted(left)], 4))


def _backward(build: _Building, batch: int, made: list[int], read: list[list[int]], weight: dict[int, int]) -> None:
    draw, gradient, updates = build.draw, dict[int, int](), list[tuple[int, int]]()
    for i in reversed(range(len(made))):
        come = [gradient[j] for j in range(len(made)) if i in read[j]]
        inputs = [made[j] for j in read[i]] or [batch]
        saved = [t for t in (*inputs, made[i]) if draw.random() < 0.6]
        if i in weight:
            size = build.storages[weight[i]].n_bytes
            updates.append((weight[i], build.op("backward", [*come, *inputs], size)))
        if read[i]:
            uses_weight = [weight[i]] if i in weight else []
            gradient[i] = build.op("backward", [*(come or [made[i]]), *saved, *uses_weight], build.size())
    for t, made_gradient in updates:
        build.update(t, made_gradient, int(build.sources[t].path.rpartition(".")[2]))


def made_costs(draw: Random, graph: Graph, *, scale_s: float = 1e-3, energy: bool = True) -> Costs:
    """Times and energies of their own; a store that is slower than some ops and faster than others."""

    def run() -> Run:
        return Run(scale_s * draw.randint(1, 9), (), scale_s * draw.randint(1, 9))

    typical = sum(s.n_bytes for s in graph.storages) / len(graph.storages)
    in_s, out_s = (scale_s * draw.uniform(0.3, 6) for _ in range(2))
    store = Store(
        typical / in_s,
        typical / out_s,
        scale_s * draw.choice((0, 0.1)),
        scale_s * draw.choice((0, 0.5)),
        draw.uniform(0.2, 1.5),
    )
    return Costs(graph.key, "modelled", tuple(OpCost({"first": run()}) for _ in graph.ops), {}, store, 0.0)


def made_step(
    seed: int, n_forward: int, shape: Shape, *, weights: bool = False, updates: Updates = "early",
    scale_bytes: int = 1000, scale_s: float = 1e-3,
) -> Problem:  # fmt: skip
    draw = Random(seed)
    graph = made_graph(draw, n_forward, shape, weights=weights, scale_bytes=scale_bytes)
    return problem(graph, made_costs(draw, graph, scale_s=scale_s), updates)
