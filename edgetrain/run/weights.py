"""Weights from a file into a model.

In: a model and a file that holds its weights: safetensors, or a state dict saved with torch.save, by itself or
under "state_dict" or "model", with or without the "module." that DataParallel puts before names; or the tensors
of one of our own checkpoints. Out: the model with those weights, and messages that say what was done.

Promised: nothing in the file is ever run. Every weight of the model comes from the file, or a `UserError` lists
what does not fit and the model is untouched. The one exception is asked for with `resize_head`: layers that
differ in nothing but the number of classes keep the fresh values they have.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from edgetrain.dtypes import dtype_name
from edgetrain.errors import UserError
from edgetrain.files import require_regular
from edgetrain.ranges import shown

_SHOWN = 4
LARGEST_BYTES = 64 << 30  # of a file of weights
_EXPECTED = "a safetensors file, or a state dict saved with torch.save"
_NOT_WEIGHTS = "a file of another kind, a damaged one, or one of other things than tensors and their names"
_NESTS = ("state_dict", "model")
# Torchvision's DenseNet files are older than the rule that the name of a module has no dot: norm.1 is norm1 now.
_DOTTED = re.compile(r"(\.denselayer\d+\.(?:norm|conv))\.([12]\.)")


@dataclass(frozen=True)
class _Fit:
    """How the names and shapes of a file compare with a model's: all empty when it fits."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    shapes: tuple[str, ...]


def load_weights(model: nn.Module, file: Path | str, *, resize_head: bool = False) -> list[str]:
    """Load the weights in `file` into the model, in place; give back messages for the user."""
    file = Path(file)
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    weights = _renamed(_read(file), own)
    again = "Save the weights again as dense float32 tensors."
    _require_numbers(file, {name: _no_numbers(value) for name, value in weights.items()}, again)
    fit = _compare(weights, own)
    heads = _heads(model, fit.shapes, weights, own) if resize_head else {}
    messages = [
        f"The layer {layer} keeps its fresh initial values: the file has {old} classes, the model {new}."
        for layer, (old, new) in heads.items()
    ]
    fit = _Fit(fit.missing, fit.unexpected, tuple(name for name in fit.shapes if _layer(name) not in heads))
    if fit.missing or fit.unexpected or fit.shapes:
        raise _misfit(file, fit, weights, own)
    kept = {name: value for name, value in weights.items() if _layer(name) not in heads}
    _require_numbers(file, {name: _other_type(value, own[name]) for name, value in kept.items()}, again)
    finite = "Use weights from before that run diverged."
    _require_numbers(file, {name: _not_finite(value, own[name]) for name, value in kept.items()}, finite)
    model.load_state_dict(kept, strict=False)
    return [f"Loaded {len(kept)} tensors from {file}.", *messages]


def _require_numbers(file: Path, wrong: Mapping[str, str | None], next_step: str) -> None:
    """Refuse tensors that the model cannot take as they are. wrong: name → what is wrong with it."""
    problems = [f"{name}: {words}" for name, words in wrong.items() if words is not None]
    if problems:
        raise UserError(
            f"The weights in {file} cannot be taken as numbers of the model.",
            expected="dense tensors of finite numbers: floating-point ones where the model has such",
            received=_first(problems), next_step=next_step,
        )  # fmt: skip


def _no_numbers(value: Tensor) -> str | None:
    if value.is_meta:
        return "no numbers (meta)"
    if value.is_quantized:
        return "quantised"
    return "sparse or nested" if value.is_nested or value.layout != torch.strided else None


def _other_type(value: Tensor, own: Tensor) -> str | None:
    if value.dtype == own.dtype or (value.is_floating_point() and own.is_floating_point()):
        return None
    counts = not any(t.is_floating_point() or t.is_complex() for t in (value, own))
    same = counts and not (value != value.to(own.dtype)).any()
    return None if same else f"{dtype_name(value.dtype)} for {dtype_name(own.dtype)}"


def _not_finite(value: Tensor, own: Tensor) -> str | None:
    """A mask of a model's own may be infinite."""
    if not value.is_floating_point() or own.is_meta:
        return None
    wrong = ~torch.isfinite(value.to(own.dtype)) & torch.isfinite(own.cpu())
    return f"{int(wrong.sum())} of its numbers are not finite" if wrong.any() else None


# Reading


def _read(file: Path) -> dict[str, Tensor]:
    """The named tensors of a file, whatever its kind."""
    try:
        with open(require_regular(file, "file of weights", LARGEST_BYTES), "rb") as data:
            start = data.read(9)
    except OSError as error:
        raise UserError(f"Cannot read the weights {file}: {error.strerror or error}.") from error
    except UserError as error:
        raise UserError(f"Cannot read the weights {file}: {error.received or error.what}.") from error
    # safetensors: eight bytes of length, then JSON; a zip or a pickle never has the brace there.
    return _read_safetensors(file) if start[8:] == b"{" else _read_torch(file)


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise UserError(f"{file} is a damaged safetensors file.", received=str(error)[:200]) from error


def _read_torch(file: Path) -> dict[str, Tensor]:
    _refuse_bomb(file)
    try:
        data = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refused(file, str(error)) from error
    except Exception as error:  # a damaged zip or pickle can fail in any way
        raise UserError(
            f"{file} cannot be read as weights.",
            expected=_EXPECTED,
            received=_NOT_WEIGHTS,
        ) from error
    return _unnested(file, data)


