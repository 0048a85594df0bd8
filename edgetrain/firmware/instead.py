"""Replacements for layers that firmware has no kernel for, as layers of torch.nn.

In:  the kind of an op that was refused, and the class of its module if known. Out: the next step.
"""

from __future__ import annotations

LAYERS = (
    "Conv2d, Linear, BatchNorm2d, GroupNorm, ReLU, ReLU6, Hardtanh, Sigmoid, Tanh, MaxPool2d, AvgPool2d, Dropout, "
    "Flatten, sums and concatenations, cross-entropy, mean squared error"
)
_BEND = "ReLU or Hardtanh"
# By the first word of the op's name: the layer, and its replacement.
_INSTEAD = {
    "hardswish": ("Hardswish", _BEND), "silu": ("SiLU", _BEND), "gelu": ("GELU", _BEND), "mish": ("Mish", _BEND),
    "elu": ("ELU", _BEND), "celu": ("CELU", _BEND), "selu": ("SELU", _BEND), "leaky_relu": ("LeakyReLU", _BEND),
    "prelu": ("PReLU", _BEND), "_prelu": ("PReLU", _BEND), "rrelu": ("RReLU", _BEND), "softplus": ("Softplus", _BEND),
    "hardsigmoid": ("Hardsigmoid", "Sigmoid"), "log_sigmoid": ("LogSigmoid", "Sigmoid"),
    "native_layer_norm": ("LayerNorm", "BatchNorm2d or GroupNorm"),
    "_native_batch_norm": ("this batch norm", "BatchNorm2d"),
    "_adaptive_avg_pool2d": ("AdaptiveAvgPool2d", "AvgPool2d, or a mean over the places of the image"),
    "adaptive_max_pool2d": ("AdaptiveMaxPool2d", "MaxPool2d"), "_softmax": ("Softmax", "CrossEntropyLoss on its input"),
    "upsample": ("Upsample", "a convolution with stride, and images of one size"),
    "binary_cross_entropy": ("this loss", "CrossEntropyLoss or MSELoss"),
    "smooth_l1_loss": ("SmoothL1Loss", "MSELoss"), "huber_loss": ("HuberLoss", "MSELoss"),
    "abs": ("an absolute value in a loss", "MSELoss"), "pow": ("a power in a loss", "MSELoss"),
    "embedding": ("Embedding", "Linear over numbers"), "bmm": ("attention", "convolutions"),
    "_scaled_dot_product": ("attention", "convolutions"), "clamp": ("clamp", "Hardtanh"),
    "exp": ("an exponential", "Sigmoid or Tanh"), "threshold": ("Threshold", "ReLU"),
}  # fmt: skip


def instead(kind: str, layer: str = "") -> str:
    """kind: as "aten.hardswish.default". layer: the class of the module, "Hardswish"."""
    name = kind.split(".")[1] if "." in kind else kind
    words = name.rstrip("_")
    match = next((entry for key, entry in _INSTEAD.items() if words == key or words.startswith(f"{key}_")), None)
    if match is None:
        return (
            f"use another layer in place of {layer or f'what computes {words}'}; docs/firmware.md lists those that work"
        )
    named, replacement = match
    return f"use {replacement} in place of {layer or named}"
