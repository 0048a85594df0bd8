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


def classify(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


def test_a_budget_is_kept_and_changes_no_bit() -> None:
    """Recomputed on the GPU: loss, parameters, statistics and state are those of the step that keeps all."""
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(6)
        for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU6(), nn.Dropout(0.1))
    ]
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *layers, nn.Flatten(), nn.LazyLinear(4)).cuda()
    x, y = torch.randn(16, 3, 32, 32, device="cuda"), torch.randint(4, (16,), device="cuda")
    model(x)
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (model, twin))
    whole = et.prepare(twin, classify, other, (x, y))
    planned = et.measure_costs(whole.graph, rounds=2)
    peak = et.plan(whole.graph, planned, et.Budget(), planner="keep-all", updates="guarded").peak_bytes
    lasting = whole.plan.persistent_bytes
    step = et.prepare(model, classify, optimizer, (x, y), memory=lasting + (peak - lasting) * 6 // 10, planner="fast")
    assert step.plan.recomputed
    for seed in range(3):
        torch.manual_seed(seed)
        found = step(x, y)
        torch.manual_seed(seed)
        assert torch.equal(found, whole(x, y))
    for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(x, y)
    grown = torch.cuda.max_memory_allocated() - before
    assert grown <= (step.plan.peak_bytes - lasting) * 1.02 + 2**20  # the allocator rounds each block up to 512 bytes
