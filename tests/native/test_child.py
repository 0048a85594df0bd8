"""Work in a process of its own: its result comes back, its failure is told, and it is gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from edgetrain import child
from edgetrain.errors import InternalError

FUNCTIONS = '''
import os, sys, time
from pathlib import Path


def work(data, progress):
    """Tells its progress, writes a lot to standard error, and says what it was given."""
    for n in range(3):
        progress(n + 1, 3)
    print("warning " * 40_000, file=sys.stderr)
    return {"data": data, "pid": os.getpid(), "variable": os.environ.get("OF_THE_TEST")}


def chatty(data, progress):
    print("a library says hello")
    progress(1, 1)
    return data


def fails(data, progress):
    raise ValueError(f"no {data} today")


def leaves(data, progress):
    os._exit(3)


def sleeps(data, progress):
    Path(data).write_text(str(os.getpid()))
    time.sleep(600)
'''
FORKING = """
import os, sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from edgetrain import child

def sleep():
    part = Path(sys.argv[3] + ".part")
    part.write_text(str(os.getpid()))
    part.rename(sys.argv[3])
    time.sleep(600)

if sys.argv[2] == "run":
    child.run("functions:sleeps", sys.argv[3])
else:
    child.forked(sleep)
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module on a path that only this process knows."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def is_there(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_for(holds: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.05)
    return False


# ---- a fresh process ------------------------------------------------------------------------------------------


def test_result_progress_and_environment_of_a_process_that_writes_a_lot(functions: Path) -> None:
    told: list[tuple[int, int]] = []
    data = {"numbers": [1, 2.5, None], "text": "größer"}
    with at_most(30):
        found = child.run(
            "functions:work", data, progress=lambda *part: told.append(part), environment={"OF_THE_TEST": "yes"}
        )
    assert found["data"] == data
    assert found["variable"] == "yes"
    assert found["pid"] != os.getpid()
    assert not is_there(found["pid"])
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_a_failure_is_told_and_nothing_is_left(
    functions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with at_most(30), pytest.raises(InternalError, match="no bread today"):
        child.run("functions:fails", "bread")
    with at_most(30), pytest.raises(InternalError, match=r"functions:leaves failed in its process \(3\)"):
        child.run("functions:leaves", None)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_what_a_library_prints_is_not_progress(functions: Path) -> None:
    told: list[tuple[int, int]] = []
    with at_most(30):
        assert child.run("functions:chatty", 7, progress=lambda *part: told.append(part)) == 7
    assert told == [(1, 1)]


@pytest.mark.parametrize("ended_by", ["SIGINT", "SIGKILL"])
@pytest.mark.parametrize("how", ["run", "forked"])
def test_ending_the_program_ends_the_process_that_works_for_it(how: str, ended_by: str, functions: Path) -> None:
    """Ctrl-C reaches all processes of a terminal, SIGKILL this one alone."""
    told = functions / "pid"
    program = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(functions), how, str(told)],
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    pid = 0
    try:
        assert wait_for(lambda: told.exists() and told.read_text(), 60)
        pid = int(told.read_text())
        assert is_there(pid)
        if ended_by == "SIGINT":
            os.killpg(program.pid, signal.SIGINT)
        else:
            program.send_signal(signal.Signals[ended_by])
        assert program.wait(20) != 0
        assert wait_for(lambda: not is_there(pid), 5)
    finally:
        for one in {program.pid, pid} - {0}:
            if is_there(one):
                os.kill(one, signal.SIGKILL)
        program.wait()


# ---- a copy of this one ---------------------------------------------------------------------------------------


def children() -> set[int]:
    return {int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    """Every process that a test started is gone and was waited for at its end."""
    before = children()
    yield
    assert children() <= before


def test_a_copy_knows_what_this_process_knows() -> None:
    secret = {"value": 41}

    def work() -> Any:
        secret["value"] += 1
        return {"secret": secret["value"], "pid": os.getpid(), "long": "x" * 1_000_000}

    with at_most(30):
        found = child.forked(work)
    assert found["secret"] == 42
    assert len(found["long"]) == 1_000_000
    assert secret == {"value": 41}
    assert not is_there(found["pid"])


def test_a_failure_in_a_copy_is_told() -> None:
    def work() -> None:
        raise ValueError("no butter either")

    with at_most(30), pytest.raises(InternalError, match="no butter either") as caught:
        child.forked(work)
    assert not isinstance(caught.value, child.Ended)


def test_a_result_that_is_no_json_is_a_failure_and_not_an_early_end() -> None:
    with at_most(30), pytest.raises(InternalError, match="JSON") as caught:
        child.forked(lambda: {1, 2})
    assert not isinstance(caught.value, child.Ended)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_copy_that_is_killed_has_ended(number: signal.Signals) -> None:
    with at_most(30), pytest.raises(child.Ended):
        child.forked(lambda: os.kill(os.getpid(), number))


def test_a_copy_that_takes_more_than_it_may_has_ended() -> None:
    code = "from edgetrain import child; print(child.forked(lambda: len(bytearray(10**8)), most_bytes={}))"
    enough, little = (
        subprocess.run([sys.executable, "-c", code.format(n)], capture_output=True, text=True, check=False)
        for n in (3 * 10**8, 5 * 10**7)
    )
    assert enough.stdout == "100000000\n"
    assert little.returncode != 0
    assert "ended without an answer" in little.stderr


def test_nothing_of_this_process_runs_on_in_the_copy(tmp_path: Path) -> None:
    """No finally block, no handler, no buffered output twice."""
    trace = tmp_path / "trace"
    with trace.open("w") as file:
        file.write("once\n")  # still in the buffer
        try:
            child.forked(lambda: sys.exit(5))
        except InternalError:
            file.write("failed\n")
        finally:
            file.write("finally\n")
    assert trace.read_text() == "once\nfailed\nfinally\n"


def test_an_interrupt_while_waiting_ends_the_copy(tmp_path: Path) -> None:
    told = tmp_path / "pid"

    def work() -> None:
        told.write_text(str(os.getpid()))
        time.sleep(600)

    with pytest.raises(TimeoutError), at_most(2):
        child.forked(work)
    assert not is_there(int(told.read_text()))
