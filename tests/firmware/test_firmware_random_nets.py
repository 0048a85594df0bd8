"""Random small nets as C, under the address and undefined-behaviour sanitizers, against PyTorch in float64.

`EDGETRAIN_EXAMPLES` asks for more of them than CI takes.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from firmware_nets import Net, Optimizers, adam, adamw, make, nesterov, plain_sgd, sgd
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from edgetrain.firmware import parity

EXAMPLES = max(int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 20, 1)
# Beyond 4 × PyTorch's own error: a gradient may be zero but for rounding, as that of a bias before a batch norm is.
ROUNDING = 1e-6

ACTIVATIONS = (nn.Identity, nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Tanh)
OPTIMIZERS: tuple[Optimizers, ...] = (plain_sgd, sgd, nesterov, adam, adamw)


class Joined(nn.Module):
    """The input beside, or added to, what layers make of it."""

    def __init__(self, inner: nn.Module, *, concat: bool) -> None:
        super().__init__()
        self.inner, self.concat = inner, concat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return torch.cat([x, y], 1) if self.concat else x + y


@st.composite
def convolutions(draw: Any, C: int, H: int, W: int) -> tuple[nn.Module, int, int, int]:
    R, S = draw(st.integers(1, min(3, H))), draw(st.sampled_from([side for side in (1, 2, 3, 5) if side <= W]))
    groups = draw(st.sampled_from([g for g in (1, 2, C) if C % g == 0]))
    K = groups * draw(st.integers(1, 3))
    stride = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    dilation = (draw(st.integers(1, 2)) if R < H / 2 else 1, draw(st.integers(1, 2)) if S < W / 2 else 1)
    layer = nn.Conv2d(C, K, (R, S), stride, padding, dilation, groups, bias=draw(st.booleans()))
    return (layer, *_after(layer, C, H, W))


@st.composite
def pools(draw: Any, C: int, H: int, W: int) -> tuple[nn.Module, int, int, int]:
    R, S = draw(st.integers(1, min(3, H))), draw(st.integers(1, min(3, W)))
    stride = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    padding = (draw(st.integers(0, R // 2)), draw(st.integers(0, S // 2)))
    ceil = draw(st.booleans())
    layer: nn.Module = nn.MaxPool2d((R, S), stride, padding, ceil_mode=ceil)
    if draw(st.booleans()):
        layer = nn.AvgPool2d((R, S), stride, padding, ceil_mode=ceil, count_include_pad=draw(st.booleans()))
    return (layer, *_after(layer, C, H, W))


def _after(layer: nn.Module, C: int, H: int, W: int) -> tuple[int, int, int]:
    with torch.no_grad():
        _, K, P, Q = layer(torch.zeros(1, C, H, W)).shape
    return K, P, Q


@st.composite
def norms(draw: Any, C: int) -> list[nn.Module]:
    kind = draw(st.sampled_from(["none", "batch", "frozen", "group", "plain"]))
    if kind == "none":
        return []
    if kind == "group":
        groups = draw(st.sampled_from([g for g in (1, 2, C) if C % g == 0]))
        return [nn.GroupNorm(groups, C, affine=draw(st.booleans()))]
    norm = nn.BatchNorm2d(C, affine=kind != "plain")
    if kind == "frozen":
        norm.eval()
    return [norm]


@st.composite
def nets(draw: Any) -> Net:
    B, C, H, W = draw(st.integers(2, 4)), draw(st.integers(1, 4)), draw(st.integers(4, 9)), draw(st.integers(4, 9))
    shape = (C, H, W)
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 3))):
        layer, K, P, Q = draw(convolutions(C, H, W))
        block: list[nn.Module] = [layer, *draw(norms(K)), draw(st.sampled_from(ACTIVATIONS))()]
        if (P, Q) == (H, W) and draw(st.booleans()):
            concat = K != C or draw(st.booleans())
            layers.append(Joined(nn.Sequential(*block), concat=concat))
            K = C + K if concat else C
        else:
            layers += block
        C, H, W = K, P, Q
        if draw(st.booleans()):
            layer, C, H, W = draw(pools(C, H, W))
            layers.append(layer)
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if draw(st.booleans()) else [nn.Flatten()]
    features = C if isinstance(layers[-2], nn.AdaptiveAvgPool2d) else C * H * W
    classes = draw(st.one_of(st.none(), st.integers(2, 5)))
    if classes is not None:
        return Net(_built([*layers, nn.Linear(features, classes)]), shape, classes, B)
    return Net(_built([*layers, nn.Linear(features, math.prod(shape)), nn.Unflatten(1, shape)]), shape, None, B)


def _built(layers: list[nn.Module]) -> Any:
    """Fresh norms have biases of 0, and what comes after them a mean of 0 but for rounding: then rounding chooses the
    side of a ReLU for whole regions at once, where a convolution met padding alone. A trained net has other biases."""

    def build() -> nn.Module:
        model = nn.Sequential(*layers)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d | nn.GroupNorm) and module.bias is not None:
                nn.init.uniform_(module.bias, -0.5, 0.5)
        return model

    return build


# Each example is a build: what fails is not made smaller, which would take minutes.
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(net=nets(), optimizer=st.sampled_from(OPTIMIZERS), seed=st.integers(0, 1000))
def test_random_nets_train_as_in_pytorch_and_touch_nothing_that_is_not_theirs(
    net: Net, optimizer: Optimizers, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as place:
        made = make(net, Path(place) / "fw", optimizer=optimizer, seed=seed)
        batches = made.batches(2)
        run, rows = parity.compare(
            Path(place) / "fw", made.model, net.loss, made.optimizer, batches, variant="sanitize"
        )
    # After one step: the next one starts from weights that Adam may have moved by the sign of a rounding error.
    first = [row for row in rows if row.what == "gradient" and row.step == 1]
    largest = max(row.scale for row in first)
    for row in first:
        assert row.error <= max(row.allowed, ROUNDING * largest), str(row)
    assert run.arena_used_bytes <= made.project.arena_bytes
    assert made.project.arena_live_bytes == made.plan.peak_bytes - made.plan.persistent_bytes
