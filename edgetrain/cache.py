"""The folder for what can be computed again: measured costs and plans, each under the content it belongs to.

It is `$EDGETRAIN_CACHE`, else `$XDG_CACHE_HOME/edgetrain`, else `~/.cache/edgetrain`. `EDGETRAIN_CACHE=off` turns it
off. Graphs are not kept: no hash covers all that a capture reads.
"""

from __future__ import annotations

import os
from pathlib import Path


def folder() -> Path | None:
    """Where it is; None when it is off."""
    chosen = os.environ.get("EDGETRAIN_CACHE")
    if chosen == "off":
        return None
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgetrain"
