"""Which code is the user's own and which that of an installed package."""

from __future__ import annotations

import functools
import sys
import sysconfig

_OURS = __name__.partition(".")[0]
_FOLDERS = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})


@functools.cache
def installed(module_name: object) -> str:
    """The installed package that a module belongs to, "python" for the standard library, "" for the user's own code."""
    if not isinstance(module_name, str):
        return "python"  # some classes written in C have a descriptor there
    top = module_name.partition(".")[0]
    if top == _OURS:  # wherever it stands: in a checkout of its sources, too
        return top
    module = sys.modules.get(top)
    if module is None or top == "__main__":
        return ""
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return "python"
    own = vars(module)  # a module may have a __getattr__ of its own
    file = own.get("__file__") or next(iter(own.get("__path__") or ()), "")  # a package without a file of its own
    return top if file.startswith(_FOLDERS) else ""
