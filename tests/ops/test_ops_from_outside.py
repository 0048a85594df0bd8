"""Ops that the package knows nothing of go all the way: captured, planned, recomputed, run, profiled, exported."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import UserError
from edgetrain.firmware.emulate import run_firmware
from edgetrain.firmware.instructions import firmware_costs
from edgetrain.firmware.parity import compare, require_right
from edgetrain.firmware.target import load_target
from edgetrain.graph.capture.training import capture_with_externals
from edgetrain.measure.timeline import Tracer, load_timeline
from edgetrain.ops import unregister
from edgetrain.ops.call import overwritable
from edgetrain.ops.entry import work
from edgetrain.ops.replay import replay
from edgetrain.plan.plan import Compute
from edgetrain.report.breakdown import category_of
from tests.cli.commands import commands
from tests.helpers.plain import Training, training
from tests.ops import outside

SOFT, KEEP, WATCHED = (f"outside.{name}.default" for name in ("soft", "keep_some", "watched"))
OURS = (SOFT, KEEP, WATCHED)

OWN = """
from tests.ops.outside import Net

def net(classes):
    return Net(1.0, 64, classes)
"""


@pytest.fixture(autouse=True)
def ops(tmp_path: Path) -> Iterator[None]:
    with outside.known(tmp_path / "c"):
        yield


def cross_entropy(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def trained(keep: float = 0.75, hidden: int = 16) -> Training:
    torch.manual_seed(1)
    return training(outside.Net(keep, hidden=hidden), cross_entropy)


def batch(n: int = 6, seed: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 8, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def test_what_was_registered_is_asked_for() -> None:
    ours = trained()
    graph = et.capture(ours.model, ours.loss, ours.optimizer, batch())
    first = {op.kind: op for op in reversed(graph.ops)}
    assert set(OURS) | {f"outside.{n}_backward.default" for n in ("soft", "keep_some", "watched")} <= set(first)
    assert (first[KEEP].random, first[SOFT].random) == (True, False)
    (largest,) = first[WATCHED].writes
    assert graph.storages[largest].role == "buffer"
    assert work(graph, first[KEEP]).flops == 10 * 6 * 16
    assert overwritable(graph, first[SOFT]) == first[SOFT].reads
    assert not overwritable(graph, first[KEEP])
    again = replay(first[WATCHED])
    assert again is not None
    assert (again.writes, again.args[1]) == ((), None)
    assert replay(first[SOFT]) == first[SOFT]
    assert replay(first[KEEP]) == first[KEEP]
    assert et.keep_all(graph).updates == "early"  # nothing in the backward pass can fail


@pytest.mark.parametrize("within", ["all the memory", "a budget"])
def test_a_step_gives_the_numbers_of_plain_pytorch(within: str) -> None:
    ours = trained(hidden=64)
    theirs = ours.twin()
    captured = capture_with_externals(ours.model, ours.loss, ours.optimizer, batch(64))
    kept = et.keep_all(captured.graph)
    budget = kept.persistent_bytes + 7 * (kept.peak_bytes - kept.persistent_bytes) // 10
    limits: dict[str, Any] = {"memory": budget, "planner": "fast"} if within == "a budget" else {}
    step = et.prepare(ours.model, ours.loss, ours.optimizer, batch(64), **limits)
    if limits:
        again = {step.graph.ops[n].kind for n in step.plan.recomputed}
        assert again & set(OURS)
        assert step.plan.exact == "bitwise"
    for seed in range(3):
        torch.manual_seed(seed)
        mine = step(*batch(64, seed))
        torch.manual_seed(seed)
        assert torch.equal(mine, theirs.plain_step(*batch(64, seed)))
    for name, value in ours.snapshot().items():
        assert torch.equal(value, theirs.snapshot()[name]), name
    assert float(ours.model.get_buffer("largest")) > 0


def test_each_of_them_can_be_recomputed() -> None:
    """The random numbers are those of the first time, and what was noted in place is noted once."""
    ours = trained(hidden=64)
    theirs = ours.twin()
    graph = et.capture(ours.model, ours.loss, ours.optimizer, batch(64))
    costs = et.measure_costs(graph, use_cache=False)
    seen: set[str] = set()
    kept = et.keep_all(graph)
    room = kept.peak_bytes - kept.persistent_bytes
    for tenths in range(9, 1, -1):
        for planner in ("fast", "chen"):
            try:
                plan = et.plan(graph, costs, et.Budget(kept.persistent_bytes + tenths * room // 10), planner=planner)
            except et.Infeasible:
                continue
            if not {graph.ops[n].kind for n in plan.recomputed} - seen:
                continue
            seen |= {graph.ops[n].kind for n in plan.recomputed}
            step = et.compile(graph, plan, ours.model, ours.optimizer, costs=costs)
            torch.manual_seed(tenths)
            mine = step(*batch(64, tenths))
            torch.manual_seed(tenths)
            assert torch.equal(mine, theirs.plain_step(*batch(64, tenths)))
    assert set(OURS) <= seen
    for name, value in ours.snapshot().items():
        assert torch.equal(value, theirs.snapshot()[name]), name


def test_a_result_lies_over_its_argument() -> None:
    ours = trained()
    step = et.prepare(ours.model, ours.loss, ours.optimizer, batch())
    over = {step.graph.ops[a.op].kind for a in step.plan.schedule if isinstance(a, Compute) and a.into is not None}
    assert {kind.replace(".default", "_backward.default") for kind in OURS} <= over


def test_gradients_are_those_of_autograd_in_float64() -> None:
    ours = trained(keep=1.0)
    model = ours.model.double()
    x, y = batch()
    step = et.prepare(model, cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), (x.double(), y))
    gradients = step.gradients(x.double(), y)
    values = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def soft(t: Tensor) -> Tensor:
        return t / (1 + t.abs())

    def dense(layer: str, t: Tensor) -> Tensor:
        return F.linear(t, values[f"{layer}.weight"], values[f"{layer}.bias"])

    a = soft(dense("first", x.double()))
    for n in range(3):
        a = soft(dense(f"middle.{n}", a)) / 2
    loss = F.cross_entropy(dense("last", soft(a)), y)
    for (name, _), plain in zip(values.items(), torch.autograd.grad(loss, list(values.values())), strict=True):
        torch.testing.assert_close(gradients[name], plain, rtol=1e-12, atol=1e-14)


def test_a_profile_knows_what_they_are(tmp_path: Path) -> None:
    ours = trained()
    tracer = Tracer(et.prepare(ours.model, ours.loss, ours.optimizer, batch()))
    tracer(*batch())
    ops = {op.kind: op for op in tracer.result().ops}
    assert (category_of(ops[SOFT]), category_of(ops[WATCHED])) == ("activation", "elementwise")
    assert ops[SOFT].flops == 3 * 6 * 16
    et.profile(et.prepare(ours.model, ours.loss, ours.optimizer, batch()), batch(), steps=2, out=tmp_path / "run")
    unregister(SOFT.removesuffix(".default"))
    saved = load_timeline(tmp_path / "run")
    assert saved is not None
    assert {category_of(op) for op in saved.ops if op.kind == SOFT} == {"activation"}


def test_a_graph_file_with_them_is_legal_only_where_they_are_known(tmp_path: Path) -> None:
    ours = trained()
    graph = et.capture(ours.model, ours.loss, ours.optimizer, batch())
    graph.save(tmp_path / "graph.json")
    assert et.Graph.load(tmp_path / "graph.json") == graph
    unregister("outside.keep_some")
    with pytest.raises(UserError, match=r"outside\.keep_some\.default, for which no entry is registered"):
        et.Graph.load(tmp_path / "graph.json")
    # What is captured here runs all the same, as an op of which nothing is known.
    step = et.prepare(ours.model, ours.loss, ours.optimizer, batch())
    assert torch.isfinite(step(*batch()))


@pytest.mark.parametrize("target", ["linux-x86_64", "nrf52840"])
def test_firmware_has_the_numbers_of_pytorch(target: str, tmp_path: Path) -> None:
    ours = trained(keep=1.0)  # which draws, and changes nothing: the masks of firmware are others than PyTorch's
    graph = et.lower_for_firmware(et.capture(ours.model, ours.loss, ours.optimizer, batch()), ours.model)
    plan = et.keep_all(graph, updates="final")
    et.export(graph, plan, ours.model, ours.optimizer, target=target, out=tmp_path / "fw")
    text = (tmp_path / "fw" / "model.c").read_text()
    assert all(f"    outside_{name}(" in text for name in ("soft", "soft_backward", "keep_some", "watched"))
    assert (tmp_path / "fw" / "kernels" / "soft.c").read_text() == outside.SOURCES["soft.c"]
    run, rows = compare(tmp_path / "fw", ours.model, ours.loss, ours.optimizer, [batch(seed=s) for s in range(3)])
    require_right(rows)
    assert len(rows) >= 3 * 6
    assert float(run.tensors["largest"]) > 0


def test_firmware_keeps_the_same_numbers_when_it_recomputes(tmp_path: Path) -> None:
    ours = trained(keep=0.5, hidden=64)
    graph = et.lower_for_firmware(et.capture(ours.model, ours.loss, ours.optimizer, batch(16)), ours.model)
    kept = et.keep_all(graph, updates="final")
    budget = kept.persistent_bytes + 7 * (kept.peak_bytes - kept.persistent_bytes) // 10
    costs = firmware_costs(graph, load_target("linux-x86_64"))
    plans = {"kept": kept, "again": et.plan(graph, costs, et.Budget(budget), updates="final", planner="fast")}
    assert {graph.ops[n].kind for n in plans["again"].recomputed} & set(OURS)
    runs = {}
    for name, plan in plans.items():
        et.export(graph, plan, ours.model, ours.optimizer, target="linux-x86_64", out=tmp_path / name)
        runs[name] = run_firmware(tmp_path / name, [batch(16, seed) for seed in range(4)])
    assert runs["kept"].losses == runs["again"].losses
    assert all(torch.equal(value, runs["again"].tensors[name]) for name, value in runs["kept"].tensors.items())


def test_the_command_line_exports_checks_and_emulates_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(
        "from tests.ops.outside import Net\n\ndef net(classes):\n    return Net(1.0, 64, classes)\n"
    )
    run = commands(capsys, monkeypatch)
    words = ("--target", "linux-x86_64", "--data", "digits", "--batch", 4, "--out", "fw", "--check", 2, "--json")
    code, out, err = run("export", "own.py:net", *words)
    assert code == 0, err
    assert json.loads(out)["wrong"] == []
    code, out, err = run("emulate", "fw", "--data", "digits", "--steps", 5, "--json")
    assert code == 0, err
    losses = json.loads(out)["losses"]
    assert len(losses) == 5
    assert all(math.isfinite(loss) for loss in losses)


def test_the_example_of_the_documentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kernels").mkdir()
    for name in ("soft.h", "soft.c"):
        text = outside.SOURCES[name].replace("outside_soft", "mine_softsign").replace("soft.h", "softsign.h")
        Path("kernels", name.replace("soft", "softsign")).write_text(text)
    page = (Path(__file__).parents[2] / "docs" / "adding.md").read_text()
    shown: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], shown)
    softsign = torch.ops.mine.softsign

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(softsign(self.first(x)))
            return result

    ours = training(Net(), cross_entropy)
    theirs = ours.twin()
    step = et.prepare(ours.model, ours.loss, ours.optimizer, batch())
    (op,) = (op for op in step.graph.ops if op.kind == "mine.softsign.default")
    assert (work(step.graph, op).flops, len(overwritable(step.graph, op))) == (3 * 6 * 16, 1)
    assert torch.equal(step(*batch()), theirs.plain_step(*batch()))
    graph = et.lower_for_firmware(et.capture(theirs.model, ours.loss, theirs.optimizer, batch()), theirs.model)
    plan = et.keep_all(graph, updates="final")
    et.export(graph, plan, theirs.model, theirs.optimizer, target="linux-x86_64", out="fw")
    require_right(compare("fw", theirs.model, ours.loss, theirs.optimizer, [batch()])[1])
    Path("kernels/softsign.c").unlink()
    Path("kernels/softsign.h").unlink()
    with pytest.raises(UserError, match="source of a C kernel is not there"):
        et.export(graph, plan, theirs.model, theirs.optimizer, target="linux-x86_64", out="other")
