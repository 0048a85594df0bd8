"""Ordinary layers and functions, trained beside plain PyTorch: what comes of any module and any arguments.

In:  a function that makes a module, and the arguments of its forward, nested as they like.
Out: how exact the captured step was ("bitwise", "rounding"), or the `UserError` that refused it. Other numbers than
     plain PyTorch's fail an assertion; any other exception is passed on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

import edgetrain as et
from edgetrain.errors import Infeasible, UserError
from tests.helpers.plain import Snapshot, Training, differing, relative_error

STEPS = 2
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
SEED = 1
_ITEMS = (Tensor, bool, int, float, str, type(None))  # what a batch may hold


class Scaled(nn.Module):
    """A module whose inputs are trained too, by one factor; so there is something to train in each."""

    def __init__(self, name: str, module: nn.Module, leaves: Sequence[Any], spec: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.add_module(name, module)
        self.called, self.spec = name, spec
        self.fixed = {n: leaf for n, leaf in enumerate(leaves) if not isinstance(leaf, _ITEMS)}
        self.scaled = tuple(n for n, t in enumerate(leaves) if _is_trained(t, dtype))
        self.scale = nn.Parameter(torch.tensor(0.95, dtype=dtype), requires_grad=bool(self.scaled))

    def forward(self, *batch: Any) -> Any:
        leaves = [self.fixed.get(place, leaf) for place, leaf in enumerate(batch)]
        given = [leaf * self.scale if place in self.scaled else leaf for place, leaf in enumerate(leaves)]
        args, kwargs = _pytree.tree_unflatten(given, self.spec)
        return getattr(self, self.called)(*args, **kwargs)


def mean_square(model: nn.Module, *batch: Any) -> Tensor:
    """Over all results that have a gradient."""
    found = [t for t in _pytree.tree_leaves(model(*batch)) if isinstance(t, Tensor)]
    real = [t.abs() if t.is_complex() else t for t in found]
    return torch.stack([t.square().mean() for t in real if t.is_floating_point() and t.requires_grad]).sum()


@dataclass(frozen=True)
class Case:
    """name: of the module, as an error is to give it."""

    name: str
    model: nn.Module
    batch: tuple[Any, ...]
    dtype: torch.dtype

    def training(self) -> Training:
        model = copy.deepcopy(self.model)
        trained = [p for p in model.parameters() if p.requires_grad]
        return Training(model, torch.optim.SGD(trained, lr=1e-3, momentum=0.9), mean_square)

    def given(self) -> tuple[Any, ...]:
        """The batch; a model may change its own."""
        return tuple(item.clone() if isinstance(item, Tensor) else item for item in self.batch)


def case(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype) -> Case:
    """The tensors among the arguments are the batch; those that need a gradient are trained through a factor."""
    leaves, spec = _pytree.tree_flatten((args, kwargs))
    batch = tuple(t.detach() if isinstance(t, Tensor) else t if isinstance(t, _ITEMS) else None for t in leaves)
    return Case(name, Scaled(name, module, leaves, spec, dtype), batch, dtype)


def _is_trained(leaf: Any, dtype: torch.dtype) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == dtype and leaf.requires_grad


def plainly(of: Case) -> Snapshot | None:
    """What plain PyTorch leaves behind; None where it cannot train this itself."""
    work, batch = of.training(), of.given()
    torch.manual_seed(SEED)
    try:
        for _ in range(STEPS):
            work.plain_step(*batch)
    except Exception:
        return None
    found = work.snapshot()
    return found if all(t.isfinite().all() for t in found.values()) else None


def trained(of: Case, right: Snapshot, **options: Any) -> str:
    """How exact the step was. An assertion fails where its numbers are not plain PyTorch's."""
    work, batch = of.training(), of.given()
    torch.manual_seed(SEED)
    step = et.prepare(work.model, work.loss, work.optimizer, batch, **options)
    for _ in range(STEPS):
        step(*batch)
    found = work.snapshot()
    different = differing(found, right)
    if different and (step.plan.exact == "rounding" or not _repeats(of, right)):
        assert "random" not in different
        assert relative_error(found, right, noise=1e-12) < TOLERANCE[of.dtype], (of.name, different)
        return "rounding"
    assert not different, (of.name, options, different, relative_error(found, right))
    return "bitwise"


def _repeats(of: Case, right: Snapshot, times: int = 12) -> bool:
    """Does plain PyTorch give the same bits each time? Some products depend on where their arguments lie in memory."""
    held = []  # so that the next run lies elsewhere
    for n in range(times):
        held.append(torch.empty(7 * n + 1))
        again = plainly(of)
        if again is None or differing(again, right):
            return False
    return True


def smallest_bytes(of: Case) -> int:
    """The smallest budget that the fast planner keeps."""
    work = of.training()
    try:
        et.prepare(work.model, work.loss, work.optimizer, of.given(), memory=1, planner="fast")
    except Infeasible as answer:
        return answer.smallest_bytes
    raise AssertionError("a step in one byte")


def outcome(of: Case, *, budget: bool = True) -> str | UserError | None:
    """'bitwise' or 'rounding', all kept and in the smallest budget; or why it is refused. None: plain PyTorch itself
    cannot train it."""
    right = plainly(of)
    if right is None:
        return None
    try:
        exact = trained(of, right)
        if budget:
            trained(of, right, memory=smallest_bytes(of), planner="fast")
    except UserError as refused:
        return refused
    return exact


def layers(make: Callable[[], nn.Module]) -> nn.Module:
    """A module with the weights of a fixed seed."""
    torch.manual_seed(0)
    return make()
