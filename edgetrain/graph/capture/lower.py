"""Turn a recording into a graph: storages resolved, in-place writes undone where that is safe, dead calls dropped.

In:  a `Recording` (calls as eager PyTorch makes them), which raw tensors are inputs, outputs and gradients.
Out: storages, tensors and ops in single-assignment form (see `ir.py`), in the order recorded.

What is promised: executing the ops in order gives bitwise the numbers of eager PyTorch. The rewrites, each of which
keeps that promise:

- an in-place call on an activation becomes its out-of-place form, unless another view of the same storage is read
  afterwards; whoever executes the graph may run it in place again when the input is dead;
- a `clone` whose source is a whole storage that is never overwritten is the source itself (autograd clones before an
  in-place activation);
- the backward of a convolution is split in gradient of weight and bias, and gradient of input;
- the backward of hardtanh (ReLU6) reads the result in place of the input, unless that is changed in place: one is
  strictly inside the limits exactly when the other is, so the mask is the same, and the input need not be kept.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

from edgetrain.dtypes import dtype_name
from edgetrain.graph.capture import kinds, predicted_layouts
from edgetrain.graph.capture.record import Recorder
from edgetrain.graph.capture.recording import RawCall, RawRef, Recording, is_random, out_of_place, plain, refs_in
from edgetrain.graph.capture.value_checks import is_check, refuses_values
from edgetrain.graph.ir import Op, Ref, Role, Tensor, Value, replace_refs
from edgetrain.graph.rewrite.builder import Builder
from edgetrain.graph.rewrite.dead_ops import live
from edgetrain.ops.entry import entry_of_function


def lower(recorder: Recorder, keep: Sequence[int], names: dict[int, tuple[str, Role]]) -> Lowering:
    """The storages, tensors and ops of the graph, without its sources and outputs.

    keep: the raw tensors that must be there at the end (loss, gradients). names: name and role of the raw tensors that
    are there at the start (inputs, parameters, buffers, externals, constants).
    """
    calls = list(_split_convolutions(_live_calls(recorder.recording, keep, set(names))))
    in_place = _must_stay_in_place(recorder, calls, keep, set(names))
    lowering = Lowering(recorder, calls, in_place, names)
    for number, call in enumerate(calls):
        lowering.add_call(number, call)
    lowering.ops = _hardtanh_reads_result(lowering.ops, lowering.tensors)
    return lowering


def _reads(call: RawCall) -> list[int]:
    return [*refs_in(call.args), *refs_in(call.kwargs)]


def _live_calls(recording: Recording, keep: Iterable[int], persistent: set[int]) -> list[RawCall]:
    """The calls that matter: for what is kept, for what outlives the step, for the random stream, and those that may
    refuse a batch, whether or not anything reads what they give."""
    lasting = {recording.storage(t) for t in persistent}

    def must_run(call: RawCall) -> bool:
        lasts = any(recording.storage(t) in lasting for t in call.writes)
        refuses = is_check(call.func) or (call.phase == "forward" and refuses_values(call.func))
        return lasts or refuses or is_random(call)

    return live(
        recording.calls,
        {recording.storage(t) for t in keep},
        reads=lambda call: (recording.storage(t) for t in _reads(call)),
        changes=lambda call: (recording.storage(t) for t in (*call.writes, *call.outputs) if t is not None),
        must_run=must_run,
    )


def _split_convolutions(calls: list[RawCall]) -> Iterator[RawCall]:
    """Gradient of weight and bias first: then the layer's input can go before the gradient of the input comes."""
    for call in calls:
        if call.func is not kinds.CONVOLUTION_BACKWARD:
            yield call
            continue
        for part in ((False, True, True), (True, False, False)):
            mask = tuple(bool(a and b) for a, b in zip(call.args[-1], part, strict=True))
            if any(mask):
                outputs = [o if m else None for o, m in zip(call.outputs, mask, strict=True)]
                yield dataclasses.replace(call, args=(*call.args[:-1], mask), outputs=outputs)


# ---- in-place writes ------------------------------------------------------------------------------------------


