from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgetrain.machine import amount, process_bytes, processor_name


def test_a_board_names_itself_better_than_its_cores(tmp_path: Path) -> None:
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: ARMv7 Processor rev 3 (v7l)\n")
    assert processor_name(tmp_path) == "ARMv7 Processor rev 3 (v7l)"
    (tmp_path / "proc/device-tree/model").write_text("Raspberry Pi 4 Model B\0")
    assert processor_name(tmp_path) == "Raspberry Pi 4 Model B"


def test_a_process_grows_by_what_it_touches() -> None:
    before = process_bytes("VmRSS")
    block = mmap.mmap(-1, 1 << 26)  # memory of its own: malloc may have some left from before
    block.write(os.urandom(1 << 26))
    after, peak = process_bytes("VmRSS"), process_bytes("VmHWM")
    assert before is not None and after is not None and peak is not None  # noqa: PT018
    assert after - before >= 0.9 * len(block)
    assert peak >= after - (1 << 20)
    assert process_bytes("VmNothing") is None


def test_another_process_has_its_own_bytes_until_it_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "print('up', flush=True); input()"], stdin=-1, stdout=-1)
    assert child.stdout is not None
    child.stdout.readline()
    small = process_bytes("VmRSS", child.pid)
    assert small is not None
    assert 0 < small < (process_bytes("VmRSS") or 0)
    child.communicate()
    assert process_bytes("VmRSS", child.pid) is None


@pytest.mark.parametrize(
    ("data", "number"),
    [
        (b"VmHWM:\t 7 kB\nVmRSS:\t 12 kB\n", 12),
        (b"NotVmRSS: 12 kB\n", None),
        (b"VmRSS: many kB\n", None),
        (b"VmRSS:", None),
        (b"VmRSS: " + b"9" * 21, None),
        (b"", None),
    ],
)
def test_amounts_of_lines(data: bytes, number: int | None) -> None:
    assert amount(data, b"VmRSS:") == number


def test_it_loads_neither_pytorch_nor_numpy() -> None:
    """The sampler's process loads it."""
    code = (
        "import sys, types; package = types.ModuleType('edgetrain'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['edgetrain'] = package; import edgetrain.machine\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    package = str(Path(sys.modules["edgetrain"].__file__ or "").parent)
    subprocess.run([sys.executable, "-c", code, package], check=True)
