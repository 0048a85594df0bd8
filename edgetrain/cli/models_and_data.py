"""From the words of a command line to a model, its task and its data.

A model is a name from the zoo or `path/to/file.py:function`, called with `classes=`. Data is a name or a path.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from edgetrain import zoo
from edgetrain.dtypes import dtype_name
from edgetrain.errors import UserError
from edgetrain.graph.capture.refusals import ExampleRefused
from edgetrain.zoo import datasets
from edgetrain.zoo.datasets import Data, keywords
from edgetrain.zoo.datasets.recognise import PUBLIC
from edgetrain.zoo.tasks import CLASSIFY, NEXT_CHARACTER, Task


@dataclass(frozen=True)
class Chosen:
    """What a command works on. `entry` is None for a model of the user's own."""

    name: str
    entry: zoo.ZooModel | None
    build: Callable[..., nn.Module]


def choose(model: str) -> Chosen:
    """Find the model; nothing is built yet."""
    path, colon, function = model.rpartition(":")
    if colon and path.endswith(".py"):
        return Chosen(model, None, _function(Path(path), function))
    if model.endswith(".py"):
        raise UserError(
            f"{model} names a file, but no function in it", expected="file.py:function", next_step=f"try {model}:build"
        )
    entry = zoo.get(model)
    return Chosen(model, entry, entry.build)


def load_data(chosen: Chosen, spec: str, *, input_size: int | None, seed: int) -> Data:
    """The data in the shape that the model wants."""
    if chosen.entry is None:
        return datasets.load(spec, input_size=input_size, seed=seed)
    entry = chosen.entry
    if entry.vocabulary:
        raise UserError(
            f"{entry.name} reads token numbers, and no data set here gives any",
            next_step="train it from Python, with batches of your own",
        )
    folder = Path(spec).is_dir() and any(child.is_dir() for child in Path(spec).iterdir())
    size = input_size or (entry.input_size if folder else None)
    data = datasets.load(spec, input_size=size, channels=entry.channels or None, sequence=entry.input_size, seed=seed)
    wanted = "characters" if entry.task is NEXT_CHARACTER else "images"
    if data.kind != wanted:
        raise UserError(
            f"{entry.name} trains on {wanted}, {spec} holds {data.kind}",
            next_step="choose another model (`edgetrain models`) or other data",
        )
    # A net that pools over the whole image takes any sides: what an image net refuses is seen when it is captured.
    if entry.size_in(data.shape) is None and not entry.channels:
        raise _other_shape(entry, spec, data.shape)
    return data


def by_sides(shape: Sequence[int]) -> str:
    """(1, 49, 10) → "1×49×10"."""
    return "×".join(map(str, shape))


def _other_shape(entry: zoo.ZooModel, spec: str, shape: tuple[int, ...]) -> UserError:
    has_data = entry.size_in(keywords.SHAPE) is not None
    return UserError(
        f"{entry.name} cannot be run on {spec}", expected=f"inputs of {by_sides(entry.input_shape())}",
        received=f"inputs of {by_sides(shape)}",
        next_step=f"give keywords as MFCCs as --data: {PUBLIC['keywords']}" if has_data
        else "no data set here has that shape: train it from Python, with batches of your own",
    )  # fmt: skip


def build_for(chosen: Chosen, data: Data, *, width: float | None) -> tuple[nn.Module, Task]:
    """The model with as many outputs as the data has classes."""
    if chosen.entry is None:
        _refuse_width(width)
        task = NEXT_CHARACTER if data.kind == "characters" else CLASSIFY
        return _call(chosen, classes=len(data.classes)), task
    entry = chosen.entry
    classes = len(data.classes) if entry.classes else None
    size = entry.size_in(data.shape) or data.shape[-1] if data.kind == "images" else None
    return zoo.build(entry.name, classes=classes, input_size=size, width=width), entry.task


def _refuse_width(width: float | None) -> None:
    if width is not None:
        raise UserError("--width is for models of the zoo", next_step="give your own function a width of its own")


def build_alone(
    chosen: Chosen, *, classes: int | None, input_size: int | None, width: float | None, batch: int
) -> tuple[nn.Module, Task, tuple[torch.Tensor, ...]]:
    """The model without data, its task, and a random batch."""
    if chosen.entry is not None:
        entry = chosen.entry
        zoo.require_room_for_batch(batch, entry.input_shape(input_size))
        model = zoo.build(entry.name, classes=classes, input_size=input_size, width=width)
        return model, entry.task, entry.example(batch, classes=classes, input_size=input_size)
    _refuse_width(width)
    side = input_size or 224
    zoo.require_room_for_batch(batch, (3, side, side))
    model = _call(chosen, classes=classes or 10)
    images = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0))
    return model, CLASSIFY, (images, torch.zeros(batch, dtype=torch.int64))


@contextmanager
def told_of_batch(model: str, source: str, batch: Sequence[torch.Tensor]) -> Iterator[None]:
    """A batch that the model refuses, explained in words of the command line, which knows no loss and no example."""
    try:
        yield
    except ExampleRefused as error:
        shapes = [f"{by_sides(t.shape)} {dtype_name(t.dtype)}" for t in batch]
        raise UserError(
            f"{model} cannot be run on {source}: {error.where} fails",
            expected=f"a model for inputs of {shapes[0]}" + (f" and labels of {shapes[1]}" if shapes[1:] else ""),
            received=error.received,
            next_step="choose or make a model that takes this shape (`edgetrain models` lists those of the zoo), or "
            "change the input: --input-size gives images another side",
        ) from error


def _call(chosen: Chosen, **arguments: Any) -> nn.Module:
    try:
        model = chosen.build(**arguments)
    except TypeError as error:
        raise UserError(
            f"{chosen.name} could not be called with classes={arguments['classes']}", received=str(error),
            expected="def function(classes): … that returns an nn.Module",
        ) from error  # fmt: skip
    except (Exception, SystemExit) as error:
        raise UserError(f"{chosen.name} failed", received=f"{type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"{chosen.name} returned no nn.Module", received=type(model).__name__)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor) or tensor.is_meta:
            kind = "has no shape before the model has run (lazy)" if is_lazy(tensor) else "has no memory (meta)"
            raise UserError(
                f"{chosen.name} gives a model that cannot be trained yet: {name} {kind}",
                next_step="let the function run the model once on a batch of zeros, and return it then"
                if is_lazy(tensor) else "let the function make its tensors on the CPU",
            )  # fmt: skip
    return model


def _function(path: Path, name: str) -> Callable[..., nn.Module]:
    if not path.is_file():
        raise UserError(f"there is no file {path}", next_step="write file.py:function with a path from here")
    own = path.stem if path.stem not in sys.modules else f"{path.stem} of {path.parent.resolve()}"  # random.py, json.py
    spec = importlib.util.spec_from_file_location(own, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[own] = module
    sys.path.insert(0, str(path.parent.resolve()))  # its own imports of files beside it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{path} could not be imported", received=f"{type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == own]
        raise UserError(f"{path} has no function {name}", expected=", ".join(names) or "a function that builds a model")
    return function  # type: ignore[no-any-return]
