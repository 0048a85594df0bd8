"""The arena allocator: what is asked for is written down, blocks lie where they are planned, none over a live one."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import signal
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from edgetrain.errors import InternalError
from edgetrain.native.arena import Program, recorded, served, trim
from tests.helpers.marks import needs_arena

pytestmark = needs_arena
ALIGNMENT = 64


def block(n_bytes: int) -> Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8)


@functools.cache
def base() -> int:
    """The address at which the arena begins."""
    gc.collect()
    with served(Program([640], [0])) as recording:
        first = block(640)
    assert recording.improvised == 0, "something of an earlier test lies there"
    return first.data_ptr()


@pytest.fixture(autouse=True)
def know_base() -> None:
    base()


def offsets(blocks: Sequence[Tensor]) -> list[int]:
    start = base()
    return [one.data_ptr() - start for one in blocks]


def held_after(events: Sequence[int]) -> tuple[int, int]:
    """The most and the last number of bytes held, played through by hand."""
    sizes = [event for event in events if event >= 0]
    held = most = 0
    for event in events:
        held += event if event >= 0 else -sizes[-1 - event]
        most = max(most, held)
    return most, held


# ---- written down ---------------------------------------------------------------------------------------------


def test_requests_and_returns_are_numbered_in_order() -> None:
    with recorded() as recording:
        a = block(100)
        b = block(200)
        del a
        c = block(300)
        del c, b
        d = block(400)
    assert recording.events == (100, 200, -1, 300, -3, -2, 400)
    assert (recording.most_bytes, recording.held_bytes) == (500, 400)
    assert held_after(recording.events) == (500, 400)
    assert (recording.improvised, recording.unused, recording.height_bytes) == (0, 0, 0)
    del d


def test_what_is_older_than_the_block_or_empty_is_not_written_down() -> None:
    old = block(1000)
    with recorded() as recording:
        del old
        empty = torch.empty(0)
        new = block(10)
    assert recording.events == (10,)
    with recorded() as recording:
        del new, empty
    assert recording.events == ()
    assert recording.held_bytes == 0


def test_a_block_returned_between_two_recordings_is_in_neither() -> None:
    with recorded():
        a = block(100)
    del a
    with recorded() as recording:
        b = block(100)  # perhaps at the same address
        del b
    assert recording.events == (100, -1)


def test_idle_requests_are_passed_on() -> None:
    start = base()
    outside = block(640)
    with recorded():
        passed_on = block(640)
    inside = [one for one in (outside, passed_on) if start <= one.data_ptr() < start + 10**9]
    assert inside == []


def test_the_block_ends_where_an_exception_leaves_it() -> None:
    with pytest.raises(RuntimeError, match="midway"), served(None) as recording:  # noqa: PT012
        a = block(128)
        raise RuntimeError("midway")
    assert recording.events == (128,)
    with recorded() as again:
        del a
    assert again.events == ()


def test_requests_of_tensors_that_torch_makes_itself() -> None:
    x = torch.ones(8, 8)
    with recorded() as recording:
        y = x + x
        y.resize_(16, 8)
        z = y.clone()
    assert recording.events == (256, 512, -1, 512)
    assert torch.equal(z[:8], torch.full((8, 8), 2.0))


# ---- served ---------------------------------------------------------------------------------------------------


def test_blocks_lie_at_their_planned_offsets() -> None:
    planned = [512, 0, 1024, 0]
    with served(Program([100, 200, 300, 200], planned)) as recording:
        a, b, c = block(100), block(200), block(300)
        del b
        d = block(200)
    assert offsets([a, c, d]) == [512, 1024, 0]
    assert (recording.improvised, recording.unused) == (0, 0)
    assert recording.height_bytes == 1024 + 320
    assert recording.most_bytes == 600


def test_a_request_that_is_not_in_the_program_gets_the_smallest_gap() -> None:
    with served(Program([64, 64, 64], [0, 256, 384])) as recording:
        blocks = [block(64) for _ in range(3)]
        small = block(60)  # fits between the second and the third
        large = block(150)  # between the first and the second
        larger = block(1000)  # above all
    assert offsets([small, large, larger]) == [320, 64, 448]
    assert recording.improvised == 3
    del blocks


def test_what_does_not_come_is_passed_over() -> None:
    with served(Program([64, 128, 192, 256], [0, 64, 192, 384])) as recording:
        a, b = block(64), block(256)
    assert offsets([a, b]) == [0, 384]
    assert (recording.improvised, recording.unused) == (0, 2)
    with served(Program([64] * 3, [0, 64, 128])) as recording:
        pass
    assert recording.unused == 3


def test_one_unforeseen_request_does_not_upset_the_rest() -> None:
    sizes = [64 * (n + 1) for n in range(10)]
    places = [100 * 64 * n for n in range(10)]
    with served(Program(sizes, places)) as recording:
        blocks = []
        for n, size in enumerate(sizes):
            if n == 4:
                blocks.append(block(1111))
            blocks.append(block(size))
    del blocks[4]
    assert recording.improvised == 1
    assert offsets(blocks) == places


def test_a_tensor_that_outlives_its_block_stays_whole() -> None:
    with served(Program([1000], [0])):
        old = block(1000).fill_(7)
    with served(Program([1000, 1000], [0, 4096])) as recording:
        new = [block(1000).fill_(1), block(1000).fill_(2)]
    assert recording.improvised == 1
    assert [int(one.unique()) for one in (old, *new)] == [7, 1, 2]
    # Its return is no event of the next block, and its place is free again.
    del new
    with served(Program([1000], [0])) as recording:
        del old
        new = [block(1000)]
    assert recording.events == (1000,)
    assert recording.improvised == 0
    assert offsets(new) == [0]


def test_other_threads_are_passed_on() -> None:
    found: list[Tensor] = []
    start = base()
    with served(Program([640, 640], [0, 640])) as recording:
        thread = threading.Thread(target=lambda: found.append(block(640)))
        thread.start()
        thread.join()
        mine = block(640)
    assert recording.events == (640,)
    assert mine.data_ptr() == start
    assert not start <= found[0].data_ptr() < start + 10**9


def test_a_return_from_another_thread_is_written_down() -> None:
    with served(None) as recording:
        blocks = [block(640)]
        thread = threading.Thread(target=blocks.clear)
        thread.start()
        thread.join()
        again = block(640)
    assert recording.events == (640, -1, 640)
    assert recording.most_bytes == 640
    assert offsets([again]) == [0]


def test_a_second_block_inside_the_first_is_refused() -> None:
    with recorded() as recording:
        a = block(100)
        for inner in (recorded(), served(None)):
            with pytest.raises(InternalError, match="a step began within another"), inner:
                pass
        b = block(200)  # the first goes on
    assert recording.events[0] == 100
    assert 200 in recording.events
    del a, b


def test_blocks_of_two_threads_take_turns() -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(50):
            with served(None):
                inside.append(1)
                most.append(len(inside))
                a = block(100)
                inside.pop()
            del a

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 150


def test_a_copy_of_the_process_can_allocate_while_others_do() -> None:
    """A fork in the middle of another thread's request leaves no lock behind."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with served(None):
                for n in range(1, 100):
                    block(n)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            pid = os.fork()
            if pid == 0:
                with contextlib.suppress(BaseException), served(None):
                    block(100)
                    os._exit(7)
                os._exit(1)
            end = time.monotonic() + 20
            while (status := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
                time.sleep(0.001)
            if status[0] == 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                pytest.fail("the copy waits for a lock")
            assert os.waitstatus_to_exitcode(status[1]) == 7
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_trim_leaves_live_blocks_alone() -> None:
    with served(Program([100_000, 300_000], [0, 1_000_000])):
        low, high = block(100_000).fill_(1), block(300_000).fill_(2)
    trim(0)
    assert int(low.unique()) == 1
    assert int(high.unique()) == 2
    del high
    trim(0)
    assert int(low.unique()) == 1


def test_trim_gives_pages_back() -> None:
    def resident() -> int:
        fields = Path("/proc/self/statm").read_text().split()
        return int(fields[1]) * 4096

    with served(None):
        large = block(64_000_000).fill_(1)
    before = resident()
    del large
    trim(0)
    assert resident() < before - 50_000_000


def test_numbers_stay_right_through_copies_views_and_files() -> None:
    torch.manual_seed(0)
    right = torch.randn(100, 30)
    with served(None):
        x = right.clone()
        view = x[10:20].t()
        file = io.BytesIO()
        torch.save({"x": x, "view": view}, file)
        shared = x.numpy()
    copy = x.clone()
    with served(None):
        noise = torch.randn(100, 30)
        noise.fill_(0)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["x"], right)
    assert torch.equal(loaded["view"], right[10:20].t())
    assert torch.equal(copy, right)
    del x
    gc.collect()
    with served(None):
        torch.zeros(100, 30)
    assert torch.equal(torch.from_numpy(shared), right)
    assert torch.equal(view, right[10:20].t())


