"""Device files: all that come with the package are whole, and a broken one is refused with its place in the file."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from edgetrain.devices.device import FOLDER, Device, load, names
from edgetrain.errors import UserError

WANTED = {
    "redmi_note_9_pro", "xiaomi_mi_9", "huawei_mate_30", "meizu_16t", "samsung_s8_plus", "huawei_honor_8",
    "samsung_note_10", "samsung_s10", "samsung_note_20", "rpi1", "rpi3", "rpi4", "jetson_tx2", "pixel_2", "nexus_5",
    "nexus_7", "nrf52840", "stm32f746", "mkr1000", "stm32f405", "cortex_m55", "linux_x86_64",
}  # fmt: skip
GOOD = """
name = "Mine"
kind = "board"
chip = "C"
runs_on = "cpu"
[processors.cpu]
kind = "cpu"
core = "A"
cores = 2
source = "me"
conv_flop_s = { value = 1e9, source = "me", plus_minus = 0.1 }
depthwise_flop_s = { value = 1e9, source = "me" }
dense_flop_s = { value = 1e9, source = "me" }
elementwise_flop_s = { value = 1e9, source = "me" }
[memory]
bandwidth_bytes_s = { value = 1e9, source = "me" }
[[memory.ram]]
name = "RAM"
n_bytes = { value = 1024, source = "me" }
[library]
name = "L"
overhead_s = { value = 0, source = "me" }
overlaps = true
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "mine.toml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def known() -> dict[str, Device]:
    return {name: load(name) for name in names()}