def _named(data: Mapping[object, object]) -> dict[str, Tensor]:
    return {k: v for k, v in data.items() if isinstance(k, str) and isinstance(v, Tensor)}


def _refuse_bomb(file: Path) -> None:
    """Refuse a zip that unpacks to more than the file: torch.save packs nothing."""
    if not zipfile.is_zipfile(file):
        return
    try:
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(item.file_size for item in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise UserError(f"{file} cannot be read as weights.", received=str(error)[:200]) from error
    if unpacked > file.stat().st_size:
        raise UserError(
            f"{file} was refused: it unpacks to more than it holds.", expected="a state dict saved with torch.save",
            received=f"{unpacked:,} bytes out of {file.stat().st_size:,}",
        )  # fmt: skip


def _refused(file: Path, reason: str) -> UserError:
    code = re.search(r"GLOBAL ([\w.]+)", reason)
    if code is None:
        return UserError(
            f"{file} cannot be read as weights.", expected=_EXPECTED,
            received=_NOT_WEIGHTS,
        )  # fmt: skip
    return UserError(
        f"{file} was refused: it holds Python objects, and loading it could run any code that its author put there.",
        expected="tensors and their names, nothing else",
        received=f"a pickle that asks for {code[1]}",
        next_step="If you trust it, load it yourself, torch.save(model.state_dict(), …) and use that file.",
    )


def _unnested(file: Path, data: object) -> dict[str, Tensor]:
    """The state dict itself, out of the dictionaries that training scripts save around it."""
    seen: set[int] = set()
    while isinstance(data, Mapping) and id(data) not in seen:
        seen.add(id(data))
        inner = next((data[name] for name in _NESTS if isinstance(data.get(name), Mapping)), None)
        if inner is None:
            break
        data = inner
    tensors = _named(data) if isinstance(data, Mapping) else {}
    if not tensors:
        names = (
            ", ".join(key[:40] if isinstance(key, str) else shown(key) for key in list(data)[:_SHOWN])
            if isinstance(data, Mapping)
            else ""
        )
        raise UserError(
            f"{file} holds no weights.",
            expected='named tensors, by themselves or under "state_dict" or "model"',
            received=f"a dictionary with {names or 'nothing'}" if isinstance(data, Mapping) else type(data).__name__,
        )
    return tensors


# Comparing


def _renamed(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under the model's names: without "module.", old names new, of our checkpoints only the model."""
    if any(name.startswith("model/") for name in weights):
        weights = {name.removeprefix("model/"): w for name, w in weights.items() if name.startswith("model/")}
    return {name if name in own else _current(name): w for name, w in weights.items()}


def _current(name: str) -> str:
    return _DOTTED.sub(r"\1\2", name.removeprefix("module."))


def _compare(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> _Fit:
    # Of tied weights a file may hold only one; the other gets its value with it.
    present = {own[name].data_ptr() for name in weights if name in own and own[name].numel()}
    missing = (
        name
        for name, value in own.items()
        # Files from before PyTorch 0.4.1 have no batch counter, and nothing but momentum=None reads it.
        if name not in weights and value.data_ptr() not in present and not name.endswith("num_batches_tracked")
    )
    both = (name for name in weights if name in own)
    shapes = tuple(name for name in both if weights[name].shape != own[name].shape)
    return _Fit(tuple(missing), tuple(name for name in weights if name not in own), shapes)


def _heads(
    model: nn.Module, names: tuple[str, ...], weights: Mapping[str, Tensor], own: Mapping[str, Tensor]
) -> dict[str, tuple[int, int]]:
    """Layers that differ only in the number of classes → that number in the file and in the model.

    A layer inside the network that differs in its outputs makes the next one differ in its inputs. So it is the
    head, or the heads, when every difference is in the first dimension and the same; a vocabulary is no class.
    """
    if not names or not all(_layer(name) and own[name].dim() and weights[name].dim() for name in names):
        return {}
    changes = {(weights[name].shape[0], own[name].shape[0]) for name in names}
    same_inputs = all(weights[name].shape[1:] == own[name].shape[1:] for name in names)
    modules = dict(model.named_modules())
    layers = {_layer(name): modules[_layer(name)] for name in names}
    if len(changes) > 1 or not same_inputs or any(isinstance(m, nn.Embedding) for m in layers.values()):
        return {}
    return dict.fromkeys(layers, changes.pop())


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _misfit(file: Path, fit: _Fit, weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> UserError:
    shapes = [f"{name} {list(weights[name].shape)} for {list(own[name].shape)}" for name in fit.shapes]
    kinds = (("missing", list(fit.missing)), ("unexpected", list(fit.unexpected)), ("other shapes", shapes))
    differences = "; ".join(f"{len(names)} {kind}: {_first(names)}" for kind, names in kinds if names)
    only_shapes = fit.shapes and not fit.missing and not fit.unexpected
    return UserError(
        f"The weights in {file} do not fit the model.",
        expected=f"the {len(own)} tensors of the model, by name and shape",
        received=differences,
        next_step="If only the number of classes differs, ask for a fresh head (resize_head)." if only_shapes else None,
    )


def _first(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
