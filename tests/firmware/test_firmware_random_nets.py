"""Random small nets as C, under the address and undefined-behaviour sanitizers, against PyTorch in float64.

`EDGETRAIN_NETS` asks for more of them than CI takes. Once with the scalar kernels, once with those of `kernels/fast`.
"""

from __future__ import annotations

import os

from firmware_nets import Net, Optimizers
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_nets import OPTIMIZERS, check, nets

# What fails is not made smaller: each example is a build.
many = settings(
    max_examples=int(os.environ.get("EDGETRAIN_NETS", "40")),
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
