"""Objects that the projects of one test session share: a kernel is compiled once for each compiler and set of flags.

In:  a project to build. Out: what `build` gives, and the same bits in it.

Every project has kernels of its own, but they are the same files, and compiling them is nearly all that a test of a
small net takes. Projects are still built by their own Makefile: it finds objects that are newer than their sources.

    project A    kernels/norm.c ── make ──→ norm.o ──→ the store, under a key
    project B    kernels/norm.c ───────────────────←── the store, if the key is the same; then make, which links

The key is a hash of all that an object is made from: compiler, program, Makefile but for its lists of files, source,
and every header that it includes. A kernel with a mistake planted in it is another file, and is compiled.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgetrain.firmware import build as building
from edgetrain.firmware.build import Built, Variant

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_LISTS = re.compile(r"^(NAMES|FAST) := .*$", re.MULTILINE)


@dataclass(frozen=True)
class Store:
    """folder: holds the objects, each named by its key."""

    folder: Path

    def build(self, folder: str | Path, variant: Variant = "plain", *, compiler: str | None = None) -> Built:
        """As `edgetrain.firmware.build.build`. Only a first build is helped: after that, make knows what is new."""
        objects = list(_objects(Path(folder), variant, compiler))
        for key, made in objects:
            if (self.folder / key).exists():
                made.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(self.folder / key, made)
        built = building.build(folder, variant, compiler=compiler)
        for key, made in objects:
            if made.exists() and not (self.folder / key).exists():  # not all sources are linked into each program
                shutil.copyfile(made, self.folder / key)
        return built


def _objects(folder: Path, variant: Variant, compiler: str | None) -> Iterator[tuple[str, Path]]:
    """The key of each object that a new program may be linked from, and where its Makefile has it."""
    program = building.PROGRAMS[variant]
    if not (folder / "Makefile").exists() or (folder / f"build/{program}.objects").exists():
        return
    flags = _LISTS.sub("", (folder / "Makefile").read_text())
    for source in sorted(folder.rglob("*.c")):
        name = source.relative_to(folder)
        parts = [str(compiler), program, flags, str(name), *_texts(folder, source, set())]
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        yield key, folder / f"build/{program}.objects" / name.with_suffix(".o")


def _texts(folder: Path, file: Path, seen: set[Path]) -> Iterator[str]:
    """A source and the headers of the project that it includes, looked for where the compiler does."""
    seen.add(file)
    text = file.read_text()
    yield text
    for name in _INCLUDE.findall(text):
        found = next((path for path in (file.parent / name, folder / name) if path.exists()), None)
        if found is not None and found.resolve() not in seen:
            yield from _texts(folder, found.resolve(), seen)
