"""Files that this user may not read, also where the tests run as root."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgetrain.measure.sensors import source

Close = Callable[..., None]


@pytest.fixture
def close(monkeypatch: pytest.MonkeyPatch) -> Close:
    """close(path, …): from now on, opening these is refused."""
    refused: set[str] = set()

    def check(path: Any) -> None:
        if str(path) in refused:
            raise PermissionError(13, "Permission denied", str(path))

    def by_name(path: Any, *args: Any, **options: Any) -> Any:
        check(path)
        return builtins.open(path, *args, **options)

    real = os.open

    def by_handle(path: Any, *args: Any, **options: Any) -> int:
        check(path)
        return real(path, *args, **options)

    monkeypatch.setattr(source, "open", by_name, raising=False)
    monkeypatch.setattr(os, "open", by_handle)
    return lambda *paths: refused.update(str(Path(path)) for path in paths)
