"""The command line that both studies of firmware share: train in the emulator of a board, print the results."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import typer

from edgetrain.firmware.emulate import Run


class Results(Protocol):
    @property
    def run(self) -> Run: ...

    def lines(self) -> list[str]: ...


def command(study: Callable[..., Results], *, steps: int, text: str) -> None:
    """steps: by default. text: of its help."""

    def main(folder: Path, target: str = "nrf52840", steps: int = steps, seed: int = 0) -> None:
        with tempfile.TemporaryDirectory() as place:
            results = study(folder, Path(place) / "fw", target=target, steps=steps, seed=seed)
        run = results.run
        print("\n".join(results.lines()))
        print(f"loss {run.losses[0]:.3f} → {run.losses[-1]:.3f}; RAM {run.built.ram_bytes} bytes; {run.time_s:.1f} s")

    main.__doc__ = text
    typer.run(main)
