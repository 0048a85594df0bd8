"""Plain PyTorch beside a captured step: the same training twice, and a comparison of all that it leaves behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[..., Tensor]
OptimizerMaker = Callable[[Any], torch.optim.Optimizer]
Snapshot = dict[str, Tensor]


@dataclass
class Training:
    """A model and an optimizer over its parameters."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Loss

    def plain_step(self, *batch: Any) -> Tensor:
        """One step as everybody writes it."""
        value = self.loss(self.model, *batch)
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return value.detach()

    def twin(self) -> Training:
        """A second model and optimizer with the same values."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        return Training(model, optimizer, self.loss)

    def snapshot(self) -> Snapshot:
        """A copy of every parameter, buffer and tensor of optimizer state, and of the random state."""
        found = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found |= {
                f"optimizer.{index}.{key}": torch.as_tensor(value) for key, value in state.items() if value is not None
            }
        found["random"] = torch.get_rng_state()
        return {name: tensor.detach().clone() for name, tensor in found.items()}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def training(model: nn.Module, loss: Loss, optimizer: OptimizerMaker = sgd) -> Training:
    return Training(model, optimizer(model.parameters()), loss)


def towards_ramp(model: nn.Module, *batch: Any) -> Tensor:
    """Mean squared distance of the model's output to a fixed ramp: a loss for an output of any shape."""
    output: Tensor = model(*batch)
    ramp = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    return (output - ramp).square().mean()


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def differing(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[str]:
    """The names whose tensors differ in type, shape or a single bit, or that only one side has."""
    same = [
        name
        for name in a.keys() & b.keys()
        if (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape)
        and torch.equal(bits(a[name]), bits(b[name]))
    ]
    return sorted((a.keys() | b.keys()) - set(same))


def relative_error(found: Mapping[str, Tensor], right: Mapping[str, Tensor], *, noise: float = 0.0) -> float:
    """The largest difference over all tensors, each relative to the largest magnitude in the right one.

    Tensors below `noise` are left out: what is zero but for rounding (the gradient of a bias before a batch norm) has
    no relative error to speak of.
    """
    assert found.keys() == right.keys()
    worst = 0.0
    for name in found.keys() - {"random"}:
        x, y = found[name].double(), right[name].double()
        assert x.shape == y.shape, name
        assert x.isfinite().all(), f"{name} is not finite"
        largest = float(y.abs().max())
        if largest > noise:
            worst = max(worst, float((x - y).abs().max()) / largest)
        elif not noise:
            assert not x.any(), f"{name} should be zero"
    return worst


def run(step: Callable[..., Tensor], batches: Sequence[Sequence[Any]], *, seed: int = 0) -> Tensor:
    """The losses of a step over some batches, under a fixed seed."""
    torch.manual_seed(seed)
    return torch.stack([step(*batch) for batch in batches])
