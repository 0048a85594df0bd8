"""Layout problems in the file format of MiniMalloc, the public benchmark of arena layouts.

In:  a CSV file of blocks. Out: the blocks, or the file with an offset for each.

    id,lower,upper,size           problem           id,lower,upper,size,offset    solution
    b1,0,3,4                                        b1,0,3,4,8
    b2,3,9,4                                        b2,3,9,4,8

Columns stand in any order. `lower` may be called `start` or `begin`, and `id` `buffer` or `buffer_id`. A column `upper`
is the first time at which the block is gone; a column `end` in its place is the last time at which it is there.
`alignment` (1 unless given; one for all blocks) and `offset` are optional, `hint` is ignored. Blocks with `gaps` in
their lives are refused. Sizes and offsets are in bytes, or in any unit as long as it is the same.

The format: https://github.com/google/minimalloc
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgetrain import files
from edgetrain.errors import UserError
from edgetrain.plan.layout import Block, Layout, check, lay_out

_ALIASES = {"buffer": "id", "buffer_id": "id", "start": "lower", "begin": "lower", "end": "upper"}
_NEEDED = ("id", "lower", "upper", "size")
_KNOWN = {*_NEEDED, "alignment", "offset", "hint", "gaps"}
_WHOLE = re.compile(r"-?[0-9]{1,15}")  # at most 15 digits: sums of many such numbers still fit 64 bits


@dataclass(frozen=True)
class Problem:
    """The blocks of a file with their names, and in a solution their offsets."""

    ids: tuple[str, ...]
    blocks: tuple[Block, ...]
    alignment: int = 1
    offsets: tuple[int, ...] | None = None


def read(path: str | Path) -> Problem:
    """UserError, with the file and the line, for what is not such a file."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file)
            return _problem(_Rows(str(path), ((rows.line_num, row) for row in rows if row)))
    except OSError as error:
        raise UserError(f"the file {path} cannot be read", received=str(error)) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file", received=str(error)) from error


def write(path: str | Path, problem: Problem) -> None:
    """With a column `alignment` where it is not 1, and a column `offset` where the problem has offsets."""
    columns: dict[str, list[str] | list[int]] = {
        "id": list(problem.ids),
        "lower": [block.start for block in problem.blocks],
        "upper": [block.end for block in problem.blocks],
        "size": [block.n_bytes for block in problem.blocks],
    }
    if problem.alignment != 1:
        columns["alignment"] = [problem.alignment] * len(problem.blocks)
    if problem.offsets is not None:
        columns["offset"] = list(problem.offsets)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    files.write_text(path, text.getvalue())


def solve(
    source: str | Path, target: str | Path, *, capacity_bytes: int | None = None, time_limit_s: float = 0.0
) -> Layout:
    """Read the problem, lay it out, check the layout and write it. The height may be above the capacity."""
    problem = read(source)
    layout = lay_out(
        problem.blocks, alignment=problem.alignment, capacity_bytes=capacity_bytes, time_limit_s=time_limit_s
    )
    check(problem.blocks, layout, alignment=problem.alignment)
    write(target, Problem(problem.ids, problem.blocks, problem.alignment, layout.offsets))
    return layout


@dataclass(frozen=True)
class _Rows:
    """Numbered lines of a file that can say where they stand."""

    path: str
    lines: Iterator[tuple[int, list[str]]]

    def error(self, line: int, what: str, *, expected: str | None = None, received: str | None = None) -> UserError:
        return UserError(f"{self.path}, line {line}: {what}", expected=expected, received=received)

    def whole(self, line: int, row: dict[str, str], column: str) -> int:
        text = row[column].strip()
        if not _WHOLE.fullmatch(text):
            raise self.error(line, f"the {column} is no whole number", received=repr(text))
        return int(text)


def _problem(rows: _Rows) -> Problem:
    line, header = next(rows.lines, (1, []))
    columns = _columns(rows, line, header)
    extra = 1 if "end" in [name.strip() for name in header] else 0
    ids: list[str] = []
    blocks: list[Block] = []
    offsets: list[int] = []
    alignment = 1
    for line, fields in rows.lines:
        if len(fields) != len(columns):
            raise rows.error(line, "wrong number of fields", expected=str(len(columns)), received=str(len(fields)))
        row = dict(zip(columns, fields, strict=True))
        if row.get("gaps", "").strip():
            raise rows.error(line, "blocks with gaps in their lives cannot be laid out", received=row["gaps"])
        ids.append(row["id"])
        blocks.append(_block(rows, line, row, extra))
        if "offset" in row:
            offsets.append(rows.whole(line, row, "offset"))
        if "alignment" in row:
            own = rows.whole(line, row, "alignment")
            if own < 1 or (own != alignment and len(blocks) > 1):
                wanted = "one alignment for all blocks, 1 or more"
                raise rows.error(line, "this alignment cannot be kept", expected=wanted, received=str(own))
            alignment = own
    return Problem(tuple(ids), tuple(blocks), alignment, tuple(offsets) if "offset" in columns else None)


def _columns(rows: _Rows, line: int, header: list[str]) -> list[str]:
    columns = [_ALIASES.get(name.strip(), name.strip()) for name in header]
    complete = set(_NEEDED) <= set(columns) <= _KNOWN
    if not complete or len(set(columns)) < len(columns):
        expected = f"{','.join(_NEEDED)}, and perhaps alignment, offset, hint or gaps; each once"
        raise rows.error(line, "this is not the header of a layout problem", expected=expected, received=str(header))
    return columns


def _block(rows: _Rows, line: int, row: dict[str, str], extra: int) -> Block:
    size, lower, upper = (rows.whole(line, row, column) for column in ("size", "lower", "upper"))
    if size < 0:
        raise rows.error(line, "the size is negative", received=str(size))
    if upper + extra <= lower:
        raise rows.error(line, "the block is gone before it is there", received=f"lower {lower}, upper {upper}")
    return Block(size, lower, upper + extra)
