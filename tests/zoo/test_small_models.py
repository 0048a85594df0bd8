"""DS-CNN and MiniLearn's CNNs: sizes as published, arguments, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from edgetrain import zoo
from edgetrain.errors import UserError
from edgetrain.zoo.models.ds_cnn import DsCnn, ds_cnn
from edgetrain.zoo.models.minilearn import (
    CIFAR_SHAPE,
    HAR_SHAPE,
    KWS_SHAPE,
    minilearn_cifar,
    minilearn_har,
    minilearn_kws,
)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_ds_cnn_has_the_layers_of_the_small_one_of_hello_edge() -> None:
    model = ds_cnn()
    assert isinstance(model, DsCnn)
    x = torch.zeros(2, 1, 49, 10)
    assert model.stem(x).shape == (2, 64, 25, 5)
    assert model.blocks(model.stem(x)).shape == (2, 64, 25, 5)
    assert model(x).shape == (2, 12)
    block = 64 * 9 + 128 + 64 * 64 + 128
    assert parameters(model) == 64 * 40 + 128 + 4 * block + 65 * 12
    assert parameters(ds_cnn(width=0.5)) < parameters(model)


@pytest.mark.parametrize(
    ("build", "shape", "classes"),
    [(minilearn_kws, KWS_SHAPE, 12), (minilearn_cifar, CIFAR_SHAPE, 10), (minilearn_har, HAR_SHAPE, 6)],
)
def test_minilearns_cnns_take_their_data(build: type[nn.Module], shape: tuple[int, ...], classes: int) -> None:
    assert build()(torch.zeros(2, *shape)).shape == (2, classes)
    assert zoo.get(build.__name__).input_shape() == shape
    assert build(classes=3, width=0.5)(torch.zeros(2, *shape)).shape == (2, 3)
    with pytest.raises(UserError, match="classes"):
        build(classes=0)
    with pytest.raises(UserError, match="width"):
        build(width=-1.0)


def test_minilearns_cnn_for_keywords_takes_28_frames_at_least() -> None:
    for frames in (28, 29, 62, 98):
        assert minilearn_kws(input_size=frames)(torch.zeros(1, 1, frames, 12)).shape == (1, 12)
    with pytest.raises(UserError, match="smallest input size is 28"):
        minilearn_kws(input_size=27)
    with pytest.raises(RuntimeError):
        minilearn_kws(input_size=28)(torch.zeros(1, 1, 27, 12))


def test_the_last_convolution_for_keywords_sees_what_minilearns_code_says() -> None:
    model = minilearn_kws()
    assert isinstance(model, nn.Sequential)
    x = torch.zeros(1, *KWS_SHAPE)
    last = [n for n, layer in enumerate(model) if isinstance(layer, nn.Conv2d)][-1]
    assert model[:last](x).shape == (1, 64, 11, 4)
    assert model[: last + 1](x).shape == (1, 32, 9, 2)
