"""Running an op a second time in the same step: which ops can, and how.

The results are bitwise those of the first time, and nothing else changes: running statistics are not updated twice,
random numbers are drawn from where they were drawn the first time.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from edgetrain.graph.ir import Op
from edgetrain.ops.call import kernel_of, resolve
from edgetrain.ops.entry import entry_of


def replay(op: Op) -> Op | None:
    """The op to run the second time, or None where a second time cannot be the same as the first.

    One that draws random numbers stays `random`: whoever runs it again gives it the generator as it was (`generator`).
    """
    if op.view:
        return op
    entry = entry_of(op.kind)
    if op.phase != "forward" or not entry.reruns or (op.random and not _takes_generator(op)):
        return None
    if not op.writes:
        return op
    state = entry.state
    if state is None or not state.changes(op.args) or len(op.writes) != len(state.given(op.args)):
        return None
    args = tuple(None if position in state.arguments else value for position, value in enumerate(op.args))
    return replace(op, args=args, writes=())


def _takes_generator(op: Op) -> bool:
    kernel = kernel_of(op.kind)
    if kernel is None or kernel.run is not None:
        return False  # our own draw from no generator of torch's
    return any(argument.name == "generator" for argument in resolve(op.kind)._schema.arguments)  # type: ignore[attr-defined]


def generator(device: str) -> torch.Generator:
    """A copy of the generator of a device as it is now."""
    if device == "cpu":
        return torch.default_generator.clone_state()
    return torch.cuda.default_generators[torch.device(device).index or 0].clone_state()
