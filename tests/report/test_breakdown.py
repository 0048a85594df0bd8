"""Where time and energy go: rows add up to the step, and what was merged stays merged."""

from __future__ import annotations

import numpy as np
import pytest

from edgetrain.measure.attributed import Attributed, Group
from edgetrain.measure.record import RunFolder
from edgetrain.measure.timeline import OpRun, Timeline
from edgetrain.report.breakdown import (
    CATEGORIES,
    between_ops_s,
    by_kind,
    by_layer,
    by_op,
    by_phase,
    category,
)
from edgetrain.report.run import load_run

MS = 1_000_000


def timeline() -> Timeline:
    """Two steps of 10 ms: 1 + 2 + 3 + 2 ms of ops."""
    ops = (
        OpRun("conv", "aten.convolution.default", "a", "forward", "first", 0, 4_000_000, 10, 10),
        OpRun("relu", "aten.relu.default", "b", "forward", "first", 0, 0, 10, 10),
        OpRun("conv_b", "aten.convolution_backward.default", "a", "backward", "first", 0, 8, 10, 10),
        OpRun("conv", "aten.convolution.default", "a", "backward", "recomputed", 0, 4_000_000, 10, 10),
    )
    begin = np.array([[0, 1, 4, 7], [20, 21, 24, 27]], dtype=np.int64) * MS
    end = begin + np.array([1, 2, 3, 2], dtype=np.int64) * MS
    return Timeline(ops, np.array([[0, 10], [20, 30]], dtype=np.int64) * MS, begin, end)


def energy(*groups: Group) -> Attributed:
    return Attributed("energy", "J", "modelled", "model", groups, 10)


def test_rows_are_sums_over_their_ops() -> None:
    rows = {row.name: row for row in by_layer(timeline())}
    assert list(rows) == ["a", "b"]
    assert rows["a"].time_s == pytest.approx(0.006)
    assert rows["a"].share == pytest.approx(0.6)
    assert rows["a"].recomputed_s == pytest.approx(0.002)
    assert (rows["a"].flops, rows["a"].n_bytes, rows["a"].places) == (8_000_008, 60, (0, 2, 3))
    assert rows["b"].flops_per_s is None
    assert rows["a"].flops_per_s == pytest.approx(8_000_008 / 0.006)
    assert {row.name for row in by_kind(timeline())} == {op.kind for op in timeline().ops}
    assert [row.name for row in by_op(timeline())] == ["conv_b", "relu", "conv", "conv"]
    assert [row.name for row in by_phase(timeline())] == ["forward", "backward"]
    assert between_ops_s(timeline()) == pytest.approx(0.002)


def test_phases_and_the_rest_are_the_step(kept_profile: RunFolder) -> None:
    found = load_run(kept_profile).timeline
    assert found is not None
    one = Timeline(found.ops, found.step_ns[:1], found.begin_ns[:1], found.end_ns[:1])  # medians of many do not add up
    total = sum(row.time_s for row in by_phase(one)) + between_ops_s(one)
    assert total == pytest.approx(float(one.step_s[0]))
    for rows in (by_phase(found), by_layer(found), by_kind(found), by_op(found)):
        assert sorted(place for row in rows for place in row.places) == list(range(len(found.ops)))


def test_a_group_that_lies_in_one_row_counts_whole() -> None:
    rows = {
        row.name: row
        for row in by_layer(timeline(), energy(Group((0, 2, 3), 6.0, 5.0, 8.0), Group((1,), 1.0, 1.0, 1.0)))
    }
    a = rows["a"].energy
    assert a is not None
    assert (a.amount_j, a.low_j, a.high_j, a.merged, a.origin) == (6.0, 5.0, 8.0, False, "modelled")


def test_a_group_in_several_rows_is_split_by_time_and_its_interval_holds_all_that_can_be() -> None:
    rows = {
        row.name: row.energy
        for row in by_layer(timeline(), energy(Group((0, 1), 3.0, 2.0, 4.0), Group((2, 3), 5.0, 5.0, 5.0)))
    }
    a, b = rows["a"], rows["b"]
    assert a is not None
    assert b is not None
    assert [a.amount_j, b.amount_j] == pytest.approx([6.0, 2.0])  # conv 1 ms, relu 2 ms
    assert a.merged
    assert b.merged
    assert [b.low_j, b.high_j] == pytest.approx([0.0, 4.0])
    assert [a.low_j, a.high_j] == pytest.approx([5.0, 9.0])


def test_widths_add_as_independent_errors_and_unknown_stays_unknown() -> None:
    groups = [
        Group((0,), 1.0, 0.7, 1.3),
        Group((2,), 1.0, 0.6, 1.4),
        Group((3,), 1.0, 1.0, None),
        Group((1,), None, None, None),
    ]
    rows = {row.name: row.energy for row in by_layer(timeline(), energy(*groups))}
    a = rows["a"]
    assert a is not None
    assert a.low_j == pytest.approx(3.0 - 0.5)
    assert a.high_j is None
    assert rows["b"] is None
    assert by_layer(timeline(), energy(*groups[:2]))[0].energy is None  # of one op nothing is known


def test_a_group_with_idle_time_in_it_is_never_whole() -> None:
    row = by_layer(timeline(), energy(Group((0, 2, 3), 6.0, 5.0, 8.0, idle=True)))[0].energy
    assert row is not None
    assert row.merged
    assert row.low_j == 0.0


def test_no_step_has_no_rows() -> None:
    whole = timeline()
    empty = Timeline(whole.ops, whole.step_ns[:0], whole.begin_ns[:0], whole.end_ns[:0])
    assert by_layer(empty) == by_phase(empty) == []
    assert between_ops_s(empty) == 0.0


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("aten.convolution_backward.default", "convolution"), ("aten.addmm.default", "matrix product"),
        ("aten.mm.default", "matrix product"), ("edgetrain.norm.backward", "normalisation"),
        ("aten.native_layer_norm.default", "normalisation"), ("edgetrain.sgd.update", "update"),
        ("aten._log_softmax_backward_data.default", "loss"), ("aten._safe_softmax.default", "activation"),
        ("aten.hardtanh_backward.default", "activation"), ("edgetrain.page.wait", "wait for storage"),
        ("aten.add_.Tensor", "elementwise"), ("aten.sum.dim_IntList", "pooling and reduction"),
        ("aten.cat.default", "copy and layout"), ("somebody.elses", "other"),
    ],
)  # fmt: skip
def test_kinds_have_a_colour(kind: str, expected: str) -> None:
    assert category(kind) == expected
    assert expected in CATEGORIES