def _must_stay_in_place(
    recorder: Recorder, calls: list[RawCall], keep: Iterable[int], persistent: set[int]
) -> set[int]:
    """Numbers of the calls whose write cannot be turned into a new tensor.

    a = relu(x)        base
    b = a[:, 0]        view        b.mul_(2) must stay: a is read below, and is to see the change
    b.mul_(2)
    c = a.sum()
    """
    recording = recorder.recording
    lasting = {recording.storage(t) for t in persistent}
    made_at: dict[int, int] = {}
    last_read: dict[int, int] = {}
    for number, call in enumerate(calls):
        for t in call.outputs:
            if t is not None:
                made_at.setdefault(t, number)
        last_read.update(dict.fromkeys(_reads(call), number))
    last_read.update(dict.fromkeys(keep, len(calls)))  # after the others: what is kept is read when all is over
    sharing: dict[int, list[int]] = {}
    for t in {*made_at, *last_read}:
        sharing.setdefault(recording.storage(t), []).append(t)

    def stays(number: int, call: RawCall) -> bool:
        if len(call.writes) != 1 or recording.storage(call.writes[0]) in lasting:
            return True
        (target,) = call.writes
        others = (t for t in sharing[recording.storage(target)] if t != target)
        if any(made_at.get(t, -1) < number < last_read.get(t, -1) for t in others):
            return True
        return _new_instead(recorder, call) is None

    return {number for number, call in enumerate(calls) if call.writes and stays(number, call)}


def _new_instead(recorder: Recorder, call: RawCall) -> Any | None:
    """The kernel that gives the result of an in-place call as a new tensor of the same type and layout, if any."""
    target = recorder.recording.fakes[call.writes[0]]
    first = call.args[0] if call.args else None
    if not _fills_storage(target) or not isinstance(first, RawRef) or first.tensor != call.writes[0]:
        return None
    kernel = out_of_place(call.func)
    if kernel is None:
        return None
    with recorder.fake_mode, suppress(Exception):  # a kernel that refuses these arguments is none
        result = predicted_layouts.result_of(
            kernel, _fakes(recorder, with_defaults(call)), _fakes(recorder, call.kwargs)
        )
        same = (result.dtype, result.shape, result.stride()) == (target.dtype, target.shape, target.stride())
        return kernel if same else None
    return None


def _fills_storage(fake: torch.Tensor) -> bool:
    """Is it all of its storage? A new tensor in the place of a part would have another size and offset."""
    dense = bool(kinds.IS_DENSE(fake))
    return dense and fake.untyped_storage().nbytes() == fake.numel() * fake.element_size()


def _is_lazy(fake: torch.Tensor) -> bool:
    """Its values are the conjugates or the negatives of what lies in memory."""
    return bool(fake.is_conj() or fake.is_neg())


def with_defaults(call: RawCall) -> tuple[Any, ...]:
    """All positional arguments: what a call leaves to its default, its out-of-place form may ask for."""
    rest = call.func._schema.arguments[len(call.args) :]
    return (*call.args, *(a.default_value for a in rest if not a.kwarg_only and a.name not in call.kwargs))


def _fakes(recorder: Recorder, value: Any) -> Any:
    if isinstance(value, RawRef):
        return recorder.recording.fakes[value.tensor]
    if isinstance(value, tuple):
        return tuple(_fakes(recorder, item) for item in value)
    if isinstance(value, dict):
        return {key: _fakes(recorder, item) for key, item in value.items()}
    return value


# ---- building the graph ---------------------------------------------------------------------------------------


