"""What can go wrong, and who can mend it.

    EdgetrainError
    ├── UserError       the caller can mend it: says what, what was expected, what came, what to do next
    ├── Infeasible      an answer, not a fault: no plan fits; says the smallest budget that would work
    └── InternalError   ours: a promise of this package was broken; asks for a report

The command line prints the first two as one short message (exit code 1); it never shows their traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class EdgetrainError(Exception):
    """Base of every error that edgetrain raises on purpose."""


class UserError(EdgetrainError):
    """Something the caller can mend.

    `what` is one sentence; the optional parts are printed on lines of their own.
    """

    def __init__(
        self, what: str, *, expected: str | None = None, received: str | None = None, next_step: str | None = None
    ) -> None:
        self.what = what
        self.expected = expected
        self.received = received
        self.next_step = next_step
        parts = (("expected", expected), ("received", received), ("next step", next_step))
        super().__init__("\n".join([what, *(f"  {label}: {text}" for label, text in parts if text)]))

    def __reduce__(self) -> tuple[object, ...]:
        state = {"what": self.what, "expected": self.expected, "received": self.received}
        return (_user_error, ({**state, "next_step": self.next_step},))


def _user_error(parts: dict[str, str | None]) -> UserError:
    what = parts.pop("what")
    return UserError(what or "", **parts)


class Infeasible(EdgetrainError):
    """No plan fits the budget. Carries the evidence.

    smallest_bytes: the smallest budget that is known to work when asked for.
    bound_bytes:    no schedule at all fits in less than this (proven).
    alive:          names of the tensors alive at the tightest op, largest first.
    lasting:        name and bytes of what lasts through the step whatever the plan: parameters, optimizer state,
                    buffers, the batch; largest first.
    least_time_s, least_energy_j: the least that was found, where a limit on one of them stands in the way.
    """

    def __init__(
        self,
        what: str,
        *,
        smallest_bytes: int,
        bound_bytes: int,
        op: str | None = None,
        alive: Sequence[str] = (),
        lasting: Sequence[tuple[str, int]] = (),
        least_time_s: float | None = None,
        least_energy_j: float | None = None,
    ) -> None:
        self.smallest_bytes = smallest_bytes
        self.bound_bytes = bound_bytes
        self.op = op
        self.alive, self.lasting = tuple(alive), tuple(lasting)
        self.least_time_s, self.least_energy_j = least_time_s, least_energy_j
        super().__init__(what)

    def in_words(self, what: str, *, smallest_bytes: int | None = None, bound_bytes: int | None = None) -> Self:
        """The same evidence in other words, and with other bounds where they are given."""
        return type(self)(
            what,
            smallest_bytes=self.smallest_bytes if smallest_bytes is None else smallest_bytes,
            bound_bytes=self.bound_bytes if bound_bytes is None else bound_bytes,
            op=self.op, alive=self.alive, lasting=self.lasting,
            least_time_s=self.least_time_s, least_energy_j=self.least_energy_j,
        )  # fmt: skip


class InternalError(EdgetrainError):
    """A promise that edgetrain makes itself was broken."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}\n  This is a defect in edgetrain; please report it with the command that led here.")
