"""Instructions counted by op: the same in two runs, all of them somebody's, and few a multiply-add."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import firmware as benchmark
from edgetrain.errors import InternalError
from edgetrain.firmware.emulate import run_firmware
from tests.firmware.firmware_nets import NETS, Exported, make, plain_sgd

missing = [tool for tool in ("arm-none-eabi-gcc", "qemu-system-arm") if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")
MOST = 4.0  # instructions a multiply-add


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make(NETS["mlp"], tmp_path_factory.mktemp("counted") / "fw", optimizer=plain_sgd, target="nrf52840")


def test_two_runs_count_the_same_and_every_call_has_its_own(board: Exported) -> None:
    batches = board.batches(3)
    run, again = (run_firmware(board.project.folder, batches) for _ in range(2))
    assert run.calls == again.calls
    ops = [board.graph.ops[at] for at in board.plan.order]
    assert [call.op for call in run.calls] == [op.name for op in ops if not op.view]
    assert all(call.instructions > 0 for call in run.calls)
    # Two layers share a kernel: apart by op, together by function.
    assert run.instructions is not None
    assert run.instructions_per_step is not None
    in_steps = sum(call.instructions for call in run.calls)
    assert in_steps == pytest.approx(3 * run.instructions_per_step)
    assert 0.5 * run.instructions < in_steps < run.instructions
    relus = [call for call in run.calls if call.function == "relu_forward"]
    assert 0 <= sum(call.instructions for call in relus) - run.instructions_by["relu_forward"] < 30 * len(relus) * 3
    first = next(call for call in run.calls if call.kind == "edgetrain.dense.forward")
    assert first.multiply_adds == 4 * 12 * 9
    longer = run_firmware(board.project.folder, batches + batches)
    assert sum(call.instructions for call in longer.calls) == pytest.approx(2 * in_steps, rel=0.01)


def test_a_step_with_other_calls_than_the_project_has_is_refused(board: Exported, tmp_path: Path) -> None:
    folder = shutil.copytree(board.project.folder, tmp_path / "copy")
    project = json.loads((folder / "project.json").read_text())
    project["calls"].reverse()
    (folder / "project.json").write_text(json.dumps(project))
    with pytest.raises(InternalError, match="calls in the linked train_step"):
        run_firmware(folder, board.batches(1))


@pytest.mark.parametrize("name", ["lenet", "autoencoder", "grouped"])
def test_kernels_take_few_instructions_as_kept(name: str, tmp_path: Path) -> None:
    figures = benchmark.figures(benchmark.run_step(benchmark.NETS[name], tmp_path / "fw"))
    kept = json.loads(benchmark.KEPT.read_text())
    if kept["about"] == benchmark.about():
        assert figures == kept["nets"][name]
    assert figures["kernels"]
    assert all(rate <= MOST for rate in figures["kernels"].values())


def test_the_kept_kernels_are_at_most_four_instructions_a_multiply_add() -> None:
    kept = json.loads(benchmark.KEPT.read_text())
    assert set(kept["nets"]) == set(benchmark.NETS)
    for net in kept["nets"].values():
        assert all(rate <= MOST for rate in net["kernels"].values())
