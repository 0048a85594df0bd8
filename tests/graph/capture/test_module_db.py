"""Every entry of PyTorch's own list of modules trains with plain PyTorch's numbers, or is refused by name.

`EDGETRAIN_EXAMPLES` asks for more of the arguments that the list has for each of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import ModuleInfo, module_db

from edgetrain.errors import UserError
from tests.helpers.ordinary import Case, case, layers, outcome

# How many of the arguments that the list has for a module, from the first to the last.
SAMPLES = int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 30
BY_VALUES = "decides by the values of a tensor"
# What is refused, and why: entries not named here train with all their arguments.
REFUSED = {
    "nn.BatchNorm1d": BY_VALUES,  # momentum=None divides by the number of batches seen
    "nn.BatchNorm2d": BY_VALUES,
    "nn.BatchNorm3d": BY_VALUES,
    "nn.GaussianNLLLoss": BY_VALUES,  # raises where a variance is negative
    "nn.TransformerEncoder": BY_VALUES,  # looks whether a mask is the causal one, where is_causal is not given
    "nn.Transformer": BY_VALUES,
    "nn.CTCLoss": BY_VALUES,  # lengths that are tensors decide the shape of a table
}
NEVER = "nn.GaussianNLLLoss"  # with no arguments; the others train with some
IS_LAZY = "is lazy"


def cases(info: ModuleInfo, dtype: torch.dtype, count: int) -> Iterator[Case]:
    torch.manual_seed(0)
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True)
    for given in _spread(list(islice(inputs, 200)), count):
        made, forward = given.constructor_input, given.forward_input
        module = layers(lambda made=made: info.module_cls(*made.args, **made.kwargs))  # type: ignore[misc]
        name = info.name.rpartition(".")[2]
        yield case(name, module.to(dtype), forward.args, forward.kwargs, dtype)


def _spread(items: list[Any], count: int) -> list[Any]:
    if len(items) <= count:
        return items
    return [items[n * (len(items) - 1) // max(1, count - 1)] for n in range(count)]


def is_lazy(info: ModuleInfo) -> bool:
    return issubclass(info.module_cls, nn.modules.lazy.LazyModuleMixin)


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
@pytest.mark.usefixtures("one_cache", "one_round")
def test_trains_as_plain_pytorch_or_is_refused(info: ModuleInfo) -> None:
    drawn = list(cases(info, torch.float64, SAMPLES))
    found = [(of, outcome(of, budget=of is drawn[-1] or SAMPLES > 2)) for of in drawn]
    assert any(result is not None for _, result in found), "plain PyTorch trains none of them"
    why = IS_LAZY if is_lazy(info) else REFUSED.get(info.name)
    for of, result in found:
        if isinstance(result, UserError):
            assert why is not None, result
            assert why in result.what
            assert of.name in result.what
    trains = any(isinstance(result, str) for _, result in found)
    assert trains or is_lazy(info) or info.name in REFUSED


@pytest.mark.parametrize("info", module_db, ids=lambda info: info.name)
def test_trains_in_float32_with_default_options(info: ModuleInfo) -> None:
    for of in cases(info, torch.float32, 1):
        result = outcome(of, budget=False)
        assert not isinstance(result, UserError) or is_lazy(info) or info.name in REFUSED


@pytest.mark.parametrize("info", [info for info in module_db if is_lazy(info)], ids=lambda info: info.name)
@pytest.mark.usefixtures("one_cache", "one_round")
def test_lazy_modules_train_after_they_have_run_once(info: ModuleInfo) -> None:
    for of in cases(info, torch.float64, 1):
        with torch.no_grad():
            of.model(*of.batch)
        assert outcome(of) == "bitwise"


def test_what_is_refused_for_its_values_trains_where_they_are_not_looked_at() -> None:
    """Each entry that is refused for some arguments, but one."""
    found = {
        info.name: any(isinstance(outcome(of, budget=False), str) for of in cases(info, torch.float64, 8))
        for info in module_db
        if info.name in REFUSED
    }
    assert found == {name: name != NEVER for name in REFUSED}
