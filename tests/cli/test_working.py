"""The spinner: on a terminal it says what is being done at the moment; elsewhere there is nothing."""

from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from edgetrain.cli import output
from edgetrain.run.activity import doing


@pytest.mark.parametrize("terminal", [True, False])
def test_the_spinner_follows_the_work_on_a_terminal_alone(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(output, "notes", Console(file=written, force_terminal=terminal, width=80))

    def wait_for(words: str) -> None:
        end = time.monotonic() + 10
        while terminal and words not in written.getvalue() and time.monotonic() < end:
            time.sleep(0.02)

    with output.working("capturing [the step]"):
        wait_for("capturing")
        doing("planning within 300 MB")
        wait_for("planning")
    doing("nobody listens any more")
    said = written.getvalue()
    assert ("capturing [the step]" in said) == terminal
    assert ("planning within 300 MB" in said) == terminal
    assert "nobody" not in said
    assert bool(said) == terminal


def test_an_error_ends_the_spinner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "notes", Console(file=io.StringIO(), force_terminal=True))
    with pytest.raises(KeyboardInterrupt), output.working("measuring"):
        raise KeyboardInterrupt
    with output.working("and again"):
        doing("without a conflict")