def test_results_of_kernels_are_those_of_plain_pytorch() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 3, 12, 12), torch.randn(5, 3, 3, 3)
    right = torch.conv2d(x, w).relu().sum((2, 3)).softmax(1)
    for _ in range(3):
        with served(None):
            found = torch.conv2d(x, w).relu().sum((2, 3)).softmax(1)
        assert torch.equal(found, right)


def test_a_program_of_unequal_lengths_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Program([1, 2], [0])
    assert len(Program([], [])) == 0
    assert Program([64, 10], [0, 128]).height_bytes == 138


@pytest.mark.parametrize("offset", [-64, -1, -(2**40), 2**63 - 1])
def test_an_offset_that_is_no_place_in_an_arena_is_refused(offset: int) -> None:
    """-64 lies before the arena, over memory of somebody else; the last one and a size are no number of bytes."""
    with pytest.raises((InternalError, ValueError)):
        Program([640], [offset])


@pytest.mark.parametrize("offset", [2**45, 2**62])
def test_an_offset_above_the_arena_is_not_followed(offset: int) -> None:
    with served(Program([640], [offset])) as recording:
        one = block(640).fill_(3)
    assert not base() <= one.data_ptr() < base() + offset
    assert int(one.unique()) == 3
    assert recording.events == (640,)