def test_every_device_is_there_and_installed() -> None:
    assert set(names()) == WANTED
    settings = tomllib.loads((FOLDER.parent.parent / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["edgetrain"]
    assert all(any(fnmatch(f"devices/{name}.toml", pattern) for pattern in patterns) for name in names())


def test_every_number_has_a_source_and_an_estimate_says_how_far_off_it_may_be(known: dict[str, Device]) -> None:
    for name, device in known.items():
        for place, quantity in device.quantities():
            assert len(quantity.source) > 3, f"{name}: {place}"
            if quantity.source.startswith(("estimate", "fitted")):
                assert quantity.plus_minus > 0, f"{name}: {place}"
            assert 0 <= quantity.plus_minus <= 1, f"{name}: {place}"


def test_what_the_papers_print_is_what_the_files_hold(known: dict[str, Device]) -> None:
    nordic, pi, mkr = known["nrf52840"], known["rpi4"], known["mkr1000"]
    assert nordic.processor.dense_flop_s is not None
    assert (nordic.processor.dense_flop_s.value, nordic.memory.ram_bytes, nordic.memory.flash_bytes) == (
        6.37e6, 262_144, 1_048_576,
    )  # fmt: skip
    assert mkr.storage is not None
    assert (mkr.storage.in_bytes_s.value, mkr.storage.in_latency_s.value) == (4.617e6, 1.09e-4)
    assert {item.value for item in pi.published} == {2e9, 1.2e8}
    assert [region.address for region in known["stm32f746"].memory.ram] == [0x20000000, 0x20010000, 0x2004C000]
    assert known["stm32f746"].memory.ram_bytes == 320 * 1024


def test_names_are_taken_as_people_write_them() -> None:
    assert load("Meizu-16T") == load(" meizu_16t ") == load(FOLDER / "meizu_16t.toml")
    assert load("RPI4").key == "rpi4"


def test_an_unknown_name_gives_close_ones() -> None:
    with pytest.raises(UserError, match="there is no device named 'rpi5'") as told:
        load("rpi5")
    assert "did you mean" in str(told.value)
    assert "rpi4" in str(told.value.next_step)
    with pytest.raises(UserError) as told:
        load("zzz")
    assert "edgetrain devices" in str(told.value.next_step)


def test_a_file_of_ones_own_is_read(tmp_path: Path) -> None:
    device = load(str(write(tmp_path, GOOD)))
    assert (device.key, device.name, device.memory.ram_bytes, device.storage) == ("mine", "Mine", 1024, None)
    assert device.processor.conv_flop_s is not None
    assert device.processor.conv_flop_s.plus_minus == 0.1


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('name = "Mine"', "", "name' is wrong"),
        ('kind = "board"', 'kind = "toaster"', "phone or board or microcontroller"),
        ('kind = "board"', 'kind = ["board"]', "phone or board or microcontroller"),
        ('runs_on = "cpu"', 'runs_on = "gpu"', "runs_on' is wrong"),
        ("cores = 2", "cores = 0", "processors.cpu.cores' is wrong"),
        ("cores = 2", "cores = 2.5", "a whole number"),
        ("cores = 2", "cores = true", "a whole number"),
        ("value = 1e9, source", "value = -1e9, source", "conv_flop_s.value' is wrong"),
        ("value = 1e9, source", "value = 0, source", "a number above 0"),
        ("value = 1e9, source", 'value = "fast", source', "a number above 0"),
        ("value = 1e9, source", "value = nan, source", "a number above 0"),
        ("value = 1e9, source", "value = inf, source", "a number above 0"),
        ("value = 1e9, source", "value = true, source", "a number above 0"),
        ("plus_minus = 0.1", "plus_minus = -0.1", "plus_minus' is wrong"),
        ("plus_minus = 0.1", "plusminus = 0.1", "plusminus is no key"),
        ('source = "me"\nconv', 'source = ""\nconv', "source' is wrong"),
        ('{ value = 1024, source = "me" }', "{ value = 1024 }", "source' is wrong"),
        ('{ value = 1024, source = "me" }', "1024", "n_bytes' is wrong"),
        ("[memory]", "[memroy]", "memory.bandwidth_bytes_s' is wrong"),
        ('[[memory.ram]]\nname = "RAM"\nn_bytes = { value = 1024, source = "me" }', "", "at least one region"),
        ('[[memory.ram]]\nname = "RAM"', '[[memory.ram]]\naddress = -1\nname = "RAM"', "address' is wrong"),
        ('name = "RAM"', 'name = "RAM"\npage_bytes = { value = 768, source = "me" }', "n_bytes' is wrong"),
        ('name = "RAM"', 'name = "RAM"\npage_bytes = { value = 128, source = "me" }', "a multiple of 256"),
        ('name = "RAM"', 'name = "RAM"\npaged_bytes = { value = 256, source = "me" }', "beside page_bytes"),
        ("overlaps = true", 'overlaps = "yes"', "true or false"),
        ("overlaps = true", 'overlaps = true\nheld = { value = 2, source = "me" }', "or none"),
        ("overlaps = true", "overlaps = true\nspeed = 3", "library.speed is no key"),
        ('chip = "C"', 'chip = "C"\ncolour = "red"', "colour is no key"),
        ('chip = "C"', 'chip = "C"\nnotes = [1]', "a list of texts"),
        ('chip = "C"', 'chip = "C"\npublished = [3]', "a table"),
        ("[library]", '[power]\nidle = 3\n[library]', "power.idle is no key"),
        ("[library]", '[[published]]\nof = "cpu.x"\nvalue = 1\nsource = "me"\n[library]', "names no number"),
        ("dense_flop_s", "dens_flop_s", "dens_flop_s is no key"),
        ("depthwise_flop_s = { value = 1e9, source = \"me\" }", "", "runs_on' is wrong"),
        ('name = "Mine"', "name = ", "is not a TOML file"),
    ],
)  # fmt: skip
def test_a_broken_file_is_refused_by_its_place(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in GOOD
    file = write(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(UserError, match=re.escape(told)) as error:
        load(file)
    assert str(file) in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no device file"):
        load("nowhere/mine.toml")
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not a TOML file"):
        load(tmp_path / "bytes.toml")
