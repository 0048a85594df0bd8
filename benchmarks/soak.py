"""What takes longer than CI may: the kill test and the random programs, many times over.

    python benchmarks/soak.py [--kills N] [--examples N]     keeps its result in benchmarks/results/soak.json

The tests are those of `make test`; environment variables turn them up. The kept result names the commit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from edgetrain.measure.record import new_record

ROOT = Path(__file__).parent.parent
TESTS = (
    "tests/run/test_kill.py",
    "tests/plan/test_random_programs.py",
    "tests/plan/test_plans_on_random_programs.py",
    "tests/plan/test_paging_on_random_programs.py",
    "tests/plan/test_random_programs_under_fire.py",
    "tests/plan/test_same_optimum_as_poet.py",
    "tests/plan/test_rest.py",
    "tests/firmware/test_firmware_random_nets.py",
    "tests/firmware/test_firmware_fast.py",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500, help="how often a training process is killed")
    parser.add_argument("--examples", type=int, default=5000, help="how many random programs are captured and run")
    given = parser.parse_args()
    turned_up = {"EDGETRAIN_KILLS": str(given.kills), "EDGETRAIN_EXAMPLES": str(given.examples)}
    rows = []
    for test in TESTS:
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "pytest", "-q", test], cwd=ROOT, env={**os.environ, **turned_up})
        rows.append({"test": test, "passed": done.returncode == 0, "seconds": round(time.monotonic() - began)})
    record = new_record(sys.argv)
    result = {"commit": record.commit, "dirty": record.dirty, "created": record.created, **vars(given), "tests": rows}
    (ROOT / "benchmarks/results/soak.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    main()
