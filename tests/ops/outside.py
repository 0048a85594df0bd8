"""Three ops that the package knows nothing of, as somebody else would write them: how they exist in PyTorch, what
edgetrain is told of them, and their C kernels.

    soft         y = x / (1 + |x|), element by element; the result may lie over the argument
    keep_some    keeps each number with some probability: draws random numbers
    watched      y = x / 2, and notes in place the largest |x| that it has seen
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from edgetrain.graph.ir import Op
from edgetrain.ops import (
    IN_PLACE,
    CKernel,
    CSource,
    Entry,
    Scene,
    State,
    called,
    each,
    elementwise_call,
    number,
    register,
    unregister,
)

# ---- in PyTorch

_LIBRARY = torch.library.Library("outside", "DEF")


def _define(schema: str, kernel: Any, fake: Any, *, draws: bool = False) -> None:
    name = _LIBRARY.define(schema, tags=(torch.Tag.nondeterministic_seeded,) if draws else ())
    _LIBRARY.impl(name, kernel, "CPU")
    torch.library.register_fake(f"outside::{name}", fake, lib=_LIBRARY)


def _like_first(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(x)


def _soft_(x: Tensor) -> Tensor:
    return x.div_(x.abs().add_(1))


def _soft_backward_(dy: Tensor, x: Tensor) -> Tensor:
    return dy.div_(x.abs().add_(1).square_())


def _keep_some(x: Tensor, keep: float, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    mask = torch.empty_like(x).bernoulli_(keep, generator=generator)
    return x * mask * (1 / keep), mask


def _watched(x: Tensor, largest: Tensor | None) -> Tensor:
    if largest is not None:
        largest.copy_(torch.maximum(largest, x.abs().max()))
    return x * 0.5


_define("soft(Tensor x) -> Tensor", lambda x: _soft_(x.clone()), _like_first)
_define("soft_(Tensor(a!) x) -> Tensor(a!)", _soft_, lambda x: x)
_define("soft_backward(Tensor dy, Tensor x) -> Tensor", lambda dy, x: _soft_backward_(dy.clone(), x), _like_first)
_define("soft_backward_(Tensor(a!) dy, Tensor x) -> Tensor(a!)", _soft_backward_, lambda dy, x: dy)
_define(
    "keep_some(Tensor x, float keep, *, Generator? generator=None) -> (Tensor, Tensor)", _keep_some,
    lambda x, keep, generator=None: (torch.empty_like(x), torch.empty_like(x)), draws=True,
)  # fmt: skip
_define(
    "keep_some_backward(Tensor dy, Tensor mask, float keep) -> Tensor", lambda dy, mask, keep: dy * mask * (1 / keep),
    _like_first,
)  # fmt: skip
_define(
    "keep_some_backward_(Tensor(a!) dy, Tensor mask, float keep) -> Tensor(a!)",
    lambda dy, mask, keep: dy.mul_(mask).mul_(1 / keep), lambda dy, mask, keep: dy,
)  # fmt: skip
_define("watched(Tensor x, Tensor(a!)? largest) -> Tensor", _watched, _like_first)
_define("watched_backward(Tensor dy) -> Tensor", lambda dy: dy * 0.5, _like_first)
_define("watched_backward_(Tensor(a!) dy) -> Tensor(a!)", lambda dy: dy.mul_(0.5), lambda dy: dy)

_ops: Any = torch.ops.outside


class _Soft(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.save_for_backward(x)
        return _ops.soft(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _ops.soft_backward(dy, *ctx.saved_tensors)


class _KeepSome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: float) -> Any:
        y, mask = _ops.keep_some(x, keep)
        ctx.save_for_backward(mask)
        ctx.keep = keep
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _ops.keep_some_backward(dy, *ctx.saved_tensors, ctx.keep), None


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: Tensor) -> Any:
        return _ops.watched(x, largest)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return _ops.watched_backward(dy), None


soft: Any = _Soft.apply
keep_some: Any = _KeepSome.apply
watched: Any = _Watched.apply


class Net(nn.Module):
    """All three of them, several times, between dense layers."""

    def __init__(self, keep: float = 0.75, features: int = 8, classes: int = 3, hidden: int = 16) -> None:
        super().__init__()
        self.keep = keep
        self.first, self.last = nn.Linear(features, hidden), nn.Linear(hidden, classes)
        self.middle = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(3))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        a = soft(self.first(x.flatten(1)))
        for layer in self.middle:
            a = keep_some(a, self.keep)
            a = watched(soft(layer(a)), self.largest)
        result: Tensor = self.last(soft(a))
        return result


# ---- what edgetrain is told

SOURCES = {
    "soft.h": """#ifndef SOFT_H
#define SOFT_H

