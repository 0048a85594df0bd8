"""What people do around a step out of habit: it takes part, it warns, or it is refused. Nothing happens in silence."""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, prune
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import edgetrain as et
from edgetrain.errors import UserError
from edgetrain.run.habits import NothingToDoWarning

X = torch.linspace(-1, 2, 12).reshape(4, 3)


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y.square().mean()


def work(kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    return model, kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]


def test_the_usual_loop_warns_once_and_trains_once() -> None:
    model, optimizer = work()
    step = et.prepare(model, mean_square, optimizer, (X,))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            step(X)
            clip_grad_norm_(model.parameters(), 1.0)
            before = [p.clone() for p in model.parameters()]
            optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    told = [str(w.message) for w in caught if issubclass(w.category, NothingToDoWarning)]
    assert len(told) == 1
    assert "clip_norm=" in told[0]
    assert "step.gradients" in told[0]
    assert [w.filename for w in caught if issubclass(w.category, NothingToDoWarning)] == [__file__]


def test_plain_training_beside_a_step_is_not_warned_of() -> None:
    model, optimizer = work()
    step = et.prepare(model, mean_square, optimizer, (X,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(X)
        mean_square(model, X).backward()
        optimizer.step()
        other, theirs = work()
        theirs.step()
        assert other is not model


class Doubling(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        return result * 2 if op is torch.ops.aten.relu.default else result


SURROUNDINGS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "no gradients": (torch.no_grad, None),
    "gradients": (torch.enable_grad, None),
    "inference": (torch.inference_mode, "inference_mode"),
    "anomalies": (torch.autograd.detect_anomaly, "detect_anomaly"),
    "hooks of saved tensors": (torch.autograd.graph.save_on_cpu, "saved_tensors_hooks"),
    "dispatch mode": (Doubling, "dispatch mode"),
    "anomalies without a look at values": (lambda: torch.autograd.detect_anomaly(check_nan=False), None),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_is_around_a_step_takes_part_or_is_refused(name: str) -> None:
    around, refused = SURROUNDINGS[name]
    left = []
    for inside in (False, True):
        model, optimizer = work()
        step = et.prepare(model, mean_square, optimizer, (X,))
        step(X)
        if inside and refused:
            before = [p.clone() for p in model.parameters()]
            with around(), pytest.raises(UserError, match=refused):
                step(X)
            with around(), pytest.raises(UserError, match=refused):
                et.prepare(model, mean_square, optimizer, (X,))
            assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        with around() if inside and not refused else torch.enable_grad():
            step(X)
        left.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


def test_a_hook_on_several_gradients_together_is_refused_by_name() -> None:
    model, optimizer = work()
    handle = torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), lambda _: None)
    with pytest.raises(UserError, match="register_multi_grad_hook"):
        et.prepare(model, mean_square, optimizer, (X,))
    handle.remove()
    et.prepare(model, mean_square, optimizer, (X,))(X)


def plainly(self: torch.optim.Optimizer) -> None:
    return None


def wrapped(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    before = optimizer.step

    @functools.wraps(before)
    def step(*args: Any) -> Any:
        return before(*args)

    return step


def below_a_scheduler(optimizer: torch.optim.Optimizer) -> None:
    vars(optimizer)["step"] = types.MethodType(plainly, optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


REPLACED: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "a function": lambda o: setattr(o, "step", lambda: None),
    "a method": lambda o: setattr(o, "step", types.MethodType(plainly, o)),
    "a wrapper with its names": lambda o: setattr(o, "step", wrapped(o)),
    "a method below a scheduler": lambda o: below_a_scheduler(o),
    "a method within": lambda o: setattr(o, "_init_group", lambda *_: False),
    "a hook before": lambda o: o.register_step_pre_hook(lambda *_: None),
    "a hook after": lambda o: o.register_step_post_hook(lambda *_: None),
    "a hook of a parameter": lambda o: o.param_groups[0]["params"][0].register_post_accumulate_grad_hook(
        lambda p: None),
}  # fmt: skip


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", REPLACED)
def test_a_replaced_update_is_refused(name: str, when: str) -> None:
    model, optimizer = work()
    if when == "before":
        REPLACED[name](optimizer)
        with pytest.raises(UserError, match="optimizer"):
            et.prepare(model, mean_square, optimizer, (X,))
        return
    step = et.prepare(model, mean_square, optimizer, (X,))
    step(X)
    REPLACED[name](optimizer)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(UserError, match="optimizer"):
        step(X)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.fixture(params=["before", "after", "class", "function"])
def of_all(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], object]]:
    handles: list[Any] = []
    change: dict[str, Callable[[], object]] = {
        "before": lambda: handles.append(register_optimizer_step_pre_hook(lambda *_: None)),
        "after": lambda: handles.append(register_optimizer_step_post_hook(lambda *_: None)),
        "class": lambda: monkeypatch.setattr(torch.optim.SGD, "step", plainly),
        "function": lambda: monkeypatch.setattr(sys.modules["torch.optim.sgd"], "sgd", lambda *_, **__: None),
    }
    yield change[request.param]
    for handle in handles:
        handle.remove()


