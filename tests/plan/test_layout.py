"""Layouts of the arena: legal, aligned, never below the live peak, and the lowest there is where that can be known."""

from __future__ import annotations

import itertools
import random
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import InternalError, UserError
from edgetrain.plan.layout import FITS, ORDERS, Block, Fit, Layout, Order, check, lay_out, live_peak


def block(n_bytes: int, start: int, length: int) -> Block:
    return Block(n_bytes, start, start + length)


any_blocks = st.lists(st.builds(block, st.integers(0, 1000), st.integers(-5, 30), st.integers(1, 20)), max_size=40)
few_blocks = st.lists(
    st.builds(block, st.integers(1, 12), st.integers(0, 7), st.integers(1, 5)), min_size=1, max_size=6
)
alignments = st.sampled_from((1, 8, 64, 100))


def training(n_layers: int, seed: int, *, dropped: float = 0.0) -> list[Block]:
    """Lifetimes as a training step has them.

        act 0   ───────────────────────      activations die in reverse order
        act 1     ───────────────────
        act 2       ─────────────            gradients of activations live for two layers,
        grad              ── ── ──           those of parameters until the update

    A share `dropped` of the activations is given up after the forward pass and made again for the backward pass.
    """
    draw = random.Random(seed)
    end = 4 * n_layers
    blocks = []
    for layer in range(n_layers):
        n_bytes = draw.choice((1, 2, 4, 6)) * 2 ** draw.randint(10, 20) // (1 + layer // 8)
        made, read = 2 * layer, end - 2 * layer
        if draw.random() < dropped and read - made > 8:
            blocks += [Block(n_bytes, made, made + 4), Block(n_bytes, read - 3, read)]
        else:
            blocks.append(Block(n_bytes, made, read))
        blocks.append(Block(n_bytes, read - 2, read + 2))  # the gradient of the activation
        blocks.append(Block(draw.randint(1, 2**16), made, read))  # statistics of a norm
        blocks.append(Block(draw.randint(1, 2**19), read - 1, draw.choice((read + 1, end + 2))))  # of a parameter
        blocks.append(Block(draw.randint(1, 2**18), made, made + 1))  # scratch
    return blocks


def lowest(blocks: list[Block]) -> int:
    """The lowest height that there is, by trying every order.

    That is exact: take a lowest layout and its blocks in order of offset. Placed at the lowest free place in that
    order, none lies higher than it did, for all that stand in its way ended below it already.
    """

    def height(order: tuple[Block, ...]) -> int:
        placed: list[tuple[int, Block]] = []
        for new in order:
            beside = sorted((o, o + b.n_bytes) for o, b in placed if b.start < new.end and new.start < b.end)
            offset = 0
            for low, high in beside:
                if offset + new.n_bytes <= low:
                    break
                offset = max(offset, high)
            placed.append((offset, new))
        return max(offset + b.n_bytes for offset, b in placed)

    return min(height(order) for order in itertools.permutations(blocks))


