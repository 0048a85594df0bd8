"""Variables of the user's own Python modules, read in every way: the next step is plain PyTorch's, or refused.

A package of several files is written to a folder, and one of its functions scales the loss. Then a variable in another
of its files is set.
"""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hostile.test_stale_graphs import Case, Net, agrees, mean_square

NAME = "own_package"
FILES = {
    "__init__.py": "",
    "cfg.py": 'SCALE = 1.0\nTABLE = {"a": 1.0}\nlevel_a = 1.0\n',
    "deep/__init__.py": "from .. import cfg",
    "util.py": """
        def scale_of(c): return c.SCALE
        def item_of(c): return c.TABLE["a"]
        def by_name(c, name): return getattr(c, name)
        def deeper(c): return c.deep.cfg.SCALE
        """,
}
JOINED = '"".join(["SC", "ALE"])'
READ = {
    "passed to a function": "from . import cfg, util\ndef read(): return util.scale_of(cfg)",
    "a table, passed to a function": "from . import cfg, util\ndef read(): return util.item_of(cfg)",
    "passed with a name": f"from . import cfg, util\ndef read(): return util.by_name(cfg, {JOINED})",
    "passed package": "from . import util\nimport own_package\nfrom . import deep\n"
                      "def read(): return util.deeper(own_package)",
    "getattr": f"from . import cfg\ndef read(): return getattr(cfg, {JOINED})",
    "getattr by a prefix": 'from . import cfg\nkind = "a"\ndef read(): return getattr(cfg, "level_" + kind, 1.0)',
    "vars": f"from . import cfg\ndef read(): return vars(cfg)[{JOINED}]",
    "__dict__": f"from . import cfg\ndef read(): return cfg.__dict__[{JOINED}]",
    "attrgetter":
        f"import operator\nfrom . import cfg\nget = operator.attrgetter({JOINED})\ndef read(): return get(cfg)",
    "map": f"from . import cfg\ndef read(): return next(map(getattr, [cfg], [{JOINED}]))",
    "from . import": "def read():\n from . import cfg\n return cfg.SCALE",
    "from .module import": "def read():\n from .cfg import SCALE\n return SCALE",
    "from .. import": "from .deep import cfg as _\ndef read():\n from .deep import cfg\n return cfg.SCALE",
    "import as": "def read():\n import own_package.cfg as c\n return c.SCALE",
    "import of a package": "def read():\n import own_package.cfg\n return own_package.cfg.SCALE",
    "from package import": "def read():\n from own_package import cfg\n return cfg.SCALE",
    "import_module":
        'import importlib\ndef read(): return importlib.import_module("own_package." + "".join("cfg")).SCALE',
    "import_module, relative":
        'import importlib\ndef read(): return importlib.import_module("." + "".join("cfg"), __package__).SCALE',
    "__import__": 'def read(): return __import__("own_package.cfg", fromlist=["cfg"]).SCALE',
    "sys.modules": 'import sys\ndef read(): return sys.modules[__package__ + ".cfg"].SCALE',
    "resolve_name": 'import pkgutil\nname = __package__ + ".cfg:SCALE"\ndef read(): return pkgutil.resolve_name(name)',
    "held": "from . import cfg\nclass Held: pass\nheld = Held()\nheld.cfg = cfg\ndef read(): return held.cfg.SCALE",
    "in a list": "from . import cfg\nheld = [cfg]\ndef read(): return held[0].SCALE",
    "as a default": "from . import cfg\ndef read(c=cfg): return c.SCALE",
    "in a function in a function":
        "def read():\n def inner():\n  from . import cfg\n  return cfg.SCALE\n return inner()",
}  # fmt: skip
OWN = {
    "globals": f"SCALE = 1.0\ndef read(): return globals()[{JOINED}]",
    "globals, new": f"def read(): return globals().get({JOINED}, 1.0)",
    "eval": f"SCALE = 1.0\ndef read(): return eval({JOINED})",
    "of a function": f"SCALE = 1.0\ndef read(): return read.__globals__[{JOINED}]",
    "of the module itself": f"import sys\nSCALE = 1.0\ndef read(): return getattr(sys.modules[__name__], {JOINED})",
    "own import": f"SCALE = 1.0\ndef read():\n from . import main\n return vars(main)[{JOINED}]",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / NAME
    (folder / "deep").mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(textwrap.dedent(text))
    yield folder
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]
    importlib.invalidate_caches()


def loaded(folder: Path, text: str) -> Any:
    forget()
    (folder / "main.py").write_text(text + "\n")
    importlib.import_module(f"{NAME}.cfg")
    return importlib.import_module(f"{NAME}.main")


def change(module: str) -> None:
    made: Any = sys.modules[f"{NAME}.{module}"]
    made.SCALE, made.level_a = 2.0, 2.0
    if module == "cfg":
        made.TABLE["a"] = 2.0


@pytest.mark.parametrize("name", [*READ, *OWN])
def test_a_variable_that_is_set(package: Path, name: str) -> None:
    def make() -> Case:
        main = loaded(package, {**READ, **OWN}[name])
        return Case(Net(lambda m: main.read()), mean_square, lambda: change("cfg" if name in READ else "main"))

    assert agrees(make) == "same"
