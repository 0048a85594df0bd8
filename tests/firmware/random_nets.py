"""Random small nets, and what holds for the program that each becomes.

    nets()     Hypothesis draws them: convolutions of every kind, norms, activations, pools, sums, concats, dense layers
    check()    builds one with the sanitizers and requires it to be right

The gradients of the first step are held against PyTorch's (`edgetrain.firmware.references`). What the optimizer makes
of gradients is held against PyTorch's optimizer over the gradients that the firmware found itself: Adam's first steps
go by the sign of a gradient, however small it is, so that after one step two programs that are equally exact may have
other weights.
"""

from __future__ import annotations

import copy
import math
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from edgetrain.firmware import parity
from edgetrain.firmware.build import Variant
from edgetrain.firmware.emulate import Run, run_firmware
from edgetrain.firmware.references import FACTOR, WAYS_OF_SMALL_NETS, Batch, References
from tests.firmware.firmware_nets import Exported, Net, Optimizers, adam, adamw, make, nesterov, plain_sgd, sgd

ACTIVATIONS = (nn.Identity, nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Tanh)
OPTIMIZERS: tuple[Optimizers, ...] = (plain_sgd, sgd, nesterov, adam, adamw)
_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.GroupNorm
_EPS = torch.finfo(torch.float32).eps


class Joined(nn.Module):
    """The input beside, or added to, what layers make of it."""

    def __init__(self, inner: nn.Module, *, concat: bool) -> None:
        super().__init__()
        self.inner, self.concat = inner, concat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return torch.cat([x, y], 1) if self.concat else x + y


# ---- nets


@st.composite
def convolutions(draw: Any, C: int, H: int, W: int) -> tuple[nn.Module, int, int, int]:
    kind = draw(st.sampled_from(["any", "any", "planes", "wide"]))
    if kind == "wide" or (kind == "planes" and min(H, W) >= 3):
        return draw(planes(C, H, W) if kind == "planes" else wide_planes(C, H, W))  # type: ignore[no-any-return]
    R, S = draw(st.integers(1, min(5, H))), draw(st.integers(1, min(5, W)))
    groups = draw(st.sampled_from([g for g in (1, 2, C) if C % g == 0]))
    K = draw(st.integers(1, 20)) if groups == 1 else groups * draw(st.integers(1, 3))
    stride = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    dilation = (draw(st.integers(1, 2)) if R < H / 2 else 1, draw(st.integers(1, 2)) if S < W / 2 else 1)
    layer = nn.Conv2d(C, K, (R, S), stride, padding, dilation, groups, bias=draw(st.booleans()))
    return (layer, *_after(layer, C, H, W))


@st.composite
def planes(draw: Any, C: int, H: int, W: int) -> tuple[nn.Module, int, int, int]:
    """3 × 3, of one channel each: these have a kernel of their own."""
    K, stride, padding = C * draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(0, 2))
    layer = nn.Conv2d(C, K, 3, stride, padding, groups=C, bias=draw(st.booleans()))
    return (layer, *_after(layer, C, H, W))


@st.composite
def wide_planes(draw: Any, C: int, H: int, W: int) -> tuple[nn.Module, int, int, int]:
    """Filters of one channel each, as wide as the image and wider, with more padding than filter."""
    K, bias = C * draw(st.integers(1, 2)), draw(st.booleans())
    sides = []
    for size in (H, W):
        filter_, dilation, stride = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        least = max(0, math.ceil((dilation * (filter_ - 1) + 1 - size) / 2))
        sides.append((filter_, stride, draw(st.integers(least, least + 3)), dilation))
    (R, *down), (S, *across) = sides
    stride, padding, dilation = (tuple(pair) for pair in zip(down, across, strict=True))
    layer = nn.Conv2d(C, K, (R, S), stride, padding, dilation, C, bias)
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
def norms(draw: Any, C: int, values: int) -> list[nn.Module]:
    """values: of each channel in a batch. The statistics of a single one are none."""
    kinds = ["none", "frozen", "group", *(["batch", "plain"] if values > 1 else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "none":
        return []
    if kind == "group":
        groups = draw(st.sampled_from([g for g in (1, 2, C) if C % g == 0 and C // g * values > 1] or [0]))
        return [nn.GroupNorm(groups, C, affine=draw(st.booleans()))] if groups else []
    norm = nn.BatchNorm2d(C, affine=kind != "plain")
    if kind == "frozen":
        norm.eval()
    return [norm]


@st.composite
def heads(draw: Any, B: int, features: int, results: int) -> list[nn.Module]:
    """Dense layers up to so many results."""
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(0, 2))):
        hidden = draw(st.integers(1, 40))
        layers.append(nn.Linear(features, hidden, bias=draw(st.booleans())))
        if B > 1 and draw(st.booleans()):
            layers.append(nn.BatchNorm1d(hidden))
        layers.append(draw(st.sampled_from(ACTIVATIONS))())
        features = hidden
    return [*layers, nn.Linear(features, results, bias=draw(st.booleans()))]


@st.composite
def nets(draw: Any) -> Net:
    B, C, H, W = draw(st.integers(1, 5)), draw(st.integers(1, 9)), draw(st.integers(4, 12)), draw(st.integers(4, 12))
    shape = (C, H, W)
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 3))):
        layer, K, P, Q = draw(convolutions(C, H, W))
        block: list[nn.Module] = [layer, *draw(norms(K, B * P * Q)), draw(st.sampled_from(ACTIVATIONS))()]
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
    layers += draw(heads(B, features, math.prod(shape) if classes is None else classes))
    layers += [nn.Unflatten(1, shape)] if classes is None else []
    frozen = draw(st.sets(st.integers(0, len(layers) - 2), max_size=2))
    return Net(_built(layers, frozen, fresh=draw(st.booleans())), shape, classes, B)


