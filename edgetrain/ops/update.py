"""Executing the update of one parameter: SGD, Adam, AdamW; and adding up its gradients over micro-batches.

In:  a parameter, its gradient, the optimizer's own state of it (a dict, changed in place as torch.optim would) and the
     settings of its group as they are now.
Out: nothing; parameter and state hold bitwise what plain PyTorch would hold on a CPU. (On a GPU its Adam takes many
     tensors at once and rounds otherwise.)

`scratch` says that nobody reads the gradient afterwards, so that it may be overwritten. `undo`, where it is given, is
told of each tensor before it changes. What changes a parameter and its state is called at once: whatever interrupts an
update, it has happened whole or not at all, and the version of the parameter tells which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch

from edgetrain.errors import UserError
from edgetrain.graph.ir import Graph, Op
from edgetrain.native.surely import at_once
from edgetrain.ops import c_features
from edgetrain.ops.c import CKernel, CSource, Scene, called
from edgetrain.ops.entry import Entry, Kernel, Update, own
from edgetrain.ops.settings import check_settings, overlaps
from edgetrain.ops.work import each
from edgetrain.ranges import Range, shown

ACCUMULATE = "edgetrain.accumulate.update"

State = MutableMapping[str, Any]


class Undo(Protocol):
    def note(self, tensor: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one parameter group for one step."""

    lr: float
    weight_decay: float
    maximize: bool
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    amsgrad: bool = False
    decoupled: bool = False


def settings(kind: str, group: dict[str, Any], number: int = 0) -> Settings:
    check_settings(kind, number, group)
    common = {"lr": float(group["lr"]), "weight_decay": group["weight_decay"], "maximize": group["maximize"]}
    if kind == "sgd":
        return Settings(**common, momentum=group["momentum"], dampening=group["dampening"], nesterov=group["nesterov"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    decoupled = kind == "adamw" or bool(group.get("decoupled_weight_decay"))
    return Settings(**common, beta1=beta1, beta2=beta2, eps=group["eps"], amsgrad=group["amsgrad"], decoupled=decoupled)


def make_state(kind: str, p: torch.Tensor, state: State, given: Settings) -> bool:
    """Create what is missing of the state, before the first step of a parameter. True if something was."""
    if kind == "sgd":
        if given.momentum == 0 or state.get("momentum_buffer") is not None:
            return False
        state["momentum_buffer"] = torch.empty_like(p, memory_format=torch.preserve_format)
        return True
    if state:
        return False
    state["step"] = torch.tensor(0.0, dtype=torch.float32)
    for key in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if given.amsgrad else ())):
        state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return True


