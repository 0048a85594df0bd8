"""Answers that speak of the same thing agree: what plans and what exports, what pages and what stores, what is claimed
of numbers and times and what is seen of them."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import edgetrain as et
from benchmarks.small_nets import SMALL
from edgetrain.cli import main
from edgetrain.devices import device as devices
from edgetrain.errors import Infeasible
from edgetrain.firmware.emulate import run_firmware
from edgetrain.firmware.instructions import core_of, cores, firmware_costs, instructions_of
from edgetrain.firmware.planned import firmware_step
from edgetrain.firmware.target import load_target, target_names
from edgetrain.graph.ir import Graph
from edgetrain.measure.metrics import Span
from edgetrain.measure.profile import _energy
from edgetrain.measure.protocol import Measured
from edgetrain.measure.record import Value
from edgetrain.measure.samples import Samples, Series
from edgetrain.measure.samples_file import Summary
from edgetrain.measure.sensors.modelled_power import PROCESS_ENERGY
from edgetrain.measure.sensors.source import Channel, Kind
from edgetrain.measure.steady import MAX_SPREAD, spread_of, steady
from edgetrain.measure.timeline import Timeline
from edgetrain.ops.entry import entry_of, registered
from edgetrain.plan import time_left
from edgetrain.plan.budget import Budget
from edgetrain.plan.planning import plan
from edgetrain.run.exact import exactness_of

Run = Callable[..., tuple[int, dict[str, Any], str]]
EXAMPLES = int(os.environ.get("EDGETRAIN_EXAMPLES", "3"))
SERVED = tuple(name for name in devices.names() if devices.load(name).firmware is not None)
NETS: tuple[tuple[Any, ...], ...] = (
    ("lenet", "--width", 0.5, "--batch", 4),
    ("lenet", "--width", 0.25, "--batch", 1, "--optimizer", "adam"),
    ("autoencoder", "--width", 0.25, "--batch", 2),
    ("ds_cnn", "--width", 0.5, "--batch", 1),
    ("own.py:mlp", "--batch", 8, "--input-size", 4, "--momentum", 0.9),
)
OWN = """
from torch import nn