def _built(layers: list[nn.Module], frozen: set[int], *, fresh: bool) -> Any:
    """The model with weights by the seed of the moment. frozen: layers that are not trained; the last one is.

    fresh: norms as they begin. Otherwise their weights, biases and statistics are as after some training.
    """

    def build() -> nn.Module:
        model = nn.Sequential(*layers)
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear | _NORMS):
                module.reset_parameters()
            if isinstance(module, _NORMS) and not fresh:
                _train_a_little(module)
        for place in frozen:
            layers[place].requires_grad_(False)
        last = [layer for layer in layers if isinstance(layer, nn.Linear)][-1]
        last.requires_grad_(True)
        return model

    return build


def _train_a_little(norm: nn.Module) -> None:
    ranges = {"weight": (0.5, 1.5), "bias": (-0.5, 0.5), "running_mean": (-0.5, 0.5), "running_var": (0.5, 2.0)}
    for name, (low, high) in ranges.items():
        value = getattr(norm, name, None)
        if value is not None:
            nn.init.uniform_(value, low, high)


# ---- what holds


def check(net: Net, optimizer: Optimizers, seed: int, variant: Variant) -> None:
    """The program trains and predicts as PyTorch does, within its memory, under the sanitizers of the variant."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "fw"
        exported = make(net, folder, optimizer=optimizer, seed=seed)
        batches = exported.batches(2)
        first, second = (run_firmware(folder, batches[:steps], variant=variant) for steps in (1, 2))
        predicted = run_firmware(folder, batches, variant=variant, predict=True)
        _compiles_without_a_warning(folder)
    _gradients_are_right(exported, first, batches)
    _updates_are_right(exported, second)
    _results_are_right(exported, predicted, batches)
    assert first.losses[0] == second.losses[0]
    assert second.arena_used_bytes <= exported.project.arena_bytes
    assert exported.project.arena_live_bytes == exported.plan.peak_bytes - exported.plan.persistent_bytes


def _compiles_without_a_warning(folder: Path) -> None:
    """What was written for this net alone, as a user builds it. The sanitizers' program has more in it: gradients."""
    for compiler in ("gcc", "clang"):
        if shutil.which(compiler) is None:
            continue
        objects = ["build/firmware.objects/model.o", "build/firmware.objects/main.o"]
        command = ["make", "-s", "-C", str(folder), f"CC={compiler} -fsyntax-only", *objects]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def _gradients_are_right(exported: Exported, run: Run, batches: Sequence[Batch]) -> None:
    """Those of the first step, and the statistics of norms after it."""
    references = References(exported.model, exported.net.loss, exported.optimizer, ways=WAYS_OF_SMALL_NETS)
    rows = parity.rows_of({1: run}, references, batches)
    gradients = [row for row in rows if row.what == "gradient"]
    buffers = {name for name, _ in exported.model.named_buffers()}
    assert {row.name for row in gradients} == {name for name, p in exported.model.named_parameters() if p.requires_grad}
    parity.require_right([*gradients, *(row for row in rows if row.name in buffers)])


def _updates_are_right(exported: Exported, run: Run) -> None:
    """Weights and the optimizer's state, after its steps over the gradients that the firmware found."""
    exact, single = (_updated(exported, run, dtype) for dtype in (torch.float64, torch.float32))
    assert set(exact) <= set(run.tensors)
    for name, right in exact.items():
        allowed = max(FACTOR * _furthest(single[name], right), 2 * _EPS * float(right.abs().max()))
        off = _furthest(run.tensors[name], right)
        assert off <= allowed, f"{name} is off by {off:.3g}, allowed {allowed:.3g}"


def _updated(exported: Exported, run: Run, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    model, optimizer = copy.deepcopy((exported.model, exported.optimizer))
    model.to(dtype)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for gradients in run.gradients:
        for name, p in trained.items():
            p.grad = gradients[name].to(dtype)
        optimizer.step()
    tensors = {name: p.detach() for name, p in trained.items()}
    for name, p in trained.items():
        state = optimizer.state.get(p, {})
        tensors |= {f"{name}.{key}": value for key, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors


def _results_are_right(exported: Exported, run: Run, batches: Sequence[Batch]) -> None:
    """Of the model in eval mode. Its activations are continuous: no side of a bend matters here."""
    for results, (x, *_) in zip(run.results, batches, strict=True):
        exact, single = (_predicted(exported.model, x, dtype) for dtype in (torch.float64, torch.float32))
        value = torch.from_numpy(results.copy())
        allowed = max(FACTOR * _furthest(single, exact), 16 * _EPS * float(exact.abs().max()))
        off = _furthest(value, exact)
        assert off <= allowed, f"results are off by {off:.3g}, allowed {allowed:.3g}"


def _predicted(model: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As they lie in the program's memory."""
    with torch.no_grad():
        value: torch.Tensor = copy.deepcopy(model).to(dtype).eval()(x.to(dtype))
    return (value.permute(0, 2, 3, 1) if value.dim() == 4 else value).flatten()


def _furthest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
