"""Batch norm as ops of our own: a legal graph of the same step, with the numbers of plain PyTorch to rounding."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.graph.ir import Graph
from edgetrain.graph.rewrite.fuse import NORM, NORM_BACKWARD, fuse_batch_norm, trains_unfused
from edgetrain.graph.verify import verify
from edgetrain.ops import norm
from tests.helpers.plain import Training, differing, relative_error, run, sgd, training

pytestmark = pytest.mark.skipif(not norm.available(), reason=str(norm.missing()))

STATISTICS, APPLY, BACKWARD = (f"edgetrain.norm.{name}" for name in ("statistics", "apply", "backward"))
CLAMPS = tuple(f"aten.{name}.default" for name in ("relu", "hardtanh", "threshold_backward", "hardtanh_backward"))
N, C, SIZE = 4, 6, 9


class Net(nn.Module):
    """A convolution, something around batch norm, and a head that makes every channel and pixel count."""

    def __init__(self, body: nn.Module, channels: int = C) -> None:
        super().__init__()
        self.conv, self.body, self.last = nn.Conv2d(3, channels, 3), body, nn.Conv2d(channels, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.body(self.conv(x)))
        return out


class Function(nn.Module):
    def __init__(self, function: Callable[[nn.BatchNorm2d, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.function = nn.BatchNorm2d(C), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.norm, x)


class Alone(nn.Module):
    """Batch norm first and last: its input needs no gradient, its output is what the loss reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


def frozen(*names: str) -> nn.Module:
    layer = nn.BatchNorm2d(C)
    for name in names:
        getattr(layer, name).requires_grad_(False)
    return nn.Sequential(layer, nn.ReLU())


def evaluating() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(C).eval(), nn.ReLU(), nn.Conv2d(C, C, 1), nn.BatchNorm2d(C), nn.ReLU())