# ---- any program, any sequence --------------------------------------------------------------------------------

SIZES = (1, 63, 64, 65, 100, 128, 500, 640, 4096)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Blocks of code, each a list of requests (sizes) and returns (-1 - which of the live ones), and a program that has
    something to do with them, or nothing at all."""
    event = st.one_of(st.sampled_from(SIZES), st.integers(-40, -1))
    steps = draw(st.lists(st.lists(event, max_size=30), min_size=1, max_size=3))
    wanted = [size for size in steps[0] if size > 0]
    if draw(st.booleans()):
        wanted = draw(st.lists(st.sampled_from(SIZES), max_size=30))
    place = st.one_of(st.integers(0, 20).map(lambda n: n * ALIGNMENT), st.integers(0, 3000), st.just(2**45))
    return steps, [(size, draw(place)) for size in wanted]


@settings(max_examples=120, deadline=None)
@given(scene=scenes(), keep=st.booleans())
def test_no_block_is_ever_placed_over_a_live_one(
    scene: tuple[list[list[int]], list[tuple[int, int]]], keep: bool
) -> None:
    """Every live tensor keeps its own pattern, those of earlier blocks too, whatever the program says."""
    steps, entries = scene
    program = Program([size for size, _ in entries], [offset for _, offset in entries])
    live: list[tuple[Tensor, int]] = []
    pattern = 0
    for step in steps:
        if not keep:
            live.clear()
        n_before = len(live)
        requests: list[int] = []
        mine: list[int] = [-1] * n_before  # the number of each live tensor's request in this block
        expected: list[int] = []
        with served(program) as recording:
            for event in step:
                if event > 0:
                    pattern = (pattern + 1) % 251
                    live.append((block(event).fill_(pattern), pattern))
                    mine.append(len(requests))
                    requests.append(event)
                    expected.append(event)
                elif live:
                    which = (-1 - event) % len(live)
                    number = mine.pop(which)
                    del live[which]
                    if number >= 0:
                        expected.append(-1 - number)
        assert recording.events == tuple(expected)
        assert (recording.most_bytes, recording.held_bytes) == held_after(expected)
        spans = sorted((one.data_ptr(), one.data_ptr() + one.numel()) for one, _ in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        for one, value in live:
            assert bool((one == value).all())
