"""The browser, started once for all tests of a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import NAMES, Browser, installed


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = installed()
    if program is None:
        pytest.skip(f"needs one of {', '.join(NAMES)} (on Debian: apt-get install chromium)")
    made = Browser(program, tmp_path_factory.mktemp("browser"))
    yield made
    made.close()