@settings(deadline=None)
@given(any_blocks, alignments)
def test_every_layout_is_legal(blocks: list[Block], alignment: int) -> None:
    layout = lay_out(blocks, alignment=alignment)
    check(blocks, layout, alignment=alignment)
    rounded = [-(-b.n_bytes // alignment) * alignment for b in blocks]
    assert layout.live_peak_bytes == live_peak(blocks, alignment=alignment)
    assert layout.live_peak_bytes <= layout.height_bytes <= sum(rounded)
    assert all(offset % alignment == 0 for offset in layout.offsets)


@settings(deadline=None)
@given(any_blocks)
def test_the_live_peak_is_the_most_alive_at_any_time(blocks: list[Block]) -> None:
    by_hand = [sum(b.n_bytes for b in blocks if b.start <= t < b.end) for t in range(-5, 60)]
    assert live_peak(blocks, alignment=1) == max(by_hand)


@settings(deadline=None)
@given(any_blocks, st.sampled_from(ORDERS), st.sampled_from(FITS), st.booleans())
def test_every_technique_alone_is_legal(blocks: list[Block], order: Order, fit: Fit, split: bool) -> None:
    layout = lay_out(blocks, orders=(order,), fits=(fit,), improve_placements=0, split=split)
    check(blocks, layout)
    assert layout.how in (f"greedy by {order}, {fit} fit", "nothing to place")
    assert lay_out(blocks).height_bytes <= layout.height_bytes or not split


@settings(deadline=None)
@given(any_blocks)
def test_the_same_blocks_get_the_same_layout(blocks: list[Block]) -> None:
    assert lay_out(blocks) == lay_out(list(blocks))


@settings(max_examples=40, deadline=None)
@given(few_blocks)
def test_with_time_it_is_the_lowest_of_all(blocks: list[Block]) -> None:
    best = lowest(blocks)
    assert lay_out(blocks, alignment=1).height_bytes >= best
    layout = lay_out(blocks, alignment=1, time_limit_s=20.0)
    check(blocks, layout, alignment=1)
    assert layout.height_bytes == best


# Greedy lays these out 11 units high in every order; 10 are enough.
MISSED = [(1, 5, 9), (4, 6, 7), (4, 2, 4), (3, 3, 7), (2, 6, 8), (3, 3, 6)]


@pytest.mark.parametrize("split", [True, False])
def test_the_solver_finds_what_greedy_misses(split: bool) -> None:
    blocks = [Block(64 * n, start, end) for n, start, end in MISSED]
    assert lay_out(blocks, improve_placements=0, split=split).height_bytes == 11 * 64
    layout = lay_out(blocks, improve_placements=0, split=split, time_limit_s=20.0)
    check(blocks, layout)
    assert (layout.height_bytes, layout.how) == (10 * 64, "CP-SAT")


@pytest.mark.parametrize(("core", "how"), [(True, "CP-SAT on the large blocks"), (False, "CP-SAT")])
def test_small_blocks_go_where_the_large_ones_leave_room(core: bool, how: str) -> None:
    blocks = [Block(64 * 10_000 * n, start, end) for n, start, end in MISSED] + [Block(64, t, t + 1) for t in (2, 7, 8)]
    layout = lay_out(blocks, improve_placements=0, core=core, time_limit_s=20.0)
    check(blocks, layout)
    assert (layout.height_bytes, layout.how) == (10 * 64 * 10_000, how)


def test_where_every_block_is_small_none_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["edgetrain.plan.layout"], "SMALL", 2.0)
    layout = lay_out([Block(64 * n, start, end) for n, start, end in MISSED], improve_placements=0, time_limit_s=20.0)
    assert (layout.height_bytes, layout.how) == (10 * 64, "CP-SAT")


def test_large_numbers_of_bytes_and_of_time() -> None:
    blocks = [Block(n * 10**14, start * 10**14, end * 10**14) for n, start, end in MISSED]
    layout = lay_out(blocks, alignment=1, time_limit_s=5.0)
    check(blocks, layout, alignment=1)
    assert layout.height_bytes <= 11 * 10**14


def test_a_search_that_time_ends_is_legal_and_no_worse() -> None:
    blocks = training(60, 3)
    layout = lay_out(blocks, time_limit_s=1.5)
    check(blocks, layout)
    assert layout.height_bytes <= lay_out(blocks).height_bytes


def test_a_search_without_the_solver_installed_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    monkeypatch.delitem(sys.modules, "highspy", raising=False)  # so that the copy of this process tries to import it
    blocks = [Block(64 * n, start, end) for n, start, end in MISSED]
    with pytest.raises(UserError, match=r"pip install .edgetrain\[layout\]"):
        lay_out(blocks, improve_placements=0, time_limit_s=1.0)
    # It is not even looked for where there is no gap to close.
    assert lay_out(blocks[:3], time_limit_s=1.0).how == "greedy by size, first fit"


def test_nothing_to_place() -> None:
    assert lay_out([]) == Layout((), 0, 0, "nothing to place")
    assert lay_out([Block(0, 0, 1), Block(0, 0, 2)]) == Layout((0, 0), 0, 0, "nothing to place")
    assert live_peak([]) == 0
    check([], lay_out([]))


def test_lives_that_only_touch_share_a_place() -> None:
    assert lay_out([Block(64, 0, 3), Block(64, 3, 5)]).offsets == (0, 0)
    assert lay_out([Block(64, 0, 4), Block(64, 3, 5)]).height_bytes == 128


def test_a_block_is_alive_for_some_time_and_has_no_negative_size() -> None:
    for wrong in ((1, 3, 3), (1, 3, 2), (-1, 0, 1)):
        with pytest.raises(InternalError):
            Block(*wrong)


def test_senseless_arguments_are_refused() -> None:
    for wrong in ({"alignment": 0}, {"orders": ()}, {"fits": ()}):
        with pytest.raises(UserError, match="needs an alignment, an order and a fit"):
            lay_out([Block(1, 0, 1)], **wrong)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dropped", [0.0, 0.6])
def test_training_steps_lie_within_two_percent_of_the_live_peak(seed: int, dropped: float) -> None:
    """These are harder than captured steps, whose sizes repeat: hence more placements than usual."""
    blocks = training(60, seed, dropped=dropped)
    layout = lay_out(blocks, improve_placements=40_000)
    check(blocks, layout)
    assert layout.height_bytes <= 1.02 * layout.live_peak_bytes


def test_a_large_step_is_laid_out_in_time() -> None:
    blocks = training(250, 0, dropped=0.5)
    assert len(blocks) > 1200
    start_s = time.process_time()
    lay_out(blocks, orders=("size",), fits=("first",), improve_placements=0)
    quick_s = time.process_time()
    lay_out(blocks)
    all_s = time.process_time()
    # About 25 ms and 0.3 s on a slow core; the rest is room for a busy machine.
    assert quick_s - start_s < 0.25
    assert all_s - quick_s < 2.5


def test_a_capacity_that_is_met_ends_the_search() -> None:
    blocks = training(30, 1, dropped=0.6)
    layout = lay_out(blocks, capacity_bytes=sum(b.n_bytes + 64 for b in blocks), time_limit_s=60.0)
    assert layout.how == "greedy by size, first fit"


def test_a_capacity_that_cannot_be_met_is_shown_by_the_height() -> None:
    blocks = [Block(64, 0, 2), Block(64, 0, 2)]
    assert lay_out(blocks, capacity_bytes=64).height_bytes == 128


def test_parts_are_laid_out_by_themselves() -> None:
    """A step that repeats: the second part need not be lower than the first, so both are as high."""
    one = training(20, 3, dropped=0.6)
    later = [Block(b.n_bytes, b.start + 1000, b.end + 1000) for b in one]
    twice = lay_out(one + later)
    check(one + later, twice)
    assert twice.height_bytes == lay_out(one).height_bytes


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"offsets": (0, 0, 128)}, "is taken"),
        ({"offsets": (0, 64)}, "2 offsets for 3 blocks"),
        ({"offsets": (0, 63, 128)}, "alignment 64"),
        ({"offsets": (0, -64, 128)}, "lies at -64"),
        ({"height_bytes": 128}, "height, live peak"),
        ({"height_bytes": 256}, "height, live peak"),
        ({"live_peak_bytes": 128}, "height, live peak"),
    ],
)
def test_the_check_refuses_broken_layouts(change: dict[str, object], what: str) -> None:
    blocks = [Block(64, 0, 4), Block(10, 1, 5), Block(64, 2, 3)]
    good = Layout((0, 64, 128), 192, 192, "by hand")
    check(blocks, good)
    with pytest.raises(InternalError, match=what):
        check(blocks, replace(good, **change))  # type: ignore[arg-type]


@settings(deadline=None)
@given(any_blocks, st.data())
def test_the_check_agrees_with_comparing_all_pairs(blocks: list[Block], data: st.DataObject) -> None:
    """Any offsets at all: `check` refuses them exactly if two blocks share a byte at some time."""
    offsets = tuple(data.draw(st.integers(0, 40)) * 64 for _ in blocks)
    tops = [o + -(-b.n_bytes // 64) * 64 for o, b in zip(offsets, blocks, strict=True) if b.n_bytes]
    layout = Layout(offsets, max(tops, default=0), live_peak(blocks), "by chance")
    clash = any(
        a.n_bytes and b.n_bytes and a.start < b.end and b.start < a.end and x < y + b.n_bytes and y < x + a.n_bytes
        for (a, x), (b, y) in itertools.combinations(zip(blocks, offsets, strict=True), 2)
    )
    if clash:
        with pytest.raises(InternalError, match="is taken"):
            check(blocks, layout)
    else:
        check(blocks, layout)
