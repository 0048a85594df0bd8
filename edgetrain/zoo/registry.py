"""The models by name: what each is for, how to build it, a batch to try it on, and how large it is.

In: a name from `MODELS`. Out: an `nn.Module`, a random batch of the right shapes, or counts of parameters and
multiply-adds. Nothing is downloaded and no data is needed; `count` allocates no tensor of the model's size.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from edgetrain.closest import closest
from edgetrain.errors import UserError
from edgetrain.graph.capture.modes import evaluating
from edgetrain.measure.sensors.room import require_room
from edgetrain.ranges import BATCH, shown
from edgetrain.zoo.models.alexnet import alexnet
from edgetrain.zoo.models.arguments import check_classes, check_size, refuse_classes
from edgetrain.zoo.models.autoencoder import autoencoder
from edgetrain.zoo.models.bert import VOCABULARY, bert_base, bert_small
from edgetrain.zoo.models.char_lstm import char_lstm
from edgetrain.zoo.models.densenet import densenet121
from edgetrain.zoo.models.ds_cnn import ds_cnn
from edgetrain.zoo.models.googlenet import googlenet
from edgetrain.zoo.models.lenet import lenet
from edgetrain.zoo.models.minilearn import minilearn_cifar, minilearn_har, minilearn_kws
from edgetrain.zoo.models.mobilenet_v1 import mobilenet_v1
from edgetrain.zoo.models.mobilenet_v2 import mobilenet_v2
from edgetrain.zoo.models.published import Published, published
from edgetrain.zoo.models.resnet import resnet18, resnet18_cifar, resnet50
from edgetrain.zoo.models.squeezenet import squeezenet
from edgetrain.zoo.models.vgg import vgg16, vgg16_cifar
from edgetrain.zoo.tasks import CLASSIFY, NEXT_CHARACTER, RECONSTRUCT, Task

Shape = tuple[int | None, ...]
_PUBLISHED = defaultdict(tuple[Published, ...], published())


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo and what it is built with by default.

    classes:    what it tells apart; for next-character models the characters; 0 for a model without classes.
    input_size: the side of an image, or the length of a sequence: tokens, frames, readings.
    shape:      of one input, with None where the input size stands: (3, None, None) is an image in colour,
                (1, None, 10) are frames of ten coefficients, (None,) are tokens.
    vocabulary: token numbers lie below it, in a model whose tokens are not its classes; 0 in all others.
    """

    name: str
    summary: str
    task: Task
    build: Callable[..., nn.Module]
    classes: int
    input_size: int
    shape: Shape
    width: float = 1.0
    published: tuple[Published, ...] = ()
    vocabulary: int = 0

    @property
    def channels(self) -> int:
        """Of a square image; 0 for a model of something else."""
        return self.shape[0] or 0 if self.shape[1:] == (None, None) else 0

    def input_shape(self, input_size: int | None = None) -> tuple[int, ...]:
        """Of one input of that size."""
        size = self.input_size if input_size is None else input_size
        return tuple(size if side is None else side for side in self.shape)

    def size_in(self, shape: tuple[int, ...]) -> int | None:
        """The input size of which `shape` is an input; None where it is one of no size."""
        sizes = {size for size, side in zip(shape, self.shape, strict=False) if side is None}
        size = sizes.pop() if sizes else None
        return size if size is not None and self.input_shape(size) == shape else None

    def example(
        self,
        batch: int,
        *,
        classes: int | None = None,
        input_size: int | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> tuple[torch.Tensor, ...]:
        """A random batch (x, y), the same for the same seed; tokens and labels are int64, the rest `dtype`."""
        size = self.input_size if input_size is None else input_size
        self._check_example(batch, classes, size)
        labels = classes if classes is not None else self.classes
        generator = torch.Generator().manual_seed(seed)
        if self.task == NEXT_CHARACTER:
            text = torch.randint(labels, (batch, size + 1), generator=generator)
            return text[:, :-1].contiguous(), text[:, 1:].contiguous()
        # A model without classes still gets labels, as it would from a data set: all of them 0.
        y = torch.randint(max(1, labels), (batch,), generator=generator)
        if not self.vocabulary:
            return torch.randn(batch, *self.input_shape(size), generator=generator).to(dtype), y
        # Token 0 is padding, which a full sequence has none of.
        return torch.randint(1, self.vocabulary, (batch, size), generator=generator), y

    def _check_example(self, batch: int, classes: int | None, size: int) -> None:
        if batch not in BATCH:
            raise UserError(
                "a batch has at least one sample",
                expected=f"1 or more: {BATCH}",
                received=f"batch={shown(batch)}",
            )
        check_size(self.name, size, smallest=1)
        require_room_for_batch(batch, self.input_shape(size))
        if not self.classes:
            refuse_classes(self.name, classes)
        elif classes is not None:
            check_classes(self.name, classes)


def _images(
    build: Callable[..., nn.Module],
    summary: str,
    *,
    task: Task = CLASSIFY,
    classes: int = 1000,
    size: int = 224,
    channels: int = 3,
) -> ZooModel:
    name = build.__name__
    return ZooModel(name, summary, task, build, classes, size, (channels, None, None), published=_PUBLISHED[name])


def _sequences(build: Callable[..., nn.Module], summary: str, *, classes: int, size: int, shape: Shape) -> ZooModel:
    """Of numbers over time, in a shape of their own."""
    name = build.__name__
    return ZooModel(name, summary, CLASSIFY, build, classes, size, shape, published=_PUBLISHED[name])


def _word_pieces(build: Callable[..., nn.Module], summary: str) -> ZooModel:
    name = build.__name__
    return ZooModel(
        name=name,
        summary=summary,
        task=CLASSIFY,
        build=build,
        classes=2,
        input_size=128,
        shape=(None,),
        published=_PUBLISHED[name],
        vocabulary=VOCABULARY,
    )


_ENTRIES = (
    _images(lenet, "LeNet-5, for grey images", classes=10, size=28, channels=1),
    _images(alexnet, "AlexNet, one tower"),
    _images(vgg16, "VGG16, without batch norm"),
    _images(vgg16_cifar, "VGG16 for small images", classes=10, size=32),
    _images(mobilenet_v1, "MobileNetV1, of any width"),
    _images(mobilenet_v2, "MobileNetV2, of any width"),
    _images(squeezenet, "SqueezeNet 1.1"),
    _images(googlenet, "GoogLeNet with batch norm"),
    _images(resnet18, "ResNet-18"),
    _images(resnet18_cifar, "ResNet-18 for small images", classes=10, size=32),
    _images(resnet50, "ResNet-50"),
    _images(densenet121, "DenseNet-121"),
    ZooModel(
        name="char_lstm",
        summary="LSTM, for next characters",
        task=NEXT_CHARACTER,
        build=char_lstm,
        classes=65,
        input_size=80,
        shape=(None,),
        published=_PUBLISHED["char_lstm"],
    ),
    _word_pieces(bert_small, "BERT-small for word pieces"),
    _word_pieces(bert_base, "BERT-base for word pieces"),
    _images(autoencoder, "a dense autoencoder", task=RECONSTRUCT, classes=0, size=28, channels=1),
    _sequences(ds_cnn, "DS-CNN, keywords as MFCCs", classes=12, size=49, shape=(1, None, 10)),
    _sequences(minilearn_kws, "MiniLearn's for keywords", classes=12, size=62, shape=(1, None, 12)),
    _images(minilearn_cifar, "MiniLearn's for CIFAR-10", classes=10, size=32),
    _sequences(minilearn_har, "MiniLearn's for activities", classes=6, size=90, shape=(None, 3, 1)),
)

MODELS: Mapping[str, ZooModel] = {entry.name: entry for entry in _ENTRIES}


def get(name: str) -> ZooModel:
    """The model of that name; a UserError with the closest one and a list of all where there is none."""
    if name in MODELS:
        return MODELS[name]
    match = closest(name, MODELS)
    raise UserError(
        f"there is no model named {shown(name)} in the zoo",
        expected="one of " + ", ".join(MODELS),
        received=shown(name),
        next_step=f"did you mean {match!r}?" if match else "choose one of these names",
    )


def require_room_for_batch(batch: int, shape: Sequence[int]) -> None:
    """Refuse a batch of float32 inputs that is too large to train on here.

    What the first layer computes from a batch takes memory beside it.
    """
    require_room(
        f"a batch of {batch:,} inputs of {'×'.join(map(str, shape))}, and a copy of it,", 8 * batch * math.prod(shape),
        next_step="give a smaller batch, or smaller inputs",
    )  # fmt: skip


def _require_room_for(entry: ZooModel, arguments: Mapping[str, object]) -> None:
    """Refuse a model that no machine like this one trains: on the meta device it is built without memory."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        parameters = sum(parameter.nbytes for parameter in entry.build(**arguments).parameters())
    asked = " and ".join(f"{name.replace('_', ' ')} {value}" for name, value in arguments.items())
    require_room(
        f"{entry.name} of {asked}, with a gradient for each weight,", 2 * parameters,
        next_step="build a smaller one",
    )  # fmt: skip


def build(
    name: str, *, classes: int | None = None, input_size: int | None = None, width: float | None = None
) -> nn.Module:
    """The named model with fresh weights, in training mode; what is not given is as in its `ZooModel`."""
    given = {"classes": classes, "input_size": input_size, "width": width}
    entry, arguments = get(name), {key: value for key, value in given.items() if value is not None}
    if arguments:
        _require_room_for(entry, arguments)
    return entry.build(**arguments)


@dataclass(frozen=True)
class Counts:
    """Trainable and frozen parameters together, and multiply-adds of one forward pass over the example."""

    parameters: int
    multiply_adds: int


def count(model: nn.Module, example_inputs: torch.Tensor | Sequence[torch.Tensor]) -> Counts:
    """Parameters of the model, and multiply-adds of its forward pass in evaluation mode.

    `example_inputs` is what `forward` takes (one tensor, or several in a sequence), without labels; only
    shapes and types matter. Counted are convolutions and matrix products, over the whole batch. The pass runs
    on fake tensors, so it computes nothing; the model, and which of its modules are in training mode, are
    left as they were.
    """
    inputs = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs)
    named = [*model.named_parameters(), *model.named_buffers()]
    counter = FlopCounterMode(display=False)
    with evaluating(model), _plain_kernels(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        state = {name: torch.empty_like(tensor, device="cpu") for name, tensor in named}
        fakes = tuple(torch.empty_like(tensor, device="cpu") for tensor in inputs)
        with counter:
            torch.func.functional_call(model, state, fakes)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return Counts(parameters, counter.get_total_flops() // 2)


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """Attention and LSTM as the matrix products they consist of.

    The counter knows neither the CPU's fused attention nor oneDNN's LSTM, and would count them as nothing.
    """
    enabled, *_ = torch.backends.mkldnn.set_flags(_enabled=False, _fp32_precision=None)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mkldnn.set_flags(_enabled=enabled, _fp32_precision=None)
