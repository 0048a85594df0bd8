"""Training on real data reaches what it should: lenet on MNIST, resnet18 on CIFAR-10 beside plain PyTorch."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import edgetrain as et
from edgetrain import zoo
from edgetrain.measure.record import RunFolder
from edgetrain.run.trainer import TrainConfig, Trainer
from edgetrain.zoo import datasets

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif("EDGETRAIN_DATA" not in os.environ, reason="EDGETRAIN_DATA does not name the data folder"),
]


def data_folder() -> Path:
    return Path(os.environ["EDGETRAIN_DATA"])


def evaluate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float, int]:
    output = model(x)
    loss = nn.functional.cross_entropy(output, y, reduction="sum")
    return float(loss), float((output.argmax(1) == y).sum()), len(y)


def test_lenet_on_mnist_passes_98_5_percent(tmp_path: Path) -> None:
    data = datasets.load(str(data_folder() / "mnist"))
    torch.manual_seed(0)
    model = zoo.build("lenet")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    loss = zoo.get("lenet").task.loss
    config = TrainConfig(epochs=2, batch=64, lr=0.05, schedule="cosine", checkpoint_every_steps=0, log_every_steps=100)
    example = data.train.batch(torch.arange(64))
    result = Trainer(config, RunFolder.create(tmp_path / "run")).run(
        model, optimizer, lambda: et.prepare(model, loss, optimizer, example), data.train, data.test, evaluate
    )
    assert result.evaluation is not None
    assert result.evaluation.count == 10_000
    assert result.evaluation.accuracy is not None
    assert result.evaluation.accuracy > 0.985


def test_resnet18_on_cifar_reaches_what_plain_pytorch_reaches() -> None:
    data = datasets.load(str(data_folder() / "cifar10"))
    loss = zoo.get("resnet18").task.loss
    torch.manual_seed(0)
    start = zoo.build("resnet18", classes=10, input_size=32, width=0.25)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    batches = [data.train.batch(order[n * 64 :][:64]) for n in range(100)]

    def train(make_step: Callable[[nn.Module, torch.optim.Optimizer], Callable[..., torch.Tensor]]) -> float:
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        step = make_step(model, optimizer)
        for batch in batches:
            step(*batch)
        model.eval()
        with torch.no_grad():
            scores = [
                evaluate(model, *data.test.batch(torch.arange(n, min(n + 256, len(data.test)))))
                for n in range(0, len(data.test), 256)
            ]
        return sum(right for _, right, _ in scores) / len(data.test)

    def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
        def step(*batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            value = loss(model, *batch)
            value.backward()
            optimizer.step()
            return value

        return step

    reached = train(plain)
    assert reached > 0.2  # far above the 0.1 of guessing
    bitwise = train(lambda m, o: et.prepare(m, loss, o, batches[0], memory_format="preserve"))
    assert bitwise == reached
    # By default images run channels-last, which rounds otherwise: another sample of the same training.
    default = train(lambda m, o: et.prepare(m, loss, o, batches[0]))
    assert default > reached - 0.06
