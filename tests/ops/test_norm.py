"""The batch norm kernels against PyTorch in float64: as exact as its contiguous kernel, the same bits every time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from edgetrain.errors import InternalError
from edgetrain.native import arena
from edgetrain.ops import norm
from tests.helpers.marks import needs_arena
from tests.helpers.plain import differing

pytestmark = pytest.mark.skipif(not norm.available(), reason=str(norm.missing()))
aten = torch.ops.aten

EPS, MOMENTUM = 1e-5, 0.1
CLAMPS = {"none": (-math.inf, math.inf), "relu": (0.0, math.inf), "relu6": (0.0, 6.0)}
# Folded and not, one tile and two, one part and several, with rows left over of each.
SHAPES = [
    (4, 32, 30, 30),
    (3, 17, 9, 7),
    (16, 3, 40, 40),
    (8, 1, 31, 31),
    (2, 200, 15, 17),
    (4, 1100, 7, 7),
    (1, 96, 2, 2),
]


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def data(shape: tuple[int, ...], mean: float = 0.3, std: float = 1.5) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, dy, weight, bias."""
    torch.manual_seed(0)
    C = shape[1]
    x = torch.randn(shape) * std + mean
    return channels_last(x), channels_last(torch.randn(shape)), torch.rand(C) + 0.5, torch.randn(C)


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def ours(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    C = x.shape[1]
    running_mean, running_var = torch.zeros(C), torch.ones(C)
    mean, invstd = norm.statistics(x, running_mean, running_var, MOMENTUM, EPS)
    y = norm.apply(x, mean, invstd, weight, bias)
    dx, dweight, dbias = norm.backward(dy, x, mean, invstd, weight, bias)
    assert dweight is not None
    assert dbias is not None
    found = {"mean": mean, "invstd": invstd, "running_mean": running_mean, "running_var": running_var, "y": y}
    return {**found, "dx": dx, "dweight": dweight, "dbias": dbias}


def theirs(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """PyTorch's contiguous kernel."""
    x, dy, weight, bias = (t.to(dtype).contiguous() for t in (x, dy, weight, bias))
    C = x.shape[1]
    running_mean, running_var = torch.zeros(C, dtype=dtype), torch.ones(C, dtype=dtype)
    y, mean, invstd = aten.native_batch_norm(x, weight, bias, running_mean, running_var, True, MOMENTUM, EPS)
    dx, dweight, dbias = aten.native_batch_norm_backward(
        dy, x, weight, running_mean, running_var, mean, invstd, True, EPS, [True, True, True]
    )
    found = {"mean": mean, "invstd": invstd, "running_mean": running_mean, "running_var": running_var, "y": y}
    return {**found, "dx": dx, "dweight": dweight, "dbias": dbias}


@pytest.mark.parametrize("mean", [0.0, 3.0, 1000.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_exact_as_the_contiguous_kernel(shape: tuple[int, ...], mean: float) -> None:
    given = data(shape, mean=mean, std=1.0)
    exact = theirs(*given, torch.float64)
    single = theirs(*given, torch.float32)
    found = ours(*given)
    for name, reference in exact.items():
        # A mean is as exact as the numbers that it is of.
        size = float(reference.abs().max()) + (1.0 if "mean" in name else 0.0)
        error, allowed = (float((t.double() - reference).abs().max()) / size for t in (found[name], single[name]))
        # PyTorch's error may happen to be nothing. Then: one rounding of a float, or of the mean where it counts.
        floor = 1.2e-7 * (max(1.0, mean / 20) if name in ("y", "dx", "dweight") else 1.0)
        assert error <= max(2 * allowed, floor), (name, error, allowed)


def test_an_outlier_and_a_drift_do_not_spoil_the_variance() -> None:
    x = torch.randn(4, 8, 64, 64)
    x[0, :, 0, 0] = 1e6  # in the rows that the first shift is guessed from
    x[:, 4:] += torch.linspace(0, 1e4, 64)
    x = channels_last(x)
    _, invstd = norm.statistics(x, None, None, MOMENTUM, EPS)
    exact = 1 / (x.double().var((0, 2, 3), unbiased=False) + EPS).sqrt()
    assert ((invstd.double() - exact) / exact).abs().max() < 3e-6


def test_running_statistics_follow_as_in_a_module() -> None:
    module = torch.nn.BatchNorm2d(24, momentum=0.3, dtype=torch.float64)
    running_mean, running_var = torch.zeros(24), torch.ones(24)
    for mean in (0.0, 2.0, -5.0):
        x = data((4, 24, 9, 9), mean=mean)[0]
        module(x.double())
        norm.statistics(x, running_mean, running_var, 0.3, EPS)
    torch.testing.assert_close(running_mean.double(), module.running_mean, rtol=3e-7, atol=3e-7)
    torch.testing.assert_close(running_var.double(), module.running_var, rtol=3e-7, atol=0)


@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_apply_is_repeatable_and_works_in_place(shape: tuple[int, ...], clamp: str) -> None:
    x, _, weight, bias = data(shape, std=4.0)
    mean, invstd = norm.statistics(x, None, None, MOMENTUM, EPS)
    y = norm.apply(x, mean, invstd, weight, bias, *CLAMPS[clamp])
    assert y.stride() == x.stride()
    before = aten.native_batch_norm(x.double(), weight.double(), bias.double(), None, None, True, MOMENTUM, EPS)[0]
    torch.testing.assert_close(y.double(), before.clamp(*CLAMPS[clamp]), rtol=1e-6, atol=2e-6)
    again = norm.apply(x, mean, invstd, weight, bias, *CLAMPS[clamp])
    same = norm.apply(x, mean, invstd, weight, bias, *CLAMPS[clamp], out=x)
    assert same is x
    assert differing({"again": again, "in place": x}, {"again": y, "in place": y}) == []


def with_autograd(x: Tensor, dy: Tensor, weight: Tensor | None, bias: Tensor | None, clamp: str) -> list[Tensor]:
    """Gradients of x, and of weight and bias where they are, in float64."""
    leaves = [None if t is None else t.double().requires_grad_() for t in (x, weight, bias)]
    y = F.batch_norm(leaves[0], None, None, leaves[1], leaves[2], training=True, eps=EPS)  # type: ignore[arg-type]
    y = {"none": lambda y: y, "relu": F.relu, "relu6": F.relu6}[clamp](y)
    return list(torch.autograd.grad(y, [t for t in leaves if t is not None], dy.double()))


def named(gradients: tuple[Tensor | None, ...]) -> dict[str, Tensor]:
    return {name: t for name, t in zip(("dx", "dweight", "dbias"), gradients, strict=True) if t is not None}


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward_against_autograd(shape: tuple[int, ...], clamp: str, affine: bool) -> None:
    x, dy, *rest = data(shape, std=4.0)
    weight, bias = (rest[0] * 3, rest[1]) if affine else (None, None)
    mean, invstd = norm.statistics(x, None, None, MOMENTUM, EPS)
    found = norm.backward(dy, x, mean, invstd, weight, bias, *CLAMPS[clamp])
    assert found[0].stride() == x.stride()
    assert (found[1] is not None, found[2] is not None) == (affine, affine)
    for gradient, exact in zip(named(found).values(), with_autograd(x, dy, weight, bias, clamp), strict=True):
        assert (gradient.double() - exact).abs().max() <= 1e-6 * exact.abs().max()
    in_place = norm.backward(dy, x, mean, invstd, weight, bias, *CLAMPS[clamp], out=dy)
    assert in_place[0] is dy
    assert differing(named(in_place), named(found)) == []


@pytest.mark.parametrize("clamp", CLAMPS)
def test_nothing_flows_at_the_bounds(clamp: str) -> None:
    """With mean 0 and invstd 1, y is x: at the bounds, next to them and inside."""
    inside = [-7.0, -1e-30, -0.0, 0.0, 1e-30, 3.0, math.nextafter(6.0, 0.0), 5.9999995, 6.0, 6.0000005, 8.0]
    x = channels_last(torch.tensor(inside).view(1, 1, -1, 1).repeat(2, 5, 1, 3))
    dy = channels_last(torch.randint(1, 9, x.shape).float())
    mean, invstd = torch.zeros(5), torch.ones(5)
    low, high = CLAMPS[clamp]
    y = norm.apply(x, mean, invstd, None, None, low, high)
    assert torch.equal(y, x.clamp(low, high))
    masked = aten.threshold_backward(dy, y, 0) if clamp == "relu" else aten.hardtanh_backward(dy, y, low, high)
    dx, _, dbias = norm.backward(dy, x, mean, invstd, torch.ones(5), torch.zeros(5), low, high)
    assert dbias is not None
    assert torch.equal(dbias, masked.sum((0, 2, 3)))
    exact = aten.native_batch_norm_backward(
        masked.double(), x.double(), None, None, None, mean.double(), invstd.double(), True, EPS, [True, False, False]
    )[0]
    torch.testing.assert_close(dx.double(), exact, rtol=1e-6, atol=1e-5)


def test_one_row() -> None:
    x, dy, weight, bias = data((1, 40, 1, 1))
    mean, invstd = norm.statistics(x, None, None, MOMENTUM, EPS)
    assert torch.equal(mean, x.flatten())
    torch.testing.assert_close(invstd, torch.full((40,), EPS**-0.5))
    assert torch.equal(norm.apply(x, mean, invstd, weight, bias).flatten(), bias)
    dx, _, dbias = norm.backward(dy, x, mean, invstd, weight, bias)
    assert dbias is not None
    assert torch.equal(dbias, dy.flatten())
    assert not dx.any()


def test_numbers_that_are_none_are_passed_on() -> None:
    x, _, weight, bias = data((2, 8, 4, 4))
    mean, invstd = norm.statistics(x, None, None, MOMENTUM, EPS)
    x[0, 3, 1, 1] = math.nan
    y = norm.apply(x, mean, invstd, weight, bias, 0.0, 6.0)
    assert y.isnan().nonzero().tolist() == [[0, 3, 1, 1]]


@pytest.mark.parametrize("shape", [(16, 24, 40, 40), (16, 1100, 7, 7)], ids=str)
def test_the_number_of_threads_changes_no_bit(shape: tuple[int, ...]) -> None:
    given = data(shape)
    runs = []
    for n in (1, 2, 2, 3):
        with threads(n):
            runs.append(ours(*given))
    assert [differing(run, runs[0]) for run in runs] == [[]] * 4


@needs_arena
def test_nothing_is_allocated_but_the_results() -> None:
    x, dy, weight, bias = data((16, 48, 20, 20))
    with arena.recorded() as recording:
        mean, invstd = norm.statistics(x, None, None, MOMENTUM, EPS)
        y = norm.apply(x, mean, invstd, weight, bias)
        norm.apply(x, mean, invstd, weight, bias, out=y)
        kept = norm.backward(dy, x, mean, invstd, weight, bias)
        kept_too = norm.backward(dy, x, mean, invstd, weight, bias, out=dy)
    assert recording.events == (192, 192, x.nbytes, x.nbytes, 192, 192, 192, 192)
    assert kept[0] is not kept_too[0]


def test_other_layouts_are_refused() -> None:
    x = torch.randn(2, 8, 4, 4)
    stats = torch.zeros(8), torch.ones(8)
    for wrong in (x, channels_last(x).double(), channels_last(x)[:, :, ::2], torch.randn(8, 8), channels_last(x)[:0]):
        with pytest.raises(InternalError, match="channels-last"):
            norm.statistics(wrong, None, None, MOMENTUM, EPS)
        with pytest.raises(InternalError, match="channels-last"):
            norm.apply(wrong, *stats, None, None)
    with pytest.raises(InternalError, match="channels-last"):
        norm.apply(channels_last(x), *stats, None, None, out=x)
    with pytest.raises(InternalError, match="channels-last"):
        norm.backward(x, channels_last(x), *stats, None, None)
