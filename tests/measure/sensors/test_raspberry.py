"""A Raspberry Pi's firmware, played by a function that answers messages of its mailbox as the firmware does."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from edgetrain.measure.sensors import gencmd, rpi_pmic, rpi_throttled
from edgetrain.measure.sensors.gencmd import Firmware
from tests.measure.sensors.trees import lay, source, values, write

ADC = """     3V7_WL_SW_A current(0)=0.09368224A
       3V3_SYS_A current(1)=0.07124816A
      VDD_CORE_A current(7)=1.18240000A
       3V3_DAC_A current(6)=0.00030525A
     3V7_WL_SW_V volt(8)=3.70440900V
       3V3_SYS_V volt(9)=3.31391500V
      VDD_CORE_V volt(15)=0.72140840V
       3V3_DAC_V volt(14)=3.30891480V
         EXT5V_V volt(24)=5.12390000V
          BATT_V volt(25)=0.00000000V
"""


class Answers:
    """What fcntl.ioctl would do to a message on /dev/vcio."""

    def __init__(self, **said: str) -> None:
        self.said: dict[str, str] = said
        self.dead = False
        self.asked: list[str] = []

    def __call__(self, handle: int, request: int, data: bytearray) -> int:
        if self.dead:
            raise OSError(5, "Input/output error")
        size, code, tag, room, *_ = struct.unpack_from("=6I", data)
        assert (size, code, tag, room) == (len(data), 0, 0x30080, 1024)
        assert request >> 30 == 3
        assert (request >> 8) & 0xFF == 100
        command = bytes(data[24:1048]).split(b"\0", 1)[0].decode()
        self.asked.append(command)
        said = self.said.get(command)
        struct.pack_into("=2I", data, 16, 0x80000000, 0 if said is not None else 1)
        data[24:1048] = (said or "error=1").encode().ljust(1024, b"\0")
        return 0


@pytest.fixture
def vcio(tmp_path: Path) -> Path:
    write(tmp_path, "dev/vcio", "")
    return tmp_path


def test_pmic_adds_the_rails_up(vcio: Path) -> None:
    answers = Answers(pmic_read_adc=ADC)
    finding, pmic = rpi_pmic.find(vcio, Firmware(vcio / "dev/vcio", answers))
    assert pmic is not None
    found = values(pmic)
    assert found["rail_VDD_CORE_power_w"] == pytest.approx(1.1824 * 0.7214084)
    rails = [value for name, value in found.items() if name.startswith("rail_")]
    assert len(rails) == 4
    assert found["pmic_power_w"] == pytest.approx(sum(value for value in rails if value is not None))
    assert {c.part_of for c in pmic.channels} == {None, "pmic_power_w"}
    assert {c.kind for c in pmic.channels} == {"derived"}
    assert "4 rails" in finding.gives
    answers.said["pmic_read_adc"] = ADC.replace("0.72140840V", "?")
    assert (values(pmic)["rail_VDD_CORE_power_w"], values(pmic)["pmic_power_w"]) == (None, None)
    answers.dead = True
    assert set(pmic.read()) == {None}
    answers.dead, answers.said["pmic_read_adc"] = False, ADC
    assert None not in pmic.read()
    pmic.close()


def test_an_older_pi_has_no_pmic(vcio: Path) -> None:
    finding, pmic = rpi_pmic.find(vcio, Firmware(vcio / "dev/vcio", Answers(get_throttled="throttled=0x0")))
    assert (finding.found, pmic) == (False, None)


def test_firmware_that_this_user_may_not_ask(vcio: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    for find in (rpi_pmic.find, rpi_throttled.find):
        finding, found = find(vcio, Firmware(vcio / "dev/vcio", Answers()))
        assert (finding.found, finding.readable, found) == (True, False, None)
        assert finding.fix == "sudo usermod -aG video $USER, then log in again"


def test_throttling_flags_from_the_kernel_and_from_the_firmware(vcio: Path) -> None:
    flags = {"under_voltage": 1, "frequency_capped": 0, "throttled": 1, "temperature_limit": 0, "throttled_before": 1}
    assert values(source(lay(vcio / "pi", "rpi5"), "raspberry throttling")) == flags
    answers = Answers(get_throttled="throttled=0x8")
    _, asked = rpi_throttled.find(vcio, Firmware(vcio / "dev/vcio", answers))
    assert asked is not None
    assert values(asked) == {**dict.fromkeys(flags, 0), "temperature_limit": 1}
    answers.said["get_throttled"] = "throttled=soon"
    assert set(asked.read()) == {None}
    asked.close()


def test_a_message_is_as_long_as_the_firmware_expects() -> None:
    data = gencmd.message("get_throttled")
    assert len(data) == 24 + 1024 + 4
    assert struct.unpack_from("=I", data)[0] == len(data)
    assert gencmd.answer(bytes(data)) == "get_throttled"


def test_vcgencmd_is_asked_where_the_device_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "vcgencmd"
    program.write_text('#!/bin/sh\n[ "$1" = get_throttled ] && echo throttled=0x50000 || echo error=1\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    firmware = Firmware(tmp_path / "no-such-device")
    assert firmware.ask("get_throttled") == "throttled=0x50000\n"
    assert firmware.ask("pmic_read_adc") is None