def mlp(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, classes))
"""
_BYTES = ("arena_bytes", "lasting_bytes", "frozen_bytes", "weights_bytes", "plan_peak_bytes", "kept_bytes", "target")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)

    def go(*words: object) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setattr(sys, "argv", ["edgetrain", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(ended.value.code or 0), json.loads(out) if out.strip() else {}, err

    return go


def both(run: Run, net: tuple[Any, ...], device: str, *more: object) -> dict[str, Any] | str:
    """What plan and export answer, which must be the same: the bytes of a program, or why there is none."""
    folder = f"fw-{random.getrandbits(48)}"
    planned = run("plan", *net, "--device", device, *more, "--json", "--time-limit", 1)
    exported = run("export", *net, "--target", device, *more, "--out", folder, "--json")
    assert planned[0] == exported[0], (planned, exported)
    if planned[0]:
        assert planned[0] == 1
        assert planned[2] == exported[2]
        return planned[2]
    program: dict[str, Any] = planned[1]["firmware"]
    assert {key: program[key] for key in _BYTES} == {key: exported[1][key] for key in _BYTES}
    assert planned[1]["plan"]["recomputed_ops"] == exported[1]["recomputed"]
    return program


# ---- plan and export


@pytest.mark.parametrize("device", SERVED)
def test_plan_and_export_give_one_answer(run: Run, device: str) -> None:
    """For each device some nets, with its own memory and with budgets around the smallest that works."""
    draw = random.Random(device)
    for net in draw.sample(NETS, min(EXAMPLES - 1, len(NETS))):
        answer = both(run, net, device)
        if isinstance(answer, str):
            assert "this step takes" in answer or "this program takes" in answer
            continue
        less = answer["ram_bytes"] * draw.randint(70, 99) // 100
        both(run, net, device, "--memory", less)
        both(run, net, device, "--memory", 1000)


def firmware(name: str, target: str) -> Any:
    torch.manual_seed(0)
    net = SMALL[name]
    model = net.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return firmware_step(model, net.loss, optimizer, net.batch(), load_target(target))


@pytest.mark.parametrize("name", ["mlp", "minilearn_har", "lenet"])
def test_the_smallest_budget_works_and_one_word_less_does_not(name: str) -> None:
    step = firmware(name, "linux-x86_64")
    with pytest.raises(Infeasible) as small:
        step.plan(1000, time_limit_s=2.0)
    smallest = small.value.smallest_bytes
    assert smallest is not None
    assert small.value.bound_bytes is not None
    assert small.value.bound_bytes <= smallest
    program = step.project(step.plan(smallest, time_limit_s=2.0))
    assert program.ram_bytes <= smallest
    with pytest.raises(Infeasible) as again:
        step.plan(smallest - 4, time_limit_s=2.0)
    assert again.value.smallest_bytes == smallest
    with pytest.raises(Infeasible):
        step.plan(small.value.bound_bytes - 4, time_limit_s=2.0)


def test_all_plans_for_a_target_are_within_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What searches takes all of the time that it is given; what comes after has none."""
    step, given, now = firmware("lenet", "nrf52840"), list[float](), [0.0]
    plan_under = plan

    def slow(*words: Any, left_s: float, **named: Any) -> Any:
        given.append(left_s)
        now[0] += left_s
        return plan_under(*words, left_s=0.0, **named)

    monkeypatch.setattr("edgetrain.firmware.fit.plan_under", slow)
    monkeypatch.setattr(time_left, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(Infeasible) as small:
        step.plan(1000, time_limit_s=2.0)
    assert given[0] == 2.0
    assert sum(given) == pytest.approx(2.0)
    assert small.value.lasting
    assert sum(n_bytes for _, n_bytes in small.value.lasting) <= small.value.bound_bytes


def test_a_plan_claims_no_more_of_firmware_than_it_keeps() -> None:
    step = firmware("mlp", "nrf52840")
    plan = step.plan()
    assert plan.exact == "rounding"
    assert plan.updates == "final"
    assert not plan.paged


def test_what_firmware_does_not_do_is_refused_or_done_by_the_library(run: Run) -> None:
    net = NETS[0]
    for more in (("--page",), ("--micro-batches", 2), ("--planner", "poet")):
        code, _, err = run("plan", *net, "--device", "nrf52840", *more)
        assert code == 1
        assert "--runtime library" in err
        code, found, _ = run("plan", *net, "--device", "rpi4", "--memory", "10MB", *more, "--json")
        assert code == 0
        assert "firmware" not in found
    assert run("plan", *net, "--device", "meizu_16t", "--runtime", "firmware")[0] == 1
    assert run("plan", *net, "--memory", "10MB", "--page")[0] == 2


# ---- instruction counts


def test_every_kernel_has_counts_on_every_core() -> None:
    kinds = {kind.removeprefix("edgetrain.") for kind in registered() if entry_of(kind).c is not None}
    for counted in cores().values():
        assert set(counted.coefficients) == kinds
        assert 0 < counted.plus_minus < 0.2
        assert all(value >= 0 for row in counted.coefficients.values() for value in row)
    boards = [load_target(name) for name in target_names() if load_target(name).is_board]
    assert {core.name for target in boards if (core := core_of(target)) is not None} == set(cores())


@pytest.mark.parametrize(("name", "target"), [("mlp", "nrf52840"), ("minilearn_har", "stm32f746"), ("mlp", "mkr1000")])
def test_instructions_are_those_that_the_emulator_counts(tmp_path: Path, name: str, target: str) -> None:
    step = firmware(name, target)
    plan = step.plan()
    folder = tmp_path / "fw"
    et.export(step.graph, plan, step.model, step.optimizer, target=step.target, out=folder, predict=False)
    counted = run_firmware(folder, [SMALL[name].batch()]).instructions_per_step
    core = core_of(step.target)
    assert core is not None
    assert counted is not None
    predicted = sum(instructions_of(step.graph, step.graph.ops[op], core) or 0.0 for op in plan.order)
    assert predicted == pytest.approx(counted, rel=3 * core.plus_minus)
    clock = step.target.device.processor.frequency_hz
    assert clock is not None
    assert plan.time_s == pytest.approx(predicted / clock.value)


def test_times_of_firmware_grow_with_its_work() -> None:
    """Twice the samples take more time on every target, and never more than four times as much."""
    for name in target_names():
        times = [_time_s(samples, name) for samples in (2, 4, 8)]
        assert times[0] < times[1] < times[2] < 4 * times[1] < 16 * times[0]


def _time_s(samples: int, target: str) -> float:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 100, 4))
    batch = (torch.randn(samples, 3, 12, 12), torch.arange(samples) % 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    graph = et.lower_for_firmware(et.capture(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, batch))
    costs = firmware_costs(graph, load_target(target))
    assert costs.store is None
    return sum(op.time_s for op in costs.ops)


# ---- devices: RAM and storage


def deep(samples: int) -> Graph:
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(64, 4))
    batch = (torch.randn(samples, 64), torch.arange(samples) % 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return et.capture(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, batch)


def with_storage(folder: Path, n_bytes: int) -> Path:
    """The fastest of stores beside the slowest of cores, with so much room."""
    text = (devices.FOLDER / "mkr1000.toml").read_text().partition("[firmware]")[0]
    lines = [line for line in text.splitlines() if not line.startswith(("n_bytes = { value = 4e", "in_bytes", "out_b"))]
    rate = 'value = 1e9, source = "made up"'
    room = f'n_bytes = {{ value = {n_bytes}, source = "made up" }}'
    storage = f"[storage]\n{room}\nin_bytes_s = {{ {rate} }}\nout_bytes_s = {{ {rate} }}"
    file = folder / f"own{n_bytes}.toml"
    file.write_text("\n".join(lines).replace("[storage]", storage))
    return file


def test_no_plan_pages_more_than_the_device_stores(tmp_path: Path) -> None:
    graph = deep(512)
    plain = et.keep_all(graph)
    budget = Budget(plain.persistent_bytes + (plain.peak_bytes - plain.persistent_bytes) * 6 // 10)
    sizes = {}
    for n_bytes in (10**9, 3000):
        costs = et.model_costs(graph, str(with_storage(tmp_path, n_bytes)))
        assert costs.store is not None
        assert costs.store.n_bytes == n_bytes
        assert type(costs).load(_saved(costs, tmp_path)).store == costs.store
        plan = et.plan(graph, costs, budget, time_limit_s=2.0, use_cache=False)
        sizes[n_bytes] = sum(graph.storages[s].n_bytes for s in plan.paged)
        assert sizes[n_bytes] <= n_bytes
    assert sizes[10**9] > 3000
    assert "nothing is paged" in plan.note
    with pytest.raises(Infeasible, match="the store holds"):
        et.plan(graph, costs, budget, planner="page-only", time_limit_s=2.0, use_cache=False)


def _saved(costs: Any, folder: Path) -> Path:
    costs.save(folder / "costs.json")
    return folder / "costs.json"


def test_a_device_pages_only_where_asked_and_what_does_not_fit_is_a_failure(run: Run, tmp_path: Path) -> None:
    Path("deep.py").write_text(
        "from torch import nn\ndef deep(classes):\n    layers = [nn.Flatten()]\n    for n in range(8):\n"
        "        layers += [nn.Linear(48, 48), nn.Tanh()]\n    return nn.Sequential(*layers, nn.Linear(48, classes))\n"
    )
    words = ("plan", "deep.py:deep", "--batch", 256, "--input-size", 4, "--device", with_storage(tmp_path, 10**9))
    plain = run(*words[:-1], "rpi4", "--runtime", "library", "--json")[1]["keep_all"]["peak_bytes"]
    assert plain > 32768
    assert run(*words, "--json")[0] == 1
    assert run(*words, "--memory", "1MB", "--planner", "keep-all", "--json")[0] == 1
    roomy = tmp_path / "roomy.toml"
    roomy.write_text(Path(words[-1]).read_text().replace("value = 32768", "value = 3276800"))
    given = (*words[:-1], roomy, "--memory", plain * 8 // 10, "--time-limit", 2, "--out")
    assert run(*given, "asleep", "--json")[0] == 0
    assert run(*given, "awake", "--page", "--json")[0] == 0
    assert not et.Plan.load("asleep/plan.json").paged
    assert et.Plan.load("awake/plan.json").paged


# ---- energy

S = 1_000_000_000
WATTS_IDLE, WATTS_OWN, WATTS_OTHERS = 5.0, 3.0, 4.0


def energies_of(*, modelled: bool, others_before: float, others_during: float) -> dict[str, Value]:
    """What a profile says of 4 s of idling and 4 s of 40 steps, with so many cores of others at work."""
    at = np.arange(0, 9) * S
    idle = np.minimum(np.arange(9.0), 4.0)
    busy = np.maximum(np.arange(9.0) - 4.0, 0.0)
    others_s = others_before * idle + others_during * busy
    own_s = busy
    joules = WATTS_IDLE * np.arange(9.0) + WATTS_OWN * own_s + WATTS_OTHERS * others_s
    kind: Kind = "modelled" if modelled else "measured"
    machine = Channel("model_energy_j" if modelled else "meter_j", "J", True, kind)
    own = Channel(PROCESS_ENERGY, "J", True, "modelled", part_of="model_energy_j")
    cores = tuple(Channel(f"cpu{n}_time_s", "s", True, "measured") for n in range(2))
    process = Channel("process_time_s", "s", True, "measured")
    both_cores = (own_s + others_s) / 2
    series = [
        Series("meter", (machine,), at, at, joules[:, None]),
        Series("cores", cores, at, at, np.stack([both_cores, both_cores], axis=1)),
        Series("process", (process,), at, at, own_s[:, None]),
    ]
    if modelled:
        series.append(Series("own", (own,), at, at, (WATTS_OWN * own_s)[:, None]))
    rows = np.stack([4 * S + np.arange(40) * S // 10, 4 * S + (np.arange(40) + 1) * S // 10], axis=1)
    nothing = np.zeros((40, 0), dtype=np.int64)
    measured = Measured(
        Timeline((), rows, nothing, nothing), Samples(S, 0, 0, tuple(series), False), Summary("stopped"),
        Span(0, 4 * S), Span(4 * S, 8 * S), (0.1,) * 10, steady([0.1] * 10),
    )  # fmt: skip
    return _energy(measured, 16)


@pytest.mark.parametrize("before", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("during", [0.0, 0.5, 1.0])
def test_energy_above_idle_is_the_process_s_own_or_not_known(before: float, during: float) -> None:
    modelled = energies_of(modelled=True, others_before=before, others_during=during)
    assert modelled["net_energy_per_step_j"].value == pytest.approx(WATTS_OWN / 10)
    measured = energies_of(modelled=False, others_before=before, others_during=during)
    net, alone = measured["net_energy_per_step_j"], before == during == 0
    assert net.value == (pytest.approx(WATTS_OWN / 10) if alone else None)
    assert net.origin == ("derived" if alone else "unavailable")
    for found in (modelled, measured):
        assert (found["idle_power_w"].value is None) == (before > 0)
        assert ("energy_note" in found) == (during > 0)
        per_step = {round(v.value, 9) for name, v in found.items() if "per_step" in name and isinstance(v.value, float)}
        assert len(per_step) <= 2


# ---- numbers and times


@torch.jit.script
def swish(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class Calls(nn.Module):
    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(4, 4), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.layer(x))


def plain_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


SCRIPTED: dict[str, Callable[[], tuple[nn.Module, Callable[..., torch.Tensor]]]] = {
    "module": lambda: (nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.GELU())), plain_loss),
    "traced": lambda: (nn.Sequential(torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4))), plain_loss),
    "function in a module": lambda: (Calls(swish), plain_loss),
    "function that a function calls": lambda: (Calls(lambda x: swish(x)), plain_loss),
    "loss": lambda: (nn.Linear(4, 4), lambda model, x, y: swish(model(x)).sum()),
    "compiled": lambda: (Calls(torch.compile(nn.Linear(4, 4))), plain_loss),
}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"lr": torch.tensor(0.01)}, {"lr": torch.tensor(0.01, dtype=torch.float64)}, {"eps": torch.tensor(1e-8)},
    {"betas": (torch.tensor(0.9), torch.tensor(0.999)), "foreach": False}, {"weight_decay": torch.tensor(0.1)},
)  # fmt: skip


