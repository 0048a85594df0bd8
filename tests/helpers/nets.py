"""Small nets of every kind that a training step is captured from. `CASES` lists them; each builds in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from tests.helpers.plain import Loss, towards_ramp

F64 = torch.float64


@dataclass(frozen=True)
class Case:
    """`build` gives the model; `inputs` are shapes of floating-point inputs, or tensors as they are."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Sequence[tuple[int, ...] | Tensor]
    loss: Loss = towards_ramp

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return self.build().double()

    def batch(self, seed: int = 0) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(
            i if isinstance(i, Tensor) else torch.randn(i, generator=generator, dtype=F64) for i in self.inputs
        )


class Apply(nn.Module):
    """A function after a linear layer, so that there is something to train."""

    def __init__(self, function: Callable[[Tensor], Tensor], features: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x), inplace=True)
        y: Tensor = self.a(x + self.b(x))
        y += x
        return y


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(2 + 2 * i, 2, 3, padding=1) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], dim=1)
        return x


class Tied(nn.Module):
    """The embedding is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.hidden = nn.Linear(6, 6)
        self.output = nn.Linear(6, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.output(torch.tanh(self.hidden(self.embedding(x))))
        return out


class Twice(nn.Module):
    """One weight read by two ops, and a module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) / 3)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(F.linear(self.norm(x @ self.weight), self.weight)) * self.weight[0]
        return out


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.merge = nn.Bilinear(4, 3, 5)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.merge(a, b)
        return out


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5)).requires_grad_(False)
        self.head = nn.Linear(5, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).relu())
        return out


