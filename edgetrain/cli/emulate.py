"""`edgetrain emulate`: firmware that `edgetrain export` wrote, built and run over data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from edgetrain import ranges
from edgetrain.cli.models_and_data import by_sides
from edgetrain.cli.options import numeric
from edgetrain.cli.output import Json, notes, print_json, results
from edgetrain.errors import UserError
from edgetrain.firmware.build import Variant, load_project
from edgetrain.firmware.counts import CountedCall
from edgetrain.firmware.emulate import CODES, FirmwareFailed, Run, run_firmware
from edgetrain.zoo import datasets
from edgetrain.zoo.datasets.base import Split


def emulate(
    folder: Annotated[Path, typer.Argument(help="Folder that `edgetrain export` wrote.")],
    data: Annotated[
        str | None,
        typer.Option(help="Data set by name or path, as in `edgetrain train`; without it a random batch."),
    ] = None,
    steps: Annotated[int, numeric(ranges.STEPS, "Steps to train.")] = 10,
    seed: Annotated[int, numeric(ranges.SEED, "Seed of the order of samples.")] = 0,
    scalar: Annotated[
        bool,
        typer.Option(
            "--scalar", help="On a Linux board: the slower program, with the same bits as on every other board."
        ),
    ] = False,
    threads: Annotated[
        int | None, numeric(ranges.THREADS, "Threads on a Linux board; by default one for each core.")
    ] = None,
    flash: Annotated[
        Path | None,
        typer.Option(help="File that stands for the board's flash: training continues from it, up to --steps in all."),
    ] = None,
    time_limit: Annotated[
        float, numeric(ranges.SECONDS, "Seconds that building and running may take together.")
    ] = 600.0,
    json: Json = False,
) -> None:
    """Build firmware and train with it in the emulator of its board; show losses, memory and instructions.

    A microcontroller has one program. A Linux board has two: a vectorised one that uses all cores, and with --scalar a
    slower one that gives bit-identical results on every board.

    Example: edgetrain emulate fw --data digits --steps 20

    Example: edgetrain emulate fw --steps 3
    """
    project = load_project(folder)
    variant: Variant = "plain" if scalar or project["is_board"] else "fast"
    if threads is not None and variant == "plain":
        own = f"{project['target']} has one core" if project["is_board"] else "the scalar program has one thread"
        raise UserError(own, next_step="leave --threads out" + ("" if project["is_board"] else ", or --scalar"))
    if flash is not None and not flash.absolute().parent.is_dir():
        raise UserError(f"{flash} cannot be made: there is no folder {flash.parent}")
    batches = _Batches(steps, [_random(project, seed)] if data is None else _batches(project, data, seed))
    try:
        with Progress(console=notes, transient=True, disable=json or not notes.is_terminal) as bar:
            task = bar.add_task(f"training on {project['target']}", total=steps)
            run = run_firmware(
                folder,
                batches,
                variant=variant,
                threads=threads,
                flash=flash,
                progress=lambda step, loss: bar.update(task, completed=step, description=f"loss {loss:.4f}"),
                time_limit_s=time_limit,
            )
    except FirmwareFailed as failed:
        if not json:
            raise
        print_json({"failed": failed.code, "why": CODES.get(failed.code, ""), "output": failed.output.strip()})
        raise typer.Exit(1) from None
    described = _described(project, run, "scalar" if variant == "plain" else "fast")
    if json:
        print_json(described)
    else:
        results.print("\n".join(_lines(project, described)), markup=False, soft_wrap=True)


@dataclass(frozen=True)
class _Batches:
    """So many batches, from the first again after the last. each: made as it is asked for."""

    count: int
    each: Iterable[tuple[torch.Tensor, ...]]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        return islice(cycle(self.each) if isinstance(self.each, list) else self.each, self.count)


def _batches(project: dict[str, Any], data: str, seed: int) -> Iterator[tuple[torch.Tensor, ...]]:
    samples, *sides = project["inputs"][0]["shape"]
    square = len(sides) == 3 and sides[0] in (1, 3) and sides[1] == sides[2]
    size, channels = (sides[-1], sides[0]) if square else (None, None)
    dataset = datasets.load(data, input_size=size, channels=channels, seed=seed)
    if list(dataset.shape) != sides:
        raise UserError(
            f"this firmware cannot train on {data}", expected=f"inputs of {by_sides(sides)}",
            received=f"inputs of {by_sides(dataset.shape)}",
            next_step="give the data that it was exported with, leave --data out for a random batch, or feed it from "
            "Python (run_firmware in edgetrain.firmware.emulate)",
        )  # fmt: skip
    if len(dataset.train) < samples:
        raise UserError(
            f"{data} has {len(dataset.train)} samples to train on", expected=f"a batch of {samples} at least"
        )
    return _in_any_order(dataset.train, samples, torch.Generator().manual_seed(seed))


def _in_any_order(train: Split, samples: int, generator: torch.Generator) -> Iterator[tuple[torch.Tensor, ...]]:
    """Batches for ever, each sample once before any comes again."""
    while True:
        left = torch.randperm(len(train), generator=generator)
        for part in left.split(samples):
            if len(part) == samples:
                yield train.batch(part)


def _random(project: dict[str, Any], seed: int) -> tuple[torch.Tensor, ...]:
    """A batch of the shapes that the firmware takes. Inputs that the step does not read have no place in it: 0."""
    generator = torch.Generator().manual_seed(seed)
    batch = [torch.zeros(())] * (1 + max(described["position"] for described in project["inputs"]))
    for described in project["inputs"]:
        shape, below = described["shape"], described.get("below", 1)
        numbers = described["dtype"] == "float32"
        batch[described["position"]] = (
            torch.randn(shape, generator=generator) if numbers else torch.randint(below, shape, generator=generator)
        )
    return tuple(batch)


def _described(project: dict[str, Any], run: Run, program: str) -> dict[str, Any]:
    board = project["is_board"]
    return {
        "target": project["target"],
        "program": program,
        "steps": len(run.losses),
        "steps_before": run.steps_before,
        "losses": list(run.losses),
        "arena_planned_bytes": project["arena_bytes"],
        "arena_used_bytes": run.arena_used_bytes,
        "stack_used_bytes": run.stack_used_bytes if board else None,
        "ram_bytes": run.built.ram_bytes if board else None,
        "resident_bytes": run.resident_bytes,
        "flash_bytes": run.built.flash_bytes if board else None,
        "kept_bytes": project["kept_bytes"],
        "sections": {name: n for name, n in run.built.sections.items() if not name.startswith((".debug", ".comment"))},
        "instructions": run.instructions,
        "instructions_per_step": run.instructions_per_step,
        "instructions_by_function": dict(run.instructions_by),
        "instructions_by_op": [_call(call, len(run.losses)) for call in run.calls],
        "time_s": run.time_s,
    }


def _call(call: CountedCall, steps: int) -> dict[str, Any]:
    """instructions: of all steps together, and so a whole number that two runs share."""
    products = call.multiply_adds * steps
    each = call.instructions / products if products else None
    return {**asdict(call), "instructions_per_multiply_add": each}


def _fall(losses: Sequence[float]) -> str:
    """A batch is small: of many steps, the means of the first and the last tenth say more than two batches."""
    n = max(1, len(losses) // 10)
    return f"loss {fmean(losses[:n]):.4f} → {fmean(losses[-n:]):.4f}" + (f", means of {n} steps" if n > 1 else "")


def _lines(project: dict[str, Any], described: dict[str, Any]) -> Iterator[str]:
    losses, before = described["losses"], described["steps_before"]
    if before:
        yield f"went on from step {before}, which a copy in flash holds"
    ran = f"{described['steps']} steps on {described['target']} in {described['time_s']:.1f} s"
    yield f"{ran}: {_fall(losses)}" if losses else f"{ran}: all were done before"
    yield f"arena: planned {described['arena_planned_bytes']} bytes, used {described['arena_used_bytes']}"
    if described["resident_bytes"] is not None:
        lasting = f"weights, state and batch {project['lasting_bytes']}"
        yield f"resident: {described['resident_bytes']} bytes at most, with arena and {lasting}"
    if not project["is_board"]:
        other = (
            "vectors, all cores; --scalar runs the bits of every board"
            if described["program"] == "fast"
            else "one core"
        )
        yield f"the {described['program']} program ran ({other})"
        return
    kept = f", and {described['kept_bytes']} for copies" if described["kept_bytes"] else ""
    memory = f"RAM {described['ram_bytes']} bytes linked, stack {described['stack_used_bytes']} used"
    yield f"{memory}; flash {described['flash_bytes']}{kept}"
    if not described["instructions_per_step"]:
        return
    yield f"{described['instructions']} instructions, {described['instructions_per_step']:.0f} a step; the most by op:"
    for call in sorted(described["instructions_by_op"], key=lambda call: -call["instructions"])[:8]:
        each = call["instructions_per_multiply_add"]
        rate = f", {each:.2f} a multiply-add" if each is not None else ""
        name = f"{call['function']} {call['module']}".strip()
        yield f"  {100 * call['instructions'] / described['instructions']:5.1f} %  {name}{rate}"
