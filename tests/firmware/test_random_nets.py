"""Random small nets as C, under the address and undefined-behaviour sanitizers, against PyTorch in float64.

`EDGETRAIN_NETS` asks for more of them than CI takes. Once with the scalar kernels, once with those of `kernels/fast`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from edgetrain.firmware.emulate import FirmwareFailed
from edgetrain.firmware.parity import WrongNumbers
from tests.firmware import random_nets
from tests.firmware.firmware_nets import Exported, Net, Optimizers, make, plain_sgd, sgd
from tests.firmware.random_nets import OPTIMIZERS, check, nets

# What fails is not made smaller: each example is a build.
many = settings(
    max_examples=int(os.environ.get("EDGETRAIN_NETS", "50")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)


@many
@given(net=nets(), optimizer=st.sampled_from(OPTIMIZERS), seed=st.integers(0, 1000))
def test_random_nets_train_as_in_pytorch_and_touch_nothing_that_is_not_theirs(
    net: Net, optimizer: Optimizers, seed: int
) -> None:
    check(net, optimizer, seed, "sanitize")


@many
@given(net=nets(), optimizer=st.sampled_from(OPTIMIZERS), seed=st.integers(0, 1000))
def test_so_do_the_vectorised_programs(net: Net, optimizer: Optimizers, seed: int) -> None:
    check(net, optimizer, seed, "fast_sanitize")


def one_number() -> nn.Module:
    """Where x is one number, PyTorch's capture has the product of its gradient transposed."""
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 1, bias=False), nn.Linear(1, 5, bias=False))


def few_numbers() -> nn.Module:
    """A norm of two numbers: what flows back is small, a difference of large ones, and PyTorch's runs are all lucky."""
    return nn.Sequential(
        nn.Sigmoid(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2), nn.ReLU(),
        nn.Linear(2, 5),
    )  # fmt: skip


def wide_border() -> nn.Module:
    """The second norm's mean is 0 but for rounding, and so is all that lies on the border: on the bend of the ReLU."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1, padding=3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(128, 5),
    )  # fmt: skip


# What random nets have found: in the generator, or in the yardstick.
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "net", [Net(one_number, (1, 2, 2), 5, 1), Net(few_numbers, (2, 8, 8), 5, 2), Net(wide_border, (1, 4, 4), 5, 3)],
    ids=["one number", "few numbers", "wide border"],
)  # fmt: skip
def test_nets_that_were_found(net: Net, seed: int) -> None:
    check(net, plain_sgd, seed, "sanitize")


SMALL = Net(lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 3)), (3, 2, 2), 3)


@pytest.mark.parametrize(
    ("file", "old", "new", "found"),
    [
        ("kernels/tanh.c", "* (1.0f - ", "* (1.00001f - ", WrongNumbers),
        ("kernels/sgd.c", "s->momentum * buffer[i] +", "1.0001f * s->momentum * buffer[i] +", AssertionError),
        ("kernels/sgd.c", "i < n", "i <= n", FirmwareFailed),
        ("model.c", "train_step(float *loss_value)\n{", "train_step(float *loss_value)\n{\n    int unused;", Exception),
    ],
    ids=["a gradient", "an update", "past the end", "a warning"],
)
def test_mistakes_are_found(
    file: str, old: str, new: str, found: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(net: Net, out: Path, **how: Any) -> Exported:
        exported = make(net, out, **how)
        text = (out / file).read_text()
        assert old in text
        (out / file).write_text(text.replace(old, new))
        return exported

    check(SMALL, sgd, 0, "sanitize")
    monkeypatch.setattr(random_nets, "make", wrong)
    with pytest.raises(found):
        check(SMALL, sgd, 0, "sanitize")
