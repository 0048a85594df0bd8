"""What cannot be captured is refused with the name of the module and a next step, and a capture leaves no trace."""

from __future__ import annotations

import logging
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as torch_module
from torch.utils.checkpoint import checkpoint

from edgetrain.errors import UserError
from edgetrain.graph.capture.training import capture, capture_inference


class Inner(nn.Module):
    """A linear layer and a function over its result, so that the error has a module to name."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.function = function
        self.x: Any = None
        self.calls = 0
        self.log: list[Any] = []
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x))


def net(function: Callable[[Any, Tensor], Tensor]) -> Any:
    """Three layers, of which `second` runs the function; Any, for its attributes are reached by name."""
    model: Any = nn.Sequential(OrderedDict(first=nn.Linear(4, 3), second=Inner(function), norm=nn.BatchNorm1d(3)))
    model.norm.eval()
    return model


def mean(model: nn.Module, *batch: Any) -> Tensor:
    output: Tensor = model(*batch)
    return output.mean()


BATCH = (torch.ones(2, 4),)


def attempt(
    model: nn.Module,
    loss: Callable[..., Any] = mean,
    example: Any = BATCH,
    optimizer: torch.optim.Optimizer | None = None,
) -> UserError:
    """The error of a capture, which must leave everything as it was."""
    optimizer = optimizer or with_state(model)
    before = picture(model, optimizer)
    with pytest.raises(UserError) as caught:
        capture(model, loss, optimizer, example, use_cache=False)
    assert picture(model, optimizer) == before
    assert caught.value.next_step, "an error that says no next step"
    assert caught.value.next_step in str(caught.value)
    return caught.value


# ---- that nothing is left behind ------------------------------------------------------------------------------


def with_state(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer that has run one step, and gradients that wait in .grad."""
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return optimizer