_KEYS = {"sgd": {"momentum_buffer"}, "adam": {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"}}


def check_keys(kind: str, p: torch.Tensor, state: Mapping[str, Any]) -> None:
    """Refuse the state of another kind of optimizer."""
    foreign = [key for key in state if key not in _KEYS["sgd" if kind == "sgd" else "adam"]]
    if foreign:
        raise _misfit(p, f"the state that {kind} keeps, and nothing else", f"{shown(foreign[0])} too")


def check_apart(states: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a tensor that is the state of two parameters: each update would undo a part of the other."""
    owners = Counter(
        v.data_ptr() for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.numel()
    )
    if any(count > 1 for count in owners.values()):
        raise UserError(
            "the optimizer's state of two parameters lies in the same memory", expected="state of its own for each",
            next_step="load the state anew (optimizer.load_state_dict), or start with a fresh optimizer",
        )  # fmt: skip


def check_state(kind: str, p: torch.Tensor, state: State, given: Settings) -> None:
    """Before anything changes: is the state what the update will read? A wrong one would fail halfway."""
    keys = ("momentum_buffer",) if kind == "sgd" else ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) * given.amsgrad))
    for key in keys:
        there = state.get(key)
        if not _is_like(there, p):
            raise _misfit(p, f"{key} of the same shape, type and device: {_described(p)}", _described(there))
        if there.data_ptr() == p.data_ptr() or (there.stride() != p.stride() and overlaps(there)):
            raise _misfit(p, f"{key} in memory of its own", "one whose numbers share memory, or are the parameter's")
    if kind != "sgd":
        step = state.get("step")
        count = step.item() if isinstance(step, torch.Tensor) and step.numel() == 1 and not step.is_meta else step
        if count not in _COUNTED:
            raise _misfit(p, "step, the number of updates so far: " + str(_COUNTED), shown(count))


def _is_like(value: object, p: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(value, torch.Tensor) and value.shape == p.shape and value.dtype == p.dtype
        and value.device == p.device and value.layout == p.layout
    )  # fmt: skip


_COUNTED = Range(0, 1e15, whole=False)


def _described(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return "nothing" if value is None else shown(value)
    kind = str(value.dtype).removeprefix("torch.")
    return f"{kind}{list(value.shape)} on {value.device}" + ("" if value.layout == torch.strided else ", sparse")


def _misfit(p: torch.Tensor, expected: str, received: str) -> UserError:
    return UserError(
        f"the optimizer's state of a parameter of shape {tuple(p.shape)} does not fit",
        expected=expected, received=received,
        next_step="load the state of an optimizer of this kind, over this model and of its type, or start with a fresh "
        "optimizer, as after model.double()",
    )  # fmt: skip


def sgd(
    p: torch.Tensor, g: torch.Tensor, state: State, given: Settings, fresh: bool, scratch: bool, undo: Undo | None
) -> None:
    """`fresh`: the momentum buffer was made just now; the first step sets it to the gradient."""
    if undo is not None:
        undo.note(p)
    calls: list[Callable[[], object]] = []
    if given.maximize and scratch:
        calls.append(g.neg_)
    elif given.maximize:
        g, scratch = g.neg(), True
    if given.weight_decay != 0 and scratch:
        calls.append(partial(g.add_, p, alpha=given.weight_decay))
    elif given.weight_decay != 0:
        g, scratch = g.add(p, alpha=given.weight_decay), True
    if given.momentum != 0:
        buffer = state["momentum_buffer"]
        if undo is not None:
            undo.note(buffer)
        if fresh:
            calls.append(partial(buffer.copy_, g))
        else:
            calls += [partial(buffer.mul_, given.momentum), partial(buffer.add_, g, alpha=1 - given.dampening)]
        if given.nesterov:
            room = g if scratch else torch.empty_like(g)
            calls.append(partial(torch.add, g, buffer, alpha=given.momentum, out=room))
            g = room
        else:
            g = buffer
    calls.append(partial(p.add_, g, alpha=-given.lr))
    at_once(calls)


def adam(
    p: torch.Tensor, g: torch.Tensor, state: State, given: Settings, fresh: bool, scratch: bool, undo: Undo | None
) -> None:
    if undo is not None:
        for tensor in (p, state["exp_avg"], state["exp_avg_sq"], state.get("max_exp_avg_sq"), state["step"]):
            if tensor is not None:
                undo.note(tensor)
    step, average, square = state["step"], state["exp_avg"], state["exp_avg_sq"]
    count = float(step) + 1
    counted = partial(step.add_, 1) if isinstance(step, torch.Tensor) else partial(state.__setitem__, "step", step + 1)
    calls: list[Callable[[], object]] = [counted]
    if given.maximize and scratch:
        calls.append(g.neg_)
    elif given.maximize:
        g, scratch = g.neg(), True
    if given.weight_decay != 0 and given.decoupled:
        calls.append(partial(p.mul_, 1 - given.lr * given.weight_decay))
    elif given.weight_decay != 0 and scratch:
        calls.append(partial(g.add_, p, alpha=given.weight_decay))
    elif given.weight_decay != 0:
        g, scratch = g.add(p, alpha=given.weight_decay), True
    calls.append(partial(average.lerp_, g, 1 - given.beta1))
    calls += [partial(square.mul_, given.beta2), partial(square.addcmul_, g, g, value=1 - given.beta2)]
    if given.amsgrad:
        largest = state["max_exp_avg_sq"]
        calls.append(partial(torch.maximum, largest, square, out=largest))
        square = largest
    root = g if scratch else torch.empty_like(square)
    calls += [
        partial(torch.sqrt, square, out=root),
        partial(root.div_, (1 - given.beta2**count) ** 0.5),
        partial(root.add_, given.eps),
        partial(p.addcdiv_, average, root, value=-(given.lr / (1 - given.beta1**count))),
    ]
    at_once(calls)


def overwrites_gradient(graph: Graph) -> set[int]:
    """The updates that may use their gradient as scratch memory: it fills its storage, and no other op reads that.

    Those that accumulate need none. The update by a sum of gradients is the last to read the sum.
    """
    readers: dict[int, set[int]] = {}
    for number, op in enumerate(graph.ops):
        for t in op.reads if not op.view and op.kind != ACCUMULATE else ():
            readers.setdefault(graph.tensors[t].storage, set()).add(number)
    kept = {graph.tensors[t].storage for t in graph.outputs}
    scratch = set()
    for number, op in enumerate(graph.ops):
        if op.kind == ACCUMULATE:
            scratch.add(number)
        elif op.phase == "update":
            gradient = graph.tensors[op.reads[1]]
            whole = gradient.n_bytes == graph.storages[gradient.storage].n_bytes and 0 not in gradient.stride
            if whole and readers[gradient.storage] == {number} and gradient.storage not in kept:
                scratch.add(number)
    return scratch


def accumulate(
    total: torch.Tensor,
    g: torch.Tensor,
    state: State,
    given: Settings | None,
    fresh: bool,
    scratch: bool,
    undo: Undo | None,
) -> None:
    """Adds the gradient of one micro-batch to the sum, by its weight in `state`; the first one (`fresh`) starts it."""
    if undo is not None:
        undo.note(total)
    if fresh:
        torch.mul(g, state["weight"], out=total)
    else:
        total.add_(g, alpha=state["weight"])


# ---- entries


def kind_of(optimizer: str) -> str:
    """The kind of op that updates by an optimizer: sgd, adam or adamw."""
    return f"edgetrain.{optimizer}.update"


def _group(op: Op) -> int:
    group = dict(op.kwargs)["group"]
    assert isinstance(group, int)
    return group


def _sgd(s: Scene, op: Op) -> list[str]:
    w, g = map(s.name, op.reads[:2])
    buffer = s.name(op.reads[2]) if len(op.reads) > 2 else "NULL"
    n, first = s.graph.tensors[op.reads[0]].n_elements, "step_number == 1" if s.fresh else "0"
    return called("sgd_update", [w, g, buffer, n, f"&settings[{_group(op)}]", first])


def _adam(s: Scene, op: Op) -> list[str]:
    w, g, mean, square, *largest, step = map(s.name, op.reads)
    n = s.graph.tensors[op.reads[0]].n_elements
    return called("adam_update", [w, g, mean, square, *(largest or ["NULL"]), step, n, f"&settings[{_group(op)}]"])


_SGD = CKernel(CSource("sgd", (), ("numbers",)), _sgd, c_features.update)
_ADAM = CKernel(CSource("adam", (), ("numbers",)), _adam, c_features.update)
for _name, _kernel, _flops, _c in (
    ("sgd", sgd, 6, _SGD), ("adam", adam, 14, _ADAM), ("adamw", adam, 14, _ADAM), ("", accumulate, 2, None),
):  # fmt: skip
    own(
        Entry(
            kernels=(Kernel("torch", _kernel),), category="update", raises="never", work=each(_flops), c=_c,
            update=Update(_name, rounds_on_gpu=_kernel is adam),
        ),
        f"{_name or 'accumulate'}.update",
    )  # fmt: skip
