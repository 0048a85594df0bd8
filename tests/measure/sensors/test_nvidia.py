"""NVML, played by an object with its functions: values, cards that support less, drivers that are missing."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from edgetrain.measure.sensors import nvidia
from tests.measure.sensors.trees import values

NOT_SUPPORTED = 3


class Nvml:
    """The functions of libnvidia-ml that are used. Results are written through the pointers, as C would."""

    def __init__(self, cards: int = 1, *, init: int = 0, without: tuple[str, ...] = ()) -> None:
        self.cards, self.init, self.without = cards, init, without
        self.energy_mj = 1_000_000
        self.lost = False
        self.open = 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += self.init == 0
        return self.init

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = self.cards
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, n: Any, handle: Any) -> int:  # noqa: N802
        handle._obj.value = 0xC0DE + n.value
        return 0

    def _give(self, name: str, result: Any, **fields: int) -> int:
        if name in self.without:
            return NOT_SUPPORTED
        if self.lost:
            return 15  # NVML_ERROR_GPU_IS_LOST
        for field, value in fields.items():
            setattr(result._obj, field, value)
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, result: Any) -> int:  # noqa: N802
        return self._give("energy", result, value=self.energy_mj)

    def nvmlDeviceGetPowerUsage(self, handle: Any, result: Any) -> int:  # noqa: N802
        return self._give("power", result, value=71_500 + (handle.value - 0xC0DE))

    def nvmlDeviceGetUtilizationRates(self, handle: Any, result: Any) -> int:  # noqa: N802
        return self._give("utilisation", result, gpu=87, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, result: Any) -> int:  # noqa: N802
        return self._give("memory", result, total=150 << 30, free=100 << 30, used=50 << 30)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int, result: Any) -> int:  # noqa: N802
        assert sensor == 0
        return self._give("temperature", result, value=44)

    def nvmlDeviceGetClockInfo(self, handle: Any, clock: int, result: Any) -> int:  # noqa: N802
        assert clock == 1
        return self._give("clock", result, value=1980)


def test_one_card_tells_everything(tmp_path: Path) -> None:
    library = Nvml()
    finding, gpu = nvidia.find(tmp_path, lambda: library)
    assert finding.readable
    assert gpu is not None
    assert values(gpu) == {
        "gpu0_energy_j": 1000.0,
        "gpu0_power_w": 71.5,
        "gpu0_utilisation": pytest.approx(0.87),
        "gpu0_memory_bytes": 50 << 30,
        "gpu0_temperature_c": 44,
        "gpu0_frequency_hz": 1.98e9,
    }
    library.energy_mj += 500
    assert values(gpu)["gpu0_energy_j"] == 1000.5
    library.energy_mj = 7  # the driver was loaded again
    assert values(gpu)["gpu0_energy_j"] == 1000.5
    gpu.close()
    gpu.close()
    assert library.open == 0
    gpu.open()
    assert values(gpu)["gpu0_power_w"] == 71.5


def test_a_card_that_is_lost_is_none_and_comes_back(tmp_path: Path) -> None:
    library = Nvml(cards=2)
    _, gpu = nvidia.find(tmp_path, lambda: library)
    assert gpu is not None
    assert values(gpu)["gpu1_power_w"] == 71.501
    library.lost = True
    assert set(gpu.read()) == {None}
    library.lost = False
    assert None not in gpu.read()


LIBRARY = Nvml()


def library() -> Nvml:
    return LIBRARY


def test_it_can_be_sent_to_another_process(tmp_path: Path) -> None:
    _, gpu = nvidia.find(tmp_path, library)
    assert gpu is not None
    gpu.close()
    there = pickle.loads(pickle.dumps(gpu))
    there.open()
    assert there.read() == gpu.read()
    there.close()
    gpu.close()
    assert LIBRARY.open == 0


def test_what_a_card_does_not_support_is_left_out(tmp_path: Path) -> None:
    _, gpu = nvidia.find(tmp_path, lambda: Nvml(without=("energy", "clock")))
    assert gpu is not None
    assert "gpu0_energy_j" not in values(gpu)
    assert "gpu0_frequency_hz" not in values(gpu)


@pytest.mark.parametrize(("error", "fix"), [(4, "sudo chmod a+rw /dev/nvidiactl"), (9, "sudo modprobe nvidia")])
def test_a_driver_that_does_not_answer(tmp_path: Path, error: int, fix: str) -> None:
    finding, gpu = nvidia.find(tmp_path, lambda: Nvml(init=error))
    assert gpu is None
    assert not finding.readable
    assert (finding.fix or "").startswith(fix)


def test_no_card_and_no_library(tmp_path: Path) -> None:
    assert nvidia.find(tmp_path, lambda: Nvml(cards=0))[0].found is False
    assert nvidia.find(tmp_path, lambda: None)[0].fix is None
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert "libnvidia-ml" in (nvidia.find(tmp_path)[0].fix or "")
