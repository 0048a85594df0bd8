"""Layout problems as files: read, solved, written, and refused with the line where they are wrong."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import UserError
from edgetrain.plan.layout import Block
from tests.oracles.minimalloc import Problem, read, solve, write

# The example of MiniMalloc's own README.
EXAMPLE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"


def file(folder: Path, text: str) -> Path:
    path = folder / "problem.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_published_example_is_read_solved_and_written(tmp_path: Path) -> None:
    source, target = file(tmp_path, EXAMPLE), tmp_path / "solution.csv"
    layout = solve(source, target)
    assert layout.height_bytes == layout.live_peak_bytes == 12
    lines = target.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "id,lower,upper,size,offset"
    rows = zip(EXAMPLE.splitlines()[1:], layout.offsets, strict=True)
    assert lines[1:] == [f"{line},{offset}" for line, offset in rows]
    solved = read(target)
    assert solved.offsets == layout.offsets
    assert solved.blocks == read(source).blocks


def test_a_capacity_is_enough(tmp_path: Path) -> None:
    assert solve(file(tmp_path, EXAMPLE), tmp_path / "solution.csv", capacity_bytes=20).height_bytes <= 20


def test_older_names_of_columns_and_the_last_time_of_a_life(tmp_path: Path) -> None:
    problem = read(file(tmp_path, "size,buffer,start,end\n4,a,0,2\n8,b,3,3\n"))
    assert problem == Problem(("a", "b"), (Block(4, 0, 3), Block(8, 3, 4)))


def test_alignment_hints_and_empty_gaps(tmp_path: Path) -> None:
    text = "id,lower,upper,size,alignment,hint,gaps\na,0,2,5,8,-1,\nb,1,3,5,8,0,\n"
    source, target = file(tmp_path, text), tmp_path / "solution.csv"
    assert read(source) == Problem(("a", "b"), (Block(5, 0, 2), Block(5, 1, 3)), alignment=8)
    layout = solve(source, target)
    assert sorted(layout.offsets) == [0, 8]
    assert read(target).alignment == 8


def test_a_file_of_no_blocks(tmp_path: Path) -> None:
    source, target = file(tmp_path, "id,lower,upper,size\n"), tmp_path / "solution.csv"
    assert solve(source, target).height_bytes == 0
    assert read(target).offsets == ()


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("", 1, "not the header"),
        ("id,lower,upper\na,0,1\n", 1, "not the header"),
        ("id,lower,upper,size,size\na,0,1,2,2\n", 1, "not the header"),
        ("id,lower,start,upper,size\na,0,0,1,2\n", 1, "not the header"),
        ("id,lower,upper,size,color\na,0,1,2,red\n", 1, "not the header"),
        ("id,lower,upper,size\na,0,1,2\nb,0,1\n", 3, "wrong number of fields"),
        ("id,lower,upper,size\na,0,1,2\n\nb,0,1,x\n", 4, "the size is no whole number"),
        ("id,lower,upper,size\na,0,1.5,2\n", 2, "the upper is no whole number"),
        ("id,lower,upper,size\na,,1,2\n", 2, "the lower is no whole number"),
        ("id,lower,upper,size\na,0,1,9999999999999999999\n", 2, "the size is no whole number"),
        ("id,lower,upper,size\na,0,1,-2\n", 2, "the size is negative"),
        ("id,lower,upper,size\na,3,3,2\n", 2, "gone before"),
        ("id,start,end,size\na,3,2,2\n", 2, "gone before"),
        ("id,lower,upper,size,gaps\na,0,9,2,3-5\n", 2, "gaps"),
        ("id,lower,upper,size,alignment\na,0,9,2,0\n", 2, "alignment"),
        ("id,lower,upper,size,alignment\na,0,9,2,8\nb,0,9,2,4\n", 3, "alignment"),
        ("id,lower,upper,size,offset\na,0,9,2,\n", 2, "the offset is no whole number"),
    ],
)
def test_what_is_wrong_is_named_with_file_and_line(tmp_path: Path, text: str, line: int, what: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(UserError, match=what) as caught:
        read(path)
    assert f"{path}, line {line}: " in str(caught.value)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path / "none.csv")
    with pytest.raises(UserError, match="cannot be written"):
        write(tmp_path, Problem((), ()))
    path = tmp_path / "bytes.csv"
    path.write_bytes(b"id,lower,upper,size\n\xff\xfe,0,1,2\n")
    with pytest.raises(UserError, match="not a CSV file"):
        read(path)


blocks = st.builds(
    lambda n, start, length: Block(n, start, start + length),
    st.integers(0, 10**9),
    st.integers(-(10**6), 10**6),
    st.integers(1, 10**6),
)
ids = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=8)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rows = draw(st.lists(st.tuples(ids, blocks, st.integers(0, 10**9)), max_size=8))
    solved = draw(st.booleans())
    return Problem(
        tuple(row[0] for row in rows),
        tuple(row[1] for row in rows),
        draw(st.sampled_from((1, 64))) if rows else 1,
        tuple(row[2] for row in rows) if solved else None,
    )


@settings(deadline=None)
@given(problems())
def test_a_problem_is_read_as_it_was_written(problem: Problem) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.csv"
        write(path, problem)
        assert read(path) == problem
