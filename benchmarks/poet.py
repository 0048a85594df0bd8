"""POET's question on the paper's nets and devices: what energy does it take to train in less memory, by recomputing, by
paging, and by both?

    python benchmarks/poet.py [--only nets|bert] [--seconds S]     keeps its result in benchmarks/results/poet.{json,md}

Everything is modelled (`et.model_costs`): no board is here. Memory is a part of what keeping all holds above
parameters, state and inputs; energy is that of a whole step, idle power included. Section `bert` plans for time: BERT
with 12 layers, batch 8 × 128 tokens, on a store of 800 MiB/s in and 400 MiB/s out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import edgetrain as et
from edgetrain import zoo
from edgetrain.costs.table import Store
from edgetrain.measure.record import new_record

RESULTS = Path(__file__).parent / "results"
NETS = (("vgg16_cifar", 1, 32), ("resnet18_cifar", 1, 32), ("bert_small", 1, 64))
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
            costs = et.model_costs(graph, device)
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
        cells.append("—" if energy is None else f"{energy:.4g} J ({100 * (energy / row['keep_all_j'] - 1):+.0f} %)")
    gap = row["plans"][-1].get("gap")
    cells.append("—" if gap is None else f"{100 * gap:.1f} %")
    alone = {plan["planner"]: plan.get("energy_j") for plan in row["plans"]}
    for name in PLANNERS[:2]:
        both, other = alone["poet"], alone[name]
        cells.append("—" if both is None or other is None else f"{100 * (1 - both / other):.0f} %")
    return "| " + " | ".join(cells) + " |"


def tables(data: dict[str, Any]) -> str:
    lines = ["# POET: recomputing, paging, and both", "", "All of it is modelled; see docs/devices.md.", ""]
    if "nets" in data:
        head = ("net", "device", "memory", "keep all", "recompute only", "page only", "both", "gap",
                "less than recompute", "less than page")  # fmt: skip
        lines += ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += [row_of(row) for row in data["nets"]["rows"]]
        best = [
            1 - plans["poet"] / max(plans[name] for name in PLANNERS[:2])
            for row in data["nets"]["rows"]
            if all((plans := {p["planner"]: p.get("energy_j") for p in row["plans"]}).values())
        ]
        most = 100 * max(best, default=0)
        lines += ["", f"At best {most:.0f} % less energy than the worse one alone; the paper says up to 40 %.", ""]
    if "bert" in data:
        lines += ["## BERT, 12 layers, batch 8 × 128, 800 MiB/s in, 400 MiB/s out: extra time", ""]
        lines += ["| device | memory | recompute only | page only | both | asked |", "|---|---|---|---|---|---|"]
        for row in data["bert"]["rows"]:
            extra = ["—" if p.get("time_s") is None else f"{100 * (p['time_s'] / row['keep_all_s'] - 1):.1f} %"
                     for p in row["plans"]]  # fmt: skip
            asked = "≤ 12 %" if row["part"] == 0.45 else ""
            lines.append(f"| {row['device']} | {row['part']} | " + " | ".join([*extra, asked]) + " |")
        lines.append("")
    lines += [f"- {name}: {part['created']}, {part['commit'][:10]}" for name, part in data.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("nets", "bert"), help="one section")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the search of each plan")
    given = parser.parse_args()
    file = RESULTS / "poet.json"
    data = json.loads(file.read_text()) if file.exists() else {}
    for name, section in (("nets", nets), ("bert", bert)):
        if given.only in (None, name):
            record = new_record(sys.argv)
            data[name] = {"commit": record.commit, "created": record.created, "seconds": given.seconds,
                          "rows": section(given.seconds)}  # fmt: skip
            file.write_text(json.dumps(data, indent=1) + "\n")
            (RESULTS / "poet.md").write_text(tables(data))
    print((RESULTS / "poet.md").read_text())


if __name__ == "__main__":
    main()