class Lowering(Builder):
    """Walks the calls in order and keeps, for each raw tensor and raw storage, its present version in the graph."""

    def __init__(
        self, recorder: Recorder, calls: list[RawCall], in_place: set[int], names: dict[int, tuple[str, Role]]
    ) -> None:
        super().__init__()
        self.recorder = recorder
        self.recording = recorder.recording
        self.in_place = in_place
        self.tensor_of: dict[int, int] = {}
        self.storage_of: dict[int, int] = {}
        # Raw storages that are changed in place, now or later: a clone of one is a copy that must be made.
        self.changed = {self.recording.storage(t) for n in in_place for t in calls[n].writes}
        self.changed |= {self.recording.storage(t) for t in names}
        for raw, (name, role) in names.items():
            self._tensor(raw, name, self._storage(raw, role))

    def add_call(self, number: int, call: RawCall) -> None:
        if self._is_idle_clone(call):
            self._alias(call.outputs[0], call.args[0].tensor)
            return
        name = self.numbered(call.func._schema.name.split("::")[-1].strip("_"))
        # The arguments first: the outputs may be new versions of them.
        args = self._values(with_defaults(call) if call.writes and number not in self.in_place else call.args)
        kwargs = self._values(call.kwargs)
        func = call.func
        writes: tuple[int, ...] = ()
        if call.writes and number in self.in_place:
            writes = tuple(dict.fromkeys(self._storage(t, "activation") for t in call.writes))
        elif call.writes:
            func = _new_instead(self.recorder, call)
            assert func is not None  # or the call would be in place
            self.storage_of.pop(self.recording.storage(call.writes[0]))
            self.tensor_of.pop(call.writes[0])
        role: Role = "gradient" if call.phase == "backward" else "activation"
        known = set(self.storage_of.values())
        outputs = [self._output(t, name, i, call, role) for i, t in enumerate(call.outputs)]
        made = {self.tensors[t].storage for t in outputs if t is not None}
        self.ops.append(
            Op(
                name=name,
                kind=str(func),
                args=args,
                kwargs=tuple(kwargs.items()),
                outputs=tuple(outputs),
                phase=call.phase,
                module=call.module,
                writes=writes,
                random=is_random(call),
                view=bool(made) and made <= known and not writes,
            )
        )

        if entry_of_function(func).oversized and outputs[0] is not None and self.tensors[outputs[0]].shape == ():
            self._shrink(call, name)

    def _shrink(self, call: RawCall, name: str) -> None:
        """Give the reduced loss a storage of its own size; the one that its kernel leaves behind can go at once."""
        raw, args = call.outputs[0], call.args
        assert raw is not None
        large = self.tensor_of[raw]
        elements = self.recording.fakes[args[0].tensor].numel()
        item = self.recording.fakes[raw].element_size()
        at = self.tensors[large].storage
        self.storages[at] = dataclasses.replace(self.storages[at], n_bytes=elements * item)
        self.storage_of.pop(self.recording.storage(raw))
        small = self._tensor(raw, f"{name}.value", self._storage(raw, "activation"))
        self.ops.append(Op(f"{name}.value", str(kinds.CLONE), (Ref(large),), (), (small,), call.phase, call.module))

    def _output(self, raw: int | None, name: str, position: int, call: RawCall, role: Role) -> int | None:
        if raw is None:
            return None
        if raw in self.tensor_of and raw in call.writes:
            return None  # the written tensor itself, returned for convenience
        label = name if call.single else f"{name}.{position}"
        return self._tensor(raw, label, self._storage(raw, role))

    def _is_idle_clone(self, call: RawCall) -> bool:
        if call.func is not kinds.CLONE or not isinstance(call.args[0], RawRef):
            return False
        source, copy = call.args[0].tensor, call.outputs[0]
        if copy is None or self.recording.fakes[source].stride() != self.recording.fakes[copy].stride():
            return False
        if not _fills_storage(self.recording.fakes[source]) or _is_lazy(self.recording.fakes[source]):
            return False
        return not {self.recording.storage(source), self.recording.storage(copy)} & self.changed

    def _alias(self, raw: int | None, source: int) -> None:
        assert raw is not None
        self.tensor_of[raw] = self.tensor_of[source]
        self.storage_of[self.recording.storage(raw)] = self.tensors[self.tensor_of[source]].storage

    def _storage(self, raw: int, role: Role) -> int:
        key = self.recording.storage(raw)
        if key not in self.storage_of:
            fake = self.recording.fakes[raw]
            self.storage_of[key] = self.add_storage(fake.untyped_storage().nbytes(), role, str(fake.device))
        return self.storage_of[key]

    def _tensor(self, raw: int, name: str, storage: int) -> int:
        fake = self.recording.fakes[raw]
        dtype = dtype_name(fake.dtype)
        shape, stride, offset = tuple(fake.shape), tuple(fake.stride()), int(fake.storage_offset())
        self.tensor_of[raw] = self.add_tensor(Tensor(name, storage, shape, stride, dtype, offset))
        return self.tensor_of[raw]

    def _values(self, value: Any) -> Any:
        if isinstance(value, RawRef):
            return Ref(self.tensor_of[value.tensor])
        if isinstance(value, tuple | list):
            return tuple(self._values(item) for item in value)
        if isinstance(value, dict):
            return {key: self._values(item) for key, item in value.items()}
        return plain(value)


def _hardtanh_reads_result(ops: list[Op], tensors: Sequence[Tensor]) -> list[Op]:
    result_of = {(op.args[0], _limits(op)): op for op in ops if op.kind == kinds.HARDTANH}
    changed = {storage for op in ops for storage in op.writes}
    readers: Counter[int] = Counter(t for op in ops if op.phase == "backward" for t in op.reads)
    for number, op in enumerate(ops):
        if op.kind != kinds.HARDTANH_BACKWARD or not isinstance(op.args[1], Ref):
            continue
        forward = result_of.get((op.args[1], op.args[2:4]))
        if forward is None or forward.outputs[0] is None or tensors[forward.outputs[0]].storage in changed:
            continue
        if readers[op.args[1].tensor] > 1 and not readers[forward.outputs[0]]:
            continue  # the input is kept for another op in any case
        change = {op.args[1].tensor: forward.outputs[0]}
        args = (op.args[0], replace_refs(op.args[1], change), *op.args[2:])
        ops[number] = dataclasses.replace(op, args=args)
    return ops


def _limits(op: Op) -> tuple[Value, ...]:
    return op.args[1:3] if len(op.args) == 3 else (-1, 1)