def picture(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """All that a capture might change, as data that compares: values, identities, attributes, flags."""
    globally = [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
    numbers = np.random.get_state(legacy=False)
    return (
        portrait(model, {}),
        portrait(optimizer.state, {}),
        portrait(optimizer.param_groups, {}),
        [len(hooks) for hooks in globally],
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(numbers),
        torch.is_grad_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch.get_default_dtype(),
    )


def portrait(value: Any, seen: dict[int, int]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, Tensor):
        assert not isinstance(value, FakeTensor), "a fake tensor is left behind"
        grad = portrait(value.grad, seen) if value.is_leaf else None
        bits = value.detach().reshape(-1).view(torch.uint8).tolist() if value.numel() else []
        return (id(value), value.data_ptr(), value.requires_grad, tuple(value.shape), bits, grad)
    if isinstance(value, dict):
        return (id(value), [(portrait(k, seen), portrait(v, seen)) for k, v in value.items()])
    if isinstance(value, list | tuple | deque):
        return (type(value), [portrait(item, seen) for item in value])
    if isinstance(value, nn.Module | SimpleNamespace | Kept):
        return (id(value), portrait(vars(value), seen))
    return id(value)


@dataclass
class Kept:
    """An object of the user's own, as a module may hold one."""

    n: int = 0
    items: list[Any] = field(default_factory=list)


def test_picture_sees_what_it_should() -> None:
    """Each of these changes shows in it; else the tests below would prove nothing."""
    model = net(lambda _, y: y)
    optimizer = with_state(model)
    weight = model.first.weight
    changes: list[Callable[[], object]] = [
        lambda: weight.data.mul_(2),
        lambda: model.second.log.append(1),
        lambda: setattr(model.second, "calls", 1),
        lambda: model.norm.train(),
        lambda: weight.grad.zero_(),
        lambda: setattr(weight, "grad", None),
        lambda: model.norm.running_mean.add_(1),
        lambda: optimizer.state[weight]["exp_avg"].mul_(0),
        lambda: optimizer.state.popitem(),
        lambda: torch.rand(1),
        lambda: random.random(),
        lambda: np.random.rand(),
    ]
    for change in changes:
        before = picture(model, optimizer)
        change()
        assert picture(model, optimizer) != before
    with FakeTensorMode():
        model.second.log.append({"deep": torch.ones(2)})
    with pytest.raises(AssertionError, match="a fake tensor is left behind"):
        picture(model, optimizer)


def stores_plain_things(module: Any, y: Tensor) -> Tensor:
    """Counters and lists, in attributes, in containers and in an object: allowed, and taken back."""
    module.calls += 1
    module.x = "ran"
    module.fresh = [1]
    module.log.append(tuple(y.shape))
    module.nested["a"]["b"].append(1)
    module.kept.n += 1
    module.kept.items.append(2)
    module.by_name["a"].append(1)
    module.recent.append(1)
    return y


def with_holders(function: Callable[[Any, Tensor], Tensor]) -> Any:
    model = net(function)
    inner: Any = model.second
    inner.nested, inner.kept = {"a": {"b": [0]}}, Kept()
    inner.by_name, inner.recent = defaultdict(list, b=[1]), deque([0], maxlen=2)
    inner.names = SimpleNamespace(last=None)
    return model


def test_successful_capture_leaves_no_trace() -> None:
    """Dropout and batch norm in training mode, and a module that counts its calls."""
    model = with_holders(stores_plain_things)
    model.add_module("drop", nn.Dropout(0.5))
    model.norm.train()
    optimizer = with_state(model)
    before = picture(model, optimizer)
    graph = capture(model, mean, optimizer, BATCH, use_cache=False)
    assert picture(model, optimizer) == before
    assert any(op.random for op in graph.ops)
    capture_inference(model, BATCH, use_cache=False)
    assert picture(model, optimizer) == before


def test_capture_without_gradients_makes_none() -> None:
    model = net(lambda _, y: y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    capture(model, mean, optimizer, BATCH, use_cache=False)
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state


# ---- what the model may not do --------------------------------------------------------------------------------


def item(_: Any, y: Tensor) -> Tensor:
    return y * y.sum().item()


def branch(_: Any, y: Tensor) -> Tensor:
    return y if y.sum() > 0 else -y


def boolean_index(_: Any, y: Tensor) -> Tensor:
    return y[y > 0]


def nonzero(_: Any, y: Tensor) -> Tensor:
    return y.flatten()[y.flatten().nonzero()]


def to_list(_: Any, y: Tensor) -> Tensor:
    return y * float(sum(y.detach().flatten().tolist()))


def to_array(_: Any, y: Tensor) -> Tensor:
    return y * float(y.detach().numpy().sum())


@pytest.mark.parametrize("function", [branch, item, boolean_index, nonzero, to_list, to_array])
def test_control_flow_by_values_is_refused(function: Callable[[Any, Tensor], Tensor]) -> None:
    error = attempt(net(function))
    assert error.what.startswith("module second decides by the values of a tensor"), error.what
    assert "torch.where" in (error.next_step or "")


def test_control_flow_by_values_in_the_loss_is_refused() -> None:
    error = attempt(net(lambda _, y: y), lambda m, x: m(x).mean() * float(m(x).detach().sum()))
    assert error.what.startswith("the loss or the outermost forward of Sequential decides by the values of a tensor")


def in_attribute(module: Any, y: Tensor) -> Tensor:
    module.x = y
    return y


def in_attribute_nested(module: Any, y: Tensor) -> Tensor:
    module.x = {"last": [y]}
    return y


def in_buffer(module: Any, y: Tensor) -> Tensor:
    module.total = module.total + y.detach().sum(0)
    return y


def in_list(module: Any, y: Tensor) -> Tensor:
    module.log.append(y)
    return y


@pytest.mark.parametrize(
    ("function", "key"), [(in_attribute, "x"), (in_attribute_nested, "x"), (in_buffer, "total"), (in_list, "log")]
)
def test_storing_a_tensor_is_refused(function: Callable[[Any, Tensor], Tensor], key: str) -> None:
    error = attempt(net(function))
    assert f"module second stores a tensor in self.{key} during forward" in error.what
    assert f"self.register_buffer('{key}'" in (error.next_step or "")


def in_nested_dict(module: Any, y: Tensor) -> Tensor:
    module.nested["a"]["b"].append(y)
    return y


def in_default_dict(module: Any, y: Tensor) -> Tensor:
    module.by_name["seen"].append(y)
    return y


def in_deque(module: Any, y: Tensor) -> Tensor:
    module.recent.append(y)
    return y


def in_object(module: Any, y: Tensor) -> Tensor:
    module.kept.items.append(y)
    return y


def in_attribute_of_object(module: Any, y: Tensor) -> Tensor:
    module.names.last = y
    return y


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (in_nested_dict, "module second stores a tensor in self.nested"),
        (in_default_dict, "module second stores a tensor in self.by_name"),
        (in_deque, "module second stores a tensor in self.recent"),
        (in_object, "keeps a tensor in a list, dict or object"),
        (in_attribute_of_object, "keeps a tensor in a list, dict or object"),
    ],
)
def test_storing_a_tensor_in_a_holder_is_refused(function: Callable[[Any, Tensor], Tensor], text: str) -> None:
    """Containers in containers and objects of the user's own count as well."""
    assert text in attempt(with_holders(function)).what


def test_loss_that_collects_tensors_is_refused() -> None:
    seen: list[Tensor] = []

    def collecting(model: nn.Module, x: Tensor) -> Tensor:
        seen.append(model(x))
        return seen[-1].mean()

    error = attempt(net(lambda _, y: y), collecting)
    assert "the model or the loss keeps a tensor in a list" in error.what
    assert seen == []


def test_checkpoint_over_dropout_is_refused() -> None:
    """Its backward pass would draw other masks than its forward pass."""
    drop = nn.Dropout(0.5)

    def checkpointed(_: Any, y: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda z: drop(z).tanh() * z, y, use_reentrant=False)
        return result

    error = attempt(net(checkpointed))
    assert "draws random numbers in the backward pass" in error.what
    assert "module second" in error.what
    assert "without torch.utils.checkpoint" in (error.next_step or "")


@pytest.mark.parametrize(
    ("draw", "source"),
    [(lambda: random.random(), "from random,"), (lambda: float(np.random.rand()), "from numpy.random,")],
    ids=["random", "numpy"],
)
def test_numbers_of_another_generator_are_refused(draw: Callable[[], float], source: str) -> None:
    assert source in attempt(net(lambda _, y: y * draw())).what


def test_generator_of_its_own_is_refused() -> None:
    generator = torch.Generator()
    error = attempt(net(lambda _, y: y + torch.rand(y.shape, generator=generator)))
    assert "module second draws random numbers from a torch.Generator of its own" in error.what


# ---- optimizers and parameters --------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    """Only one head is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.used(x)
        return y


def test_unreached_parameter_is_refused() -> None:
    error = attempt(TwoHeads())
    assert "does not reach 2 parameter(s) that the optimizer holds, in spare: spare.weight, spare.bias" in error.what
    assert 'unused="freeze"' in (error.next_step or "")


def test_unreached_parameter_may_be_frozen() -> None:
    model = TwoHeads()
    optimizer = with_state(model)
    before = picture(model, optimizer)
    graph = capture(model, mean, optimizer, BATCH, unused="freeze", use_cache=False)
    assert graph.unused == ("spare.weight", "spare.bias")
    assert {graph.tensors[p].name for p in graph.gradients} == {"used.weight", "used.bias"}
    assert picture(model, optimizer) == before


def test_parameter_outside_the_model_is_named_by_its_place() -> None:
    model = TwoHeads()
    stray = nn.Parameter(torch.ones(2))
    error = attempt(model, optimizer=torch.optim.SGD([*model.used.parameters(), stray], lr=0.1))
    assert "optimizer.0.2" in error.what


class MySGD(torch.optim.SGD):
    """A subclass may update otherwise."""


@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda p: torch.optim.RMSprop(p), "RMSprop"), (lambda p: MySGD(p, lr=0.1), "MySGD")],
    ids=["RMSprop", "subclass"],
)
def test_unknown_optimizer_is_refused(make: Callable[[Any], torch.optim.Optimizer], name: str) -> None:
    model = net(lambda _, y: y)
    error = attempt(model, optimizer=make(model.parameters()))
    assert f"the update of {name} is not known" in error.what
    assert "SGD, Adam or AdamW" in (error.expected or "")


