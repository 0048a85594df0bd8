"""On a CUDA device a captured step computes what plain PyTorch computes there. Run with `pytest -m gpu`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import edgetrain as et
from edgetrain import zoo
from edgetrain.errors import UserError

pytestmark = pytest.mark.gpu
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9, "weight_decay": 1e-4}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": 1e-3, "weight_decay": 1e-2, "amsgrad": True}),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["lenet", "mobilenet_v2", "squeezenet", "resnet18", "char_lstm", "bert_small"])
def test_parity_with_plain_pytorch(name: str, optimizer: str) -> None:
    entry = zoo.get(name)
    sizes = {"lenet": 28, "mobilenet_v2": 64, "squeezenet": 64, "resnet18": 64}
    sized = {"input_size": sizes[name]} if name in sizes else {}
    torch.manual_seed(0)
    plain = zoo.build(name, **sized).double().cuda()
    ours = copy.deepcopy(plain)
    batch = tuple(t.cuda() for t in entry.example(8, dtype=torch.float64, **sized))
    make, settings = OPTIMIZERS[optimizer]
    theirs, own = make(plain.parameters(), **settings), make(ours.parameters(), **settings)
    step = et.prepare(ours, entry.task.loss, own, batch, use_cache=False)
    for number in range(5):
        torch.manual_seed(number)
        theirs.zero_grad()
        expected = entry.task.loss(plain, *batch)
        expected.backward()
        theirs.step()
        torch.manual_seed(number)
        value = step(*batch)
        torch.testing.assert_close(value, expected.detach(), rtol=1e-7, atol=1e-9)
    if optimizer == "sgd":  # Adam makes a step of full size of a gradient that is nothing but rounding
        for a, b in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True):
            assert (a - b).abs().max() <= 1e-9 * a.abs().max().clamp(min=1)


def test_a_step_that_fails_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(8, 4, device="cuda")
    step = et.prepare(model, lambda m, x: m(x).mean(), optimizer, (x,), check_finite=True)
    step(x)
    before = copy.deepcopy(model.state_dict())
    random = torch.cuda.get_rng_state()
    with pytest.raises(UserError, match="not finite"):
        step(x * float("inf"))
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(random, torch.cuda.get_rng_state())
