"""What a step reads and changes outside of itself: the live tensors of the batch, the model, the optimizer, the loss.

In:  a graph, and the model, the optimizer and the loss's own tensors (`externals`) that it was captured with.
Out: for each lasting tensor of the graph a function that gives the tensor there is now; the optimizer's state of each
     parameter that is updated; an item of a batch in the layout of the graph.
Promised: a graph of another model or optimizer is a UserError before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from edgetrain.dtypes import dtype_name, dtype_of
from edgetrain.errors import UserError
from edgetrain.graph.capture import optimizers
from edgetrain.graph.ir import Graph, Op, Source, Tensor
from edgetrain.ops import update
from edgetrain.run.undo import Undo

Before = list[tuple[torch.Tensor, update.State | None]]  # parameters, each with the state that it had


@dataclass(frozen=True, eq=False)
class Binding:
    """kind: of the optimizer. externals: by the names in `graph.sources`."""

    graph: Graph
    kind: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    externals: Mapping[str, torch.Tensor]

    def require_same_optimizer(self, updates: Sequence[Op]) -> None:
        """The updates of the graph are those of this optimizer, parameter by parameter and state by state."""
        trained = {parameter.path: parameter for parameter in optimizers.trained(self.optimizer)}
        for op in updates:
            if op.kind == update.ACCUMULATE:
                continue
            parameter = trained.get("{}.{}".format(*place_of_update(op)))
            steps = ("step",) if parameter is not None and parameter.counts_steps else ()
            keys = {self.graph.sources[t].path.rpartition(".")[2] for t in op.reads[2:]}
            if parameter is None or keys != {*parameter.state_keys, *steps} or op.kind != update.kind_of(self.kind):
                raise _other("optimizer", f"{op.kind} of {self.graph.tensors[op.reads[0]].name}, with {sorted(keys)}")

    def binder(self, t: int) -> Callable[[], torch.Tensor]:
        """A function that gives the live tensor, so that what the user puts in its place between steps is seen; now it
        has the shape and type that the graph was captured with."""
        source, tensor = self.graph.sources[t], self.graph.tensors[t].carrier
        try:
            bind = self._binder(source, t)
            real = bind()
        except (AttributeError, KeyError, IndexError) as error:
            raise _other("model", f"{source.sort} {source.path}, {tensor}") from error
        if (tuple(real.shape), dtype_name(real.dtype)) != (tensor.shape, tensor.dtype):
            raise _other("model", f"{source.sort} {source.path}, {tensor}")
        return bind

    def _binder(self, source: Source, t: int) -> Callable[[], torch.Tensor]:
        if source.sort == "optimizer":
            group, index = (int(n) for n in source.path.split("."))
            return lambda: self.optimizer.param_groups[group]["params"][index].detach()  # the list may be another one
        if source.sort in ("parameter", "buffer"):
            owner_path, _, leaf = source.path.rpartition(".")
            owner = _owner(self.model, owner_path)
            if isinstance(owner, torch.jit.ScriptModule):  # whose tensors are attributes that C++ keeps
                return lambda: getattr(owner, leaf).detach()
            shelf: Any = owner._parameters if source.sort == "parameter" else owner._buffers
            return lambda: shelf[leaf].detach()
        if source.sort == "constant":
            value = _constant(self.graph, t)
            return lambda: value
        if source.path not in self.externals:
            raise UserError(
                f"the graph reads a tensor {source.path} that neither the model nor the optimizer holds",
                next_step=f"pass it: externals={{{source.path!r}: tensor}}",
            )
        return self.externals[source.path].detach

    def parameter(self, op: Op) -> torch.Tensor:
        """What an update updates."""
        group, index = place_of_update(op)
        parameter: torch.Tensor = self.optimizer.param_groups[group]["params"][index]
        return parameter

    def states(
        self, updates: Sequence[Op], given: list[update.Settings], before: Before, *, weight: float, starts: bool
    ) -> tuple[list[update.State], list[bool]]:
        """The optimizer's state of each updated parameter; what is missing is made now, before anything else can fail.

        What was there is added to `before`. weight, starts: of a micro-batch, whose gradients are added up.
        """
        states: list[update.State] = []
        fresh: list[bool] = []
        for op in updates:
            if op.kind == update.ACCUMULATE:
                states.append({"weight": weight})
                fresh.append(starts)
                continue
            parameter = self.parameter(op)
            stateless = self.kind == "sgd" and len(op.args) == 2
            there = self.optimizer.state.get(parameter)
            update.check_keys(self.kind, parameter, there or {})
            if not stateless:
                before.append((parameter, None if there is None else dict(there)))
            state: update.State = {} if stateless else self.optimizer.state[parameter]
            states.append(state)
            settings = given[place_of_update(op)[0]]
            fresh.append(not stateless and update.make_state(self.kind, parameter, state, settings))
            if not stateless:
                update.check_state(self.kind, parameter, state, settings)
        update.check_apart(states)
        return states, fresh

    def put_back_states(self, before: Before) -> None:
        """After a step that failed."""
        for parameter, state in before:
            if state is None:
                self.optimizer.state.pop(parameter, None)
            else:
                self.optimizer.state[parameter].clear()
                self.optimizer.state[parameter].update(state)

    def note_updated(self, updates: Sequence[Op], undo: Undo) -> None:
        """All that the updates change, to be taken back."""
        for op in updates:
            if op.kind == update.ACCUMULATE:
                continue
            parameter = self.parameter(op)
            undo.note(parameter)
            for value in self.optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor):
                    undo.note(value)


def live_storages(
    graph: Graph, model: nn.Module, optimizer: torch.optim.Optimizer, externals: Mapping[str, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Storage of the graph → the parameter, buffer or other lasting tensor that lies there, all of it."""
    binding = Binding(graph, "", model, optimizer, externals)
    tensors: dict[int, torch.Tensor] = {}
    for t, source in graph.sources.items():
        tensor = graph.tensors[t].carrier
        if source.sort in ("optimizer", "parameter", "buffer") or source.path in externals:
            real = binding.binder(t)()
            whole = (tensor.offset, tensor.n_bytes) == (0, graph.storages[tensor.storage].n_bytes)
            if whole and real.stride() == tensor.stride and str(real.device) == graph.storages[tensor.storage].device:
                tensors[tensor.storage] = real
    return tensors


