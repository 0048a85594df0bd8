"""A real browser for tests: Chromium without a window, driven through its DevTools protocol over two pipes.

    Popen ── fd 3 ──▶ chromium      {"id": 1, "method": "Input.dispatchMouseEvent", …}\\0
          ◀── fd 4 ──               {"id": 1, "result": …}\\0 and events in between

Nothing but the standard library is used, no port is opened, and the browser ends with its pipes. `Page` keeps what the
page asked of the network and what it logged, so that a test can say that both are nothing.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions", "--mute-audio",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
LONGEST_S = 60.0


def installed() -> str | None:
    """The browser of this machine."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


def started(profile: Path) -> Iterator[Browser]:
    """For a fixture: a browser while it is used; a machine without one skips its tests."""
    program = installed()
    if program is None:
        pytest.skip(f"needs one of {', '.join(NAMES)} (on Debian: apt-get install chromium)")
    made = Browser(program, profile)
    yield made
    made.close()


class Browser:
    """The two ends of the pipes."""

    def __init__(self, program: str, profile: Path) -> None:
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # Above 10, so that neither of the numbers that the browser wants is taken; and both numbers are in use here,
        # so that Popen does not take them for a pipe of its own.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]
        taken = [os.open(os.devnull, os.O_RDONLY)]
        while taken[-1] <= 4:
            taken.append(os.open(os.devnull, os.O_RDONLY))

        def put_in_place() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [program, *ARGUMENTS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=put_in_place, pass_fds=(3, 4), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for end in (theirs_in, theirs_out, *high, *taken):
            os.close(end)
        self._rest, self._number = b"", 0
        self.events: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send one command and wait for its answer; events that come first are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + LONGEST_S
        while True:
            answer = self._receive(until)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            waiting = select.poll()  # select() knows no descriptor above 1023
            waiting.register(self._in, select.POLLIN)
            ready = waiting.poll(1000 * max(0.0, until - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._in, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.ask("Browser.close")
        os.close(self._out)
        os.close(self._in)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Page:
    """One tab, with all that it asks for and logs from its first moment on."""

    def __init__(self, browser: Browser, *, width: int = 1100, height: int = 900, phone: bool = False) -> None:
        self.browser = browser
        self._target = browser.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.ask("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )  # fmt: skip
        if phone:
            self.ask("Emulation.setTouchEmulationEnabled", enabled=True, maxTouchPoints=2)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.ask(method, self.session, **parameters)

    def open(self, file: Path) -> None:
        self.visit(file.as_uri())
        self.until("document.readyState === 'complete' && location.protocol === 'file:'")

    def visit(self, address: str) -> None:
        self.ask("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """What an expression is in the page."""
        result = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true."""
        ends = time.monotonic() + LONGEST_S
        while not (found := self.value(expression)):
            assert time.monotonic() < ends, f"never true: {expression}"
            time.sleep(0.02)
        return found

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def drag(self, x: float, y: float, to: float) -> None:
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        for part in (0.3, 0.7, 1.0):
            self.mouse("mouseMoved", x + part * (to - x), y, button="left", buttons=1)
        self.mouse("mouseReleased", to, y, button="left", clickCount=1)

    def fingers(self, kind: str, *places: tuple[float, float]) -> None:
        points = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(places)]
        self.ask("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def requests(self) -> list[str]:
        """What was asked of the network, or would have been: not the file itself, and not what is inside it."""
        found = [event["params"]["request"]["url"] for event in self._events("Network.requestWillBeSent")]
        return [url for url in found if not url.startswith(("file:", "data:", "about:"))]

    def complaints(self) -> list[str]:
        """Errors that were thrown, and whatever was logged as an error or a warning."""
        thrown = [str(event["params"]["exceptionDetails"]) for event in self._events("Runtime.exceptionThrown")]
        logged = [event["params"]["entry"] for event in self._events("Log.entryAdded")]
        console = [event["params"] for event in self._events("Runtime.consoleAPICalled")]
        thrown += [entry["text"] for entry in logged if entry["level"] in ("error", "warning")]
        return thrown + [str(entry["args"]) for entry in console if entry["type"] in ("error", "warning", "assert")]

    def _events(self, method: str) -> Iterator[dict[str, Any]]:
        self.value("1")  # what was sent before this answer has come by then
        return (e for e in self.browser.events if e.get("sessionId") == self.session and e["method"] == method)

    def close(self) -> None:
        self.browser.ask("Target.closeTarget", targetId=self._target)
