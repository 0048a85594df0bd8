"""The public data sets themselves, from the folder that EDGETRAIN_DATA names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from edgetrain.zoo.datasets import Data, load

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif("EDGETRAIN_DATA" not in os.environ, reason="EDGETRAIN_DATA names no folder of data sets"),
]


def load_real(name: str, **options: int) -> Data:
    return load(str(Path(os.environ["EDGETRAIN_DATA"]) / name), **options)


def test_mnist() -> None:
    data = load_real("mnist")
    assert (data.name, len(data.train), len(data.test), data.shape) == ("mnist", 60_000, 10_000, (1, 28, 28))
    assert data.classes == tuple("0123456789")
    x, y = data.train.batch(torch.arange(60_000))
    assert y[:3].tolist() == [5, 0, 4]
    assert abs(float(x.mean())) < 1e-3
    assert abs(float(x.std()) - 1) < 1e-3
    assert data.test.batch(torch.arange(3))[1].tolist() == [7, 2, 1]


def test_cifar10() -> None:
    data = load_real("cifar10")
    assert (len(data.train), len(data.test), data.shape) == (8_334, 1_666, (3, 32, 32))
    x, y = data.train.batch(torch.arange(len(data.train)))
    assert [data.classes[i] for i in y[:3].tolist()] == ["frog", "truck", "truck"]
    assert x.mean(dim=(0, 2, 3)).abs().max() < 0.05
    assert (x.std(dim=(0, 2, 3)) - 1).abs().max() < 0.05


def test_flowers5() -> None:
    data = load_real("flowers5", input_size=96)
    assert data.classes == ("daisy", "dandelion", "rose", "sunflower", "tulip")
    for part, count in ((data.train, 80), (data.test, 20)):
        assert len(part) == 5 * count
    x, y = data.test.batch(torch.arange(len(data.test)))
    assert x.shape == (100, 3, 96, 96)
    assert torch.bincount(y).tolist() == [20] * 5


def test_tinyshakespeare() -> None:
    data = load_real("tinyshakespeare/input.txt.gz", sequence=128)
    assert (data.kind, len(data.classes), data.shape) == ("characters", 65, (128,))
    test_characters = 1_115_394 // 10
    assert len(data.train) == (1_115_394 - test_characters - 1) // 128
    assert len(data.test) == (test_characters - 1) // 128
    x, y = data.train.batch(torch.tensor([0]))
    assert "".join(data.classes[i] for i in x[0].tolist()).startswith("First Citizen:\nBefore we proceed")
    assert torch.equal(x[0, 1:], y[0, :-1])


@pytest.mark.parametrize("name", ["mnist", "cifar10", "flowers5", "tinyshakespeare/input.txt.gz"])
def test_batches_are_deterministic(name: str) -> None:
    indices = torch.tensor([5, 0, 301, 5])
    first, second = load_real(name).train.batch(indices), load_real(name).train.batch(indices)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(first[0][0], first[0][3])
