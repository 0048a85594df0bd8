"""A step is captured twice: what moves by itself between the two would be frozen in the graph, and is refused.

In:  the work of a capture, and what their code may have changed (`Before`).
Out: what ran. A UserError where the two recordings differ, or where code did what a captured step does not do again:
     seed a generator, draw numbers elsewhere than from torch's default generator, go on with an iterator, read a
     clock, call backward().

Each capture starts from what the one before left behind, so that a counter in `forward` shows. Where something still
moves in the second, more follow: a state that goes through four phases is seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np

from edgetrain.errors import UserError
from edgetrain.graph.capture.counters import shown_as_they_are, unwatch_values, watch_values
from edgetrain.graph.capture.files import stamp
from edgetrain.graph.capture.made import KeptTensors
from edgetrain.graph.capture.observe import Observed
from edgetrain.graph.capture.refusals import exchanged
from edgetrain.graph.capture.restore import Before
from edgetrain.graph.capture.settings import settings
from edgetrain.graph.capture.signature import Signature, first_difference
from edgetrain.native.signals import raised_by_handler

MOST_CAPTURES = 12  # where something moves each time; from the fourth on, while they took
MOST_S = 0.5  # less than this
_STATE = "keep what changes from step to step in a buffer that is changed in place, or pass it in the batch"


class Work(Protocol):
    seen: Observed

    @property
    def signature(self) -> Signature: ...

    def expect(self, like: Signature) -> None: ...

    @property
    def kept(self) -> KeptTensors: ...


W = TypeVar("W", bound=Work)


def record_twice(make: Callable[[], W], record: Callable[[W], None], before: Sequence[Before], times: int) -> W:
    """Record a step again and again and compare: `times`, and a few times more where something moves each time. What
    has moved is for the caller to restore. Returns the first recording, with all that was seen."""
    with _nothing_set(), _no_other_randomness() as seed_anew:

        def record_seeded(work: W) -> None:
            seed_anew()
            record(work)

        first = make()
        record_seeded(first)
        if first.kept:
            first.kept.realise(before)
            first = make()
            record_seeded(first)
        refuse_calls(first.seen)  # before what follows from it
        for state in before:
            _refuse_settings(state)
            _refuse_exchanged(state)
        unsteady = _repeat(first, make, record_seeded, before) if times > 1 else None
    refuse_calls(first.seen)
    for state in before:
        _refuse_moves(state, first.seen)
    _refuse_files(first.seen)
    if unsteady is not None:
        raise unsteady
    return first


def _repeat(first: W, make: Callable[[], W], record: Callable[[W], None], before: Sequence[Before]) -> UserError | None:
    """Each capture starts from what the one before left behind. Returns what is wrong with it, if anything."""
    begin_s = time.perf_counter()
    was = _moved(before)
    blind: set[str] = set()  # where code takes nothing but a number itself

    def takes_another(path: str) -> bool:
        return path not in blind

    for number in range(1, MOST_CAPTURES):
        used: set[str] = set()
        watched = _watch(before, used, takes_another)
        failed = _again(first, make, record, before)
        if failed is not None and watched:
            used.clear()
            failed = _again(first, make, record, before)
            if failed is None:
                blind.update(_refused(watched, first, make, record, before, used))
        if failed is not None:
            return failed
        now = _moved(before)
        moving = [path for path in now if now[path] != was.get(path)]
        if decides_by := _deciding(moving, used, before, was, blind):
            return decides_by
        if not moving or (number > 2 and time.perf_counter() - begin_s > MOST_S):
            break
        was = now
    return None


def _watch(before: Sequence[Before], used: set[str], at: Callable[[str], bool]) -> list[str]:
    return watch_values((place for state in before for place in state.places()), used, at)


def _refused(
    paths: Sequence[str],
    first: W,
    make: Callable[[], W],
    record: Callable[[W], None],
    before: Sequence[Before],
    used: set[str],
) -> set[str]:
    """Those of the paths where code refuses what stands in for a number, or does something else with it; the others
    are watched."""
    blind: set[str] = set()
    groups = [[*dict.fromkeys(paths)]]
    while groups:
        group = groups.pop()
        noted: set[str] = set()
        _watch(before, noted, frozenset(group).__contains__)
        if _again(first, make, record, before) is None:
            used |= noted
        elif len(group) == 1:
            blind.update(group)
        else:
            groups += [group[: len(group) // 2], group[len(group) // 2 :]]
    return blind


def _again(first: W, make: Callable[[], W], record: Callable[[W], None], before: Sequence[Before]) -> UserError | None:
    """One more. Returns what is wrong with it, if anything."""
    for state in before:
        state.clear_caches()
    again = make()
    again.expect(first.signature)
    try:
        with shown_as_they_are():
            record(again)
        for state in before:
            _refuse_exchanged(state)
    except UserError as error:
        if raised_by_handler(error):
            raise
        _unwatch(before)
        wrong = _once_only(error, before)
        wrong.__cause__ = error.__cause__
        return wrong
    finally:
        _unwatch(before)
    first.seen.merge(again.seen)
    for state in before:
        state.clear_caches()
    difference = first_difference(first.signature, again.signature)
    return _unsteady(difference, before) if difference else None


def _unwatch(before: Sequence[Before]) -> None:
    for state in before:
        unwatch_values(state.places())


def _moved(before: Sequence[Before]) -> dict[str, str]:
    return {path: text for state in before for path, text in state.fingerprint().items()}


def _deciding(
    moving: Sequence[str], used: set[str], before: Sequence[Before], was: Mapping[str, str], blind: set[str]
) -> UserError | None:
    """By what moves each time; what moved once (`self.built = True`) may well be used, and what was appended is new."""
    blind = {path for state in before for path in state.unseen()} | {"os.environ"} | blind
    within = {path[:at] for path in used for at in range(len(path) + 1) if path[at : at + 1] in ("", ".")}
    decides_by = [path for path in moving if path in within or (path in blind and path in was)]
    if not decides_by:
        return None
    return UserError(
        f"the model or the loss decides by {decides_by[0]}, which changes each time it runs; a captured step would not "
        "change it",
        next_step=_STATE,
    )


def _refuse_files(seen: Observed) -> None:
    """A file that says another thing each time, since the step writes it."""
    for file, then in seen.files.items():
        if stamp(file) != then:
            raise UserError(
                f"the model or the loss reads {file} and writes it, which a captured step does not do again",
                next_step="keep what changes from step to step in a buffer that is changed in place, or in a variable",
            )


def _refuse_settings(before: Before) -> None:
    for path, _ in before.moved():
        if path.startswith(("param_groups", "state")):
            raise UserError(
                f"the model or the loss changes the optimizer ({path}), which a captured step does not do again",
                next_step="do it between steps, as a learning-rate scheduler does",
            )


def _refuse_exchanged(before: Before) -> None:
    """What is put in the place of a tensor's memory, or of its gradient."""
    for path in before.with_other_memory():
        raise exchanged(path)
    for path in before.with_other_gradients():
        raise UserError(
            f"the model or the loss sets {path}.grad, which a captured step does not do again",
            next_step="return the loss; the step computes the gradients, step.gradients gives them",
        )


