"""Where each tensor of a step lies in the arena of firmware.

In:  a lowered graph and its plan. Out: `Arena`: an offset for each life of each storage that is not persistent.

    offset
      │  ┌── relu_1, over conv2d_1 ──┐             a result that overwrites an input extends its block
      │  │ conv2d_1 │ relu_1         │ d_dense_1
      └──────────────────────────────────────────  position in the schedule

Promised: two lives at the same time never overlap, and `live_bytes` is the plan's peak less its persistent bytes.
`height_bytes` is the size of the arena; it equals `live_bytes` unless the layout has gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from edgetrain.errors import InternalError, UserError
from edgetrain.firmware.lowering import WORD_BYTES
from edgetrain.graph.ir import Graph
from edgetrain.plan.layout import Block, Layout, check, lay_out
from edgetrain.plan.plan import Compute, Free, Plan

_SEARCH_S = 4.0  # for a layout without gaps, where greedy ones leave some


@dataclass(frozen=True)
class Life:
    """One life of a storage: created by the action at `start`, freed before the one at `end`. over: the storage that it
    overwrites."""

    storage: int
    start: int
    end: int
    offset: int
    over: int | None = None


@dataclass(frozen=True)
class Arena:
    lives: tuple[Life, ...]
    height_bytes: int
    live_bytes: int


def arena_of(graph: Graph, plan: Plan) -> Arena:
    chains = _lives(graph, plan)
    layout = _layout(tuple(_block(graph, chain) for chain in chains))
    lives = [
        Life(life.storage, life.start, life.end, offset, life.over)
        for chain, offset in zip(chains, layout.offsets, strict=True)
        for life in chain
    ]
    expected = plan.peak_bytes - plan.persistent_bytes
    if layout.live_peak_bytes != expected:
        raise InternalError(f"the arena holds {layout.live_peak_bytes} bytes at its peak, the plan says {expected}")
    lives.sort(key=lambda life: (life.start, life.storage))
    return Arena(tuple(lives), layout.height_bytes, layout.live_peak_bytes)


@lru_cache(maxsize=16)
def _layout(blocks: tuple[Block, ...]) -> Layout:
    """Once for the same blocks: a search with a time limit may find another layout the next time, and the arena that
    `export` writes must be the one that `fit` judged."""
    layout = lay_out(blocks, alignment=WORD_BYTES, time_limit_s=_SEARCH_S)
    check(blocks, layout, alignment=WORD_BYTES)
    return layout


def _block(graph: Graph, chain: list[Life]) -> Block:
    return Block(graph.storages[chain[0].storage].n_bytes, chain[0].start, chain[-1].end)


def _lives(graph: Graph, plan: Plan) -> list[list[Life]]:
    """Lives in chains: each life but the first overwrites the one before it."""
    chains: list[list[Life]] = []
    now: dict[int, int] = {}  # storage → its chain
    for at, action in enumerate(plan.schedule):
        if isinstance(action, Free):
            _end(chains[now.pop(action.storage)], at)
            continue
        if not isinstance(action, Compute):
            raise UserError(
                "this plan pages tensors to storage, which firmware cannot", next_step="plan with page=False"
            )
        for position, storage in enumerate(graph.new_storages[action.op]):
            life = Life(storage, at, len(plan.schedule), 0)
            if position == 0 and action.into is not None:
                chain = now.pop(action.into)
                _end(chains[chain], at)
                chains[chain].append(Life(storage, at, len(plan.schedule), 0, over=action.into))
                now[storage] = chain
                continue
            now[storage] = len(chains)
            chains.append([life])
    return chains


def _end(chain: list[Life], at: int) -> None:
    last = chain[-1]
    chain[-1] = Life(last.storage, last.start, at, last.offset, last.over)
