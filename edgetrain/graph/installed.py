"""Which code is the user's own and which that of an installed package."""

from __future__ import annotations

import functools
import sys
import sysconfig

_FOLDERS = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})


@functools.cache
def installed(module_name: object) -> str:
    """The installed package that a module belongs to, "python" for the standard library, "" for the user's own code."""
    if not isinstance(module_name, str):
        return "python"  # some classes written in C have a descriptor there
    top = module_name.partition(".")[0]
    module = sys.modules.get(top)
    if module is None or top == "__main__":
        return ""
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return "python"
    file = vars(module).get("__file__")  # a module may have a __getattr__ of its own
    return top if file is not None and file.startswith(_FOLDERS) else ""