class Ema(nn.Module):
    """Buffers that forward changes in place: whole, through a view, from one another, and by `+=`."""

    count: Tensor
    mean: Tensor
    history: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("history", torch.zeros(3, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.history[1].copy_(self.history[0])
            self.history[0] += self.mean
            self.count += 1
        return h - self.mean + self.history[1] / self.count


class Clamped(nn.Module):
    """Changes its own parameter in forward, as a max-norm constraint does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        out: Tensor = self.linear(x)
        return out


class Attention(nn.Module):
    def __init__(self, *, masked: bool, dropout: float, causal: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.masked, self.dropout, self.causal = masked, dropout, causal

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mask = torch.ones(t, t, dtype=torch.bool).tril() if self.masked else None
        out = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=self.causal)
        return out.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        out: Tensor = self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        return out


class Recurrent(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out


class Square(torch.autograd.Function):
    """x² with a gradient that autograd would not find: 3x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x: Tensor = ctx.saved_tensors[0]
        return grad * 3 * x


class PassesOn(torch.autograd.Function):
    """A product whose gradients are the very tensors that came in."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (a * b).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return b, a


class GradientsArePersistent(nn.Module):
    """The gradient of each parameter is the other parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = PassesOn.apply(self.a, self.b)  # type: ignore[no-untyped-call]
        return out


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)
        return out


class Penalty(nn.Module):
    """A gradient inside the loss: double backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().clone().requires_grad_()
        out: Tensor = self.net(x)
        slope: Tensor = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
        return out + slope.square().sum(1, keepdim=True)


def times_three_x(x: Tensor) -> Tensor:
    out: Tensor = Square.apply(x)  # type: ignore[no-untyped-call]
    return out


def scaled_by(factor: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor


def two_closures() -> Callable[[Tensor], Tensor]:
    """Two functions whose variables have the same name."""
    double, triple = scaled_by(torch.tensor(2.0, dtype=F64)), scaled_by(torch.tensor(3.0, dtype=F64))
    return lambda x: double(x) + triple(x).square()


def draw_and_forget(x: Tensor) -> Tensor:
    torch.rand(3)
    return x + torch.rand(6, dtype=x.dtype)


def add_to_column(x: Tensor) -> Tensor:
    x[:, 0] += 2 * x[:, 1]
    return x


def write_after_relu6(x: Tensor) -> Tensor:
    y = F.relu6(4 * x)
    y[:, 1].add_(3)
    y[:, 2] = -1
    return y * y


def write_to_slice_alone(x: Tensor) -> Tensor:
    part = (x * 2)[1:3]
    part.mul_(x[1:3])
    return part


def write_to_column_alone(x: Tensor) -> Tensor:
    part = (x * 2)[:, 1:4]
    part.mul_(x[:, 1:4]).tanh_()
    return part


def write_without_gradient(x: Tensor) -> Tensor:
    with torch.no_grad():
        part = (x * 2)[1:3]
        part.mul_(3)
        column = (x * 5)[:, 1:2]
        column.add_(1)
    return x * part[1] + column


def clone_of_slice(x: Tensor) -> Tensor:
    part = (x * 2)[1:3].clone()
    return part.view(-1)[3:9].view(2, 3) * x[:2, :3]


def write_through_transpose(x: Tensor) -> Tensor:
    y = x * 1
    y.t()[1].mul_(3)
    y.unsqueeze(0).view(-1, 2).sigmoid_()
    return y


def fill_masked(x: Tensor) -> Tensor:
    y = x.clone()
    y.masked_fill_(torch.eye(4, 6, dtype=torch.bool), 0.5)
    return y + x.masked_fill(x < 0, -1.0)


def put_by_index(x: Tensor) -> Tensor:
    y = x * 1
    y[torch.tensor([0, 2]), torch.tensor([1, 5])] = x[1, :2]
    y.index_add_(0, torch.tensor([3, 3]), x[:2])
    y.scatter_(1, torch.zeros(4, 1, dtype=torch.int64), 2.0)
    return y


def slices(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=1)
    return torch.cat([a[1:, ::2], b[:-1, 1:], x.flip(0)[:3].roll(1, 1)], dim=1) * x.narrow(1, 0, 1)[:3]


def in_place_chain(x: Tensor) -> Tensor:
    return x.mul_(2).add_(1).clamp_(-1, 1).neg_().sub_(0.5).div_(3)


def copies(x: Tensor) -> Tensor:
    y = torch.empty(4, 6, dtype=x.dtype)
    y.copy_(x).add_(x.clone())
    z = torch.zeros_like(y)
    z[:2].copy_(y[2:])
    z.fill_diagonal_(7.0)
    return z + y.expand(2, 4, 6).sum(0)


def noise(x: Tensor) -> Tensor:
    return x + torch.randn_like(x) + torch.rand(6, dtype=x.dtype) * torch.bernoulli(torch.full_like(x, 0.5))


def noise_for_transposed(x: Tensor) -> Tensor:
    return x.t() + torch.randn_like(x.t()) + torch.rand_like(x.t()) + F.dropout(x.t(), 0.5)


def own_constants(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=F64) + torch.arange(6, dtype=F64) + torch.tensor(0.5)


def embedding(**options: Any) -> nn.Module:
    return nn.Embedding(9, 5, **options)


def _layer(name: str, build: Callable[[], nn.Module], *inputs: tuple[int, ...] | Tensor) -> Case:
    return Case(name, build, inputs)


def _function(name: str, function: Callable[[Tensor], Tensor]) -> Case:
    return Case(name, lambda: Apply(function), [(4, 6)])


IMAGE, SIGNAL, VOLUME, SEQUENCE = (2, 4, 7, 6), (2, 4, 9), (2, 2, 4, 5, 4), (2, 5, 8)
TOKENS = torch.tensor([[1, 2, 0, 8], [4, 4, 0, 3]])

CONVOLUTIONS = [
    _layer("conv2d", lambda: nn.Conv2d(4, 5, 3), IMAGE),
    _layer("conv2d strided, without bias", lambda: nn.Conv2d(4, 5, 3, stride=2, padding=1, bias=False), IMAGE),
    _layer("conv2d grouped", lambda: nn.Conv2d(4, 6, 3, groups=2), IMAGE),
    _layer("conv2d depthwise", lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1)), IMAGE),
    _layer("conv2d dilated", lambda: nn.Sequential(nn.Conv2d(4, 4, 3, dilation=2), nn.ReLU()), IMAGE),
    _layer("conv2d reflecting", lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), IMAGE),
    _layer("conv2d padded the same", lambda: nn.Conv2d(4, 4, (4, 3), padding="same"), IMAGE),
    _layer("conv1d", lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.Conv1d(4, 3, 2, groups=1, dilation=2)), SIGNAL),
    _layer("conv3d", lambda: nn.Sequential(nn.Conv3d(2, 2, 2), nn.Conv3d(2, 2, 2, groups=2)), VOLUME),
    _layer("conv2d transposed", lambda: nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1), IMAGE),
    _layer("conv2d transposed, grouped", lambda: nn.ConvTranspose2d(4, 4, 3, groups=2, dilation=2), IMAGE),
    _layer("conv1d transposed", lambda: nn.ConvTranspose1d(4, 3, 3), SIGNAL),
    _layer("conv3d transposed", lambda: nn.ConvTranspose3d(2, 3, 2), VOLUME),
]

NORMS = [
    _layer("batch norm 1d", lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), (4, 6)),
    _layer(
        "batch norm 2d", lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU6(inplace=True)), IMAGE
    ),
    _layer("batch norm 3d", lambda: nn.Sequential(nn.Conv3d(2, 2, 2), nn.BatchNorm3d(2, affine=False)), VOLUME),
    _layer("batch norm unless tracked", lambda: nn.BatchNorm2d(4, track_running_stats=False), IMAGE),
    _layer("layer norm", lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm((5, 8))), SEQUENCE),
    _layer("rms norm", lambda: nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)), SEQUENCE),
    _layer("group norm", lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4)), IMAGE),
    _layer("instance norm", lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), IMAGE),
    _layer("local response norm", lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.LocalResponseNorm(2)), IMAGE),
    _layer("weight norm", lambda: parametrizations.weight_norm(nn.Linear(6, 4)), (4, 6)),
    _layer("spectral norm", lambda: parametrizations.spectral_norm(nn.Linear(6, 4)), (4, 6)),
    _layer("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(6, 6), orthogonal_map="cayley"), (4, 6)),
]

RANDOM = [
    _layer("dropout", lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.Linear(6, 6)), (4, 6)),
    _layer("dropout in place", lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3, inplace=True)), (4, 6)),
    _layer("dropout 1d", lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.Dropout1d(0.4)), SIGNAL),
    _layer("dropout 2d", lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.Dropout2d(0.4)), IMAGE),
    _layer("alpha dropout", lambda: nn.Sequential(nn.Linear(6, 6), nn.SELU(), nn.AlphaDropout(0.4)), (4, 6)),
    _layer("rrelu", lambda: nn.Sequential(nn.Linear(6, 6), nn.RReLU()), (4, 6)),
    _function("noise", noise),
    _function("numbers drawn for nothing", draw_and_forget),
    _function("noise for a transposed tensor", noise_for_transposed),
    _function("gumbel softmax", lambda x: F.gumbel_softmax(x, tau=0.7)),
]

POOLS = [
    _layer("max pool", lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.MaxPool2d(3, 2, padding=1, ceil_mode=True)), IMAGE),
    _layer("max pool 1d", lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.MaxPool1d(2)), SIGNAL),
    _layer("average pool", lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.AvgPool2d(2, padding=1)), IMAGE),
    _layer("adaptive average pool", lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d((3, 2))), IMAGE),
    _layer("global average pool", lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(1)), IMAGE),
    _layer("adaptive max pool", lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.AdaptiveMaxPool2d(2)), IMAGE),
    _layer(
        "upsampling", lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Upsample(scale_factor=2, mode="bilinear")), IMAGE
    ),
    _layer("pixel shuffle", lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.PixelShuffle(2)), IMAGE),
]

ACTIVATIONS = [
    _function(f"{name}{' in place' if options else ''}", getattr(nn, name)(**options))
    for name in ("ReLU", "ReLU6", "SiLU", "Hardswish", "Hardsigmoid", "LeakyReLU", "ELU", "CELU", "SELU", "Mish")
    for options in ({}, {"inplace": True})
] + [
    _function("GELU", nn.GELU()),
    _function("GELU by tanh", nn.GELU("tanh")),
    _function("sigmoid", nn.Sigmoid()),
    _function("sigmoid in place", lambda x: x.sigmoid_()),
    _function("tanh", nn.Tanh()),
    _function("tanh in place", lambda x: x.tanh_()),
    _function("softmax", nn.Softmax(dim=-1)),
    _function("log softmax", nn.LogSoftmax(dim=-1)),
    _function("softplus", nn.Softplus()),
    _function("hardtanh between two kept tensors", lambda x: F.hardtanh(2 * x) * (2 * x)),
    _layer("PReLU", lambda: nn.Sequential(nn.Linear(6, 6), nn.PReLU()), (4, 6)),
    _function("GLU", nn.GLU()),
]

SEQUENCES = [
    _layer("embedding", embedding, TOKENS),
    _layer("embedding with padding", lambda: embedding(padding_idx=0), TOKENS),
    _layer("embedding scaled by frequency", lambda: embedding(scale_grad_by_freq=True), TOKENS),
    _layer("attention", lambda: Attention(masked=False, dropout=0.0), SEQUENCE),
    _layer("attention masked", lambda: Attention(masked=True, dropout=0.0), SEQUENCE),
    _layer("attention causal", lambda: Attention(masked=False, dropout=0.0, causal=True), SEQUENCE),
    _layer("attention with dropout", lambda: Attention(masked=False, dropout=0.3), SEQUENCE),
    _layer("attention masked, with dropout", lambda: Attention(masked=True, dropout=0.3), SEQUENCE),
    _layer("multi-head attention", SelfAttention, SEQUENCE),
    _layer("multi-head attention with dropout", lambda: SelfAttention(dropout=0.2, add_bias_kv=True), SEQUENCE),
    _layer(
        "transformer encoder layer",
        lambda: nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True, norm_first=True),
        SEQUENCE,
    ),
    _layer("transformer", lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True), SEQUENCE, (2, 3, 8)),
    _layer("LSTM", lambda: Recurrent(nn.LSTM(8, 6, num_layers=2, dropout=0.3, batch_first=True)), SEQUENCE),
    _layer("LSTM of two directions", lambda: Recurrent(nn.LSTM(8, 4, bidirectional=True, proj_size=3)), SEQUENCE),
    _layer("GRU", lambda: Recurrent(nn.GRU(8, 6, num_layers=2, bidirectional=True)), SEQUENCE),
    _layer("RNN", lambda: Recurrent(nn.RNN(8, 6, nonlinearity="relu", bias=False)), SEQUENCE),
    _layer("LSTM cell", lambda: Recurrent(nn.LSTMCell(8, 6)), (5, 8)),  # type: ignore[arg-type]
]

STRUCTURES = [
    _layer("residual", Residual, (2, 3, 5, 5)),
    _layer("dense connections", Dense, (2, 2, 5, 5)),
    _layer("tied weights", Tied, TOKENS),
    _layer("weight used twice", Twice, (4, 6)),
    _layer("two inputs", TwoInputs, (3, 4), (3, 3)),
    _layer("partly frozen", PartlyFrozen, (6, 4)),
    _layer("buffers changed in place", Ema, (5, 4)),
    _layer("parameter changed in forward", Clamped, (5, 4)),
    _function("custom function", times_three_x),
    _function("two closures", two_closures()),
    _layer("gradients that are parameters", GradientsArePersistent, (1,)),
    _layer("checkpoint without dropout", Checkpointed, (3, 4)),
    _layer("gradient penalty", Penalty, (3, 4)),
]

WRITES = [
    _function("add to a column", add_to_column),
    _function("write after relu6", write_after_relu6),
    _function("write to a slice alone", write_to_slice_alone),
    _function("write to a column alone", write_to_column_alone),
    _function("write without gradient", write_without_gradient),
    _function("clone of a slice", clone_of_slice),
    _function("write through a transpose", write_through_transpose),
    _function("masked fill", fill_masked),
    _function("index put, add and scatter", put_by_index),
    _function("slices", slices),
    _function("chain in place", in_place_chain),
    _function("copies", copies),
    _function("own constants", own_constants),
]

CASES = [*CONVOLUTIONS, *NORMS, *RANDOM, *POOLS, *ACTIVATIONS, *SEQUENCES, *STRUCTURES, *WRITES]
