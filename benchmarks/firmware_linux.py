"""The vectorised program of a Linux board against PyTorch: seconds of a step, and memory of the whole process.

    python -m benchmarks.firmware_linux [MODEL …]   keeps benchmarks/results/firmware_linux.{json,md}

Each contender is a process of its own with as many threads as there are cores, and trains on the same batch from the
same weights. They take turns in bursts of steps, in a new random order each round; the first steps of a burst are not
counted, as they wake threads and fill caches. A round's time is the median of its burst; the ratio is taken within a
round, and its median is given with a 95 % interval. PyTorch is the faster of its two memory formats.

Memory is the most that was resident at once (VmHWM) over the whole life of the process: of PyTorch with Python and all
libraries, of the program with everything that it has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import edgetrain as et
from benchmarks.contenders import EAGER, RESULTS, Case, Times, about, build, faster, plain, ratio, start
from benchmarks.markdown import head, line, made
from edgetrain.bench.contender import Contender
from edgetrain.firmware import build as building
from edgetrain.firmware import emulate
from edgetrain.firmware.export import Project

CASES = {
    case.model: case
    for case in (
        Case("lenet", 8, "plain_sgd", classes=10),
        Case("mobilenet_v2", 8, "plain_sgd", classes=10, input_size=64, width=0.35),
    )
}
FAST, ONE, SCALAR = "firmware", "firmware, one thread", "firmware, scalar"
BURST, NOT_COUNTED = 12, 4
REST_S = 0.03  # between bursts: threads of the one before stop spinning


def contending(name: str, program: Path, threads: int) -> Contender:
    """A project with firmware_linux.c in place of its main.c."""
    environment = {"FIRMWARE_THREADS": str(threads)}
    return Contender(name, [str(program)], environment=environment, folder=program.parent)


@dataclass(frozen=True)
class Firmware:
    project: Project
    batch: tuple[Any, ...]
    weights_bytes: int
    resident_bytes: int


def export(case: Case, folder: Path) -> Firmware:
    """The project, and the memory of its own program over a few steps."""
    built = build(case)
    built.model.train()
    graph = et.lower_for_firmware(et.capture(built.model, built.loss, built.optimizer, built.batch))
    plan = et.keep_all(graph, updates="final")
    project = et.export(graph, plan, built.model, built.optimizer, target="linux-x86_64", out=folder)
    run = emulate.run_firmware(folder, [built.batch] * 5, variant="fast")
    assert run.resident_bytes is not None
    weights_bytes = sum(p.numel() * p.element_size() for p in built.model.parameters())
    return Firmware(project, built.batch, weights_bytes, run.resident_bytes)


def program(firmware: Firmware, variant: building.Variant) -> Path:
    """The contender's program, from the objects of the project's own one."""
    folder = firmware.project.folder
    done = building.build(folder, variant)
    objects = [path for path in Path(f"{done.program}.objects").rglob("*.o") if path.name != "main.o"]
    where = folder / f"contender_{variant}"
    where.mkdir()
    own = Path(__file__).with_suffix(".c")
    flags = ["-std=c11", "-O2", "-I", str(folder), "-static", "-pthread"]
    command = ["gcc", *flags, str(own), *map(str, objects), "-lm", "-o", str(where / "contender")]
    subprocess.run(command, check=True)
    content = emulate.batch_bytes(building.load_project(folder), 0, firmware.batch)
    (where / "batch.bin").write_bytes(content)
    return where / "contender"


def burst(one: Contender) -> float:
    """The median of a burst, without its first steps."""
    if one.name == SCALAR:
        return float(one.ask("step"))
    times = [float(one.ask("step")) for _ in range(BURST)]
    return statistics.median(times[NOT_COUNTED:])


@contextlib.contextmanager
def contenders(case: Case, firmware: Firmware, threads: int) -> Iterator[dict[str, Contender]]:
    fast, scalar = program(firmware, "fast"), program(firmware, "plain")
    with contextlib.ExitStack() as stack:
        running: dict[str, Contender] = {}
        for way in plain(case):
            running[way.name] = stack.enter_context(start(case, way))
        for name, path, n in ((FAST, fast, threads), (ONE, fast, 1), (SCALAR, scalar, 1)):
            running[name] = stack.enter_context(contending(name, path, n))
        yield running


def run_case(case: Case, rounds: int, threads: int, folder: Path) -> dict[str, Any]:
    firmware = export(case, folder)
    times: Times = {}
    shuffle = random.Random(0)
    with contenders(case, firmware, threads) as running:
        for one in running.values():
            burst(one)
        for _ in range(rounds):
            for name in shuffle.sample(list(running), len(running)):
                time.sleep(REST_S)
                times.setdefault(name, []).append(burst(running[name]))
        torch_bytes = min(running[way.name].ask("memory")["peak_bytes"] for way in plain(case))
    best = faster(times)
    project = firmware.project
    return {
        "model": case.model,
        "batch": case.batch,
        "optimizer": case.optimizer,
        "rounds": rounds,
        "threads": threads,
        "median_s": {name: statistics.median(values) for name, values in times.items()},
        "faster_eager": best,
        "time_ratio": ratio(times[FAST], times[best]),
        "one_thread_ratio": ratio(times[ONE], times[best]),
        "arena_bytes": project.arena_bytes,
        "weights_bytes": firmware.weights_bytes,
        "other_lasting_bytes": project.lasting_bytes + project.frozen_bytes - firmware.weights_bytes,
        "resident_bytes": firmware.resident_bytes,
        "besides_bytes": firmware.resident_bytes - project.arena_bytes - firmware.weights_bytes,
        "torch_resident_bytes": torch_bytes,
    }


def page(result: dict[str, Any]) -> str:
    names = (EAGER.name, "eager channels-last", FAST, ONE, SCALAR)
    lines = ["# A training step on a Linux board: vectorised C against PyTorch", "", made(result["about"]), ""]
    lines += head("model, batch", *(f"{name}, ms" for name in names), "time of firmware / PyTorch (95 %)")
    for row in result["rows"]:
        found = row["time_ratio"]
        cells = [f"{row['median_s'][name] * 1e3:.2f}" for name in names]
        spread = f"{found['median']:.2f} ({found['low']:.2f}–{found['high']:.2f})"
        lines.append(line(f"{row['model']}, {row['batch']}", *cells, spread))
    lines += [
        "",
        "Resident at most, MB (millions of bytes); the rest is code, C library, stacks, batch and buffers:",
        "",
    ]
    lines += head("model", "PyTorch", "firmware", "of it arena", "weights", "the rest")
    for row in result["rows"]:
        keys = ("torch_resident_bytes", "resident_bytes", "arena_bytes", "weights_bytes", "besides_bytes")
        lines.append(line(row["model"], *(f"{row[key] / 1e6:.2f}" for key in keys)))
    about_case = f"Plain SGD, {result['rows'][0]['threads']} threads, {result['rows'][0]['rounds']} rounds."
    return "\n".join([*lines, "", about_case, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*CASES, []], help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--rounds", type=int, default=31)
    given = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of the contenders; PyTorch would take as many by itself
    rows = []
    for name in given.models or CASES:
        print(f"{name} …", file=sys.stderr, flush=True)
        place = Path(tempfile.mkdtemp(prefix="firmware-linux-"))
        try:
            rows.append(run_case(CASES[name], given.rounds, threads, place / "fw"))
        finally:
            shutil.rmtree(place)
    result = {"about": about(), "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "firmware_linux.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "firmware_linux.md").write_text(page(result))
    print(page(result))


if __name__ == "__main__":
    main()
