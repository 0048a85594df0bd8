"""What ops take, kept in a run folder: read back equal, never trusted, and unknown stays unknown."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgetrain.errors import UserError
from edgetrain.measure.attributed import (
    FILE,
    Attributed,
    Group,
    groups,
    load_attributed,
    op_names,
    save_attributed,
)

FOUND = Attributed(
    "energy", "J", "measured", "rapl package-0",
    (Group((0,), 0.5, 0.4, 0.6), Group((1, 2), 0.25, 0.0, None), Group((), 0.1, 0.1, 0.1, True),
     Group((3,), None, None, None)),
    120, 0.03,
)  # fmt: skip


@dataclass(frozen=True)
class Share:
    names: tuple[str, ...]
    amount: float | None
    amount_low: float | None
    amount_high: float | None


def test_shares_over_all_steps_become_amounts_of_one() -> None:
    names = op_names(4)
    shares = [Share((names[2], names[1]), 5.0, 4.0, math.inf), Share(("idle", names[0]), 2.0, 1.0, 3.0)]
    assert groups([*shares, Share((names[3],), None, None, None)], 10) == (
        Group((1, 2), 0.5, 0.4, None),
        Group((0,), 0.2, 0.1, 0.3, True),
        Group((3,), None, None, None),
    )


def test_it_comes_back_equal(tmp_path: Path) -> None:
    assert load_attributed(tmp_path, 4) == ()
    save_attributed([FOUND], tmp_path)
    assert load_attributed(tmp_path, 4) == (FOUND,)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": 2}, "newer version"),
        ({"attributed": 3}, "'attributed'"),
        ({"attributed": [FOUND.quantity] * 3}, "'attributed[0]'"),
        ({"attributed": [{}] * 101}, "at most"),
        ({"unit": 3}, "'attributed[0].unit'"),
        ({"origin": "guessed"}, "'attributed[0].origin'"),
        ({"ops": [4]}, "'attributed[0].groups[0].ops'"),
        ({"ops": [True]}, "'attributed[0].groups[0].ops'"),
        ({"ops": [1]}, "in several"),
        ({"amount": 0.7}, "'attributed[0].groups[0].amount'"),
        ({"amount": 10**400}, "'attributed[0].groups[0].amount'"),
        ({"idle": 0}, "'attributed[0].groups[0].idle'"),
    ],
)
def test_the_file_is_not_trusted(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    save_attributed([FOUND], tmp_path)
    data = json.loads((tmp_path / FILE).read_text())
    for key, value in change.items():
        one = data["attributed"][0]
        next(place for place in (data, one, one["groups"][0]) if key in place)[key] = value
    (tmp_path / FILE).write_text(json.dumps(data))
    with pytest.raises(UserError, match=FILE) as caught:
        load_attributed(tmp_path, 4)
    assert told in str(caught.value)
