"""Checkpoints that survive a lost battery.

    checkpoints/
      step-00000123/           appears by one rename, when everything in it is on the disk
        tensors.safetensors    model/<name>, optimizer/<parameter>/<key>, rng/torch
        state.json             everything else, with the checksum of the tensors and of itself
      .tmp-…                   being written or being removed; never read

In: a model and an optimizer (ordinary torch objects) and a `State`. Out: a folder as above, and back again.

Promised: a process that ends at any moment, for any reason, leaves every earlier checkpoint whole. `latest`
never gives out one that was cut short or altered: it says which and why, and takes the one before. `restore`
brings back values bit for bit: weights, buffers, optimizer state, hyper-parameters, random generators.

Tensors are written one by one from where they lie and read through a file mapping, so that a checkpoint costs
no second copy of the model in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from edgetrain.errors import UserError
from edgetrain.files import explained, refuse_links, require_regular, sync, writable
from edgetrain.saved import Fields, read_object

SCHEMA = 1
LARGEST_BYTES = 1 << 40  # of the tensors of a checkpoint
_DAMAGE = (
    SafetensorError, OSError, LookupError, AttributeError, TypeError, ValueError, RuntimeError, ArithmeticError,
)  # fmt: skip
_TEMPORARY = ".tmp-"
# ".old" is a checkpoint in the moment between making room for another of the same step and that one's arrival.
_NAME = re.compile(r"step-(\d{8,})(\.old)?")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class State:
    """Where training stands, apart from the tensors.

    epoch, offset: position in the data: whole passes done, and samples of the present one.
    length:        samples in the training data.
    scheduler, evaluation, metadata: plain JSON of the trainer's and the caller's.
    """

    step: int
    epoch: int
    offset: int
    length: int
    batch: int
    seed: int
    scheduler: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None
    metadata: Mapping[str, Any]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk whose checksums are right."""

    path: Path
    state: State
    content: Fields


def save(folder: Path, model: nn.Module, optimizer: Optimizer, state: State, *, keep: int = 2) -> Path:
    """Write a checkpoint into `folder` and give back its path; then remove all but the newest `keep`.

    A full disk is a UserError with the bytes needed; whatever was in the folder before stays as it was.
    """
    tensors: dict[str, Tensor] = {}
    content = _content(model, optimizer, state, tensors)
    target = folder / f"step-{state.step:08d}"
    temporary = folder / f"{_TEMPORARY}{target.name}"
    # The names stand in both files, so twice the JSON is room enough for the JSON and the tensors' header.
    needed_bytes = sum(tensor.nbytes for tensor in tensors.values()) + 2 * len(_sealed(content))
    refuse_links(folder)
    with explained(folder, needed_bytes):
        if not folder.is_dir():
            folder.mkdir(parents=True)
            sync(folder.parent)
        _remove_temporary(folder)
        try:
            _write(temporary, tensors, content)
            _publish(temporary, target)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    _prune(folder, state.step, keep)
    return target


def latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, or None; and one message for each newer one that was refused, with the reason."""
    refused: list[str] = []
    for _, _, path in reversed(_found(folder)):
        try:
            return verified(path), refused
        except UserError as error:
            reason = " ".join(str(error).split())
            refused.append(f"Checkpoint {path.name} was refused: {reason}")
    return None, refused


def verified(path: Path) -> Checkpoint:
    """Check the two files of a checkpoint against their checksums; a UserError says what is wrong."""
    file = read_object(path / "state.json")
    content = file.inside("content")
    schema = content.get("schema", int)
    if schema != SCHEMA:
        raise file.wrong("content.schema", str(SCHEMA), str(schema))
    if (path / "state.json").read_bytes() != _sealed(content.values):
        raise UserError(f"{file.file} was altered: its checksum is wrong.")
    tensors = path / "tensors.safetensors"
    require_regular(tensors, "file of tensors", LARGEST_BYTES)
    try:
        with open(tensors, "rb") as data:
            digest = hashlib.file_digest(data, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"Cannot read {tensors}: {error.strerror or error}.") from error
    if digest != content.get("tensors_sha256", str):
        size, expected = tensors.stat().st_size, content.get("tensors_bytes", int)
        how = "altered: its checksum is wrong" if size == expected else f"cut short: {size} of {expected} bytes"
        raise UserError(f"{tensors} was {how}.")
    return Checkpoint(path, _state(content.inside("state")), content)


def restore(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer) -> None:
    """Bring model, optimizer and random generators, in place, to where they were when it was saved."""
    file, content = checkpoint.path / "tensors.safetensors", checkpoint.content
    aliases = content.inside("aliases")
    try:
        with safe_open(file, framework="pt") as tensors:

            def read(name: str) -> Tensor:
                tensor: Tensor = tensors.get_tensor(aliases.get(name, str) if name in aliases.values else name)
                return tensor

            _restore_model(content.inside("model"), model, read)
            _restore_optimizer(content.inside("optimizer"), content.inside("orders"), model, optimizer, read)
            set_rng_state(_decode(content.values["rng"], read))
    except _DAMAGE as error:
        raise UserError(
            f"The checkpoint {checkpoint.path} does not fit this model and optimizer.",
            expected="the model, optimizer and settings of the run that wrote it",
            received=str(error)[:400],
            next_step="Resume with the settings of that run, or start a new run in another folder.",
        ) from error


def rng_state() -> dict[str, Any]:
    """The state of the random generators of Python, numpy and torch (and CUDA, once it is in use)."""
    name, key, *rest = np.random.get_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    state = {"python": random.getstate(), "numpy": (name, np.asarray(key).tolist(), *rest)}
    return {**state, "torch": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the random generators where `rng_state` found them."""
    random.setstate(state["python"])
    name, key, *rest = state["numpy"]
    np.random.set_state((name, np.array(key, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"].clone())
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([tensor.clone() for tensor in state["cuda"][: torch.cuda.device_count()]])


@contextlib.contextmanager
def rng_preserved() -> Iterator[None]:
    """Whatever the block draws, afterwards the random generators stand where they stood."""
    state = rng_state()
    try:
        yield
    finally:
        set_rng_state(state)


# From objects to JSON and named tensors


def _content(model: nn.Module, optimizer: Optimizer, state: State, tensors: dict[str, Tensor]) -> dict[str, object]:
    """Everything but the checksums; the tensors go into `tensors`, each of them once."""
    weights = {name: _encode(value, f"model/{name}", tensors) for name, value in model.state_dict().items()}
    content: dict[str, object] = {
        "schema": SCHEMA,
        "state": asdict(state),
        "model": weights,
        "optimizer": _optimizer_content(model, optimizer, tensors),
        "rng": _encode(rng_state(), "rng", tensors),
        "orders": {name: order for name, tensor in tensors.items() if (order := _dim_order(tensor))},
    }
    aliases = _aliases(tensors)
    for alias in aliases:
        del tensors[alias]
    return {**content, "aliases": aliases}


def _optimizer_content(model: nn.Module, optimizer: Optimizer, tensors: dict[str, Tensor]) -> dict[str, object]:
    names, saved = _parameter_names(model, optimizer), optimizer.state_dict()
    flat = list(chain.from_iterable(names))
    groups = [
        {"params": params, "options": _encode(_without_params(group), f"optimizer_groups/{index}", tensors)}
        for index, (params, group) in enumerate(zip(names, saved["param_groups"], strict=True))
    ]
    entries = {
        flat[index]: _encode(dict(entry), f"optimizer/{flat[index]}", tensors)
        for index, entry in saved["state"].items()
    }
    return {"kind": type(optimizer).__name__, "groups": groups, "state": entries}


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """For each group of the optimizer the model's names of its parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    if any(name is None for name in chain.from_iterable(groups)):
        raise UserError(
            "The optimizer holds a parameter that is not the model's, so a checkpoint would not hold its value.",
            next_step="Make it part of the model, or leave it out of the optimizer.",
        )
    return [[name for name in group if name is not None] for group in groups]


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _encode(value: object, path: str, tensors: dict[str, Tensor]) -> object:
    """JSON for a value. What JSON does not know is an object with one key that says what it is."""
    if isinstance(value, Tensor) and value.dtype in _DTYPES and value.layout == torch.strided:
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}/{index}", tensors) for index, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encode(item, f"{path}/{key}", tensors) for key, item in value.items()}}
    raise UserError(
        f"A checkpoint cannot hold {path}.",
        expected="dense tensors of plain types, numbers, texts, and lists and dictionaries of them",
        received=f"{value.dtype}, {value.layout}" if isinstance(value, Tensor) else type(value).__name__,
    )


def _decode(value: Any, read: Callable[[str], Tensor]) -> Any:
    """The value that `_encode` was given; `read` gives a tensor by its name."""
    if not isinstance(value, dict):
        return value
    [(kind, inner)] = value.items()
    if kind == "tensor":
        return read(inner)
    if kind == "float":
        return float(inner)
    if kind == "dict":
        return {key: _decode(item, read) for key, item in inner.items()}
    items = [_decode(item, read) for item in inner]
    return tuple(items) if kind == "tuple" else items


def _dim_order(tensor: Tensor) -> list[int] | None:
    """The order of the dimensions in memory where it is not the usual one (channels_last), else None."""
    if tensor.is_contiguous():
        return None
    order = list(tensor.dim_order())
    return order if tensor.permute(order).is_contiguous() else None


def _aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Names of tensors that are the same memory as an earlier one (tied weights) → the name of that one."""
    first: dict[object, str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        known = first.setdefault(key, name)
        if known != name and tensor.numel():
            aliases[name] = known
    return aliases


def _sealed(content: Mapping[str, object]) -> bytes:
    """The bytes of state.json: one spelling for one content, so that any other bytes are an alteration."""
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"A checkpoint's metadata must be plain JSON: {error}.") from error
    return f'{{"content":{text},"sha256":"{hashlib.sha256(text.encode()).hexdigest()}"}}\n'.encode()


# To the disk


def _write(folder: Path, tensors: Mapping[str, Tensor], content: Mapping[str, object]) -> None:
    folder.mkdir()
    digest, size = _write_file(folder / "tensors.safetensors", _chunks(tensors))
    _write_file(folder / "state.json", iter([_sealed({**content, "tensors_sha256": digest, "tensors_bytes": size})]))
    sync(folder)


def _write_file(file: Path, chunks: Iterator[bytes | memoryview]) -> tuple[str, int]:
    """Write a file through to the disk; give back its sha256 and its size in bytes."""
    digest = hashlib.sha256()
    with writable(file, "xb") as out:
        for chunk in chunks:
            digest.update(chunk)
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
        return digest.hexdigest(), out.tell()


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file. The library's own writer would first copy every tensor.

    u64 n │ JSON header, n bytes, padded with spaces to 8 │ tensors, widest type first so that all are aligned
    """
    header: dict[str, object] = {}
    start = 0
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    for name, tensor in ordered:
        span = [start, start + tensor.nbytes]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        start += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _publish(temporary: Path, target: Path) -> None:
    old = target.with_name(f"{target.name}.old")
    if target.exists():
        if old.exists():
            _discard(old)
        target.rename(old)
    temporary.rename(target)
    sync(target.parent)


# What is on the disk


def _found(folder: Path) -> list[tuple[int, bool, Path]]:
    """(step, is not .old, path) of each folder named like a checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), match[2] is None, path) for match, path in matches if match)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Remove what the checkpoint of `step`, just written, makes needless.

    A later one can only be there when `latest` refused it; it goes, but not before it was found broken again.
    """
    checkpoints = _found(folder)
    earlier = [path for at, current, path in checkpoints if at <= step and current]
    kept = set(earlier[-max(keep, 1) :])
    for at, _, path in checkpoints:
        if path not in kept and (at <= step or not _is_whole(path)):
            _discard(path)


def _is_whole(path: Path) -> bool:
    try:
        verified(path)
    except UserError:
        return False
    return True


def _discard(path: Path) -> None:
    """Remove a checkpoint: gone by one rename, so that a half-removed one is never seen."""
    doomed = path.with_name(f"{_TEMPORARY}removed-{path.name}")
    with contextlib.suppress(OSError):  # what cannot be removed is no reason to stop training
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)


def _remove_temporary(folder: Path) -> None:
    for path in folder.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


def _state(data: Fields) -> State:
    numbers = {name: data.get(name, int) for name in ("step", "epoch", "offset", "length", "batch", "seed")}
    for name, number in numbers.items():
        if number < 0:
            raise data.wrong(name, "0 or more", str(number))
    return State(
        **numbers,
        scheduler=data.get("scheduler", dict),
        evaluation=data.maybe("evaluation", dict),
        metadata=data.get("metadata", dict),
    )


# Back into objects


def _restore_model(content: Fields, model: nn.Module, read: Callable[[str], Tensor]) -> None:
    model.load_state_dict({name: _decode(value, read) for name, value in content.values.items()})


def _restore_optimizer(
    content: Fields, orders: Fields, model: nn.Module, optimizer: Optimizer, read: Callable[[str], Tensor]
) -> None:
    names, groups = _parameter_names(model, optimizer), content.get("groups", list)
    kind = content.get("kind", str)
    if kind != type(optimizer).__name__ or [group["params"] for group in groups] != names:
        raise ValueError(f"it was saved with {kind} over {sum(len(g['params']) for g in groups)} parameters")
    indices = {name: index for index, name in enumerate(chain.from_iterable(names))}

    def copied(name: str) -> Tensor:
        # Optimizers keep and update what they are given: it must be memory of its own, not the file's mapping.
        tensor = read(name)
        order = orders.get(name, list) if name in orders.values else list(range(tensor.dim()))
        return torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype).copy_(tensor)

    state = {indices[name]: _decode(entry, copied) for name, entry in content.inside("state").values.items()}
    options = [
        {**_decode(group["options"], copied), "params": [indices[name] for name in group["params"]]} for group in groups
    ]
    optimizer.load_state_dict({"state": state, "param_groups": options})
    _undo_casts(optimizer, state)


def _undo_casts(optimizer: Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Optimizer.load_state_dict gives state the type of its parameter; saved as another type, it is that again."""
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    for index, entry in state.items():
        loaded = optimizer.state[parameters[index]]
        for key, value in entry.items():
            if isinstance(value, Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)