def test_optimizer_without_anything_to_train_is_refused() -> None:
    model = net(lambda _, y: y)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.requires_grad_(False)
    assert "holds no parameter that needs a gradient" in attempt(model, optimizer=optimizer).what


@pytest.mark.parametrize("option", ["differentiable", "capturable"])
def test_option_that_a_step_cannot_honour_is_refused(option: str) -> None:
    model = net(lambda _, y: y)
    options: dict[str, Any] = {option: True}
    error = attempt(model, optimizer=torch.optim.Adam(model.parameters(), **options))
    assert f"parameter group 0 asks for {option}=True" in error.what


# ---- the example and the loss ---------------------------------------------------------------------------------


def test_example_of_another_shape_names_the_module() -> None:
    error = attempt(net(lambda _, y: y), example=(torch.ones(2, 5),))
    assert error.what == "module first cannot be run on the example"
    assert "[2, 5] X [4, 3]" in (error.received or "")
    assert "loss(model, *example)" in (error.next_step or "")


def test_pytorch_prints_no_traceback_beside_the_error() -> None:
    printed: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: printed.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(FakeTensorMode.__module__)
    log.addHandler(handler)
    try:
        attempt(net(lambda _, y: y), example=(torch.ones(2, 5),))
        assert printed == []
        log.error("of others")  # what is not ours is printed as before
        assert printed == ["of others"]
    finally:
        log.removeHandler(handler)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("places", [(), (2, 2)], ids=["one label", "a label a place"])
