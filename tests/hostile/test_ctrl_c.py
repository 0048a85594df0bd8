"""Ctrl-C on the command line, at any moment: one message, exit code 130, no traceback, no process that is left.

The first half of the moments lies in the imports of PyTorch and of this package, the other in the command.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgetrain import child, interrupts

MOMENTS = max(1, int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 60)


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "edgetrain", *words], cwd=folder, text=True, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def until(process: subprocess.Popen[str], module: str) -> None:
    """Wait until the process has imported the module."""
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("import time:") and line.rsplit("|", 1)[-1].strip() == module:
            return
    raise AssertionError(f"{module} was never imported")


def members(group: int) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = file.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(words[2]) == group and words[0] != "Z":
            found.append(file.parent.name)
    return found


MODULES = ["edgetrain.interrupts", "torch._C", "torch.nn.functional", "torch", "edgetrain.plan.plan", "typer",
           "edgetrain.cli.train"]  # fmt: skip


@pytest.mark.parametrize("module", MODULES if MOMENTS > 1 else MODULES[::2])
def test_while_python_imports(module: str, tmp_path: Path) -> None:
    process = started(tmp_path, "plan", "lenet", "--memory", "1MB")
    until(process, module)
    time.sleep(0.01 if module == "edgetrain.interrupts" else 0)  # it is imported, and then called
    require_stopped(process, 1 + MODULES.index(module) % 3)
    assert not list(tmp_path.iterdir())


def require_stopped(process: subprocess.Popen[str], presses: int) -> None:
    for _ in range(presses):
        os.killpg(process.pid, signal.SIGINT)
    assert process.stderr is not None
    told = [line for line in process.stderr.read().splitlines() if not line.startswith("import time:")]
    assert process.wait(30) == 130, told
    assert len(told) == 1, told
    assert told[0].startswith("stopped by Ctrl-C; ")
    deadline = time.monotonic() + 5
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not members(process.pid)


@pytest.mark.parametrize("moment", range(MOMENTS))
@pytest.mark.parametrize(
    "words", [("train", "lenet", "--batch", "500", "--out", "run"), ("profile", "lenet", "--out", "run")], ids=str
)
def test_while_a_command_works(words: tuple[str, ...], moment: int, tmp_path: Path) -> None:
    drawn = random.Random(f"{words}{moment}")
    process = started(tmp_path, *words)
    until(process, "edgetrain.cli.train")
    time.sleep(drawn.random() * 4)
    require_stopped(process, drawn.choice((1, 2, 3)))
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith((".tmp", "part"))]


def test_wrong_use_and_the_end_are_not_interrupted(tmp_path: Path) -> None:
    code = "from edgetrain import interrupts; import os, signal, sys\nsignal.signal(signal.SIGINT, interrupts._leave)\n"
    code += "from edgetrain.cli import main\ntry: main()\nfinally: os.kill(os.getpid(), signal.SIGINT)"
    for words, expected in (["devices"], 0), (["plan", "lenet", "--nonsense"], 2):
        done = subprocess.run([sys.executable, "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == expected, done.stderr
        assert "Traceback" not in done.stderr


@pytest.fixture
def as_a_command() -> Iterator[None]:
    """The process's handler as it is where the process is the command."""
    before, hook = signal.getsignal(signal.SIGINT), sys.unraisablehook
    signal.signal(signal.SIGINT, interrupts._leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        sys.unraisablehook = hook


def test_what_is_raised_in_a_destructor_is_not_lost(as_a_command: None, capsys: pytest.CaptureFixture[str]) -> None:
    class Pressed:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    def work() -> None:
        Pressed()
        time.sleep(10)
        raise AssertionError("the interrupt was lost")

    with pytest.raises(KeyboardInterrupt):
        interrupts.interruptible(work)
    assert capsys.readouterr().err == ""
    signal.raise_signal(signal.SIGINT)  # ignored: the command is over


def test_a_press_that_comes_twice_is_one(as_a_command: None) -> None:
    cleaned = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupts.interruptible(work)
    assert cleaned


def test_other_processes_are_left_alone() -> None:
    handler = signal.getsignal(signal.SIGINT)
    interrupts.starting()  # this is pytest, and no command
    assert interrupts.interruptible(lambda: signal.getsignal(signal.SIGINT)) is handler
    interrupts.over()
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_program_and_what_it_started_end_with_the_wait() -> None:
    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(TimeoutError):
            child.command(["sh", "-c", "sleep 98765 & sleep 98765"])
    finally:
        signal.signal(signal.SIGALRM, before)
    time.sleep(0.1)
    every = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
    assert not any(b"98765" in words and b"sleep" in words for words in every)


def test_a_forked_child_runs_no_handler_of_the_parent() -> None:
    ran = []

    def handler(*_: object) -> None:
        ran.append(os.getpid())
        raise SystemExit(7)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        told = child.forked(lambda: signal.getsignal(signal.SIGALRM) == signal.SIG_DFL)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert told is True
    assert not ran
