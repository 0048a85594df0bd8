"""Signals while a step is recorded: handled at once in the user's own code, and elsewhere before the next kernel call.

While PyTorch records, its C++ functions call Python where they may not throw (they look up how a mode treats an op, or
drop a weak reference): an exception of a handler there ends the process, or is lost.
"""

from __future__ import annotations

from pathlib import Path
from types import FrameType

import torch

from edgetrain.graph.capture.installed import installed
from edgetrain.native.signals import HeldSignals

_HOLD = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


class RecordingSignals(HeldSignals):
    def comes_through(self, frame: FrameType | None) -> bool:
        """The user's code runs, or code of Python or of a package that it called."""
        while frame is not None and not frame.f_code.co_filename.startswith(_HOLD):
            if not installed(frame.f_globals.get("__name__")):
                return True
            frame = frame.f_back
        return False
