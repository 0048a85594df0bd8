"""A later recording of the same step follows the first: while the calls are the same, nothing is computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edgetrain.graph.capture import predicted_layouts
from edgetrain.graph.capture.training import capture_with_externals

Net = tuple[Callable[[], nn.Module], tuple[int, ...]]

NETS: dict[str, Net] = {
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()),
        (2, 3, 8, 8),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 4, 8)),
    "views": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3)), nn.Dropout(), nn.Tanh()), (4, 6)),
}


@pytest.mark.parametrize("name", NETS)
def test_capturing_again_computes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, shape = NETS[name]
    model = make()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        # What a custom function saves is detached, which is no call of a kernel's.
        value: Tensor = model(x.detach()).square().mean()
        return value

    captured = capture_with_externals(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(shape),))
    computed: list[str] = []

    def counted(func: Any, args: Any, kwargs: Any) -> Any:
        computed.append(str(func))
        return original(func, args, kwargs)

    original = predicted_layouts.result_of
    monkeypatch.setattr(predicted_layouts, "result_of", counted)
    assert captured.difference() is None
    assert set(computed) <= {"aten.detach.default", "aten.alias.default"}
