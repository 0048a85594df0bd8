"""Contenders: they answer in turns, refuse in words, and leave no process behind."""

from __future__ import annotations

import mmap
import os
import sys
from typing import Any

import pytest

from edgetrain.bench.contender import Answers, Contender, Growth, Refused, python_contender
from edgetrain.errors import InternalError, UserError


def doubling(arguments: dict[str, Any]) -> Answers:
    """A contender of these tests."""
    if arguments.get("impossible"):
        raise UserError("it cannot be done", next_step="ask for less")
    print("a library that prints")

    def answer(word: str) -> Any:
        if word == "end":
            os._exit(7)
        return {"pid": os.getpid(), "value": arguments["factor"] * int(word)}

    return answer


def started(name: str, **arguments: Any) -> Contender:
    return python_contender(name, f"{__name__}:doubling", arguments)


def test_each_answers_in_a_process_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    with started("a", factor=2) as a, started("b", factor=3) as b:
        answers = [one.ask(str(n)) for n in range(3) for one in (a, b)]
    assert [answer["value"] for answer in answers] == [0, 0, 2, 3, 4, 6]
    assert len({answer["pid"] for answer in answers} | {os.getpid()}) == 3
    for pid in {answer["pid"] for answer in answers}:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert "a library that prints" in capfd.readouterr().err


def test_what_cannot_be_done_is_refused_in_words() -> None:
    with pytest.raises(Refused, match="it cannot be done\n  next step: ask for less"), started("a", impossible=True):
        pass


def test_one_that_ends_in_the_middle_is_named() -> None:
    with pytest.raises(InternalError, match="“a” ended with exit code 7"), started("a", factor=1) as a:
        a.ask("end")


def test_a_program_of_any_language_can_be_one() -> None:
    code = "print('{\"ready\": true}', flush=True); print(len(input()), flush=True); input()"
    with Contender("program", [sys.executable, "-c", code]) as program:
        assert program.ask("seven77") == 7


def test_an_error_between_questions_ends_it_at_once() -> None:
    pids: list[int] = []
    with pytest.raises(KeyError), started("a", factor=1) as a:  # noqa: PT012
        answer = a.ask("1")
        pids.append(answer["pid"])
        answer["nothing of the kind"]
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_growth_counts_from_now_on() -> None:
    before = mmap.mmap(-1, 1 << 27)  # a peak that does not count
    before.write(bytes(1 << 27))
    before.close()
    growth = Growth()
    block = mmap.mmap(-1, 1 << 26)
    block.write(os.urandom(1 << 26))
    assert 0.9 * len(block) <= growth.n_bytes < 2.5 * len(block)  # with the random bytes themselves
