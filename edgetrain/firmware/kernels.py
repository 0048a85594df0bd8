"""Which C kernel runs an op, and the files that a program of some kernels is built from.

In:  ops of a lowered graph. Out: their kernels (`Entry.c`), and files by their names in a project.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edgetrain.errors import InternalError, UserError
from edgetrain.graph.ir import Op
from edgetrain.ops.c import CKernel, CSource
from edgetrain.ops.entry import entry_of

FOLDER = Path(__file__).parent / "kernels"


def kernel_of(op: Op) -> CKernel:
    kernel = entry_of(op.kind).c
    if kernel is None:
        raise InternalError(f"{op.name} of kind {op.kind} has no kernel, and lowering let it pass")
    return kernel


def _folder(source: CSource) -> Path:
    return FOLDER if source.folder is None else Path(source.folder)


def has_fast(source: CSource) -> bool:
    """It is there for vectors and threads, too."""
    return (_folder(source) / "fast" / f"{source.file}.c").exists()


def files_of(sources: Sequence[CSource], *, fast: bool = False) -> dict[str, Path]:
    """The files that these are built from, in vectors or not: first sources, then headers; by their names."""
    inside, everywhere = ("fast", ("parallel", "vector")) if fast else ("", ("sums",))
    parts = [(part, _folder(s)) for s in sources for part in (s.file, *(s.fast_needs if fast else s.needs))]
    files: dict[str, Path] = {}
    for part, folder in (*parts, *((part, FOLDER) for part in everywhere)):
        paths = {path.name: path for at in (FOLDER, folder) for path in sorted((at / inside).glob(f"{part}.[ch]"))}
        if not paths:
            raise UserError(f"the source of a C kernel is not there: {folder / inside / part}.c")
        for name, path in paths.items():
            if files.setdefault(name, path) != path:
                raise UserError(
                    f"two C kernels have a file of the name {name}", received=f"{files[name]} and {path}",
                    next_step="give one of them another name",
                )  # fmt: skip
    return dict(sorted(files.items(), key=lambda item: (item[1].suffix, item[0])))
