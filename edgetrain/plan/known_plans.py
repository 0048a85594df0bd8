"""The plans that were made before, for two ends: the next run of the same program starts at once, and a smaller budget
never gives a larger peak.

    budget   300 MB        400 MB            A plan that was made for more and keeps this budget is the plan for this
    peak         290 ≤ ?  ≤    395           budget: nothing needs to be searched. One that was made for less and holds
                                             more than what was found is taken instead of it.

Known are the plans of one problem (graph, costs, place of the updates), made in one way (planner, time for the search).
The order of the smallest peak that was ever found for a problem is kept too: a budget that an `Infeasible` names works
when it is asked for.

They lie in a folder of the cache, budget and peak in the file's name; without a cache they are known to this process
alone. A file that cannot be read, or holds anything but a legal plan of that peak, is a miss.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from edgetrain import cache, files
from edgetrain.costs.table import to_json
from edgetrain.errors import EdgetrainError
from edgetrain.plan.plan import Plan
from edgetrain.plan.plan import to_json as plan_to_json
from edgetrain.plan.problem import Problem
from edgetrain.plan.validate import validate

VERSION = 2  # of what planners make: plans of another are not looked for
MAX_PLANS = 500
MAX_PROBLEMS = 16  # without a cache
_NAME = re.compile(r"(\d+)-(\d+)\.json")

Key = tuple[int, int]  # budget and peak, in bytes
_without_cache: dict[str, dict[Key, Plan]] = {}


class KnownPlans:
    def __init__(self, task: Problem, way: str, *, use_cache: bool = True, any_costs: bool = False) -> None:
        """way: how the plans are made; only those of one way are compared. any_costs: and whatever they were made with;
        a peak is then that of those costs."""
        costs = None if any_costs else to_json(task.costs)
        parts = json.dumps([VERSION, task.graph.key, costs, task.updates, way], sort_keys=True)
        self._task = task
        self._digest = hashlib.sha256(parts.encode()).hexdigest()[:24]
        kept = cache.folder() if use_cache else None
        self._folder = None if kept is None else kept / "plans" / self._digest

    def keeping(self, budget: int) -> Plan | None:
        """The plan of the smallest peak that was made for this budget, or for more, and keeps it."""
        return self._first(
            sorted(self._keys(lambda made_for, peak: peak <= budget <= made_for), key=lambda key: key[1])
        )

    def holding_more(self, budget: int, peak_bytes: int) -> Plan | None:
        """The plan of the largest peak above this one that was made for less than the budget."""
        keys = self._keys(lambda made_for, peak: made_for < budget and peak > peak_bytes)
        return self._first(sorted(keys, key=lambda key: -key[1]))

    def below(self, budget: int) -> Plan | None:
        """The plan that was made for the largest budget under this one."""
        return self._first(sorted(self._keys(lambda made_for, _: made_for < budget), reverse=True))

    def keep(self, budget: int, plan: Plan) -> None:
        key = (budget, plan.peak_bytes)
        if self._folder is None:
            _without_cache.setdefault(self._digest, {})[key] = plan
            while len(_without_cache) > MAX_PROBLEMS:
                _without_cache.pop(next(iter(_without_cache)))
            return
        files.write_cache(self._path(key), json.dumps(plan_to_json(plan)))
        with contextlib.suppress(OSError):
            _drop_oldest(self._folder.parent)

    def _keys(self, wanted: Callable[[int, int], bool]) -> list[Key]:
        if self._folder is None:
            keys: Iterable[Key] = _without_cache.get(self._digest, {})
        else:
            names = (_NAME.fullmatch(path.name) for path in self._folder.glob("*.json"))
            keys = ((int(name[1]), int(name[2])) for name in names if name)
        return [key for key in keys if wanted(*key)]

    def _first(self, keys: Iterable[Key]) -> Plan | None:
        return next((plan for plan in map(self._read, keys) if plan is not None), None)

    def _read(self, key: Key) -> Plan | None:
        if self._folder is None:
            return _without_cache[self._digest][key]
        try:
            plan = Plan.load(self._path(key))
            validate(self._task.graph, plan)
        except EdgetrainError:
            return None
        return plan if plan.peak_bytes == key[1] else None

    def _path(self, key: Key) -> Path:
        assert self._folder is not None
        return self._folder / f"{key[0]}-{key[1]}.json"


def _drop_oldest(plans: Path) -> None:
    files = sorted(plans.glob("*/*.json"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[MAX_PLANS:]:
        file.unlink(missing_ok=True)
