"""A batch is more than its numbers: classes, attributes, whether two items are one tensor or share memory, types.

It trains with plain PyTorch's numbers, or is refused before anything is changed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import UserError

X = torch.linspace(-1, 2, 12).reshape(4, 3)
IMAGES = torch.linspace(-1, 2, 4 * 3 * 6 * 6).reshape(4, 3, 6, 6)
Loss = Callable[..., Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.conv, self.norm = nn.Linear(3, 3), nn.Conv2d(3, 2, 3), nn.GroupNorm(3, 3)
        self.attention, self.table = nn.MultiheadAttention(4, 2), nn.Embedding(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x) if x.dim() == 4 else self.linear(x)
        return y


def prepared(model: nn.Module, loss: Loss, batch: tuple[Any, ...], **options: Any) -> et.Step:
    return et.prepare(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch, unused="freeze", **options)


def plain(loss: Loss, batch: tuple[Any, ...], steps: int = 3) -> list[float]:
    model, values = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model, *batch)
        value.backward()
        optimizer.step()
        values.append(float(value.detach()))
    return values


# ---- one tensor twice ---------------------------------------------------------------------------------------------


def same_counts(model: Any, x: Tensor, y: Tensor) -> Any:
    return (model(x) * model(y)).mean() * (2.0 if x is y else 1.0)


OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {"memory_format": "preserve"}, "micro-batches": {"micro_batches": 2}, "unequal": {"micro_batches": 3},
    "process": {"process_memory": "4GB"}, "channels-last": {"memory_format": "channels_last"},
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_an_item_that_comes_twice_is_one_tensor_in_the_loss(name: str) -> None:
    x = IMAGES if name == "channels-last" else X
    model = Net()
    step = prepared(model, same_counts, (x, x), **OPTIONS[name])
    for batch in ((x, x), (x, x.clone()), (x.clone(), x.clone()), (x, x)):
        expected = same_counts(model, *batch).item()
        assert float(step(*batch)) == pytest.approx(expected, rel=1e-5)


def test_the_pattern_among_three_items() -> None:
    def loss(model: Any, x: Tensor, y: Tensor, z: Tensor) -> Any:
        return model(x).square().mean() * ((x is y) + 2.0 * (y is z) + 4.0 * (x is z) + 1)

    model = Net()
    step = prepared(model, loss, (X, X, X))
    for batch in ((X, X, X), (X, X, X.clone()), (X, X.clone(), X), (X.clone(), X, X), (X, X + 0, X + 0)):
        expected = loss(model, *batch).item()
        assert float(step(*batch)) == pytest.approx(expected, rel=1e-5)


def test_a_graph_has_such_an_item_once() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = et.capture(model, same_counts, optimizer, (X, X), unused="freeze")
    assert len(graph.inputs) == 1


def test_attention_sees_that_the_query_is_the_key() -> None:
    q = torch.linspace(-1, 1, 24).reshape(2, 3, 4)

    def loss(model: Any, query: Tensor, key: Tensor) -> Any:
        y: Tensor = model.attention(query, key, key, need_weights=False)[0]
        return y.square().mean()

    for batch in ((q, q), (q, q.clone())):
        model = Net()
        step = prepared(model, loss, batch)
        assert [float(step(*batch)) for _ in range(3)] == plain(loss, batch)


# ---- memory -------------------------------------------------------------------------------------------------------


def writes(model: Any, x: Tensor, y: Tensor) -> Any:
    x.add_(1)
    return model(x).square().mean() + model(y).mean()


@pytest.mark.parametrize(
    "make", [lambda v: (v[:3], v[1:]), lambda v: (v[1:], v[:3]), lambda v: (v, v.view(4, 3)), lambda v: (v, v.T.T)]
)
def test_what_the_loss_writes_into_an_item_is_not_lost_in_another(make: Callable[[Tensor], Any]) -> None:
    step = prepared(Net(), writes, (X.clone(), X.clone()))
    before = X.clone()
    with pytest.raises(UserError, match="shares memory"):
        step(*make(before))
    assert torch.equal(before, X)


def test_what_the_loss_writes_into_an_item_is_seen_there() -> None:
    ours, theirs = X.clone(), X.clone()
    assert float(prepared(Net(), writes, (ours, ours))(ours, ours)) == plain(writes, (theirs, theirs), 1)[0]
    assert torch.equal(ours, theirs)
    gaps = torch.cat([X, X], 1)[:, :3]
    before = gaps.clone()
    step = prepared(Net(), writes, (gaps, X.clone()))
    with pytest.raises(UserError, match="gaps"):
        step(gaps, X.clone())
    assert torch.equal(gaps, before)


# ---- classes and attributes ---------------------------------------------------------------------------------------


class Own(torch.Tensor):
    pass


class Silent(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def with_attribute(name: str) -> Tensor:
    x = X.clone()
    setattr(x, name, 2.0)
    return x


OBJECTS: dict[str, tuple[Callable[[], Tensor], str | None]] = {
    "subclass": (lambda: X.as_subclass(Own), "as_subclass"),
    "subclass without functions": (lambda: X.as_subclass(Silent), "as_subclass"),
    "constant parameter": (lambda: nn.Parameter(X, requires_grad=False), "as_subclass"),
    "attribute": (lambda: with_attribute("weight"), "weight"),
    "attribute with an underscore": (lambda: with_attribute("_weight"), "_weight"),
    "of torch.compile": (lambda: with_attribute("_dynamo_static_input_type"), None),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_what_a_captured_step_would_not_see_of_an_item_is_refused(name: str) -> None:
    make, said = OBJECTS[name]

    def loss(model: Any, x: Any) -> Any:
        return model(x).square().mean() * getattr(x, "weight", 1.0)

    step = prepared(Net(), loss, (X,), memory_format="preserve")
    if said is None:
        step(make())
        return
    for attempt in (lambda: prepared(Net(), loss, (make(),)), lambda: step(make()), lambda: step.gradients(make())):
        with pytest.raises(UserError, match=said):
            attempt()
    assert step.count == 0


# ---- types --------------------------------------------------------------------------------------------------------

D, N, T = X.double(), torch.tensor([[0, 1, 2], [2, 1, 0], [1, 1, 0], [0, 0, 1]]), IMAGES.double()
TYPES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "linear of float64": (lambda m, x: m.linear(x), (D,)),
    "linear of int64": (lambda m, x: m.linear(x), (N,)),
    "linear of bool": (lambda m, x: m.linear(x), (N > 0,)),
    "linear of bfloat16": (lambda m, x: m.linear(x), (X.bfloat16(),)),
    "mm": (lambda m, x: m.linear.weight @ x.T, (D,)),
    "mv": (lambda m, x: m.linear.weight @ x[0], (D,)),
    "dot": (lambda m, x: m.linear.weight[0] @ x[0], (D,)),
    "bmm": (lambda m, x: torch.bmm(x[None], m.linear.weight[None]), (D,)),
    "addmm": (lambda m, x: torch.addmm(x, m.linear(X), m.linear.weight), (D,)),
    "baddbmm": (lambda m, x: torch.baddbmm(x[None], m.linear(X)[None], m.linear.weight[None]), (D,)),
    "addmv": (lambda m, x: torch.addmv(x[0], m.linear.weight, m.linear.bias), (D,)),
    "einsum": (lambda m, x: torch.einsum("ij,kj->ik", x, m.linear.weight), (D,)),
    "convolution": (lambda m, x: m.conv(x), (T,)),
    "transposed convolution": (lambda m, x: F.conv_transpose2d(x, m.conv.weight.transpose(0, 1)), (T,)),
    "batch norm": (lambda m, x: F.batch_norm(x, None, None, m.linear.bias, m.linear.bias, training=True), (T,)),
    "layer norm": (lambda m, x: F.layer_norm(x, (3,), m.linear.bias, m.linear.bias), (D,)),
    "group norm": (lambda m, x: m.norm(x), (T,)),
    "float indices": (lambda m, x: m.table(x), (X,)),
    "int16 indices": (lambda m, x: m.table(x), (N.short(),)),
    "select by floats": (lambda m, x: m.linear(X).index_select(0, x), (torch.tensor([0.0, 1.0]),)),
    "index add": (lambda m, x: m.linear(X).index_add(0, torch.arange(4), x), (D,)),
    "index put": (lambda m, x: m.linear(X).index_put((torch.tensor([0]),), x[0]), (D,)),
    "int32 labels": (lambda m, x: F.cross_entropy(m.linear(X), x), (torch.tensor([0, 1, 2, 0]).int(),)),
    "int targets": (lambda m, x: F.binary_cross_entropy(m.linear(X).sigmoid(), x), (N.clamp(max=1),)),
    "float64 targets": (lambda m, x: F.binary_cross_entropy(m.linear(X).sigmoid(), x), (D.clamp(0, 1),)),
    "huber of float64": (lambda m, x: F.huber_loss(m.linear(X), x), (D,)),
    "int mask": (lambda m, x: m.linear(X).masked_fill(x, 0.0), (N,)),
    "int condition": (lambda m, x: torch.where(x, m.linear(X), 0.0), (N,)),
    "weights of a bag": (lambda m, x: F.embedding_bag(N, m.table.weight, per_sample_weights=x, mode="sum"), (D,)),
    "attention": (lambda m, x: m.attention(x, x, x)[0], (torch.ones(2, 3, 4).double(),)),
    "distances": (lambda m, x: torch.cdist(m.linear(X), x), (D,)),
    "grid": (lambda m, x: F.grid_sample(IMAGES * m.linear.bias.mean(), x), (torch.zeros(4, 2, 2, 2).double(),)),
    "softmax of int": (lambda m, x: m.linear(X) * F.softmax(x, 1), (N,)),
    "relu of bool": (lambda m, x: m.linear(X) * F.relu(x), (N > 0,)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Default grid_sample")
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("options", [{}, {"memory": "10MB"}], ids=["all kept", "budget"])
def test_types_that_a_kernel_does_not_take(name: str, options: dict[str, Any]) -> None:
    function, batch = TYPES[name]

    def loss(model: nn.Module, *batch: Tensor) -> Any:
        return function(model, *batch).square().mean()

    with pytest.raises((RuntimeError, ValueError)):
        plain(loss, batch, 1)
    model = Net()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError) as caught:
        prepared(model, loss, batch, **options)(*batch)
    assert "InternalError" not in str(caught.value)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


PROMOTED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "mse of float64": (lambda m, x: F.mse_loss(m.linear(X), x), (D,)),
    "mse of int": (lambda m, x: F.mse_loss(m.linear(X), x), (N,)),
    "concatenation": (lambda m, x: torch.cat([m.linear(X), x]), (D,)),
    "choice": (lambda m, x: torch.where(x > 0, m.linear(X), x), (D,)),
    "sum": (lambda m, x: m.linear(X) + x, (N,)),
    "int32 indices": (lambda m, x: m.table(x), (N.int(),)),
    "rows by int32": (lambda m, x: m.linear(X)[x], (torch.tensor([0, 1]).int(),)),
    "logits": (lambda m, x: F.binary_cross_entropy_with_logits(m.linear(X), x), (D.clamp(0, 1),)),
    "probabilities": (lambda m, x: F.cross_entropy(m.linear(X), x), (D.clamp(0, 1),)),
}


@pytest.mark.parametrize("name", PROMOTED)
def test_types_that_kernels_take_together(name: str) -> None:
    function, batch = PROMOTED[name]

    def loss(model: nn.Module, *batch: Tensor) -> Any:
        return function(model, *batch).square().mean()

    step = prepared(Net(), loss, batch, memory_format="preserve")
    assert [float(step(*batch)) for _ in range(3)] == plain(loss, batch)


def test_norms_under_autocast_take_types_together() -> None:
    def loss(model: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = F.layer_norm(model.linear(x), (3,), model.linear.bias, model.linear.bias)
            z = model.norm(F.pad(model.conv(IMAGES), (0, 0, 0, 0, 0, 1)))
        return y.float().square().mean() + z.float().square().mean()

    step = prepared(Net(), loss, (X,), memory_format="preserve")
    assert [float(step(X)) for _ in range(3)] == plain(loss, (X,))


def test_a_model_of_another_type_between_steps() -> None:
    def loss(model: nn.Module, x: Tensor) -> Any:
        return model(x).square().mean()

    for change in (nn.Module.double, nn.Module.bfloat16):
        model = Net()
        step = prepared(model, loss, (X,))
        step(X)
        change(model)
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(UserError, match=r"pass it as \.to\("):
            step(X)
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        assert step.count == 1