@pytest.mark.parametrize("which", SCRIPTED)
def test_compiled_code_claims_no_bits(which: str) -> None:
    model, loss = SCRIPTED[which]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    assert exactness_of(model, loss, optimizer, "preserve") == "rounding"
    assert exactness_of(Calls(torch.tanh), plain_loss, optimizer, "preserve") == "bitwise"


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "_".join(settings))
def test_adam_with_settings_in_tensors_claims_no_bits(settings: dict[str, Any]) -> None:
    model = nn.Linear(4, 4)
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        optimizer = kind(model.parameters(), lr=0.01)
        optimizer.param_groups[0].update(settings)
        assert exactness_of(model, plain_loss, optimizer, "preserve") == "rounding"
        assert exactness_of(model, plain_loss, kind(model.parameters(), lr=0.01), "preserve") == "bitwise"


@pytest.mark.parametrize("seed", range(EXAMPLES))
@pytest.mark.parametrize("steps", [10, 30, 200])
def test_steady_is_not_said_of_steps_that_spread(steps: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    wild = {
        "even": draw.uniform(1, 6, steps), "two levels": draw.choice([1.0, 6.0], steps),
        "long tail": draw.lognormal(0, 0.6, steps), "one in five": np.where(np.arange(steps) % 5 == 4, 6.0, 1.0),
    }  # fmt: skip
    calm = steady(draw.normal(1.0, 0.01, steps).tolist())
    for kind, times in wild.items():
        assert spread_of(times.tolist()) > MAX_SPREAD, kind
        found = steady(times.tolist())
        assert found.first is None, kind
        assert str(found).startswith("not reached"), kind
        if calm.first is not None:
            assert calm.of_measured(times.tolist()).startswith("not reached"), kind