def refuse_calls(seen: Observed) -> None:
    """Of what no later step would do."""
    for call, instead in seen.once.items():
        raise UserError(f"the model or the loss {call}, which a captured step does not do again", next_step=instead)


def _refuse_moves(before: Before, seen: Observed) -> None:
    if used := before.moved_by_use(seen):
        raise UserError(
            f"the model or the loss goes on with {used[0]}, an iterator, generator, file or buffer, which a captured "
            "step does not do again",
            next_step="pass what changes from step to step in the batch",
        )


def _unsteady(difference: str, before: Sequence[Before]) -> UserError:
    return UserError(
        "the model or the loss is not the same each time it runs, and a captured step would be",
        expected="the same ops each time, for batches of one shape",
        received=difference + _changes(before),
        next_step=_STATE,
    )


def _once_only(error: UserError, before: Sequence[Before]) -> UserError:
    return UserError(
        "the model or the loss runs once and not a second time",
        expected="the same ops each time, for batches of one shape",
        received=f"{error.what}: {error.received}" + _changes(before),
        next_step=_STATE,
    )


def _changes(before: Sequence[Before]) -> str:
    moved = list(dict.fromkeys(path for state in before for path, _ in state.moved()))
    return f"; what it changes: {', '.join(moved[:5])}" if moved else ""


@contextmanager
def _nothing_set() -> Iterator[None]:
    """Switches of torch stay as they are."""
    before = settings()
    yield
    if settings() != before:
        raise UserError(
            "the model or the loss sets a global switch of torch, which a captured step does not do again",
            next_step="set it before the step",
        )


@contextmanager
def _no_other_randomness() -> Iterator[Callable[[], None]]:
    """Numbers that Python or NumPy draws would be captured once and then be the same in every step. Their generators
    have a state of their own within the block, another one for each capture, so that any use of them shows, even where
    the state is put back; of torch's the recorder knows."""
    begin = kept = _states()
    used: list[str] = []

    def look() -> None:
        used.extend(name for name, now in _states().items() if not _same(now, begin[name]))

    def seed_anew() -> None:
        nonlocal begin
        look()
        random.seed()
        np.random.seed()
        begin = _states()

    try:
        yield seed_anew
        look()
    finally:
        random.setstate(kept["random"])
        np.random.set_state(kept["numpy.random"])
    if used:
        raise UserError(
            f"the model or the loss draws numbers from {used[0]}, which a captured step would not draw again",
            next_step="draw them with torch (torch.rand), without deciding by their values in Python",
        )


def _states() -> dict[str, Any]:
    return {
        "random": random.getstate(),
        "numpy.random": np.random.get_state(legacy=False),
    }


def _same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b) if isinstance(a, dict) else bool(a == b)
