"""Values that plain PyTorch refuses: a step refuses them too, by an error of the same type that names op and module,
and nothing is changed. Capture sees no values, and PyTorch leaves some of its checks out there."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import UserError

pytestmark = pytest.mark.usefixtures("one_cache", "one_round")

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 3, 4, 0])
P = torch.rand(6, 5, generator=torch.Generator().manual_seed(1))
MATRIX = torch.eye(4) * 3 + 0.1
ONE, NAN = torch.tensor(1.0), float("nan")
HANN = torch.hann_window(16)
Loss = Callable[[Any, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Rows of five from rows of four, and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out

    @property
    def weight(self) -> Tensor:
        return self.inner.weight


def first(values: Tensor, value: float) -> Tensor:
    values = values.clone()
    values.view(-1)[0] = value
    return values


def both(part: Callable[[Tensor], Tensor]) -> Loss:
    """A loss that takes something of the second item, beside the net."""
    return lambda m, x, y: m(x).square().mean() * part(y).sum()


def beside(part: Callable[[Tensor, Tensor], Any]) -> Loss:
    """A loss with a call whose result nobody reads."""

    def loss(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = m(x)
        part(out, y)
        return out.square().mean()

    return loss


def to(target: Callable[[Tensor], Tensor]) -> Loss:
    return lambda m, x, y: F.mse_loss(m(x).softmax(1), target(y))


@torch.jit.script
def scripted_one_hot(y: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(y, 5).float()


def spectrum(**options: Any) -> Tensor:
    return torch.stft(torch.ones(64), 16, 4, window=torch.ones(16), return_complex=True, **options)


WRONG = [first(Y, 7), first(Y, -1), first(Y, 2**40)]
FAR = [first(Y, 70), first(Y, -90)]
HOT = F.one_hot(Y, 5).float()
# A loss, a second item that it takes, and others that plain PyTorch refuses.
VALUES: dict[str, tuple[Loss, Tensor, list[Tensor]]] = {
    "one_hot": (to(lambda y: F.one_hot(y, 5).float()), Y, WRONG),
    "one_hot of what is computed": (to(lambda y: F.one_hot(y - 1, 5).float()), Y + 1, [first(Y, 7), Y]),
    "one_hot op": (to(lambda y: torch.ops.aten.one_hot.default(y, 5).float()), Y, WRONG),
    "one_hot, scripted": (to(lambda y: scripted_one_hot(y)), Y, WRONG),
    "quantile": (lambda m, x, y: torch.quantile(m(x), y), ONE / 2, [ONE * 3, ONE * -0.01, ONE * NAN]),
    "quantiles": (lambda m, x, y: torch.nanquantile(m(x), y, dim=1).sum(), P[0], [-P[0]]),
    "istft": (both(lambda y: torch.istft(spectrum(), 16, 4, window=y)), HANN, [HANN * 0, first(HANN * 0, 1)]),
    "istft, not centred": (
        both(lambda y: torch.istft(spectrum(center=False), 16, 4, window=y, center=False)), torch.ones(16), [HANN],
    ),
    "inv": (both(torch.linalg.inv), MATRIX, [MATRIX * 0]),
    "inv of weights": (lambda m, x, y: torch.linalg.inv(m.weight[:4] * y).sum() + m(x).mean(), ONE, [ONE * 0]),
    "solve": (lambda m, x, y: torch.linalg.solve(y, m(x).T[:4]).square().sum(), MATRIX, [MATRIX * 0]),
    "matrix_power": (both(lambda y: torch.linalg.matrix_power(y, -2)), MATRIX, [MATRIX * 0]),
    "tensorinv": (both(lambda y: torch.linalg.tensorinv(y, ind=1)), MATRIX, [MATRIX * 0]),
    "cholesky": (both(torch.linalg.cholesky), MATRIX, [-MATRIX]),
    "multivariate": (
        lambda m, x, y: -torch.distributions.MultivariateNormal(m(x)[:, :4], y, validate_args=False).log_prob(x).mean(),
        MATRIX, [-MATRIX],
    ),
    "categorical": (lambda m, x, y: -D.Categorical(logits=m(x)).log_prob(y).mean(), Y, WRONG),
    "probabilities of a distribution": (
        lambda m, x, y: -D.Categorical(probs=m(x).softmax(1) * y).log_prob(Y).mean(), ONE, [ONE * NAN],
    ),
    "scale of a distribution": (lambda m, x, y: -D.Normal(m(x), y).log_prob(y).mean(), P + 1, [P - 2, P * NAN]),
    "a value of a distribution": (
        lambda m, x, y: -D.Independent(D.LogNormal(m(x), 1.0), 1).log_prob(y).mean(), P + 1, [P - 2, P * NAN],
    ),
    "lu_factor": (both(lambda y: torch.linalg.lu_factor(y)[0]), MATRIX, [MATRIX * 0]),
    "ldl_factor": (both(lambda y: torch.linalg.ldl_factor(y)[0]), MATRIX, [MATRIX * 0]),
    "inv_ex": (both(lambda y: torch.linalg.inv_ex(y, check_errors=True)[0]), MATRIX, [MATRIX * 0]),
    "eigh": (both(torch.linalg.eigvalsh), MATRIX, [MATRIX * NAN]),
    "svd": (lambda m, x, y: torch.linalg.svdvals(m(x) * y).sum(), ONE, [ONE * NAN]),
    "nobody reads gather": (beside(lambda out, y: out.gather(1, y[:, None])), Y, WRONG),
    "nobody reads cross_entropy": (beside(F.cross_entropy), Y, WRONG),
    "nobody reads one_hot": (beside(lambda out, y: F.one_hot(y, 5)), Y, WRONG),
    "nobody reads inv": (beside(lambda out, y: torch.linalg.inv(y)), MATRIX, [MATRIX * 0]),
    "cross_entropy": (lambda m, x, y: F.cross_entropy(m(x), y), Y, WRONG),
    "cross_entropy of what is computed": (lambda m, x, y: F.cross_entropy(m(x), y - 1), Y + 1, [first(Y, 7), Y]),
    "multi_margin": (lambda m, x, y: F.multi_margin_loss(m(x), y), Y, WRONG),
    "multilabel_margin": (
        lambda m, x, y: F.multilabel_margin_loss(m(x), y), Y.new_zeros(6, 5), [Y.new_full((6, 5), 9)],
    ),
    "binary_cross_entropy": (
        lambda m, x, y: F.binary_cross_entropy(m(x).sigmoid(), y), P, [first(P, 2), first(P, -1)],
    ),
    "a probability": (lambda m, x, y: F.binary_cross_entropy(m(x).sigmoid() * y, HOT), ONE, [ONE * -1]),
    "gather": (lambda m, x, y: m(x).gather(1, y[:, None]).square().mean(), Y, WRONG),
    "take": (lambda m, x, y: m(x).take(y).square().mean(), Y, FAR),
    "put": (lambda m, x, y: m(x).put(y, torch.ones(6)).square().mean(), Y, FAR),
    "index": (lambda m, x, y: m(x)[torch.arange(6), y].square().mean(), Y, FAR),
    "index of a weight": (lambda m, x, y: m.weight[y].mean() + m(x).mean(), Y, FAR),
    "assignment": (lambda m, x, y: _assigned(m(x) * 1, y).square().mean(), Y, FAR),
    "index_select": (lambda m, x, y: m(x).index_select(1, y).square().mean(), Y, WRONG),
    "index_add": (lambda m, x, y: torch.zeros(5, 5).index_add(0, y, m(x)).square().mean(), Y, WRONG),
    "index_copy": (lambda m, x, y: torch.zeros(5, 5).index_copy(0, y, m(x)).square().mean(), Y, WRONG),
    "index_fill": (lambda m, x, y: m(x).index_fill(0, y, 0).square().mean() + m(x).mean(), Y, FAR),
    "index_reduce": (lambda m, x, y: torch.zeros(5, 5).index_reduce(0, y, m(x), "mean").mean(), Y, WRONG),
    "index_put": (lambda m, x, y: torch.zeros(5, 5).index_put((y,), m(x)).square().mean(), Y, FAR),
    "scatter": (to(lambda y: torch.zeros(6, 5).scatter(1, y[:, None], 1.0)), Y, WRONG),
    "scatter_add": (to(lambda y: torch.zeros(6, 5).scatter_add(1, y[:, None], torch.ones(6, 1))), Y, WRONG),
    "scatter_reduce": (
        to(lambda y: torch.zeros(6, 5).scatter_reduce(1, y[:, None], torch.ones(6, 1), "amax")), Y, WRONG,
    ),
    "embedding": (lambda m, x, y: F.embedding(y, m.weight).mean() + m(x).mean(), Y, WRONG),
    "embedding of what is computed": (
        lambda m, x, y: F.embedding(y - 1, m.weight).mean() + m(x).mean(), Y + 1, [first(Y, 9), Y],
    ),
    "bag": (lambda m, x, y: F.embedding_bag(y.view(2, 3), m.weight).mean() + m(x).mean(), Y, WRONG),
    "bag of maxima": (
        lambda m, x, y: F.embedding_bag(y.view(2, 3), m.weight, mode="max").mean() + m(x).mean(), Y, WRONG,
    ),
    "offsets": (
        lambda m, x, y: F.embedding_bag(torch.arange(5), m.weight, y).mean() + m(x).mean(),
        torch.tensor([0, 2, 3]), [torch.tensor([1, 2, 3]), torch.tensor([0, 2, 9])],
    ),
    "multinomial": (both(lambda y: torch.multinomial(y, 2).float()), P, [first(P, -1), P * 0]),
    "bernoulli": (both(torch.bernoulli), P, [first(P, 2)]),
    "poisson": (both(torch.poisson), P, [first(P, -1)]),
    "normal": (both(lambda y: torch.normal(0.0, y)), P, [first(P, -1)]),
    "division": (both(lambda y: 10 // y), Y + 1, [Y]),
    "masked_scatter": (
        lambda m, x, y: m(x).masked_scatter(y > 0, torch.ones(3)).square().mean(), P * 0, [P + 1],
    ),
    "max_unpool": (
        lambda m, x, y: F.max_unpool1d(m(x)[:, None, :3], y, [2]).mean(), torch.tensor([[[0, 2, 4]]] * 6),
        [torch.tensor([[[0, 2, 40]]] * 6)],
    ),
    "segment_reduce": (
        lambda m, x, y: torch.segment_reduce(m(x), "sum", lengths=y).square().mean(), torch.tensor([2, 4]),
        [torch.tensor([2, 9]), torch.tensor([-2, 8])],
    ),
}  # fmt: skip


def _assigned(out: Tensor, y: Tensor) -> Tensor:
    out[y, 0] = 0
    return out


def plain(loss: Loss, net: nn.Module, y: Tensor) -> Exception | None:
    net = copy.deepcopy(net)
    try:
        loss(net, X, y).backward()
    except Exception as error:
        return error
    return None


def prepared(loss: Loss, y: Tensor, **options: Any) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    step = et.prepare(net, loss, optimizer, (X, y), **options)
    return net, lambda y: step(X, y)


def require_refused(net: nn.Module, call: Callable[[Tensor], Any], loss: Loss, wrong: Tensor) -> UserError:
    expected = plain(loss, net, wrong)
    assert expected is not None
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    with pytest.raises(UserError) as told:
        call(wrong)
    kinds = [c for c in type(expected).__mro__ if c.__module__ == "builtins"]
    assert isinstance(told.value, kinds[0]), told.value  # TorchScript has a class of its own
    assert told.value.__cause__ is not None
    assert "nothing was changed" in str(told.value)
    assert re.search(r"the loss|module \w", str(told.value))
    assert "received" in str(told.value)
    assert all(torch.equal(now, before[name]) for name, now in net.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    return told.value


@pytest.mark.parametrize("name", VALUES)
def test_values_that_plain_pytorch_refuses(name: str) -> None:
    loss, right, wrong = VALUES[name]
    net, step = prepared(loss, right)
    assert plain(loss, net, right) is None
    step(right)
    for values in wrong:
        require_refused(net, step, loss, values)
    step(right)
    net, step = prepared(loss, wrong[0])  # the example itself
    require_refused(net, step, loss, wrong[0])


LABELS = ("one_hot", "gather", "embedding", "cross_entropy", "multi_margin", "binary_cross_entropy", "index_select")


@pytest.mark.parametrize("name", LABELS)
def test_under_a_budget_in_micro_batches_and_paged(name: str, tmp_path: Any) -> None:
    loss, right, wrong = VALUES[name]
    some: list[dict[str, Any]] = [{"memory": "20kB"}, {"memory": "20kB", "page_to": tmp_path}, {"check_finite": True}]
    for options in (*some, {"micro_batches": 2}):
        if "micro_batches" in options and name in ("index_select", "multi_margin"):
            continue  # refused: no mean over samples, or not known as one
        net, step = prepared(loss, right, **options)
        step(right)
        for values in wrong:
            told = require_refused(net, step, loss, values)
            assert "item 1 of the batch holds a" in str(told)
        step(right)


@pytest.mark.parametrize("name", ["categorical", "scale of a distribution"])
def test_distributions_under_a_budget_and_in_micro_batches(name: str) -> None:
    loss, right, wrong = VALUES[name]
    some: list[dict[str, Any]] = [{"memory": "20kB"}, {"check_finite": True}, {"micro_batches": 2}]
    for options in some:
        net, step = prepared(loss, right, **options)
        step(right)
        for values in wrong:
            require_refused(net, step, loss, values)
        step(right)


def test_what_the_words_say() -> None:
    def told(name: str, number: int = 0) -> str:
        loss, right, wrong = VALUES[name]
        net, step = prepared(loss, right)
        return str(require_refused(net, step, loss, wrong[number]))

    assert "item 1 of the batch holds an index that the loss" in told("one_hot")
    assert "numbers from 0 to 4" in told("one_hot")
    assert "7, 1 such in all" in told("one_hot")
    assert "item 1 of the batch is made into a token" in told("embedding of what is computed")
    assert "numbers from 0 to 1\n  received: 2.0" in told("binary_cross_entropy")
    assert "numbers from -5 to 4" in told("index of a weight")
    assert "all elements of input should be between 0 and 1" in told("a probability")
    assert "quantile() q values must be in the range [0, 1]" in told("quantile")
    assert "received: parameter scale of Normal is not GreaterThan(lower_bound=0.0)" in told("scale of a distribution")
    assert "the input matrix is singular" in told("inv")


def test_the_module_is_named() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, 3)

        def forward(self, i: Tensor) -> Tensor:
            rows: Tensor = self.words(i)
            return rows

    model = Words()
    step = et.prepare(model, lambda m, i: m(i).square().mean(), torch.optim.SGD(model.parameters(), 0.1), (Y,))
    with pytest.raises(IndexError, match=r"item 0 of the batch holds a token that module words does not know"):
        step(WRONG[0])
    with pytest.raises(UserError):
        step.gradients(WRONG[0])


def test_an_exception_that_no_kernel_raised_is_left_alone() -> None:
    """Of a budget that is asked for within the step."""
    loss, right, _ = VALUES["one_hot"]
    asked = 0

    def budget() -> str:
        nonlocal asked
        asked += 1
        if asked > 20:
            raise ValueError("no budget today")
        return "1MB"

    _, step = prepared(loss, right, memory=budget)

    def steps() -> None:
        for _ in range(100):
            step(right)

    with pytest.raises(ValueError, match="no budget today") as told:
        steps()
    assert not isinstance(told.value, UserError)
