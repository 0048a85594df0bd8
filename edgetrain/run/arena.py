"""The memory of one compiled step: an arena laid out for the blocks that the step asks for.

In:  what a run of the step asks for and gives back, in order: predicted from a plan and measured costs (`predict`), or
     written down while it runs.
Out: every block at its own place in an arena that is hardly higher than what is alive at the peak.

    predicted, or run 1 written down  →  a layout  →  the next run is served by it
                                         ↑                 │ it asked for something else
                                         └─────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from edgetrain.costs.table import Costs
from edgetrain.graph.ir import Graph
from edgetrain.native import arena
from edgetrain.plan.layout import Block, lay_out
from edgetrain.plan.lifetimes import new_storages, way_of
from edgetrain.plan.plan import RANDOM_STATE_BYTES, Compute, Free, PageIn, Plan


class StepArena:
    def __init__(self, events: Sequence[int] | None = None) -> None:
        self._program = None if events is None else program(events)
        self.last = arena.Recording()
        self.disturbed = False  # this run does something that the next one will not

    def watch(self) -> arena.Watch:
        """For the next run; `learn` from it when it is over."""
        self.disturbed = False  # it may still say so of a run that failed
        return arena.served(self._program)

    def learn(self, recording: arena.Recording) -> None:
        """From a run that did not fail: another layout, where it asked for something else."""
        self.last = recording
        if self.disturbed:
            arena.trim(self.height_bytes)
        elif recording.improvised:
            self._program = program(recording.events)
            arena.trim(self._program.height_bytes)

    @property
    def height_bytes(self) -> int:
        """Of the layout; 0 where there is none yet."""
        return 0 if self._program is None else self._program.height_bytes


@contextmanager
def from_arena(min_bytes: int = 0) -> Iterator[arena.Recording]:
    """Other work between steps, served from the arena too. Where no step uses one, as usual.

    min_bytes: the height that the arena may have afterwards, whatever steps have used so far.
    """
    height = max(arena.reached_bytes(), min_bytes)
    if not height or not arena.available():
        yield arena.Recording()
        return
    with arena.served(None) as recording:
        yield recording
    arena.trim(height)


def program(events: Sequence[int]) -> arena.Program:
    """A layout for the requests and returns of one run."""
    blocks = lifetimes(events)
    return arena.Program([block.n_bytes for block in blocks], lay_out(blocks).offsets)


def lifetimes(events: Sequence[int]) -> list[Block]:
    """The blocks in the order of their requests. One that is not returned lives to the end."""
    ends = {-1 - event: time for time, event in enumerate(events) if event < 0}
    starts = [time for time, event in enumerate(events) if event >= 0]
    return [Block(events[start], start, ends.get(n, len(events))) for n, start in enumerate(starts)]


def predict(graph: Graph, plan: Plan, costs: Costs, held: Sequence[int], *, rehearse: bool) -> list[int] | None:
    """What the step will ask for and give back. None where the costs do not tell.

    held: the lasting tensors that the step is given; those that a forward op changes are copied before.
    """
    events: list[int] = []
    requests = 0
    place: dict[int, int] = {}  # storage → the number of its request
    done: set[int] = set()
    if any(op.random for op in graph.ops):
        events.append(RANDOM_STATE_BYTES)  # the state of the generator, kept to the end
        requests += 1
    for action in plan.schedule:
        if isinstance(action, Free):
            events.append(-1 - place.pop(action.storage))
            continue
        if isinstance(action, PageIn):
            events.append(graph.storages[action.storage].n_bytes)
            place[action.storage] = requests
            requests += 1
        if not isinstance(action, Compute):
            continue
        op = graph.ops[action.op]
        if rehearse and op.phase == "update":
            continue
        if action.op not in done and (op.phase != "update" or plan.updates == "guarded"):
            lasting = dict.fromkeys((*held, *graph.inputs, *(t for t in op.reads if graph.role(t) == "state")))
            copied = [t for s in op.writes for t in lasting if graph.tensors[t].storage == s]
            events += [graph.tensors[t].n_bytes for t in copied]
            requests += len(copied)
        run = costs.ops[action.op].run(way_of(action, done))
        done.add(action.op)
        events += [event if event >= 0 else event - requests for event in run.events]
        returned = {-1 - event for event in run.events if event < 0}
        sizes = [event for event in run.events if event >= 0]
        left = {requests + n: size for n, size in enumerate(sizes) if n not in returned}
        requests += len(sizes)
        if action.into is not None:
            place[graph.tensors[op.creates[0]].storage] = place.pop(action.into)
        for s in new_storages(graph, action.op)[1 if action.into is not None else 0 :]:
            match = next((n for n, size in left.items() if size == graph.storages[s].n_bytes), None)
            if match is None:
                return None
            place[s] = match
            del left[match]
        if left:
            return None
    return events
