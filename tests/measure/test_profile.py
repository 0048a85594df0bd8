"""A profile as a whole: a known meter is read right, every op is there, what is missing is missing."""

from __future__ import annotations

import os
import shutil
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import UserError
from edgetrain.measure import profile as profiling
from edgetrain.measure.attributed import load_attributed
from edgetrain.measure.picture import load as load_picture
from edgetrain.measure.profile import Profile, found_sources, profile
from edgetrain.measure.protocol import Protocol
from edgetrain.measure.record import RunFolder
from edgetrain.measure.repeats import combined
from edgetrain.measure.sampler import Sampler
from edgetrain.measure.samples import read_samples
from edgetrain.measure.sensors import process_time
from edgetrain.measure.sensors.source import Source
from edgetrain.measure.timeline import load_timeline
from edgetrain.report.embedded import held_bytes
from edgetrain.run.step import Step
from tests.measure.fake_sources import Watts

STEPS = 20
QUICK = Protocol(idle_s=0.3, rounds=1, most_warm_up=10)
BATCH = (torch.linspace(-1, 1, 256 * 64).reshape(256, 64), torch.arange(256) % 5)


def prepared(**options: Any) -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 5)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return et.prepare(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, BATCH, **options)


def taken(folder: Path, sources: list[Source]) -> Profile:
    return profile(prepared(), BATCH, steps=STEPS, out=folder, sources=sources, protocol=QUICK)


def own_time() -> Source:
    source = process_time.find(Path("/"), os.getpid())[1]
    assert source is not None
    return source


@pytest.fixture(scope="module")
def metered(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return taken(tmp_path_factory.mktemp("profile") / "run", [Watts(20.0), own_time()])


def test_a_meter_of_known_power(metered: Profile) -> None:
    found, span = metered.summary, metered.measured.measured
    assert found["power_w"].value == pytest.approx(20.0, rel=1e-3)
    assert found["idle_power_w"].value == pytest.approx(20.0, rel=1e-3)
    assert found["energy_per_step_j"].value == pytest.approx(20.0 * span.time_s / STEPS, rel=1e-3)
    assert found["net_energy_per_step_j"].value == pytest.approx(0.0, abs=0.02 * span.time_s)
    assert found["energy_source"].value == "meter"
    energy = next(one for one in metered.attributed if one.quantity == "energy")
    total = sum(group.amount for group in energy.groups if group.amount is not None)
    assert total == pytest.approx(20.0 * span.time_s / STEPS, rel=0.1)


def test_the_folder_holds_all_of_it(metered: Profile) -> None:
    record = RunFolder(metered.folder).load()
    assert record == metered.record
    assert record.status == "finished"
    timeline = load_timeline(metered.folder)
    assert timeline is not None
    assert timeline.steps == STEPS
    assert read_samples(metered.folder).source("meter").values.shape[0] > 10
    assert load_attributed(metered.folder, len(timeline.ops)) == metered.attributed
    assert {one.quantity for one in metered.attributed} == {"energy", "cpu time"}
    held = held_bytes(timeline, load_picture(metered.folder))
    assert held is not None
    assert max(filter(None, held)) == metered.summary["peak_bytes"].value


def test_the_parts_add_up(metered: Profile) -> None:
    found = metered.summary
    number = {name: float(value.value) for name, value in found.items() if isinstance(value.value, int | float)}
    parts = sum(number[name] for name in ("forward_s", "backward_s", "update_s", "recomputed_s", "between_ops_s"))
    assert parts == pytest.approx(number["step_time_s"], rel=0.5)
    split = [name for name in number if name.startswith("peak_") and name.endswith("_bytes") and name != "peak_bytes"]
    assert sum(number[name] for name in split) == pytest.approx(number["peak_bytes"], rel=0.01)
    assert number["samples_per_s"] == pytest.approx(256 / number["step_time_s"])
    assert number["memory_over_inference"] > 1


def test_what_measuring_costs_is_told(metered: Profile) -> None:
    for name in ("overhead_sampling", "overhead_tracing"):
        busy = "overhead_note" in metered.summary  # this machine has other work too
        assert metered.summary[name].origin == ("unavailable" if busy else "measured")


@pytest.mark.parametrize(
    ("sampling", "tracing", "alone", "known"),
    [(1.02, 1.03, True, True), (0.99, 1.03, True, True), (0.3, 1.03, True, False), (1.02, 0.3, True, False),
     (1.02, 1.03, False, False), (0.3, 0.3, False, False)],
)  # fmt: skip
def test_what_measuring_costs_is_not_stated_of_a_busy_machine(
    sampling: float, tracing: float, alone: bool, known: bool, metered: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "_alone", lambda measured, span: alone)
    plain = [1 + 0.02 * (n % 5 - 2) for n in range(12)]  # so the interval of 0.99 holds 0
    blocks: dict[Any, tuple[float, ...]] = {"nothing": tuple(plain)}
    for way, factor in (("sampling", sampling), ("tracing", tracing)):
        blocks[way] = tuple(factor * value for value in reversed(plain))
    found = profiling._trust(replace(metered.measured, blocks=blocks))
    for name in ("overhead_sampling", "overhead_tracing"):
        assert (found[name].value is not None) == known
        assert (found[name].high or 0) >= 0
    assert ("overhead_note" in found) != known
    if not known:
        assert found["overhead_note"].value == "not known: the machine was busy"


def test_without_a_sensor_energy_is_missing(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    short = Protocol(idle_s=0, rounds=0, most_warm_up=10)
    found = profile(
        prepared(), BATCH, steps=5, out=tmp_path / "run", sources=[own_time()], protocol=short, threads=1,
        cores=[min(cores)],
    ).summary  # fmt: skip
    for name in ("energy_per_step_j", "net_energy_per_sample_j", "power_w", "utilisation", "overhead_tracing"):
        assert (found[name].value, found[name].origin) == (None, "unavailable")
    assert (found["threads"].value, found["cores"].value) == (1, str(min(cores)))
    assert os.sched_getaffinity(0) == cores


def test_a_step_that_fails_leaves_a_record_that_says_so(tmp_path: Path) -> None:
    step = prepared()
    with pytest.raises(UserError):
        profile(step, (BATCH[0], None), steps=3, out=tmp_path / "run", sources=[own_time()], protocol=QUICK)
    assert RunFolder(tmp_path / "run").load().status == "failed"


def test_repeats_taken_together(metered: Profile, tmp_path: Path) -> None:
    shutil.copytree(metered.folder, tmp_path / "first")
    second = taken(tmp_path / "second", [Watts(40.0), own_time()])
    shutil.copytree(second.folder, tmp_path / "third")
    runs = [RunFolder(tmp_path / name) for name in ("first", "second", "third")]
    steps = [s for run in runs if (t := load_timeline(run.path)) is not None for s in t.step_s.tolist()]
    found = combined(runs[0], runs[1:])
    assert found["repeats"].value == 3
    assert found["power_w"].value == second.summary["power_w"].value  # the median of one of 20 W and two of 40 W
    assert found["power_w"].low == pytest.approx(20.0, rel=1e-3)
    assert found["step_time_s"].value == pytest.approx(statistics.median(steps))
    assert runs[0].load().summary == found


def test_the_sampler_stays_light_with_all_that_this_machine_has(tmp_path: Path) -> None:
    """A source that needs PyTorch to be unpickled would start ten times as slowly and hold 200 MB."""
    with Sampler(found_sources("rpi4"), tmp_path) as sampler:
        pass
    held = sampler.summary.resident_bytes
    assert held is not None
    assert held < 60_000_000
