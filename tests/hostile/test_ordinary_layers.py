"""Any op of PyTorch's own list, any layer of every day: plain PyTorch's numbers or a `UserError`, and nothing else.

The ops and their arguments are drawn from `op_db` by a seed; `EDGETRAIN_EXAMPLES` asks for more of them.
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils.checkpoint import checkpoint

import edgetrain as et
from edgetrain.errors import Infeasible, UserError
from tests.helpers.ordinary import Case, case, layers, outcome

EXAMPLES = int(os.environ.get("EDGETRAIN_EXAMPLES", "60"))
SLOW = ("polygamma", "special.polygamma")  # minutes, in plain PyTorch
ARGUMENTS = 20  # of one op, that are looked at

pytestmark = pytest.mark.usefixtures("one_cache", "one_round")


class Function(nn.Module):
    """A function as a module, over layers of its own."""

    def __init__(self, function: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts, self.about = function, nn.ModuleList(parts), ""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, *self.parts, **kwargs)


def drawn(seed: int) -> tuple[str, Case]:
    """An op with some of its arguments, and its name."""
    choice = random.Random(seed)
    torch.manual_seed(seed)
    while True:
        op = choice.choice(op_db)
        if not op.supports_autograd or op.name in SLOW or torch.float64 not in op.supported_dtypes("cpu"):
            continue
        samples = list(islice(op.sample_inputs("cpu", torch.float64, requires_grad=True), ARGUMENTS))
        if samples:
            given = choice.choice(samples)
            module = Function(op.get_op())
            module.about = f"{op.name}.{op.variant_test_name}"  # torch's lambdas of one file have all the same name
            return op.name, case("op", module, (given.input, *given.args), dict(given.kwargs), torch.float64)


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_any_op_trains_as_plain_pytorch_or_is_refused(seed: int) -> None:
    name, of = drawn(seed)
    found = outcome(of)
    assert found is None or isinstance(found, str | UserError), name


def test_few_ops_are_refused() -> None:
    found = [outcome(drawn(seed)[1], budget=False) for seed in range(20)]
    assert sum(isinstance(result, UserError) for result in found) <= 4


ROWS = torch.arange(12).reshape(3, 4) % 9
LENGTHS: Any = ((5, 5, 5), (2, 1, 2))
X = torch.rand(3, 5, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
# Functions of a batch of three sequences of five steps, in float32, with the layers that they take.
TRAINED: dict[str, tuple[Callable[..., Any], Callable[[], list[nn.Module]]]] = {
    "gru": (lambda x, m: m(x)[0], lambda: [nn.GRU(8, 4, batch_first=True)]),
    "gru in two directions": (lambda x, m: m(x)[0], lambda: [nn.GRU(8, 4, 2, bidirectional=True, batch_first=True)]),
    "rnn": (lambda x, m: m(x)[0], lambda: [nn.RNN(8, 4, batch_first=True)]),
    "lstm": (lambda x, m: m(x)[0], lambda: [nn.LSTM(8, 4, batch_first=True, proj_size=2)]),
    "bag of means": (lambda x, m: x.mean() * m(ROWS), lambda: [nn.EmbeddingBag(10, 4, mode="mean")]),
    "bag of maxima": (lambda x, m: x.mean() * m(ROWS), lambda: [nn.EmbeddingBag(10, 4, mode="max")]),
    "bag with padding": (lambda x, m: x.mean() * m(ROWS), lambda: [nn.EmbeddingBag(10, 4, padding_idx=2)]),
    "quantile": (lambda x: torch.quantile(x, 0.3, dim=-1), list),
    "quantiles": (lambda x: torch.nanquantile(x, torch.tensor([0.3, 0.5]), dim=0), list),
    "stft": (lambda x: torch.stft(x.reshape(3, -1), 16, 4, return_complex=True).abs(), list),
    "fft": (lambda x: torch.fft.irfft2(torch.fft.rfft2(x) * (1 + 2j)), list),
    "polar": (lambda x: torch.polar(x.abs() + 1, x).real, list),
    "vmap": (lambda x, m: torch.vmap(torch.vmap(m))(x), lambda: [nn.Linear(8, 3)]),
    "norm of order 3": (lambda x: torch.linalg.vector_norm(x, 3, dim=-1), list),
    "norm of order ½": (lambda x: torch.linalg.vector_norm(x, 0.5), list),
    "cdist": (lambda x: torch.cdist(x, x[:, :2] + 1), list),
    "turned in place": (lambda x: (x * 2).transpose_(0, 1).unsqueeze_(0).squeeze_(0).mul_(3).add(x.mT[0, 0, 0]), list),
    "turned and read before": (lambda x: _turned_between(x * 1), list),
    "fold": (lambda x: F.fold(F.unfold(x[:, None], 2), (5, 8), 2), list),
    "ctc": (lambda x: F.ctc_loss(x.transpose(0, 1).log_softmax(-1), ROWS[:, :2] + 1, *LENGTHS), list),
    "gradient in the loss": (lambda x: torch.func.grad(lambda r: (r**3).sum())(x), list),
    "attention": (
        lambda x, m: m(x, x, x, need_weights=False)[0], lambda: [nn.MultiheadAttention(8, 2, batch_first=True)],
    ),
    "solve": (lambda x: torch.linalg.solve(x[:, :4, :4] + 5 * torch.eye(4), x[:, :4]), list),
    "another object": (lambda x: x.as_subclass(Tensor) * (2 * x).as_subclass(Tensor), list),
    "masked product": (lambda x: (x / 2 + 0.7).cumprod(1).prod(2), list),
}  # fmt: skip


def _turned_between(x: Tensor) -> Tensor:
    before = x.sum(0)
    x.transpose_(1, 2)
    return x * before.t()


@pytest.mark.parametrize("name", TRAINED)
def test_everyday_functions_train(name: str) -> None:
    function, parts = TRAINED[name]
    module = layers(lambda: Function(function, *parts()))
    found = outcome(case("inner", module, (X,), {}, torch.float32))
    assert found in ("bitwise", "rounding"), found


def _exchanged(x: Tensor, *other: Callable[[Tensor], Tensor]) -> Tensor:
    y = x * 1
    y.data = other[0](y.data) if other else (y * 2).data
    return y * x


def _with_seed(x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return x * torch.rand_like(x)


def _swapped(x: Tensor, y: Tensor) -> Tensor:
    torch.utils.swap_tensors(x, y)
    return x / (y + 1)


# What is refused, and what the refusal must say.
REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], list[nn.Module]], str]] = {
    "lazy": (lambda x, m: m(x), lambda: [nn.LazyLinear(3)], r"inner.parts.0 \(LazyLinear\) is lazy"),
    "sparse gradient": (
        lambda x, m: x.mean() * m(ROWS), lambda: [nn.Embedding(10, 4, sparse=True)], "inner.parts.0 works with a",
    ),
    "sparse constant": (lambda x: torch.eye(5).to_sparse() @ x[0], list, "inner works with a sparse"),
    "half complex": (lambda x: x.to(torch.complex32).abs().float(), list, "inner works with a tensor of type"),
    "nested": (lambda x: torch.nested.nested_tensor(list(x)).values(), list, "inner"),
    "seed": (_with_seed, list, "inner sets the state of torch's random generator"),
    "resized": (lambda x: x * torch.ones(2, 2).resize_(4).sum(), list, "inner changes the shape or the memory of"),
    "new memory": (_exchanged, list, "inner works with a tensor of shape .* whose memory was exchanged"),
    "new strides": (lambda x: _exchanged(x[:, :, :5], lambda y: y.mT), list, "inner works .* memory was exchanged"),
    "swapped": (lambda x: _swapped(x * 1, x * 2), list, "inner"),
    "a copied object": (lambda x: copy.copy(x.detach()) * x, list, "inner works .* without a kernel"),
    "address": (lambda x: x * (x.data_ptr() != 0), list, "inner decides by the values"),
    "dropout again": (
        lambda x: checkpoint(lambda t: F.dropout(t.sin()), x, use_reentrant=False), list, "inner draws random numbers"
    ),
    "masked": (lambda x: x[x > 0.5], list, "inner decides by the values"),
    "split by values": (lambda x: x.tensor_split(ROWS[0, 1:3])[0], list, "inner decides by the values"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_graph_can_hold_is_refused_by_name(name: str) -> None:
    function, parts, said = REFUSED[name]
    model = case("inner", layers(lambda: Function(function, *parts())), (X,), {}, torch.float32).model
    optimizer = torch.optim.SGD([p for p in model.parameters() if not is_lazy(p)], lr=0.1)
    with pytest.raises(UserError, match=said):
        et.prepare(model, lambda model, x: model(x).square().mean(), optimizer, (X.detach(),), unused="freeze")


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_mkldnn"])
def test_a_sparse_batch_is_refused_by_its_place(layout: str) -> None:
    model = nn.Linear(4, 2)
    x = getattr(torch.eye(4), layout)()
    with pytest.raises(UserError, match="item 1 of the batch"):
        et.prepare(
            model, lambda m, y, x: m(x.to_dense()).mean(), torch.optim.SGD(model.parameters(), 0.1), (torch.ones(1), x)
        )


def test_the_batch_is_not_turned_in_place() -> None:
    model = nn.Linear(4, 2)
    x = torch.rand(4, 3)
    with pytest.raises(UserError, match="in place"):
        et.prepare(model, lambda m, x: m(x.t_()).mean(), torch.optim.SGD(model.parameters(), 0.1), (x,))
    assert x.shape == (4, 3)


def test_a_model_that_is_one_layer_is_named_by_its_type() -> None:
    model = nn.Embedding(10, 4, sparse=True)
    with pytest.raises(UserError, match="Embedding works with a sparse"):
        et.prepare(model, lambda m, x: m(x).mean(), torch.optim.SGD(model.parameters(), 0.1), (ROWS,))


def test_bags_at_places_that_the_batch_gives_are_not_cut() -> None:
    """Over a part of the batch the kernel would read, unchecked, beyond its end."""
    model = nn.EmbeddingBag(10, 4, mode="sum", include_last_offset=True)
    batch = ROWS, torch.tensor([0, 3, 12])

    def prepared(**options: Any) -> et.Step:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return et.prepare(model, lambda m, x, at: m(x.flatten(), at).square().mean(), optimizer, batch, **options)

    with pytest.raises(UserError, match="reads where an item of the batch says"):
        prepared(micro_batches=3)
    with pytest.raises(Infeasible, match="micro-batches: refused") as answer:
        prepared(memory=1, planner="fast")
    before = model.weight.detach().clone()
    prepared(memory=answer.value.smallest_bytes, planner="fast")(*batch)
    assert not torch.equal(model.weight, before)


def test_a_batch_of_conjugates_and_negatives_is_its_numbers() -> None:
    x = torch.complex(X.detach()[0], X.detach()[1])
    for lazy in (x.conj(), x.conj().imag):
        values = []
        for given in (lazy, lazy.resolve_conj().resolve_neg()):
            torch.manual_seed(0)
            model = nn.Linear(8, 3)
            step = et.prepare(
                model, lambda m, x: m(x.real + x.imag if x.is_complex() else x).square().mean(),
                torch.optim.SGD(model.parameters(), 0.1), (given,),
            )  # fmt: skip
            values.append((step(given), model.weight.detach().clone()))
        assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))


Draws = Callable[[Tensor], Tensor]
# A loss of a tensor of 3 by 5 by 8, over a distribution that checks what it is given.
DISTRIBUTIONS: dict[str, Draws] = {
    "a variational bound": lambda y: (
        D.kl_divergence(q := D.Normal(y[..., :4], y[..., 4:].exp()), D.Normal(0.0, 1.0)) + q.rsample().square()
    ).mean(),
    "a policy": lambda y: -((p := D.Categorical(logits=y)).log_prob(p.sample()) + p.entropy()).mean(),
    "a squashed policy": lambda y: D.TransformedDistribution(
        D.Normal(y[..., :4], y[..., 4:].exp()), [D.TanhTransform(cache_size=1)]
    ).rsample().mean(),
    "a mixture": lambda y: -D.MixtureSameFamily(D.Categorical(logits=y), D.Normal(y, 1.0)).log_prob(y[..., 0]).mean(),
    "probabilities": lambda y: -D.Dirichlet(y.exp()).log_prob(y.softmax(-1)).mean(),
    "a mean in many dimensions": lambda y: -D.MultivariateNormal(y, scale_tril=torch.eye(8)).log_prob(X * 2).mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_that_check_what_they_are_given(name: str) -> None:
    module = layers(lambda: Function(lambda x, m: DISTRIBUTIONS[name](m(x)), nn.Linear(8, 8)))
    found = outcome(case("inner", module, (X.detach(),), {}, torch.float32))
    assert found in ("bitwise", "rounding"), found
