"""From recorded calls to a graph: what lowering makes of in-place calls that change nothing but the view."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.graph.capture.training import capture_with_externals


def test_an_in_place_change_of_the_view_takes_no_new_storage() -> None:
    """Average pooling to one pixel ends, channels-last, in `as_strided_` over its own result."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = (torch.randn(2, 3, 8, 8), torch.tensor([0, 1]))
    graph = capture_with_externals(
        model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, example, memory_format="channels_last"
    ).graph
    strided = [op for op in graph.ops if op.kind == "aten.as_strided.default"]
    assert strided
    assert all(op.view for op in strided)
    et.verify(graph)