def laid_out(batch: tuple[Any, ...], position: int, tensor: Tensor) -> torch.Tensor:
    """The item of the batch in the layout that the graph was captured with."""
    item: Any = batch[position] if position < len(batch) else None
    tensor = tensor.carrier
    fits = isinstance(item, torch.Tensor) and tuple(item.shape) == tensor.shape
    if not fits or dtype_name(item.dtype) != tensor.dtype:
        raise UserError(
            f"item {position} of the batch does not fit the captured step",
            expected=str(tensor),
            received=f"{item.dtype}{list(item.shape)}" if isinstance(item, torch.Tensor) else repr(item),
            next_step="call the step that et.prepare gave; it captures other shapes by itself",
        )
    given: torch.Tensor = item.detach().resolve_conj().resolve_neg()  # the graph has numbers as they lie in memory
    if given.stride() == tensor.stride:
        return given
    return torch.empty_strided(tensor.shape, tensor.stride, dtype=given.dtype, device=given.device).copy_(given)


def require_apart(graph: Graph, written: Sequence[int], batch: Sequence[Any]) -> None:
    """What the loss writes into an item of the batch is not to be seen in another one, and is to be seen in itself."""
    items = {int(graph.sources[t].path): graph.tensors[t].carrier for t in graph.inputs}
    ends = {position: _ends(batch[position]) for position in items}
    for position in (int(graph.sources[t].path) for t in written):
        begin, end = ends[position]
        shared = any(b < end and begin < e for at, (b, e) in ends.items() if at != position)
        if shared or batch[position].stride() != items[position].stride:
            raise UserError(
                f"the loss writes into item {position} of the batch, "
                + ("which shares memory with another item" if shared else "which is a view with gaps"),
                next_step="pass it as .clone(), or let the loss make a new tensor",
            )


def _ends(item: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * step for n, step in zip(item.shape, item.stride(), strict=True))
    return item.data_ptr(), item.data_ptr() + (last + 1) * item.element_size() * (item.numel() > 0)


def _other(what: str, expected: str) -> UserError:
    return UserError(
        f"the graph was captured with another {what}",
        expected=expected,
        next_step=f"capture it with this {what}, or call et.prepare, which does",
    )


def _owner(model: nn.Module, path: str) -> nn.Module:
    """The module at that path. Scripted ones have no get_submodule."""
    for name in filter(None, path.split(".")):
        model = getattr(model, name)
    return model


def place_of_update(op: Op) -> tuple[int, int]:
    at: dict[str, Any] = dict(op.kwargs)
    return at["group"], at["index"]


def _constant(graph: Graph, t: int) -> torch.Tensor:
    tensor = graph.tensors[t].carrier
    dtype = dtype_of(tensor.dtype)
    raw = bytearray(graph.constants[t])
    if not raw:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).reshape(tensor.shape).clone()