def test_a_replaced_update_of_all_optimizers_is_refused(of_all: Callable[[], object]) -> None:
    model, optimizer = work()
    of_all()
    with pytest.raises(UserError, match="optimizer"):
        et.prepare(model, mean_square, optimizer, (X,))


def test_torch_compile_elsewhere_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first use in a process wraps a method of every class of optimizers, for good."""
    model, optimizer = work()
    step = et.prepare(model, mean_square, optimizer, (X,))
    step(X)
    for kind in (torch.optim.SGD, torch.optim.Adam):
        monkeypatch.setattr(kind, "_init_group", torch._dynamo.disable(vars(kind)["_init_group"]))
    step(X)
    plain, of_plain = work()
    for _ in range(2):
        of_plain.zero_grad()
        mean_square(plain, X).backward()
        of_plain.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    model, optimizer = work(torch.optim.Adam)
    et.prepare(model, mean_square, optimizer, (X,))(X)


def test_a_setting_that_no_step_honours_is_refused_when_it_comes() -> None:
    model, optimizer = work(torch.optim.Adam)
    step = et.prepare(model, mean_square, optimizer, (X,))
    step(X)
    optimizer.param_groups[0]["differentiable"] = True
    with pytest.raises(UserError, match="differentiable"):
        step(X)


@pytest.mark.parametrize(
    ("name", "value"),
    [("fused", True), ("lr", torch.tensor(0.01)), ("lr", np.float32(0.01)), ("betas", (torch.tensor(0.9), 0.99))],
)
def test_a_setting_that_rounds_otherwise_ends_the_claim(name: str, value: object) -> None:
    model, optimizer = work(torch.optim.Adam)
    step = et.prepare(model, mean_square, optimizer, (X,))
    claims = [step.plan.exact]
    optimizer.param_groups[0][name] = value
    step(X)
    claims.append(step.plan.exact)
    assert claims == ["bitwise", "rounding"]


def test_both_switches_for_the_precision_of_products() -> None:
    """torch refuses to tell the one where the other was set too."""
    if not hasattr(torch.backends.mkldnn, "matmul"):
        pytest.skip("this torch has one switch")
    before = torch.backends.mkldnn.matmul.fp32_precision
    model, optimizer = work()
    step = et.prepare(model, mean_square, optimizer, (X,))
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
        step(X)
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_the_norm_of_the_gradients(kind: type[torch.optim.Optimizer]) -> None:
    options: dict[str, Any]
    for options in ({"clip_norm": 0.01}, {"check_finite": True}, {"clip_norm": 0.01, "check_finite": True},
                    {"clip_norm": 0.01, "micro_batches": 2}):  # fmt: skip
        model, optimizer = work(kind)
        step = et.prepare(model, mean_square, optimizer, (X,), **options)
        assert step.grad_norm is None
        for _ in range(2):
            gradients = torch.autograd.grad(mean_square(model, X), list(model.parameters()))
            right = torch.cat([g.flatten() for g in gradients]).norm()
            step(X)
            assert step.grad_norm == pytest.approx(float(right), rel=1e-5)
    model, optimizer = work(kind)
    step = et.prepare(model, mean_square, optimizer, (X,))
    step(X)
    assert step.grad_norm is None


def test_a_large_gradient_is_finite() -> None:
    """Its squares are not."""
    model = nn.Linear(1, 1, bias=False)
    step = et.prepare(model, lambda m, x: m(x).sum(), torch.optim.SGD(model.parameters(), lr=0.0),
                      (torch.full((1, 1), 1e30),), check_finite=True)  # fmt: skip
    step(torch.full((1, 1), 1e30))
    with pytest.raises(UserError, match="not finite"):
        step(torch.full((1, 1), float("inf")))


# ---- gradients that are there -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=["whole", "micro-batches"])
def test_gradients_that_a_step_drops_are_warned_of_once(options: dict[str, Any]) -> None:
    model, optimizer = work()
    step = et.prepare(model, mean_square, optimizer, (X,), **options)
    told = []
    for _ in range(3):
        mean_square(model, X).backward()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(X)
        told += [w for w in caught if issubclass(w.category, NothingToDoWarning)]
        assert all(p.grad is None for p in model.parameters())
    assert len(told) == 1
    assert "micro_batches=" in str(told[0].message)
    assert told[0].filename == __file__
    other, of_other = work()
    step = et.prepare(other, mean_square, of_other, (X,), **options)
    mean_square(other, X).backward()
    with pytest.warns(NothingToDoWarning, match=r"\.grad"):
        step(X)


def test_gradients_of_zeros_and_those_of_others_are_not_warned_of() -> None:
    model, optimizer = work()
    step = et.prepare(model, mean_square, optimizer, (X,))
    other, _ = work()
    mean_square(model, X).backward()
    mean_square(other, X).backward()
    optimizer.zero_grad(set_to_none=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            step(X)
            step.gradients(X)
            optimizer.zero_grad()
    assert all(p.grad is not None for p in other.parameters())


def set_gradient(model: Any, x: Tensor) -> Tensor:
    model[0].weight.grad = torch.ones(4, 3)
    return mean_square(model, x)


def set_gradient_last(model: Any, x: Tensor) -> Tensor:
    value = mean_square(model, x)
    for p in model.parameters():
        p.grad = p.detach()
    return value


def set_gradient_in_a_hook(model: Any, x: Tensor) -> Tensor:
    def hook(gradient: Tensor) -> None:
        model[0].weight.grad = gradient.detach()

    y = model(x)
    y.register_hook(lambda _: hook(torch.ones(4, 3)))
    return y.square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("loss", [set_gradient, set_gradient_last, set_gradient_in_a_hook])
def test_a_gradient_that_the_loss_sets_is_refused(loss: Callable[..., Tensor]) -> None:
    model, optimizer = work()
    kept = torch.zeros(4, 3)
    model.get_submodule("0").weight.grad = kept
    with pytest.raises(UserError, match=r"model\.0\.weight\.grad"):
        et.prepare(model, loss, optimizer, (X,))
    assert model.get_submodule("0").weight.grad is kept


# ---- requires_grad within the loss --------------------------------------------------------------------------------


def frozen_before(model: Any, x: Tensor) -> Tensor:
    model[0].requires_grad_(False)
    return mean_square(model, x)


def frozen_meanwhile(model: Any, x: Tensor) -> Tensor:
    model[0].requires_grad_(False)
    value = mean_square(model, x)
    model[0].requires_grad_(True)
    return value


@pytest.mark.parametrize("loss", [frozen_before, frozen_meanwhile])
def test_a_parameter_that_the_loss_freezes_is_one_that_it_does_not_reach(loss: Callable[..., Tensor]) -> None:
    plain, optimizer = work()
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(plain, X)
        value.backward()
        optimizer.step()
        expected.append(float(value.detach()))
    model, optimizer = work()
    with pytest.raises(UserError, match=r"0\.weight, 0\.bias") as caught:
        et.prepare(model, loss, optimizer, (X,))
    assert ("requires_grad=False" in str(caught.value)) == (loss is frozen_before)
    step = et.prepare(model, loss, optimizer, (X,), unused="freeze", memory_format="preserve")
    assert [float(step(X)) for _ in range(3)] == expected
    assert all(p.requires_grad for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_parameter_that_the_loss_wants_trained_is_not_left_out() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        model[0].requires_grad_(True)
        return mean_square(model, x)

    model, optimizer = work()
    model.get_submodule("0").requires_grad_(False)
    with pytest.raises(UserError, match=r"requires_grad of 0\.weight"):
        et.prepare(model, loss, optimizer, (X,))
    assert not model.get_submodule("0").weight.requires_grad
    model.get_submodule("0").requires_grad_(True)
    et.prepare(model, loss, optimizer, (X,))(X)


# ---- torch.utils.checkpoint ---------------------------------------------------------------------------------------

REENTRANT: dict[str, Callable[..., Tensor]] = {
    "all": lambda m, x: checkpoint(m, x, use_reentrant=True).square().mean(),
    "the first part": lambda m, x: m[2](checkpoint(m[:2], x, use_reentrant=True)).square().mean(),
    "in the middle": lambda m, x: m[2](checkpoint(m[1], m[0](x), use_reentrant=True)).square().mean(),
    "an input with gradients": lambda m, x: m[2](
        checkpoint(m[:2], x.clone().requires_grad_(), use_reentrant=True)).square().mean(),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("unused", ["error", "freeze"])
@pytest.mark.parametrize("name", REENTRANT)
def test_a_checkpoint_with_a_backward_pass_of_its_own_is_refused(name: str, unused: Any) -> None:
    model, optimizer = work()
    with pytest.raises(UserError, match="use_reentrant=False"):
        et.prepare(model, REENTRANT[name], optimizer, (X,), unused=unused)


def test_a_checkpoint_without_one_trains() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(model, x, use_reentrant=False)
        return y.square().mean()

    plain, of_plain = work()
    model, optimizer = work()
    step = et.prepare(model, loss, optimizer, (X,), memory_format="preserve")
    for _ in range(3):
        of_plain.zero_grad()
        mean_square(plain, X).backward()
        of_plain.step()
        step(X)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def normalised(norm: Callable[[nn.Module], nn.Module]) -> Callable[[Any], object]:
    def apply(model: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            norm(model[0])

    return apply


COMPUTED: dict[str, Callable[[Any], object]] = {
    "pruning": lambda m: prune.l1_unstructured(m[0], "weight", amount=0.2),
    "pruning of weight and bias": lambda m: [prune.l1_unstructured(m[0], n, amount=0.2) for n in ("weight", "bias")],
    "pruning, then another type": lambda m: (prune.l1_unstructured(m[0], "weight", amount=0.2), m.double()),
    "weight norm": normalised(nn.utils.weight_norm),
    "spectral norm": normalised(nn.utils.spectral_norm),
}


@pytest.mark.parametrize("looked_at", ["never", "by a plain forward pass"])
@pytest.mark.parametrize("name", COMPUTED)
def test_what_hooks_compute_is_left_behind_as_plain_pytorch_does(name: str, looked_at: str) -> None:
    """Pruning once more chooses by what the last forward pass has computed."""
    captures: list[int] = []

    def trained(*, ours: bool) -> list[Tensor]:
        left: list[Tensor] = []
        model, _ = work()
        COMPUTED[name](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = X.to(next(model.parameters()).dtype)
        step: Any = et.prepare(model, mean_square, optimizer, (x,), memory_format="preserve") if ours else None
        for number in range(6):
            if number == 3 and "pruning" in name:
                prune.l1_unstructured(model[0], "weight", amount=0.3)  # type: ignore[index]
            if ours:
                step(x)
            else:
                optimizer.zero_grad()
                mean_square(model, x).backward()
                optimizer.step()
            first: Any = model[0]  # type: ignore[index]
            left += [t.detach().clone() for t in (first.weight, first.bias, *model.state_dict().values())]
            if looked_at != "never":
                with torch.no_grad():
                    model.eval()(x)
                    model.train()
        if ours:
            captures.append(step._captures)
        return left

    plain, left = trained(ours=False), trained(ours=True)
    assert len(plain) == len(left)
    assert all(torch.equal(a, b) for a, b in zip(plain, left, strict=True))
    assert captures == [2 if "pruning" in name else 1]


def test_what_hooks_compute_is_taken_back_with_its_step() -> None:
    model, _ = work()
    prune.l1_unstructured(model[0], "weight", amount=0.2)  # type: ignore[index]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    step = et.prepare(model, mean_square, optimizer, (X,), memory_format="preserve", check_finite=True)
    step(X)
    first: Any = model[0]  # type: ignore[index]
    before = first.weight.clone()
    with pytest.raises(UserError, match="not finite"):
        step(X * torch.nan)
    step.gradients(X)
    assert torch.equal(first.weight, before)
    step(X)
    assert not torch.equal(first.weight, before)
