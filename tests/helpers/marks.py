"""Marks that tests of several folders have in common."""

from __future__ import annotations

import pytest

from edgetrain.native import arena

needs_arena = pytest.mark.skipif(not arena.available(), reason=str(arena.missing()))
# Steps that are planned and run from an arena, with costs that were measured once for all tests of a file.
PLANNED_STEPS = [needs_arena, pytest.mark.usefixtures("one_cache", "one_round")]
