"""The two studies of examples/ in the emulator: new keywords in 256 KB, and faults of a bearing, never heard before."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

missing = [tool for tool in ("arm-none-eabi-gcc", "qemu-system-arm") if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif("EDGETRAIN_DATA" not in os.environ, reason="EDGETRAIN_DATA does not name the data folder"),
    pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
RAM_BYTES = 262_144


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """They import firmware_study as a script does: from their own folder."""
    monkeypatch.syspath_prepend(EXAMPLES)


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def data(name: str) -> Path:
    return Path(os.environ["EDGETRAIN_DATA"]) / name


def test_the_last_layers_of_a_ds_cnn_learn_new_keywords_as_well_as_in_pytorch(tmp_path: Path) -> None:
    keywords = example("firmware_keywords")
    results = keywords.study(data("kws01_mfcc"), tmp_path / "fw", steps=120, epochs=8)
    assert abs(results.firmware - results.pytorch) <= 0.02
    assert results.firmware >= 0.45  # of four classes; it knew none of them before
    assert results.run.losses[0] > sum(results.run.losses[-20:]) / 20 + 0.3
    assert results.run.built.ram_bytes <= RAM_BYTES
    assert {name.split(".")[0] for name in results.run.tensors} == {"blocks", "classifier"}
    assert {name.split(".")[1] for name in results.run.tensors if name.startswith("blocks")} == {"3"}


def test_an_autoencoder_hears_faults_of_a_bearing_that_it_never_heard(tmp_path: Path) -> None:
    bearings = example("firmware_bearings")
    results = bearings.study(data("cwru_bearing"), tmp_path / "board")
    assert len(results.auroc) == 2
    assert min(results.auroc.values()) >= 0.95
    assert max(results.before.values()) < 0.9  # with this seed it is training that tells them apart
    assert results.run.built.ram_bytes <= RAM_BYTES
    on_linux = bearings.study(data("cwru_bearing"), tmp_path / "here", target="linux-x86_64")
    assert results.run.losses == on_linux.run.losses
    assert all(torch.equal(value, on_linux.run.tensors[name]) for name, value in results.run.tensors.items())
    learned, unseen, faults = bearings.divided(data("cwru_bearing"))
    assert (len(learned), len(unseen)) == (71, 41)
    assert all(len(windows) > 200 for windows in faults.values())
