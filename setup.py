"""Builds the libraries of edgetrain/native; those that PyTorch is linked to only where it is installed already.

PyTorch is found by its folder and never imported: pip builds in an environment of its own that does not see it.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

PURELIB = Path(sysconfig.get_path("purelib"))
PLAIN = [
    Extension(f"edgetrain.native._{name}", [f"edgetrain/native/{name}.c"], extra_compile_args=["-O2"], optional=True)
    for name in ("marks", "same", "ticks")
]


def extensions() -> list[Extension]:
    torch = PURELIB / "torch"
    try:
        found = re.search(r"__version__\s*=\s*'([\w.+]+)'", (torch / "version.py").read_text())
    except OSError:
        found = None
    if found is None or not sys.platform.startswith("linux"):
        print(f"edgetrain: no PyTorch in {PURELIB}; its native libraries are left out", file=sys.stderr)
        return PLAIN
    return [
        *PLAIN,
        extension("arena", torch, found[1], libraries=["c10"], options=["-O2"]),
        extension(
            "norm",
            torch,
            found[1],
            libraries=["torch_cpu", "c10"],
            # OpenMP is not linked: its symbols come with torch_cpu, so that there is one pool of threads, PyTorch's.
            # A product and a sum are rounded apart, so that every vector width gives the same bits (see norm.cpp).
            options=["-O3", "-fopenmp", "-ffp-contract=off", "-fno-trapping-math", "-fno-math-errno"],
        ),
    ]


def extension(name: str, torch: Path, version: str, libraries: list[str], options: list[str]) -> Extension:
    return Extension(
        f"edgetrain.native._{name}",
        [f"edgetrain/native/{name}.cpp"],
        include_dirs=[str(torch / "include")],
        library_dirs=[str(torch / "lib")],
        libraries=libraries,
        define_macros=[("ET_TORCH_VERSION", f'"{version}"')],
        extra_compile_args=["-std=c++20", *options],
        optional=True,  # without a compiler the package still installs
    )


setup(ext_modules=extensions())
