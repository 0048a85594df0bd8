"""What every source promises, on every recorded machine: nothing raises, what is gone is None and never 0, what comes
back is read again."""

from __future__ import annotations

import errno
import math
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import edgetrain
from edgetrain.measure.sensors import Finding, Source, find
from edgetrain.measure.sensors.source import Counter, outermost
from tests.measure.sensors.trees import NAMES, PID, closer, files, lay, remove, values, write

GARBAGE = ("", "\n", "garbage\n", "-\n", "12 34 56 78\n", "0x1f\n", "1e400\n", "nan\n", "9" * 400 + "\n", "\x00\xff\n")


def sources(root: Path) -> list[Source]:
    found = [source for _, source in find(root, pid=PID, reads=0) if source is not None]
    for source in found:
        source.open()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_channel_has_a_value_a_unit_and_one_name(tmp_path: Path, name: str) -> None:
    found = sources(lay(tmp_path, name))
    assert found
    names = [channel.name for source in found for channel in source.channels]
    assert len(set(names)) == len(names)
    for source in found:
        for channel, value in zip(source.channels, source.read(), strict=True):
            assert channel.kind in ("measured", "derived")
            assert value is None or math.isfinite(value)
            assert channel.part_of is None or channel.part_of in names


@pytest.mark.parametrize("name", NAMES)
def test_what_disappears_is_none_and_comes_back(tmp_path: Path, name: str) -> None:
    root, before = lay(tmp_path, name), {}
    found = sources(root)
    for source in found:
        before[source.name] = source.read()
    for path in files(name):
        remove(root, path)
    for source in found:
        assert set(source.read()) == {None}, source.name
        assert set(source.read()) == {None}, source.name
    lay(root, name)
    for source in found:
        assert source.read() == before[source.name], source.name


@pytest.mark.parametrize("name", NAMES)
def test_a_read_that_the_kernel_refuses_is_none(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = sources(lay(tmp_path, name))
    real = os.pread

    def refused(*_: object) -> bytes:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(os, "pread", refused)
    for source in found:
        assert set(source.read()) == {None}, source.name
    monkeypatch.setattr(os, "pread", real)
    for source in found:
        assert any(value is not None for value in source.read()), source.name


@pytest.mark.parametrize("garbage", GARBAGE, ids=repr)
def test_garbage_is_never_a_value(tmp_path: Path, garbage: str) -> None:
    for name in NAMES:
        root = lay(tmp_path / name, name)
        found = sources(root)
        for path in files(name):
            write(root, path, garbage)
        for source in found:
            assert set(source.read()) == {None}, (name, source.name)
        for finding, again in find(root, pid=PID, reads=1):
            assert again is None or finding.readable
            for value in again.read() if again else ():
                assert value is None, (name, finding.name)


@pytest.mark.parametrize("name", NAMES)
def test_closed_files_are_found_and_the_fix_names_them(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = lay(tmp_path, name)
    there = {finding.name for finding, source in find(root, pid=PID, reads=0) if source is not None}
    closer(monkeypatch)(
        *(path for path in root.rglob("*") if path.is_file() and path.name not in ("name", "type", "cgroup"))
    )
    for finding, source in find(root, pid=PID, reads=0):
        if finding.name in there - {"raspberry throttling"}:
            assert (finding.found, finding.readable, source) == (True, False, None), finding.name
            assert finding.fix is not None
            assert finding.fix.startswith(f"sudo chmod a+r {root}/"), finding.name


def test_an_empty_machine_has_nothing_and_says_so(tmp_path: Path) -> None:
    found = find(tmp_path, pid=PID)
    assert {finding.name for finding, _ in found} >= {"rapl", "nvidia", "ina3221", "power supply", "process time"}
    for finding, source in found:
        assert source is None
        assert (finding.found, finding.readable, finding.read_s, finding.channels) == (False, False, None, ())
        assert finding.gives
        assert finding.resolution


@pytest.mark.parametrize("name", NAMES)
def test_a_source_can_be_sent_to_another_process(tmp_path: Path, name: str) -> None:
    for source in sources(lay(tmp_path, name)):
        before = source.read()
        source.close()
        there = pickle.loads(pickle.dumps(source))
        there.open()
        assert there.read() == before
        there.close()


def test_sensors_need_neither_pytorch_nor_numpy() -> None:
    """As the sampler's own process loads them: without what edgetrain/__init__.py loads."""
    code = """
import sys, types
package = types.ModuleType("edgetrain")
package.__path__ = [sys.argv[1]]
sys.modules["edgetrain"] = package
import edgetrain.measure.sensors, edgetrain.measure.sensors.modelled_power
print(sorted({"torch", "numpy"} & set(sys.modules)))
"""
    words = [sys.executable, "-c", code, str(Path(edgetrain.__file__).parent)]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_this_machine(tmp_path: Path) -> None:
    """The real thing: CPU time of this process grows by what it uses."""
    found: dict[str, tuple[Finding, Source | None]] = {each[0].name: each for each in find(reads=3)}
    finding, source = found["process time"]
    assert source is not None
    assert finding.read_s is not None
    assert finding.read_s > 0
    source.open()
    before = values(source)["process_time_s"]
    used = os.times().user
    while os.times().user - used < 0.05:
        pass
    after = values(source)["process_time_s"]
    assert before is not None
    assert after is not None
    assert 0.03 < after - before < 10
    for name in ("process memory", "memory", "core time"):
        each = found[name][1]
        assert each is not None
        assert all(value is not None and value >= 0 for value in each.read()), name
        each.close()
        each.close()


def test_outermost_adds_nothing_twice(tmp_path: Path) -> None:
    channels = [
        c for source in sources(lay(tmp_path / "a", "laptop")) if source.name == "rapl" for c in source.channels
    ]
    assert [c.name for c in outermost(channels, "J")] == ["rapl_psys_energy_j"]
    channels = [
        c for source in sources(lay(tmp_path / "b", "server")) if source.name == "rapl" for c in source.channels
    ]
    names = [c.name for c in outermost(channels, "J")]
    parts = ("package_0", "package_0_dram", "package_1", "package_1_dram")
    assert names == [f"rapl_{part}_energy_j" for part in parts]


def test_a_battery_holds_the_chips_of_its_machine(tmp_path: Path) -> None:
    channels = [c for source in sources(lay(tmp_path / "a", "laptop")) for c in source.channels]
    assert "hwmon_amdgpu_slowPPT_power_w" in {c.name for c in channels}
    assert [c.name for c in outermost(channels, "W")] == ["supply_power_w"]
    finding = {f.name: f for f, _ in find(tmp_path / "a", pid=PID, reads=0)}["hwmon"]
    assert {c.part_of for c in finding.channels if c.unit == "W"} == {"supply_power_w"}


def test_a_counter_that_goes_round_and_one_that_starts_again() -> None:
    counter = Counter(100)
    assert [counter.add(shown) for shown in (90, 97, 4, None, 101, -1, 30)] == [90, 97, 104, None, None, None, 130]
    restarted = Counter(1000)
    assert [restarted.add(shown) for shown in (400, 350, 360)] == [400, 400, 410]
    plain = Counter()
    assert [plain.add(shown) for shown in (5.0, 7.0, 1.0, 3.0)] == [5.0, 7.0, 7.0, 9.0]
