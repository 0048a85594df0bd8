"""POET's question on the paper's nets and devices: what energy does it take to train in less memory, by recomputing, by
paging, and by both?

    python -m benchmarks.poet [--only nets|bert] [--seconds S]     keeps its result in benchmarks/results/poet.{json,md}

Everything is modelled (`et.model_costs`): no board is here. Memory is a part of what keeping all holds above
parameters, state and inputs; energy is that of a whole step, without idle power, as the paper counts it. Section
`bert` plans for time: BERT with 12 layers, batch 8 × 128 tokens, on a store of 800 MiB/s in and 400 MiB/s out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import edgetrain as et
from benchmarks.contenders import RESULTS, about
from benchmarks.markdown import head, line, made
from edgetrain import zoo
from edgetrain.costs.table import Store

NETS = (("vgg16_cifar", 32, 32), ("resnet18_cifar", 16, 32), ("bert_small", 4, 64))
DEVICES = ("mkr1000", "nrf52840", "rpi4", "jetson_tx2")
PARTS = (0.7, 0.5, 0.35)
PLANNERS = ("recompute-only", "page-only", "poet")
MIB = 2**20


def graph_of(name: str, batch: int, size: int) -> et.Graph:
    torch.manual_seed(0)
    entry = zoo.get(name)
    model = zoo.build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return et.capture(model, entry.task.loss, optimizer, entry.example(batch, input_size=size))


def memory_at(keep_all: et.Plan, part: float) -> int:
    return keep_all.persistent_bytes + int(part * (keep_all.peak_bytes - keep_all.persistent_bytes))


def planned(graph: et.Graph, costs: et.Costs, budget: et.Budget, planner: str, seconds: float) -> dict[str, Any]:
    begin = time.monotonic()
    try:
        made = et.plan(graph, costs, budget, planner=planner, time_limit_s=seconds, use_cache=False)
    except et.Infeasible as answer:
        return {"planner": planner, "smallest_bytes": answer.smallest_bytes}
    return {
        "planner": planner, "energy_j": made.energy_j, "time_s": made.time_s, "gap": made.gap,
        "peak_bytes": made.peak_bytes, "recomputed": len(made.recomputed), "paged": len(made.paged),
        "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip


def nets(seconds: float) -> list[dict[str, Any]]:
    rows = []
    for name, batch, size in NETS:
        graph = graph_of(name, batch, size)
        for device in DEVICES:
            costs = replace(et.model_costs(graph, device), idle_w=0.0)
            whole = et.plan(graph, costs, et.Budget())
            for part in PARTS:
                budget = et.Budget(memory_at(whole, part), objective="energy")
                found = [planned(graph, costs, budget, planner, seconds) for planner in PLANNERS]
                rows.append({"net": name, "batch": batch, "device": device, "part": part,
                             "keep_all_j": whole.energy_j, "plans": found})  # fmt: skip
                print(row_of(rows[-1]), file=sys.stderr, flush=True)
    return rows


def bert(seconds: float) -> list[dict[str, Any]]:
    graph = graph_of("bert_base", 8, 128)
    rows = []
    for device in ("rpi4", "jetson_tx2"):
        costs = et.model_costs(graph, device)
        costs = replace(costs, store=Store(800 * MIB, 400 * MIB, power_w=costs.store.power_w if costs.store else 0.0))
        whole = et.plan(graph, costs, et.Budget())
        for part in (0.45, 0.3):
            budget = et.Budget(memory_at(whole, part))
            found = [planned(graph, costs, budget, p, seconds) for p in ("recompute-only", "page-only", "optimal")]
            rows.append({"device": device, "part": part, "keep_all_s": whole.time_s, "plans": found})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def row_of(row: dict[str, Any]) -> str:
    cells = [row["net"], row["device"], f"{row['part']:.2f}", f"{row['keep_all_j']:.4g} J"]
    for plan in row["plans"]:
        energy = plan.get("energy_j")
        cells.append("none" if energy is None else f"{100 * (energy / row['keep_all_j'] - 1):+.1f} %")
    gap = row["plans"][-1].get("gap")
    cells.append("—" if gap is None else f"{100 * gap:.1f} %")
    for name in PLANNERS[:2]:
        less = saved(row, name)
        cells.append("—" if less is None else f"{100 * less:.1f} %")
    return line(*cells)


def saved(row: dict[str, Any], other: str) -> float | None:
    """The part of the other planner's energy that both together save; None where one of them found no plan."""
    energy = {plan["planner"]: plan.get("energy_j") for plan in row["plans"]}
    if energy["poet"] is None or energy[other] is None:
        return None
    return 1 - float(energy["poet"] / energy[other])


def tables(data: dict[str, Any]) -> str:
    lines = ["# POET: recomputing, paging, and both", "", "All of it is modelled; see docs/devices.md.", ""]
    if "nets" in data:
        lines += [*_nets_table(data["nets"]["rows"]), ""]
    if "bert" in data:
        lines += ["## BERT, 12 layers, batch 8 × 128, 800 MiB/s in, 400 MiB/s out: extra time", ""]
        lines += [*_bert_table(data["bert"]["rows"]), ""]
    lines += [f"- {name}, {part['seconds']:g} s a search: {made(part['about'])}" for name, part in data.items()]
    return "\n".join(lines) + "\n"


def _nets_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "Energy of a step above keeping all, by what is allowed; and what both save of the energy of one alone."
    yield ""
    yield from head("net", "device", "memory", "keep all", "recompute only", "page only", "both", "gap",
                    "saves of recompute only", "saves of page only")  # fmt: skip
    yield from (row_of(row) for row in rows)
    savings = [less for row in rows for name in PLANNERS[:2] if (less := saved(row, name)) is not None]
    planned = [row for row in rows if "energy_j" in row["plans"][-1]]
    alone = sum(any(saved(row, name) is None for name in PLANNERS[:2]) for row in planned)
    worse = sum(less < -1e-6 for less in savings)
    yield ""
    yield (
        f"At most {100 * max(savings, default=0):.0f} % less energy than one alone (the paper: up to 40 %); both are "
        f"worse than one alone in {worse} of {len(savings)} comparisons, and where both have a plan one alone has none "
        f"in {alone} of {len(planned)} rows. In the other {len(rows) - len(planned)} rows nobody has one: there the "
        "largest gradient takes most of the memory, and neither way can move it."
    )


def _bert_table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield from head("device", "memory", "recompute only", "page only", "both", "asked of both", "gap", "searched")
    for row in rows:
        extra = ["none" if p.get("time_s") is None else f"{100 * (p['time_s'] / row['keep_all_s'] - 1):.1f} %"
                 for p in row["plans"]]  # fmt: skip
        both = row["plans"][-1]
        gap = "—" if both.get("gap") is None else f"{100 * both['gap']:.1f} %"
        asked = "≤ 12 %, where recompute only takes 25 %" if row["part"] == 0.45 else "—"
        took = f"{both['seconds']:.0f} s" if "seconds" in both else "—"
        yield line(row["device"], str(row["part"]), *extra, asked, gap, took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("nets", "bert"), help="one section")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the search of each plan")
    given = parser.parse_args()
    file = RESULTS / "poet.json"
    data = json.loads(file.read_text()) if file.exists() else {}
    for name, section in (("nets", nets), ("bert", bert)):
        if given.only in (None, name):
            data[name] = {"about": about(), "seconds": given.seconds, "rows": section(given.seconds)}
            file.write_text(json.dumps(data, indent=1) + "\n")
            (RESULTS / "poet.md").write_text(tables(data))
    print((RESULTS / "poet.md").read_text())


if __name__ == "__main__":
    main()
