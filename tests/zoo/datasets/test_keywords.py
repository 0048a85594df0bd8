"""Keywords and bearings: what is read, what is held out, what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from edgetrain.errors import UserError
from edgetrain.zoo import datasets
from edgetrain.zoo.datasets import bearings
from tests.helpers.keyword_files import KEYWORDS
from tests.helpers.keyword_files import write_keywords as write


def test_keywords_are_read_and_a_quarter_of_each_class_is_held_out(tmp_path: Path) -> None:
    data = datasets.load(str(write(tmp_path / "kws")))
    assert (data.kind, data.classes, data.shape) == ("images", KEYWORDS, (1, 49, 10))
    assert (len(data.train), len(data.test)) == (18, 6)
    x, y = data.test.batch(torch.arange(6))
    assert x.shape == (6, 1, 49, 10)
    assert sorted(y.tolist()) == [0, 0, 1, 1, 2, 2]
    # The first coefficient back to what was written: the number of the sample.
    number = x[:, 0, 0, 0] * 41.63 + 57.44
    assert torch.equal(number.round().long() % 3, y)
    again = datasets.load(str(tmp_path / "kws" / "kws01_mfcc_int8_1000.tar.xz"))
    assert torch.equal(again.test.batch(torch.arange(6))[0], x)
    other = datasets.load(str(tmp_path / "kws"), seed=1)
    assert not torch.equal(other.test.batch(torch.arange(6))[0], x)


def test_what_is_no_keywords_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no sample"):
        datasets.load(str(write(tmp_path / "short", size=489)))
    with pytest.raises(UserError, match="does not hold keywords"):
        datasets.load(str(write(tmp_path / "gap", classes=(0, 2))))
    with pytest.raises(UserError, match="cannot be resized"):
        datasets.load(str(write(tmp_path / "kws")), input_size=32)
    cut = write(tmp_path / "cut") / "kws01_mfcc_int8_1000.tar.xz"
    cut.write_bytes(cut.read_bytes()[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        datasets.load(str(tmp_path / "cut"))


def test_a_recording_becomes_spectra_without_loudness(tmp_path: Path) -> None:
    time = np.arange(2048 + 100) / 12_000
    tone = np.sin(2 * np.pi * 3000 * time)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "quiet.npz", DE=0.01 * (tone + 0.1 * rng.normal(size=len(time))), FE=tone)
    found = bearings.load(tmp_path)
    x = bearings.spectra(found["quiet"])
    assert x.shape == (4, bearings.BANDS)
    assert x.dtype == torch.float32
    assert x.argmax(1).tolist() == [18] * 4  # the first 16 bands have 7 of 256 frequencies, the others 6
    torch.testing.assert_close(x, bearings.spectra(100 * found["quiet"]), rtol=1e-3, atol=1e-3)


def test_a_normal_recording_is_brought_to_the_rate_of_the_others(tmp_path: Path) -> None:
    def tone(rate_hz: int, hz: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.sin(2 * np.pi * hz * np.arange(rate_hz // 2) / rate_hz)

    np.savez(tmp_path / "1797_Normal.npz", DE=tone(48_000, 1500.0) + tone(48_000, 9000.0))
    np.savez(tmp_path / "1797_IR_7_DE12.npz", DE=tone(12_000, 1500.0))
    found = bearings.load(tmp_path)
    torch.testing.assert_close(found["1797_Normal"], found["1797_IR_7_DE12"], rtol=0, atol=1e-6)


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no recordings"):
        bearings.load(tmp_path)
    np.savez(tmp_path / "a.npz", FE=np.zeros(2000))
    with pytest.raises(UserError, match="is no recording"):
        bearings.load(tmp_path)
    np.savez(tmp_path / "a.npz", DE=np.array([{}], dtype=object))
    with pytest.raises(UserError, match="is no recording"):
        bearings.load(tmp_path)
    np.savez(tmp_path / "a.npz", DE=np.full(2000, np.nan))
    with pytest.raises(UserError, match="no whole window"):
        bearings.load(tmp_path)
    (tmp_path / "a.npz").write_bytes(b"no zip")
    with pytest.raises(UserError, match="is no recording"):
        bearings.load(tmp_path)


@pytest.mark.data
@pytest.mark.skipif("EDGETRAIN_DATA" not in os.environ, reason="EDGETRAIN_DATA does not name the data folder")
def test_the_real_ones() -> None:
    folder = Path(os.environ["EDGETRAIN_DATA"])
    data = datasets.load(str(folder / "kws01_mfcc"))
    assert len(data.train) + len(data.test) == 1000
    assert len(data.classes) == 12
    assert data.classes[0] == "Down"
    assert {name: len(value) for name, value in bearings.load(folder / "cwru_bearing").items()} == {
        "1797_B_7_DE12": 122_571, "1797_IR_7_DE12": 121_265, "1797_Normal": 243_938 // 4,
    }  # fmt: skip
