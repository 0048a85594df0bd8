"""The metrics of a run: one JSON object a line, and no line from after the place that a run goes on from.

In: what happened at a step. Out: `metrics.jsonl` in the run folder.
Promised: after a crash and a resume the file reads as that of one run; a line that was torn is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgetrain.files import explained, sync, writable


def append(file: Path, line: Mapping[str, Any]) -> None:
    """One line more; what is None is not known, and left out."""
    text = json.dumps({key: value for key, value in line.items() if value is not None}, allow_nan=False)
    with explained(file), writable(file, "ab") as out:
        out.write(text.encode() + b"\n")


def cut(file: Path, step: int) -> None:
    """Keep the lines up to this step; a torn line, and all after it, goes too."""
    kept_bytes = 0
    with explained(file), writable(file, "a+b") as lines:
        lines.seek(0)
        for line in lines:
            at = _line_step(line)
            if at is None or at > step:
                break
            kept_bytes += len(line)
        lines.truncate(kept_bytes)
        lines.flush()
        os.fsync(lines.fileno())
        sync(file.parent)


def _line_step(line: bytes) -> int | None:
    with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return int(json.loads(line)["step"]) if line.endswith(b"\n") else None
    return None
