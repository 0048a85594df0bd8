"""What takes longer than CI may: the kill test, the random programs, the random nets and the attacks, many times over.

    python -m benchmarks.soak [--kills N] [--examples N] [--nets N] [--only TEXT]

The tests are those of `make test`; environment variables turn them up. `benchmarks/results/soak.json` keeps a row for
each file of tests, with its commit: how many cases the last run of it tried, and the names of those that failed. So one
file can be run again by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from edgetrain.measure.record import new_record

ROOT = Path(__file__).parent.parent
TESTS = (
    "tests/run/test_kill.py",
    "tests/plan/test_random_programs.py",
    "tests/plan/test_plans_on_random_programs.py",
    "tests/plan/test_paging_on_random_programs.py",
    "tests/plan/test_random_programs_under_fire.py",
    "tests/oracles/test_same_optimum_as_poet.py",
    "tests/plan/test_rest.py",
    "tests/graph/capture/test_module_db.py",
    "tests/firmware/test_random_nets.py",
    *sorted(f"tests/hostile/{file.name}" for file in (ROOT / "tests/hostile").glob("test_*.py")),
)
KEPT = ROOT / "benchmarks/results/soak.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="how often a training process is killed")
    parser.add_argument("--examples", type=int, default=5000, help="how many random programs are captured and run")
    parser.add_argument("--nets", type=int, default=250, help="how many random nets run as firmware, each way")
    parser.add_argument("--only", default="", help="only the tests with this in their names")
    given = parser.parse_args()
    if not any(given.only in test for test in TESTS):
        parser.error(f"no test has {given.only!r} in its name: {', '.join(TESTS)}")
    turned_up = {"kills": given.kills, "examples": given.examples, "nets": given.nets}
    asked = [_ran(test, turned_up) for test in TESTS if given.only in test]
    kept = {row["test"]: row for row in [*_kept(), *asked]}
    KEPT.write_text(json.dumps({"tests": [kept[test] for test in TESTS if test in kept]}, indent=1) + "\n")
    sys.exit(not all(row["passed"] for row in asked))


def _ran(test: str, turned_up: Mapping[str, int]) -> dict[str, Any]:
    began, record = time.monotonic(), new_record(sys.argv)
    environment = os.environ | {f"EDGETRAIN_{name.upper()}": str(n) for name, n in turned_up.items()}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", test]
        done = subprocess.run(command, cwd=ROOT, env=environment)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    failed = [case.get("name") for case in cases if case.find("failure") is not None or case.find("error") is not None]
    about = {"commit": record.commit, "dirty": record.dirty, "created": record.created}
    seconds = round(time.monotonic() - began)
    return {
        "test": test, "passed": done.returncode == 0, "cases": len(cases), "failed": failed, "seconds": seconds,
        **turned_up, **about,
    }  # fmt: skip


def _kept() -> list[dict[str, Any]]:
    return list(json.loads(KEPT.read_text())["tests"]) if KEPT.exists() else []


if __name__ == "__main__":
    main()
