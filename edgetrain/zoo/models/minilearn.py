"""The three CNNs that MiniLearn trains on an nRF52840 (Profentzas et al. 2022), from its authors' released code.

In: [B, C, H, W], sizes below. Out: class scores [B, classes].

    kws     1×62×12  MFCCs           conv 5×5 16, pool 2×1, conv 3×3 32, pool 2×1, conv 3×3 64, conv 3×3 32, 96, classes
    cifar   3×32×32  images          conv 3×3 32, pool, conv 3×3 32, pool, conv 3×3 16, pool, 256, classes
    har     90×3×1   accelerometer   conv 1×1 32 three times, 64, classes

No padding anywhere; ReLU after each convolution and the hidden dense layer. Sizes are those of `parameters.h` and
`main.c` in github.com/chrpro/MiniLearn; of kws they give the last convolution (64×11×4 in, 32 filters) and the dense
layer, and the layers before it are those of NNoM's example, which its code loads, with the sizes that lead there. What
MiniLearn does to these nets, int8 and pruning, is no part of them.
"""

from __future__ import annotations

from torch import nn

from edgetrain.zoo.models.arguments import check_classes, check_size, check_width, scaled

KWS_SHAPE, CIFAR_SHAPE, HAR_SHAPE = (1, 62, 12), (3, 32, 32), (90, 3, 1)


def minilearn_kws(*, classes: int = 12, input_size: int = 62, width: float = 1.0) -> nn.Module:
    """For keywords, as `input_size` frames of 12 MFCCs; `width` scales the filters and the hidden layer."""
    a, b, c, d, hidden = _scaled("minilearn_kws", classes, width, (16, 32, 64, 32, 96))
    check_size("minilearn_kws", input_size, smallest=28)
    pool = (2, 1)
    frames = ((input_size - 4) // 2 - 2) // 2 - 4  # 9 of 62
    return nn.Sequential(
        nn.Conv2d(1, a, 5), nn.ReLU(), nn.MaxPool2d(pool), nn.Conv2d(a, b, 3), nn.ReLU(), nn.MaxPool2d(pool),
        nn.Conv2d(b, c, 3), nn.ReLU(), nn.Conv2d(c, d, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(d * frames * 2, hidden), nn.ReLU(), nn.Linear(hidden, classes),
    )  # fmt: skip


def minilearn_cifar(*, classes: int = 10, input_size: int = 32, width: float = 1.0) -> nn.Module:
    """For colour images of `input_size` squared; `width` scales the filters and the hidden layer."""
    a, b, c, hidden = _scaled("minilearn_cifar", classes, width, (32, 32, 16, 256))
    check_size("minilearn_cifar", input_size, smallest=22)
    side = (((input_size - 2) // 2 - 2) // 2 - 2) // 2  # 2 of 32
    return nn.Sequential(
        nn.Conv2d(3, a, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(a, b, 3), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(b, c, 3), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(c * side * side, hidden), nn.ReLU(), nn.Linear(hidden, classes),
    )  # fmt: skip


def minilearn_har(*, classes: int = 6, input_size: int = 90, width: float = 1.0) -> nn.Module:
    """For activities: `input_size` readings (the channels) of three axes (the rows); `width` scales the layers."""
    a, b, c, hidden = _scaled("minilearn_har", classes, width, (32, 32, 32, 64))
    check_size("minilearn_har", input_size, smallest=1)
    return nn.Sequential(
        nn.Conv2d(input_size, a, 1), nn.ReLU(), nn.Conv2d(a, b, 1), nn.ReLU(), nn.Conv2d(b, c, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(c * 3, hidden), nn.ReLU(), nn.Linear(hidden, classes),
    )  # fmt: skip


def _scaled(name: str, classes: int, width: float, layers: tuple[int, ...]) -> tuple[int, ...]:
    check_classes(name, classes)
    check_width(name, width)
    return tuple(scaled(size, width) for size in layers)