def test_labels_that_a_kernel_would_refuse_are_told(dtype: torch.dtype, places: tuple[int, ...]) -> None:
    """Tracing lets int32 pass; the step would fail when it runs."""

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores = model(x)
        return nn.functional.cross_entropy(scores[:, :, None, None].expand(-1, -1, *places) if places else scores, y)

    error = attempt(net(lambda _, y: y), loss, (torch.ones(2, 4), torch.zeros(2, *places, dtype=dtype)))
    assert str(dtype) in (error.received or "")
    assert "y.long()" in (error.next_step or "")


def test_example_of_another_length_is_refused() -> None:
    error = attempt(net(lambda _, y: y), lambda m, x, y: m(x).mean() + y.mean())
    assert "missing 1 required positional argument" in (error.received or "")


@pytest.mark.parametrize(
    ("example", "text"),
    [
        (torch.ones(2, 4), "an example must be one batch as a tuple"),
        ({"x": torch.ones(2, 4)}, "an example must be one batch as a tuple"),
        (None, "an example must be one batch as a tuple"),
        ((torch.ones(2, 4), {"y": torch.ones(2)}), "item 1 of the example cannot be captured"),
        (([torch.ones(2, 4)],), "item 0 of the example cannot be captured"),
        ((np.ones((2, 4)),), "item 0 of the example cannot be captured"),
    ],
    ids=["tensor", "dict", "none", "dict inside", "list inside", "array inside"],
)
def test_example_of_another_form_is_refused(example: Any, text: str) -> None:
    error = attempt(net(lambda _, y: y), example=example)
    assert error.what == text
    wrong = example if "tuple" in text else next(i for i in example if not isinstance(i, Tensor))
    assert error.received == type(wrong).__name__


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (lambda m, x: m(x), "a tensor of shape (2, 3), torch.float32"),
        (lambda m, x: m(x).argmax(), "a tensor of shape (), torch.int64"),
        (lambda m, x: None, "None"),
        (lambda m, x: 0.5, "0.5"),
    ],
    ids=["not reduced", "integer", "nothing", "number"],
)
def test_loss_that_is_no_scalar_is_refused(loss: Callable[..., Any], text: str) -> None:
    error = attempt(net(lambda _, y: y), loss)
    assert (error.what, error.received) == ("the loss is not a scalar", text)


def without_gradient(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return mean(model, x)


@pytest.mark.parametrize("loss", [lambda m, x: m(x).mean().detach(), without_gradient], ids=["detach", "no_grad"])
def test_detached_loss_is_refused(loss: Callable[..., Tensor]) -> None:
    error = attempt(net(lambda _, y: y), loss)
    assert error.what == "the loss depends on no parameter that needs a gradient"
    assert ".detach()" in (error.next_step or "")


def test_error_of_the_model_itself_is_passed_on() -> None:
    """Its text and its traceback are there."""

    def fails(_: Any, y: Tensor) -> Tensor:
        raise RuntimeError("the valve is stuck")

    model = net(fails)
    error = attempt(model)
    assert "module second cannot be run" in error.what
    assert error.received == "RuntimeError: the valve is stuck"
    assert isinstance(error.__cause__, RuntimeError)


def test_capture_after_a_failed_one_succeeds() -> None:
    model = net(branch)
    attempt(model)
    model.second.function = lambda _, y: y
    graph = capture(model, mean, with_state(model), BATCH, use_cache=False)
    twin = net(lambda _, y: y)
    assert graph == capture(twin, mean, with_state(twin), BATCH, use_cache=False)
