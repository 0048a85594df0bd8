"""A captured step rewritten as a micro-batch: what lasts, what is updated, and which graphs are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import edgetrain as et
from edgetrain.errors import InternalError
from edgetrain.graph.ir import Graph, from_json, to_json
from edgetrain.graph.rewrite.accumulate import accumulates_only, accumulating, accumulators, ending
from edgetrain.graph.verify import verify
from edgetrain.ops.update import ACCUMULATE

SAMPLES, PART = 12, 4


@pytest.fixture(scope="module")
def slice_of_a_step() -> Graph:
    model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.Adam(model.parameters())
    example = torch.zeros(PART, 5), torch.zeros(PART, dtype=torch.int64)
    return et.capture(model, lambda m, x, y: F.cross_entropy(m(x), y), optimizer, example, use_cache=False)


WHOLE = {0: (SAMPLES, 5), 1: (SAMPLES,)}


def test_both_forms_hold_all_that_lasts(slice_of_a_step: Graph) -> None:
    before = slice_of_a_step.bytes_by_role()
    for form in (accumulating, ending):
        graph = form(slice_of_a_step, WHOLE)
        after = graph.bytes_by_role()
        assert after["state"] == before["state"] + before["parameter"]
        assert after["input"] == SAMPLES * (5 * 4 + 8)
        assert after["activation"] == before["activation"]
        assert from_json(to_json(graph)) == graph


def test_only_the_last_form_changes_parameters(slice_of_a_step: Graph) -> None:
    first, last = accumulating(slice_of_a_step, WHOLE), ending(slice_of_a_step, WHOLE)
    assert accumulates_only(first)
    assert not accumulates_only(last)
    assert not accumulates_only(slice_of_a_step)
    written = {s for op in first.ops for s in op.writes}
    assert {first.storages[s].role for s in written} == {"state"}
    assert accumulators(first) == accumulators(last) == {f"gradient_sum.0.{n}": (0, n) for n in range(4)}
    sums = {op.reads[0] for op in last.ops if op.kind == ACCUMULATE}
    assert {op.reads[1] for op in last.ops if op.kind == "edgetrain.adam.update"} == sums


def test_a_sum_that_is_left_out_is_refused(slice_of_a_step: Graph) -> None:
    for form in (accumulating, ending):
        graph = form(slice_of_a_step, WHOLE)
        dropped = next(n for n, op in enumerate(graph.ops) if op.kind == ACCUMULATE)
        broken = replace(graph, ops=(*graph.ops[:dropped], *graph.ops[dropped + 1 :]))
        with pytest.raises(InternalError, match="accumulated is not the gradients"):
            verify(broken)


def test_an_update_that_is_left_out_is_refused(slice_of_a_step: Graph) -> None:
    graph = ending(slice_of_a_step, WHOLE)
    with pytest.raises(InternalError, match="updated parameters"):
        verify(replace(graph, ops=graph.ops[:-1]))
