"""The memory sensor on recorded file trees: control groups of both versions, nested, and machines without."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgetrain.measure.sensors.memory import Memory, memory

MEMINFO = """MemTotal:        8000000 kB
MemFree:          500000 kB
MemAvailable:    3000000 kB
HugePages_Total:       0
"""
KB, MB = 1024, 10**6


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_machine_without_groups(tmp_path: Path) -> None:
    assert memory(tree(tmp_path, {})) == Memory(3_000_000 * KB, 8_000_000 * KB, None)


@pytest.mark.parametrize("files", [{"proc/meminfo": ""}, {"proc/meminfo": "MemTotal: 8 kB\n"}])
def test_what_nobody_tells_is_not_there(tmp_path: Path, files: dict[str, str]) -> None:
    assert memory(tree(tmp_path, files)) is None
    assert memory(tmp_path / "nothing") is None


def test_the_tightest_group_of_version_2_counts(tmp_path: Path) -> None:
    found = memory(
        tree(
            tmp_path,
            {
                "proc/self/cgroup": "0::/user.slice/job\n",
                "sys/fs/cgroup/user.slice/memory.max": f"{900 * MB}\n",
                "sys/fs/cgroup/user.slice/memory.current": f"{700 * MB}\n",
                "sys/fs/cgroup/user.slice/memory.stat": f"anon {500 * MB}\ninactive_file {150 * MB}\n",
                "sys/fs/cgroup/user.slice/job/memory.max": "max\n",
                "sys/fs/cgroup/user.slice/job/memory.current": f"{600 * MB}\n",
                "proc/pressure/memory": "some avg10=12.50 avg60=3.00 total=1\nfull avg10=1.00 avg60=0 total=1\n",
            },
        )
    )
    # 900 − (700 − 150): cached files that can be dropped count as free
    assert found == Memory(350 * MB, 900 * MB, 0.125)


def test_groups_of_version_1(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{5000 * MB}\n",
        "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": f"{400 * MB}\n",
        "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": f"{390 * MB}\n",
        "sys/fs/cgroup/memory/a/b/memory.stat": f"inactive_file 0\ntotal_inactive_file {40 * MB}\n",
    }
    assert memory(tree(tmp_path, files)) == Memory(50 * MB, 400 * MB, None)


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job\n",
        "sys/fs/cgroup/job/memory.max": "1000\n",
        "sys/fs/cgroup/job/memory.current": "5000\n",
    }
    assert memory(tree(tmp_path, files)) == Memory(0, 1000, None)


def test_a_path_cannot_lead_out_of_the_root(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/../../../outside\n", "sys/fs/cgroup/outside/memory.max": "1000\n"}
    files["sys/fs/cgroup/outside/memory.current"] = "400\n"
    assert memory(tree(tmp_path, files)) == Memory(600, 1000, None)


def test_this_machine_tells() -> None:
    found = memory()
    assert found is not None
    assert 0 < found.available_bytes <= found.limit_bytes
