"""The five networks of EMDL'21 as the code that its authors released builds them.

In: a name as in the data (`Lenet`, `Alexnet`, `GoogLenet`, `Squeezenet`, `Mobilenet`). Out: an `nn.Module` and a batch.

They are not those of the papers they are named after (and not those of our zoo), and the measured times and bytes are
theirs. What differs, from github.com/UbiquitousLearning/Benchmark-On-Device-Training (tools/train/source/models):

- LeNet is Caffe's: 20 and 50 filters, 400 hidden units, one ReLU.
- AlexNet has 96, 256, 384, 384 and 256 filters, one dense layer fewer and 10 classes.
- SqueezeNet is 1.0 without any ReLU; its last convolution has stride 2, left over from the first one.
- GoogLeNet has neither ReLU nor batch norm, and 10 classes. Its second convolution (3×3) has stride 2, left over from
  the first one, so everything after it has a quarter of the places that the paper's has. So has its last.
- MobileNetV2 is MNN's own demo: the paper's, with 1001 classes.

Padding "same" is TensorFlow's (more on the right and below); here it is half the kernel on every side, which gives the
same sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from edgetrain import zoo


def conv(c_in: int, c_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2)


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(800, 400), nn.ReLU(), nn.Dropout(0.5), nn.Linear(400, 10),
    )  # fmt: skip


def alexnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 96, 11, 4), nn.ReLU(), nn.MaxPool2d(3, 2),
        conv(96, 256, 5), nn.ReLU(), nn.MaxPool2d(3, 2),
        conv(256, 384, 3), nn.ReLU(), conv(384, 384, 3), nn.ReLU(), conv(384, 256, 3), nn.MaxPool2d(3, 2),
        nn.Flatten(), nn.Linear(256 * 5 * 5, 4096), nn.ReLU(), nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.5),
        nn.Linear(4096, 10),
    )  # fmt: skip


class Beside(nn.Module):
    """Branches over one input, their results side by side."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def fire(c_in: int, squeeze: int, expand: int) -> nn.Module:
    return nn.Sequential(conv(c_in, squeeze, 1), Beside(conv(squeeze, expand, 1), conv(squeeze, expand, 3)))


def pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, 2, 1)


def squeezenet() -> nn.Module:
    return nn.Sequential(
        conv(3, 96, 7, 2), pool(), fire(96, 16, 64), fire(128, 16, 64), fire(128, 32, 128), pool(),
        fire(256, 32, 128), fire(256, 48, 192), fire(384, 48, 192), fire(384, 64, 256), pool(), fire(512, 64, 256),
        conv(512, 10, 1, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


def inception(c_in: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pooled: int) -> nn.Module:
    return Beside(
        conv(c_in, one, 1),
        nn.Sequential(conv(c_in, reduce3, 1), conv(reduce3, three, 3)),
        nn.Sequential(conv(c_in, reduce5, 1), conv(reduce5, five, 5)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(c_in, pooled, 1)),
    )


def googlenet() -> nn.Module:
    return nn.Sequential(
        conv(3, 64, 7, 2), pool(), conv(64, 192, 3, 2), pool(),
        inception(192, 64, 96, 128, 16, 32, 32), inception(256, 128, 128, 192, 32, 96, 64), pool(),
        inception(480, 192, 96, 208, 16, 48, 64), inception(512, 160, 112, 224, 24, 64, 64),
        inception(512, 128, 128, 256, 24, 64, 64), inception(512, 112, 144, 288, 32, 64, 64),
        inception(528, 256, 160, 320, 32, 128, 128), pool(),
        inception(832, 256, 160, 320, 32, 128, 128), inception(832, 384, 192, 384, 48, 128, 128),
        nn.AdaptiveAvgPool2d(1), conv(1024, 10, 1, 2), nn.Flatten(),
    )  # fmt: skip


def mobilenet() -> nn.Module:
    return zoo.build("mobilenet_v2", classes=1001)


Nets = Mapping[str, Callable[[], nn.Module]]
NETS: Nets = {
    "Lenet": lenet, "Alexnet": alexnet, "GoogLenet": googlenet, "Squeezenet": squeezenet, "Mobilenet": mobilenet,
}  # fmt: skip

# For comparison: those of our zoo, which are the published ones.
ZOO: Nets = {
    name: partial(zoo.build, key)
    for name, key in (
        ("Lenet", "lenet"), ("Alexnet", "alexnet"), ("GoogLenet", "googlenet"), ("Squeezenet", "squeezenet"),
        ("Mobilenet", "mobilenet_v2"),
    )
}  # fmt: skip


def example(name: str, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (1, 28, 28) if name == "Lenet" else (3, 224, 224)
    return torch.zeros(batch, *shape), torch.zeros(batch, dtype=torch.int64)
