"""`edgetrain calibrate`: this machine's watts, read off a plug meter, for the energy that is modelled here."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated

import typer

from edgetrain import ranges
from edgetrain.cli.options import numeric
from edgetrain.cli.output import Json, notes, print_json, results
from edgetrain.errors import UserError
from edgetrain.measure import calibration, power_model

PHASE_S = replace(ranges.IDLE_SECONDS, low=0.1)
_PHASES = {"idle": "with the machine idle", "busy": "with every core at work"}


def calibrate(
    idle_watts: Annotated[
        float | None, numeric(ranges.WATTS, "Watts on the meter when idle; asked for if left out.", "--idle-watts")
    ] = None,
    busy_watts: Annotated[
        float | None,
        numeric(ranges.WATTS, "Watts on the meter with every core at work; asked for if left out.", "--busy-watts"),
    ] = None,
    idle_seconds: Annotated[
        float, numeric(PHASE_S, "Seconds that the machine is left idle before the reading.", "--idle-seconds")
    ] = 20.0,
    busy_seconds: Annotated[
        float, numeric(PHASE_S, "Seconds that every core is at work before the reading.", "--busy-seconds")
    ] = 20.0,
    json: Json = False,
) -> None:
    """Fit the energy model to this machine, with a plug meter between it and the wall.

    The machine is left idle, then every core is put to work; read the meter at the end of each. From then on modelled
    energy is marked "modelled (calibrated)". End other programs first. A laptop needs a full battery, so that it does
    not charge meanwhile.

    Example: edgetrain calibrate
    """
    given = {"idle": idle_watts, "busy": busy_watts}
    notes.print(f"idle for {idle_seconds:g} s, then every core at work for {busy_seconds:g} s: watch the meter")

    def ask(phase: str) -> float:
        watts = given[phase]
        return _asked(phase) if watts is None else watts

    fitted = calibration.calibrate(ask, idle_s=idle_seconds, busy_s=busy_seconds)
    path = calibration.save(fitted)
    model = power_model.from_calibration(fitted)
    if json:
        print_json({"file": str(path), "calibration": asdict(fitted), "model": asdict(model)})
        return
    results.print(
        f"{model.idle_w:.3g} W idle and {model.core_w:.3g} W a busy core, {model.label}.\n"
        f"Measured with {fitted.idle_cores:.2f} and {fitted.busy_cores:.2f} busy cores; kept in {path}.",
        markup=False,
        soft_wrap=True,
    )


def _asked(phase: str) -> float:
    try:
        return float(typer.prompt(f"watts on the meter now, {_PHASES[phase]}", type=float, err=True))
    except typer.Abort as error:  # no terminal to ask on
        raise UserError(
            f"the watts {_PHASES[phase]} are missing",
            next_step=f"run it in a terminal, or give --{phase}-watts",
        ) from error
