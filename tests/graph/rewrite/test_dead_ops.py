"""What nothing needs goes; what lasts, draws numbers or checks values stays, whoever reads its results."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from edgetrain.graph.ir import Op, Ref, Source
from edgetrain.graph.rewrite.builder import Builder
from edgetrain.graph.rewrite.dead_ops import live, remove_dead_ops

Call = tuple[list[int], list[int], bool]  # reads, changes, must run


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)), st.booleans()), max_size=12),
    st.sets(st.integers(0, 9)),
)
def test_an_op_is_live_if_a_path_leads_from_it_to_the_end(calls: Sequence[Call], needed: set[int]) -> None:
    """Held against paths, listed: from each op forward, over all later ops that read what it changes."""

    def lives(at: int) -> bool:
        _, changes, must_run = calls[at]
        ends = must_run or not needed.isdisjoint(changes)
        return ends or any(lives(b) and set(changes) & set(calls[b][0]) for b in range(at + 1, len(calls)))

    numbered = list(enumerate(calls))
    kept = live(
        numbered, needed, reads=lambda c: c[1][0], changes=lambda c: c[1][1], must_run=lambda c: c[1][2]
    )  # fmt: skip
    assert [at for at, _ in kept] == [at for at in range(len(calls)) if lives(at)]


def step() -> Builder:
    """x and a running mean, and nothing that anybody asked for yet."""
    builder = Builder()
    for name, source in (("x", Source("input", "0")), ("mean", Source("buffer", "mean"))):
        builder.sources[builder.add(name, "input" if name == "x" else "buffer", (4,), "float32")] = source
    return builder


def add(builder: Builder, name: str, *reads: int, random: bool = False) -> int:
    made = builder.add(name, "activation", (4,), "float32")
    args = tuple(Ref(t) for t in reads)
    builder.add_op(Op(name, f"aten.{name}.default", args, (), (made,), "forward", random=random))
    return made


def names(builder: Builder) -> list[str]:
    return [op.name for op in builder.build(compact=True).ops]


def test_only_what_leads_to_an_output_is_kept() -> None:
    builder = step()
    add(builder, "exp", add(builder, "sin", 0))
    builder.outputs = [add(builder, "tan", add(builder, "cos", 0))]
    remove_dead_ops(builder)
    assert names(builder) == ["cos_1", "tan_1"]
    assert [t.name for t in builder.build(compact=True).tensors] == ["x", "mean", "cos", "tan"]


def test_a_gradient_is_needed_as_an_output_is() -> None:
    builder = step()
    builder.outputs = [add(builder, "cos", 0)]
    builder.gradients[1] = add(builder, "sin", 0)
    remove_dead_ops(builder)
    assert [op.name for op in builder.ops] == ["cos_1", "sin_1"]


def test_what_lasts_draws_checks_or_refuses_is_kept() -> None:
    builder = step()
    builder.outputs = [add(builder, "cos", 0)]
    add(builder, "gather", 0)
    add(builder, "bernoulli", 0, random=True)
    builder.add_op(
        Op("add_", "aten.add_.Tensor", (Ref(1), Ref(add(builder, "sin", 0))), (), (), "forward", writes=(1,))
    )
    builder.add_op(Op("check", "aten._assert_async.default", (Ref(add(builder, "tan", 0)),), (), (), "forward"))
    add(builder, "exp", 0)
    remove_dead_ops(builder)
    assert names(builder) == ["cos_1", "gather_1", "bernoulli_1", "sin_1", "add__1", "tan_1", "check_1"]


def test_a_write_into_what_passes_is_kept_for_whoever_reads_it() -> None:
    """In place over a result of the step: needed where the result is read, and only there."""
    builder = step()
    read, unread = add(builder, "cos", 0), add(builder, "sin", 0)
    for t in (read, unread):
        writes = (builder.tensors[t].storage,)
        builder.add_op(Op("mul_", "aten.mul_.Scalar", (Ref(t), 2.0), (), (), "forward", writes=writes))
    builder.outputs = [read]
    remove_dead_ops(builder)
    assert names(builder) == ["cos_1", "mul__1"]