/* y = x / (1 + |x|). The result may lie over the first argument. */
void outside_soft(float *y, const float *x, int n);
void outside_soft_backward(float *dx, const float *dy, const float *x, int n);

#endif
""",
    "soft.c": """#include "soft.h"

static float size(float x)
{
    return x < 0.0f ? -x : x;
}

void outside_soft(float *y, const float *x, int n)
{
    for (int i = 0; i < n; i++) {
        y[i] = x[i] / (1.0f + size(x[i]));
    }
}

void outside_soft_backward(float *dx, const float *dy, const float *x, int n)
{
    for (int i = 0; i < n; i++) {
        const float below = 1.0f + size(x[i]);
        dx[i] = dy[i] / (below * below);
    }
}
""",
    "keep_some.h": """#ifndef KEEP_SOME_H
#define KEEP_SOME_H

#include <stdint.h>

/* Numbers of x, each kept with a probability, over it. The same seed, step and stream keep the same ones. */
void outside_keep_some(float *y, float *mask, const float *x, int n, float keep, uint32_t seed, uint32_t step,
                       uint32_t stream);
void outside_keep_some_backward(float *dx, const float *dy, const float *mask, int n, float keep);

#endif
""",
    "keep_some.c": """#include "keep_some.h"

static uint32_t mix(uint32_t h)
{
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    return h ^ (h >> 16);
}

void outside_keep_some(float *y, float *mask, const float *x, int n, float keep, uint32_t seed, uint32_t step,
                       uint32_t stream)
{
    const uint32_t first = mix(mix(seed ^ stream) + step);
    const uint32_t limit = (uint32_t)(keep * 16777216.0f);
    for (int i = 0; i < n; i++) {
        mask[i] = (mix(first + (uint32_t)i * 0x9e3779b9u) >> 8) < limit ? 1.0f : 0.0f;
        y[i] = x[i] * mask[i] / keep;
    }
}

void outside_keep_some_backward(float *dx, const float *dy, const float *mask, int n, float keep)
{
    for (int i = 0; i < n; i++) {
        dx[i] = dy[i] * mask[i] / keep;
    }
}
""",
    "watched.h": """#ifndef WATCHED_H
#define WATCHED_H

/* y = x / 2; largest: the largest |x| so far, or NULL where it is not to change. */
void outside_watched(float *y, float *largest, const float *x, int n);
void outside_watched_backward(float *dx, const float *dy, int n);

#endif
""",
    "watched.c": """#include "watched.h"

#include <stddef.h>

void outside_watched(float *y, float *largest, const float *x, int n)
{
    for (int i = 0; i < n; i++) {
        const float size = x[i] < 0.0f ? -x[i] : x[i];
        if (largest != NULL && size > *largest) {
            *largest = size;
        }
        y[i] = 0.5f * x[i];
    }
}

void outside_watched_backward(float *dx, const float *dy, int n)
{
    for (int i = 0; i < n; i++) {
        dx[i] = 0.5f * dy[i];
    }
}
""",
}


def _keep_some_call(s: Scene, op: Op) -> list[str]:
    x, keep = op.args
    drawn = ("model_seed", "step_number", str(s.stream(op)))
    return called("outside_keep_some", [*s.results(op), s.pointer(x), s.elements(op.reads[0]), number(keep), *drawn])


def _watched_call(s: Scene, op: Op) -> list[str]:
    x, largest = op.args
    return called("outside_watched", [*s.results(op), s.pointer(largest), s.pointer(x), s.elements(op.reads[0])])


def entries(folder: Path) -> dict[str, Entry]:
    """folder: of the C sources."""

    def c(file: str, call: Any = elementwise_call) -> CKernel:
        return CKernel(CSource(file, folder=folder), call)

    bend = Entry(overwrites=IN_PLACE, raises="never", category="activation", c=c("soft"))
    mask = Entry(overwrites=IN_PLACE, raises="never", work=each(2), category="activation", c=c("keep_some"))
    half = Entry(overwrites=IN_PLACE, raises="never", category="elementwise", c=c("watched"))
    return {
        "outside.soft": replace(bend, work=each(3)),
        "outside.soft_backward": replace(bend, work=each(4)),
        "outside.keep_some": replace(mask, work=each(10), c=c("keep_some", _keep_some_call)),
        "outside.keep_some_backward": mask,
        "outside.watched": replace(half, work=each(2), state=State((1,)), c=c("watched", _watched_call)),
        "outside.watched_backward": half,
    }


@contextmanager
def known(folder: Path) -> Iterator[None]:
    """Within the block edgetrain knows the ops. folder: where their C sources are written."""
    folder.mkdir(exist_ok=True)
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    ours = entries(folder)
    for kind, entry in ours.items():
        register(entry, kind)
    try:
        yield
    finally:
        unregister(*ours)