def function(made: Callable[[nn.BatchNorm2d, Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Net(Function(made))


def layers(*made: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Net(nn.Sequential(*(make() for make in made)))


def bn(**options: object) -> Callable[[], nn.Module]:
    return lambda: nn.BatchNorm2d(C, **options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """`fused`: how many batch norms become ours; `clamps`: how many ops of activations are left."""

    build: Callable[[], nn.Module]
    fused: int = 1
    clamps: int = 0
    size: int = SIZE


CASES = {
    "alone": Case(layers(bn())),
    "ReLU": Case(layers(bn(), nn.ReLU)),
    "ReLU in place": Case(layers(bn(), lambda: nn.ReLU(inplace=True))),
    "ReLU6": Case(layers(bn(), nn.ReLU6)),
    "ReLU6 in place": Case(layers(bn(), lambda: nn.ReLU6(inplace=True))),
    "hardtanh": Case(layers(bn(), lambda: nn.Hardtanh(-0.5, 0.25))),
    "tanh, which stays": Case(layers(bn(), nn.Tanh)),
    "two layers": Case(layers(bn(), nn.ReLU, lambda: nn.Conv2d(C, C, 3), bn(), nn.ReLU6), fused=2),
    "two without a layer between": Case(layers(bn(), nn.ReLU, bn(), nn.ReLU), fused=2),
    "input added before ReLU": Case(function(lambda norm, x: F.relu(norm(x) + x)), clamps=2),
    "used twice": Case(function(lambda norm, x: (lambda y: F.relu(y) + torch.sigmoid(y))(norm(x))), clamps=2),
    "used again without gradient": Case(
        function(lambda norm, x: (lambda y: F.relu(y) + torch.sigmoid(y.detach()))(norm(x))), clamps=2
    ),
    "activation used twice": Case(function(lambda norm, x: (lambda y: y * torch.sigmoid(y))(F.relu(norm(x))))),
    "two activations of one": Case(function(lambda norm, x: (lambda y: F.relu(y) + F.relu6(y))(norm(x))), clamps=4),
    "ReLU of ReLU6": Case(function(lambda norm, x: F.relu(F.relu6(norm(x)))), clamps=2),
    "shared module": Case(function(lambda norm, x: F.relu(norm(F.relu(norm(x)) + x))), fused=2),
    "without affine": Case(layers(bn(affine=False), nn.ReLU)),
    "untracked": Case(layers(bn(track_running_stats=False), nn.ReLU)),
    "other momentum and eps": Case(layers(bn(momentum=0.4, eps=0.1), nn.ReLU)),
    "frozen weight": Case(lambda: Net(frozen("weight"))),
    "frozen bias": Case(lambda: Net(frozen("bias"))),
    "frozen": Case(lambda: Net(frozen("weight", "bias"))),
    "one that does not train": Case(lambda: Net(evaluating()), clamps=2),
    "one pixel": Case(layers(bn(), nn.ReLU), size=3),
    "one channel": Case(lambda: Net(nn.Sequential(nn.BatchNorm2d(1), nn.ReLU()), channels=1)),
    "gradient of another layout": Case(function(lambda norm, x: (lambda y: y.mean((2, 3), keepdim=True) * x)(norm(x)))),
    "gradient spread over all": Case(function(lambda norm, x: x + norm(x).mean())),
    "transposed afterwards": Case(function(lambda norm, x: F.relu(norm(x)).transpose(2, 3).contiguous())),
    "first and last": Case(Alone),
}


def towards_ramp(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return (out - torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).square().mean()


def total(model: nn.Module, x: Tensor) -> Tensor:
    """Its gradient is one number, spread over the output."""
    out: Tensor = model(x)
    return out.square().mean() + out.mean()


def work_of(case: Case) -> Training:
    torch.manual_seed(0)
    model = case.build()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    trained = [p for p in model.parameters() if p.requires_grad]
    return Training(model, sgd(trained), towards_ramp)


def batches(case: Case, count: int = 3, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(N, 3, case.size, case.size, generator=generator).to(dtype),) for _ in range(count)]


def captured(work: Training, batch: tuple[Tensor]) -> Graph:
    return et.capture(work.model, work.loss, work.optimizer, batch, memory_format="channels_last", use_cache=False)


def kinds(graph: Graph) -> Counter[str]:
    return Counter(op.kind for op in graph.ops)


@pytest.mark.parametrize("name", CASES)
def test_the_fused_graph_is_legal_and_holds_our_ops(name: str) -> None:
    case = CASES[name]
    plain = captured(work_of(case), batches(case)[0])
    fused = fuse_batch_norm(plain)
    verify(fused)
    found = kinds(fused)
    assert (found[STATISTICS], found[APPLY], found[BACKWARD]) == (case.fused,) * 3
    assert sum(found[kind] for kind in CLAMPS) == case.clamps
    assert not trains_unfused(fused)
    assert kinds(plain)[NORM] - found[NORM] == kinds(plain)[NORM_BACKWARD] - found[NORM_BACKWARD] == case.fused
    # What lasts is as it was: the same parameters, buffers and states, and a gradient for the same parameters.
    assert {s.path for s in fused.sources.values()} == {s.path for s in plain.sources.values()}
    trained = [{graph.tensors[p].name for p in graph.gradients} for graph in (plain, fused)]
    assert trained[0] == trained[1]
    assert fuse_batch_norm(fused) == fused


@pytest.mark.parametrize("loss", [towards_ramp, total])
@pytest.mark.parametrize("name", CASES)
def test_a_fused_step_trains_as_plain_pytorch(name: str, loss: Callable[..., Tensor]) -> None:
    """Three steps: as near to float64 as plain PyTorch in float32 is, and near to that."""
    case = CASES[name]
    work = work_of(case)
    work.loss = loss
    plain, exact = work.twin(), work.twin()
    exact = Training(exact.model.double(), sgd([p for p in exact.model.parameters() if p.requires_grad]), loss)
    graph = fuse_batch_norm(captured(work, batches(case)[0]))
    step = et.compile(graph, et.keep_all(graph, exact="rounding"), work.model, work.optimizer)
    right = run(exact.plain_step, batches(case, dtype=torch.float64))
    expected, found = run(plain.plain_step, batches(case)), run(step, batches(case))
    assert torch.allclose(found.double(), right, rtol=1e-5, atol=1e-6)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    model, plain_model, exact_model = (
        {name: tensor for name, tensor in one.snapshot().items() if name.startswith("model.")}
        for one in (work, plain, exact)
    )
    error, plain_error = (relative_error(one, exact_model, noise=1e-5) for one in (model, plain_model))
    assert error < max(4 * plain_error, 2e-6)
    # Statistics: whole numbers are the same; those that plain training leaves alone are left alone.
    before = work_of(case).model.state_dict()
    for key, value in work.model.state_dict().items():
        if not value.is_floating_point() or torch.equal(plain.model.state_dict()[key], before[key]):
            assert torch.equal(value, plain.model.state_dict()[key]), key


@pytest.mark.parametrize("name", CASES)
def test_fused_gradients_are_those_of_the_unfused_graph(name: str) -> None:
    case = CASES[name]
    work = work_of(case)
    (batch,) = batches(case, 1)
    graph = captured(work, batch)
    found, right = (
        et.compile(one, et.keep_all(one), work.model, work.optimizer).gradients(*batch)
        for one in (fuse_batch_norm(graph), graph)
    )
    assert relative_error(found, right, noise=1e-5) < 1e-4


def test_a_batch_norm_that_does_not_train_is_left_alone() -> None:
    case = Case(lambda: Net(nn.Sequential(nn.BatchNorm2d(C).eval(), nn.ReLU())))
    graph = captured(work_of(case), batches(case)[0])
    assert fuse_batch_norm(graph) is graph
    assert not trains_unfused(graph)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_alone(dtype: torch.dtype) -> None:
    case = CASES["ReLU"]
    work = work_of(case)
    work = training(work.model.to(dtype), work.loss)
    graph = captured(work, batches(case, dtype=dtype)[0])
    assert fuse_batch_norm(graph) is graph
    assert trains_unfused(graph)


def test_images_that_are_not_channels_last_are_left_alone() -> None:
    case = CASES["ReLU"]
    work = work_of(case)
    graph = et.capture(work.model, work.loss, work.optimizer, batches(case)[0], use_cache=False)
    assert fuse_batch_norm(graph) is graph
    assert not trains_unfused(graph)


def test_the_output_of_the_norm_is_a_result() -> None:
    """A model's own output, kept after the step, is not what a fused activation may swallow."""

    def with_output(model: nn.Module, x: Tensor) -> Tensor:
        h: Tensor = model.norm(model.conv(x))  # type: ignore[operator]
        return h.relu().square().mean() + h.mean()

    torch.manual_seed(0)
    model = nn.ModuleDict({"conv": nn.Conv2d(3, C, 3), "norm": nn.BatchNorm2d(C)})
    work = training(model, lambda m, x: with_output(m, x))
    work.model.conv, work.model.norm = model["conv"], model["norm"]
    case = CASES["ReLU"]
    graph = fuse_batch_norm(captured(work, batches(case)[0]))
    verify(graph)
    assert kinds(graph)[APPLY] == 1
    plain = work.twin()
    step = et.compile(graph, et.keep_all(graph), work.model, work.optimizer)
    assert torch.allclose(run(step, batches(case)), run(plain.plain_step, batches(case)), rtol=1e-5)


def test_prepare_takes_the_fused_graph_and_says_so() -> None:
    case = CASES["two layers"]
    work = work_of(case)
    plain = work.twin()
    step = et.prepare(work.model, work.loss, work.optimizer, batches(case)[0])
    assert kinds(step.graph)[APPLY] == 2
    assert step.plan.exact == "rounding"
    run(step, batches(case))
    run(plain.plain_step, batches(case))
    assert relative_error(work.snapshot(), plain.snapshot(), noise=1e-5) < 1e-4
    bitwise = work_of(case)
    step = et.prepare(bitwise.model, bitwise.loss, bitwise.optimizer, batches(case)[0], memory_format="preserve")
    assert kinds(step.graph)[APPLY] == 0
    assert step.plan.exact == "bitwise"
    run(step, batches(case))
    assert differing(bitwise.snapshot(), plain.snapshot()) == []


def test_a_step_that_fails_takes_statistics_back() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, C, 3), nn.BatchNorm2d(C), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    work = training(net, lambda model, x, y: F.cross_entropy(model(x), y))
    x, y = torch.randn(4, 3, SIZE, SIZE), torch.randint(C, (4,))
    step = et.prepare(work.model, work.loss, work.optimizer, (x, y))
    assert kinds(step.graph)[APPLY] == 1
    step(x, y)
    before = work.snapshot()
    with pytest.raises(IndexError):
        step(x, torch.full_like(y, 77))
    assert differing(work.snapshot(), before) == []
