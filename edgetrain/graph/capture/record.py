"""Run a function over fake tensors and write down every kernel call that plain PyTorch would make.

In:  a function, and the batch as fake tensors. Real tensors that the function meets (parameters, buffers, tensors in
     closures) are noted as externals and replaced by fake ones at the kernel call, so nothing is computed, nothing of
     the user's is changed and no activation memory is taken.
Out: a `Recording`: the calls in the order in which eager PyTorch makes them, in-place writes and views as they are.

Recording sits below autograd: the calls are coarse (a convolution is one, its backward is one) and the backward pass
records itself when `torch.autograd.grad` runs. `lower.py` turns a recording into a `Graph`.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from edgetrain.errors import InternalError, UserError
from edgetrain.graph.capture import batches, kinds, predicted_layouts
from edgetrain.graph.capture.fake_tensors import ValuesRefused, without_their_cache, without_their_log
from edgetrain.graph.capture.observe import paused
from edgetrain.graph.capture.recording import (
    Ahead,
    Layout,
    Like,
    Place,
    Places,
    RawCall,
    RawRef,
    Recording,
    asked_for,
    is_dense,
    is_random,
    out_of_place,
    place_in_memory,
    plain,
    unsupported,
    written_by,
)
from edgetrain.graph.capture.recording_signals import RecordingSignals
from edgetrain.graph.capture.refusals import exchanged, random_backward
from edgetrain.graph.capture.value_checks import is_check, values_checked
from edgetrain.graph.ir import ITEM_BYTES, Phase

aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Writes down each kernel call. Use it inside its fake mode: `with recorder.active(): …`."""

    def __init__(self, modules: Mapping[int, str], outermost: str, places: Places, signals: RecordingSignals) -> None:
        """places: those of real tensors before any code ran."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._real_places = {**places}
        self.ahead: Ahead | None = None  # what is known already of the calls to come
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=False, shape_env=None)
        self.recording = Recording()
        self.constants: dict[int, torch.Tensor] = {}  # real tensors that are constants of the step, by id
        self.kept: set[int] = set()  # their numbers, as far as they were met
        self.phase: Phase = "forward"
        self._names, self._outermost = modules, outermost
        self._signals = signals
        self._stack: list[str] = []
        self._number_of: dict[int, int] = {}
        self._places: dict[int, Place] = {}  # number → where it lies
        self._number_at: dict[Place, int] = {}  # where a tensor lies → the first number there
        self._fake_of_real: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._leaves: list[torch.Tensor] = []  # real tensors that no graph of autograd's had made when they were met
        self._inputs: list[torch.Tensor] = []
        self._thread = threading.get_ident()
        self._generator = torch.empty(0)  # the state of torch's generator after what was drawn so far
        self._relaid = False  # an input was taken channels-last that came otherwise
        # Autograd numbers its nodes as they are made. Between two marks the same module runs, so the marks tell which
        # module made a node, and so which module a backward call belongs to.
        self._mark_numbers: list[int] = []
        self._mark_modules: list[str] = []
        self.visited: dict[int, nn.Module] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Record within the block. The innermost module at an error stays readable in `module`."""
        before = nn.modules.module.register_module_forward_pre_hook(self._enter)
        after = nn.modules.module.register_module_forward_hook(self._leave)
        state = torch.default_generator.get_state()
        try:
            self._draw()
            with without_their_log(), values_checked(), ValuesRefused(), self.fake_mode, self:
                yield
            self.refuse_seeding()
            self._refuse_exchanged_inputs()
        finally:
            torch.default_generator.set_state(state)
            before.remove()
            after.remove()

    @property
    def module(self) -> str:
        return self._stack[-1] if self._stack else ""

    @property
    def _where(self) -> str:
        return batches.place_of(self._source(), self._outermost)

    def fake_input(self, like: torch.Tensor | Like) -> torch.Tensor:
        """A fake tensor of the same shape and type; the batch is given this way."""
        like = Like.of(like) if isinstance(like, torch.Tensor) else like
        with without_their_cache(), self.fake_mode:
            fake = torch.empty_strided(like.shape, like.strides, dtype=like.dtype, device=like.device)
            if not is_dense(fake):
                fake = torch.empty_like(fake, memory_format=torch.contiguous_format)
        self._number(fake)
        self._inputs.append(fake)
        return fake

    def channels_last(self, fake: torch.Tensor) -> torch.Tensor:
        """Images with their channels innermost; while recording, so that the copy is part of the step."""
        if fake.dim() != 4 or not fake.is_floating_point():
            return fake
        self._relaid = True
        return fake.contiguous(memory_format=torch.channels_last)

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor that the recording knows, or of a real one from now on."""
        if not isinstance(tensor, FakeTensor):
            tensor = self._fake(tensor)
        return self._known(tensor)

    def number_of(self, fake: torch.Tensor) -> int | None:
        """The number of a fake tensor that is as its kernel made it."""
        number = self._number_of.get(id(fake))
        return number if number is not None and self._places[number] == place_in_memory(fake) else None

    def outlive_step(self, tensors: Sequence[torch.Tensor | None]) -> list[bool]:
        """Which are (views of) real tensors, such as a parameter that a custom function hands on as a gradient?"""
        storage = self.recording.storage
        real = {storage(raw) for raw in self.recording.externals}
        return [tensor is not None and storage(self.number(tensor)) in real for tensor in tensors]

    def _number(self, fake: torch.Tensor) -> int:
        known = self._number_of.get(id(fake))
        if known is None:
            self._refuse_kind(fake)
            known = self._number_of[id(fake)] = len(self.recording.fakes)
            self.recording.fakes.append(fake)
            place = self._places[known] = place_in_memory(fake)
            self._number_at.setdefault(place, known)
        return known

    def _known(self, fake: torch.Tensor) -> int:
        """The number of a fake tensor that a kernel made or that was given in, or of another object for the same one.

        Python can make such an object without a kernel call (`as_subclass`, `copy.copy`), and exchange what an object
        stands for (`t.data = …`, `swap_tensors`): the first is followed, the second refused.
        """
        if id(fake) in self._real_places:
            raise exchanged(self._real_places[id(fake)][0])
        place, number = place_in_memory(fake), self._number_of.get(id(fake))
        if number is None:
            number = self._number_at.get(place)
            if number is not None:
                self._number_of[id(fake)] = number
                self.recording.fakes.append(fake)  # kept for its identity only
        if number is None or self._places[number] != place:
            raise UserError(
                f"{self._where} works with a tensor of shape {tuple(fake.shape)} whose memory was exchanged, or that "
                "came about, without a kernel of torch: a captured step cannot do so again",
                expected="tensors that torch's functions give",
                next_step="write `t = new` or t.copy_(new) in place of `t.data = new`, and take no tensors apart",
            )
        return number

    def _refuse_kind(self, tensor: torch.Tensor) -> None:
        kind = unsupported(tensor)
        if kind is not None:
            raise UserError(
                f"{self._where} works with {kind}, which a captured step cannot hold",
                expected=f"dense tensors of {', '.join(ITEM_BYTES)}",
                next_step="use a dense form; for nn.Embedding and nn.EmbeddingBag that is sparse=False",
            )

    def _fake(self, real: torch.Tensor) -> torch.Tensor:
        self._refuse_kind(real)
        place = place_in_memory(real)
        path, before = self._real_places.setdefault(id(real), ("", place))
        if place != before:
            raise exchanged(path or f"a tensor of shape {tuple(real.shape)}")
        found = self._fake_of_real.get(id(real))
        if found is None and id(real) in self.constants:
            found = self._fake_of_real[id(real)] = (real, self._lift(real))
            self.kept.add(self._number(found[1]))
        if found is None:
            with _disable_current_modes():
                plain = real.detach()
            fake = self.fake_mode.from_tensor(plain, static_shapes=True)
            found = self._fake_of_real[id(real)] = (real, fake)
            self.recording.externals[self._number(fake)] = real
            if real.grad_fn is None:
                self._leaves.append(real)
        return found[1]

    def forget_history(self) -> None:
        """Autograd notes a write in place on the real tensor, though only its fake was written: take that off again."""
        for real in self._leaves:
            if real.grad_fn is not None:
                real.detach_()

    def release_tensors(self) -> None:
        """Drop the weak references that the fake mode holds to real tensors and their storages.

        The mode is garbage of a cycle. A storage that dies while Python 3.11 collects such references crashes the
        process: `PyObject_ClearWeakRefs` allocates a tuple between reading and clearing them.
        """
        describer = self.fake_mode.fake_tensor_converter.meta_converter.describer
        describer.lookup_tensor.clear()
        describer.lookup_storage.clear()

    def _enter(self, module: nn.Module, _args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self.visited[id(module)] = module
        self._stack.append(self._names.get(id(module), type(module).__name__))
        self._mark()

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._stack.pop()
        self._mark()

    def _mark(self) -> None:
        self._mark_numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._mark_modules.append(self.module)

    def _source(self) -> str:
        """The module of the call: the one that runs, or in the backward pass the one whose forward made the node."""
        if self.phase == "forward":
            return self.module
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return ""
        mark = bisect_right(self._mark_numbers, node._sequence_nr()) - 1
        return self._mark_modules[mark] if mark >= 0 else ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is kinds.DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # autograd asks for it several times at each of its nodes
        self._signals.deliver()
        with paused():
            return self._dispatched(func, args, kwargs or {})

    def _dispatched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace in ("prim", "profiler"):
            return func(*args, **kwargs)
        if func in kinds.LIFTS:
            return self._lift(args[0])
        args, kwargs = self._swap(args), self._swap(kwargs)
        if torch.Tag.inplace_view in func.tags:
            return self._turn_in_place(func, args, kwargs)
        if (
            self._relaid
            and func in kinds.LIKE
            and "memory_format" not in kwargs
            and predicted_layouts.is_channels_last(args[0])
        ):
            # Random numbers fill memory in its order. Drawn for an activation that is channels-last by our choice they
            # would not be those that plain training draws, so what random kernels fill is contiguous.
            kwargs = {**kwargs, "memory_format": torch.contiguous_format}
        asked = self._refs(args), self._refs(kwargs)
        if func in kinds.SAME:
            result = predicted_layouts.result_of(func, args, kwargs)
            self._number_of[id(result)] = self._number(args[0])
            self.recording.fakes.append(result)  # kept for its identity only; nothing refers to this entry
            return result
        if is_check(func):  # which would look at values here
            self._note(func, args, kwargs, asked, None)
            return None
        result = self._expected(func, *asked)
        if result is None:
            result = predicted_layouts.result_of(func, args, kwargs)
        self._note(func, args, kwargs, asked, result)
        return result

    def _expected(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Tensors laid out as those that this call gave in an earlier recording; None where that is not known."""
        known = self.ahead(len(self.recording.calls), str(func), args, kwargs) if self.ahead else None
        if known is False:
            self.ahead = None  # from here on all may be other
        if not known:
            return None
        single, layouts = known
        with in_kernel_invocation_manager(self.fake_mode):
            results = [None if layout is None else self._laid_out(layout) for layout in layouts]
        return results[0] if single else tuple(results)

    def _laid_out(self, layout: Layout | int) -> torch.Tensor:
        if isinstance(layout, int):
            return self.recording.fakes[layout]
        shape, stride, dtype, device, base, offset = layout
        if base is None:
            plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            plain = self.recording.fakes[base].as_strided(shape, stride, offset)
        return FakeTensor(self.fake_mode, plain, device)

    def _turn_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`t.transpose_(0, 1)` and its like make a view, and the same Python object is that view from then on.

        The tensor keeps its number under a copy of its old shape; the object gets the number of the view.
        """
        target = args[0]
        if func is kinds.DETACH_IN_PLACE:
            return target
        number, view = self._number(target), out_of_place(func)
        if func.overloadpacket is kinds.EXCHANGES:
            raise exchanged(self._path(number) or f"a tensor of shape {tuple(target.shape)}")
        is_view = view is not None and view._schema.returns[0].alias_info is not None
        if not is_view or self.outlive_step([target])[0] or any(target is fake for fake in self._inputs):
            raise UserError(
                f"{self._where} changes the shape or the memory of a tensor in place ({func}), and a captured step "
                "cannot follow that",
                next_step=f"use the form that gives a new tensor: {func._schema.name.split('::')[1].rstrip('_')}",
            )
        before = kinds.ALIAS(target)
        func(*args, **kwargs)
        self.recording.fakes[number] = before
        self._number_of[id(before)] = number
        self._number_of.pop(id(target))
        args = (before, *args[1:])
        self._note(view, args, kwargs, (self._refs(args), self._refs(kwargs)), target)
        return target

    def _lift(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, FakeTensor):
            return value
        with _disable_current_modes():
            kept = value.detach().clone()
        fake = self.fake_mode.from_tensor(kept, static_shapes=True)
        self.recording.lifted[self._number(fake)] = kept
        return fake

    def _swap(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, FakeTensor) else self._fake(value)
        if isinstance(value, list | tuple):
            return type(value)(self._swap(item) for item in value)
        if isinstance(value, dict):
            return {key: self._swap(item) for key, item in value.items()}
        return value

    def _note(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asked: tuple[Any, Any], result: Any
    ) -> None:
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if draws:
            self.refuse_seeding("torch.utils.checkpoint" if self.phase == "backward" else None)
        written = {self._number(t) for t in written_by(func, args, kwargs)}
        single = isinstance(result, torch.Tensor)
        results = [result] if single else list(result) if isinstance(result, list | tuple) else []
        if any(r is not None and not isinstance(r, torch.Tensor) for r in results):
            raise InternalError(f"{func} returns something that is not a tensor: {result!r}")
        results = [r if asked else None for r, asked in zip(results, asked_for(func, args, results), strict=True)]
        call = RawCall(
            func=func,
            args=asked[0],
            kwargs=asked[1],
            outputs=[None if r is None else self._number(r) for r in results],
            single=single,
            writes=tuple(sorted(written)),
            phase=self.phase,
            module=self._source(),
        )
        self.recording.calls.append(call)
        if draws and is_random(call):
            self._draw()

    def _draw(self) -> None:
        """Move torch's generator on, as a kernel that draws does: a state that is put back is another one then."""
        torch.default_generator.manual_seed(int.from_bytes(os.urandom(7)))
        self._generator = torch.default_generator.get_state()

    def refuse_seeding(self, draws_by: str | None = None) -> None:
        """Who finds the generator elsewhere than where the last draw has left it, where numbers are drawn or when
        a pass is over, has set it. draws_by: what does so in the backward pass."""
        with _disable_current_modes():
            same = torch.equal(self._generator, torch.default_generator.get_state())
        if not same and draws_by:
            raise random_backward(self._where, draws_by)
        if not same:
            raise UserError(
                f"{self._where} sets the state of torch's random generator, which a captured step would not do again",
                expected="random numbers of the generator as it is when the step is called",
                next_step="seed, and put states of generators back (fork_rng too), outside of the model and the loss",
            )

    def _refuse_exchanged_inputs(self) -> None:
        for position, fake in enumerate(self._inputs):
            if self._places[self._number_of[id(fake)]] != place_in_memory(fake):
                raise exchanged(f"item {position} of the batch")

    def _path(self, number: int) -> str | None:
        real = self.recording.externals.get(number)
        return self._real_places[id(real)][0] if real is not None else None

    def _refs(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return RawRef(self._known(value))
        if isinstance(value, torch.Generator):
            raise UserError(
                f"{self._where} draws random numbers from a torch.Generator of its own",
                expected="random numbers of torch's default generator, whose state a step can take back",
                next_step="leave generator= out, and seed with torch.manual_seed",
            )
        if isinstance(value, list | tuple):
            return tuple(self._refs(item) for item in value)
        if isinstance(value, dict):
            return {key: self._refs(item) for key, item in value.items()}
        try:
            plain(value)
        except TypeError:
            raise UserError(
                f"{self._where} calls an op with an argument of type {type(value).__name__}, which a graph cannot hold",
                expected="tensors, numbers, strings and torch's own constants",
                received=repr(value),
            ) from None
        return value


def trace_backward(recorder: Recorder, loss: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor | None]:
    """Record the backward pass of `loss`. None for a parameter that it does not reach, or that needs no gradient since
    the loss ran."""
    recorder.refuse_seeding()
    recorder.phase = "backward"
    asked = [p for p in parameters if p.requires_grad]
    gradients = dict(zip(map(id, asked), torch.autograd.grad(loss, asked, allow_unused=True), strict=True))
    return [gradients.get(id(p)) for p in parameters]
