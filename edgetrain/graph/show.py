"""A graph as text that people read: one line per op with its results and their size, and totals at the end.

forward
  convolution_1        aten.convolution        features.0.0  input.0, … → float32[16,32,112,112]  25.7 MB
  native_batch_norm_1  aten.native_batch_norm  features.0.1  convolution_1, … → …  writes features.0.1.running_mean
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from edgetrain.graph.ir import PHASES, ROLES, Graph, Op


def show(graph: Graph, *, views: bool = False) -> str:
    """`views=True` lists view ops too; they compute nothing."""
    lines = [_title(graph)]
    for phase in PHASES:
        ops = [op for op in graph.ops if op.phase == phase and (views or not op.view)]
        if ops:
            lines += ["", phase, *_table([_row(graph, op) for op in ops])]
    return "\n".join([*lines, "", *summary(graph)])


def summary(graph: Graph) -> list[str]:
    """Counts by phase, bytes by role, and what is marked."""
    counts = Counter(op.phase for op in graph.ops if not op.view)
    views = sum(op.view for op in graph.ops)
    ops = ", ".join(f"{counts[phase]} {phase}" for phase in PHASES if counts[phase])
    lines = [f"{sum(counts.values())} ops ({ops}) and {views} views"]
    totals = graph.bytes_by_role()
    lines += [f"  {totals[role] / 1e6:10.2f} MB  {role}" for role in ROLES if totals[role]]
    random = [op.name for op in graph.ops if op.random]
    statistics = [op.name for op in graph.ops if op.phase == "forward" and op.writes]
    if random:
        lines.append(f"random: {len(random)} ops, {_some(random)}")
    if statistics:
        lines.append(f"change buffers in the forward pass: {len(statistics)} ops, {_some(statistics)}")
    if graph.unused:
        lines.append(f"not reached by the loss, left as they are: {_some(graph.unused)}")
    return lines


def _title(graph: Graph) -> str:
    sort = "training step" if graph.gradients else "prediction"
    optimizer = f", {graph.about['optimizer']}" if "optimizer" in graph.about else ""
    batch = ", ".join(f"{graph.tensors[t].name} {graph.tensors[t]}" for t in graph.inputs)
    return f"{sort} of {graph.about.get('model', 'a model')}{optimizer}; {batch}; graph {graph.key}"


def _row(graph: Graph, op: Op) -> tuple[str, str, str, str]:
    reads = ", ".join(graph.tensors[t].name for t in op.reads)
    text = reads
    if op.creates:
        results = ", ".join(str(graph.tensors[t]) for t in op.creates)
        storages = {graph.tensors[t].storage for t in op.creates} if not op.view else set()
        text += f" → {results}" + (
            f"  {sum(graph.storages[s].n_bytes for s in storages) / 1e6:.2f} MB" if storages else ""
        )
    if op.writes:
        names = {tensor.storage: tensor.name for tensor in reversed(graph.tensors)}
        text += "  writes " + ", ".join(names[s] for s in op.writes)
    return op.name, op.kind.removesuffix(".default"), op.module, text + ("  random" if op.random else "")


def _table(rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        yield "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False)) + "  " + row[3]


def _some(names: list[str] | tuple[str, ...], max_shown: int = 4) -> str:
    return ", ".join(names[:max_shown]) + (", …" if len(names) > max_shown else "")
