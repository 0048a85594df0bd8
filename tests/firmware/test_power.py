"""Power that is lost at any moment: the program always starts from a whole copy, and ends with the same bits."""

from __future__ import annotations

import random
import re
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

from edgetrain.devices.device import FOLDER
from edgetrain.errors import UserError
from edgetrain.firmware.build import build, load_project
from edgetrain.firmware.emulate import command, run_firmware, write_batches
from edgetrain.firmware.target import load_target
from tests.firmware.firmware_nets import NETS, Exported, adam, make, sgd
from tests.firmware.power_trials import Trial, first_wrong, killed_at_random, trial, uninterrupted

STEPS = 30
emulated = pytest.mark.skipif(shutil.which("qemu-system-arm") is None, reason="qemu-system-arm is not installed")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make(NETS["mlp"], tmp_path_factory.mktemp("made") / "fw", optimizer=sgd, keep_every=1)


@pytest.fixture(scope="module")
def reference(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, list[bytes]]:
    device = trial(exported, STEPS, tmp_path_factory.mktemp("here"))
    return device, uninterrupted(device, STEPS)


def test_the_power_is_cut_at_every_write_of_a_save(reference: tuple[Trial, list[bytes]]) -> None:
    device, expected = reference
    writes = device.writes_of_a_save()
    assert writes > 300
    device.flash.unlink()
    assert device.run(1, (writes + 1, 0)).code == 0  # there is no write after these
    # Over an older copy (with erases of a page that are cut off); then the second save ever, and the first.
    assert first_wrong(device, expected, range(1, writes + 1), saves=2, to_end=10) is None
    assert first_wrong(device, expected, range(1, writes + 1, 9), saves=1, to_end=9) is None
    assert first_wrong(device, expected, range(1, writes - 16, 9), saves=0, to_end=9) is None


def test_power_that_is_cut_again_and_again_costs_no_step_that_was_saved(reference: tuple[Trial, list[bytes]]) -> None:
    device, expected = reference
    device.flash.unlink(missing_ok=True)
    draw, cuts = random.Random(0), 0
    while device.run(STEPS, (draw.randint(1, 2000), cuts)).code:
        cuts += 1
        restarted = device.run(0)
        assert restarted.trained == expected[restarted.steps_before]
    assert cuts > 5
    assert device.run(STEPS).trained == expected[-1]


PLANTED = {
    "the commit word first": [
        ("!write_data(start, &h) || !write_commit(start)", "!write_commit(start) || !write_data(start, &h)"),
    ],
    "the commit word first, and no checksum": [
        ("!write_data(start, &h) || !write_commit(start)", "!write_commit(start) || !write_data(start, &h)"),
        ("return checksum_of(h) == h->checksum;", "return h != NULL;"),
    ],
    "one slot": [("newest_slot == 0 ? 1 : 0", "0")],
    "the older copy": [("heads[1].sequence > heads[0].sequence", "heads[1].sequence < heads[0].sequence")],
    "not the step": [("{&step_number, sizeof step_number}", "{&model_seed, sizeof model_seed}")],
    "no erase": [("!erase_slot(start)", "(0 && !erase_slot(start))")],
}
SAID = {
    "the commit word first": "committed and not whole",
    "the commit word first, and no checksum": "committed and not whole",
    "one slot": "starts from step 0",
    "the older copy": "starts from step 1",
    "not the step": "exit code 0",
    "no erase": "exit code 7",
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_copy_that_is_kept_wrongly_is_found(
    name: str, exported: Exported, reference: tuple[Trial, list[bytes]], tmp_path: Path
) -> None:
    spoilt = trial(exported, STEPS, tmp_path, PLANTED[name])
    shutil.copy(reference[0].where / "batches.bin", tmp_path)
    assert SAID[name] in str(first_wrong(spoilt, reference[1], range(10, 330, 40), saves=2))


def test_against_lost_power_the_order_or_the_checksum_would_each_do(
    exported: Exported, reference: tuple[Trial, list[bytes]], tmp_path: Path
) -> None:
    turned, unchecked = PLANTED["the commit word first, and no checksum"]
    for name, change in (("order", unchecked), ("checksum", turned)):
        (tmp_path / name).mkdir()
        alone = trial(exported, STEPS, tmp_path / name, [change])
        shutil.copy(reference[0].where / "batches.bin", tmp_path / name)
        alone.run(2)
        before = alone.flash.read_bytes()
        for cut in range(1, alone.writes_of_a_save() - 16, 11):
            alone.flash.write_bytes(before)
            assert alone.run(3, (cut, cut)).code == 9
            assert alone.run(0).trained == reference[1][2]


def test_without_both_checksum_and_order_a_half_written_copy_would_be_trained_on(
    exported: Exported, reference: tuple[Trial, list[bytes]], tmp_path: Path
) -> None:
    spoilt = trial(exported, STEPS, tmp_path, PLANTED["the commit word first, and no checksum"])
    shutil.copy(reference[0].where / "batches.bin", tmp_path)
    spoilt.run(2)
    assert spoilt.run(3, (200, 0)).code == 9
    assert spoilt.run(0).trained not in reference[1]


def test_a_bit_that_flash_forgets_costs_one_copy(reference: tuple[Trial, list[bytes]]) -> None:
    device, expected = reference
    for place in (0, 70, 64 + 12, 200, 1000):  # the commit word, the head, its checksum, the data
        device.flash.unlink(missing_ok=True)
        device.run(2)  # slot 0 holds step 1, slot 1 step 2
        data = bytearray(device.flash.read_bytes())
        data[device.slot_bytes + place] ^= 1
        device.flash.write_bytes(data)
        assert device.run(0).trained == expected[1]
        data[place] ^= 1
        device.flash.write_bytes(data)
        ended = device.run(0)
        assert (ended.steps_before, ended.trained) == (0, expected[0])
        assert device.run(STEPS).trained == expected[-1]


def test_flash_that_was_never_written_or_holds_anything_at_all_is_no_copy(reference: tuple[Trial, list[bytes]]) -> None:
    device, expected = reference
    size = 2 * device.slot_bytes
    for content in (b"", b"\xff" * 100, b"\0" * size, random.Random(1).randbytes(size), b"\xff" * (size + 999)):
        device.flash.write_bytes(content)
        assert device.run(STEPS).trained == expected[-1]


def test_the_program_is_killed_at_random_moments(reference: tuple[Trial, list[bytes]]) -> None:
    device, expected = reference
    device.flash.unlink(missing_ok=True)
    _, within = killed_at_random(device, expected, longest_s=0.02, least=40, draw=random.Random(2))
    assert within > 0


@emulated
@pytest.mark.parametrize(("target", "kills"), [("nrf52840", 8), ("mkr1000", 0)])
def test_a_board_loses_its_power(target: str, kills: int, reference: tuple[Trial, list[bytes]], tmp_path: Path) -> None:
    board = make(NETS["mlp"], tmp_path / "made", optimizer=sgd, keep_every=1, target=target)
    device = trial(board, STEPS, tmp_path)
    shutil.copy(reference[0].where / "batches.bin", tmp_path)
    started = time.monotonic()
    assert device.run(STEPS).trained == reference[1][-1]
    whole_s = time.monotonic() - started
    writes = device.writes_of_a_save()
    assert first_wrong(device, reference[1], range(2, writes + 1, writes // 3), saves=2, to_end=2) is None
    device.flash.unlink()
    _, within = killed_at_random(device, reference[1], longest_s=whole_s, least=kills, draw=random.Random(3))
    assert within > 0 or not kills


def test_a_run_goes_on_from_its_flash_and_another_model_does_not(exported: Exported, tmp_path: Path) -> None:
    flash = tmp_path / "flash.bin"
    batches = exported.batches(6)
    whole = run_firmware(exported.project.folder, batches)
    first = run_firmware(exported.project.folder, batches[:4], flash=flash)
    rest = run_firmware(exported.project.folder, batches, flash=flash)
    assert (first.steps_before, rest.steps_before) == (0, 4)
    assert first.losses + rest.losses == whole.losses
    done = run_firmware(exported.project.folder, batches, flash=flash)
    assert (done.steps_before, done.losses) == (6, ())
    results = run_firmware(exported.project.folder, batches, flash=flash, predict=True).results
    assert (results[0] != run_firmware(exported.project.folder, batches, predict=True).results[0]).any()
    other = make(NETS["mlp"], tmp_path / "other", optimizer=sgd, keep_every=1, seed=1)
    assert run_firmware(other.project.folder, batches, flash=flash).steps_before == 0


def test_copies_are_made_every_so_many_steps_and_at_the_end(tmp_path: Path) -> None:
    exported = make(NETS["mlp"], tmp_path / "made", optimizer=adam, keep_every=3)
    device = trial(exported, 8, tmp_path)
    expected = uninterrupted(device, 8)
    writes = device.writes_of_a_save()
    for cut, step in ((writes - 20, 0), (2 * writes - 20, 3), (3 * writes - 20, 6)):
        device.flash.unlink()
        assert device.run(8, (cut, 1)).code == 9
        restarted = device.run(0)
        assert (restarted.steps_before, restarted.trained) == (step, expected[step])
    assert device.run(8).trained == expected[-1]


@pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed")
def test_sanitizers_and_clang_have_nothing_to_say(exported: Exported, tmp_path: Path) -> None:
    batches = exported.batches(3)
    checked = run_firmware(exported.project.folder, batches, variant="sanitize", flash=tmp_path / "flash.bin")
    assert run_firmware(exported.project.folder, batches, flash=tmp_path / "flash.bin").steps_before == 3
    copy = shutil.copytree(exported.project.folder, tmp_path / "clang", ignore=shutil.ignore_patterns("build"))
    assert run_firmware(copy, batches, compiler="clang").losses == checked.losses


def test_firmware_without_copies_takes_no_flash(tmp_path: Path) -> None:
    plain = make(NETS["mlp"], tmp_path / "fw")
    assert not (tmp_path / "fw/checkpoint.c").exists()
    with pytest.raises(UserError, match="keeps nothing in flash"):
        run_firmware(plain.project.folder, plain.batches(1), flash=tmp_path / "flash.bin")
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(UserError, match="keep_every"):
            make(NETS["mlp"], tmp_path / "other", keep_every=wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"how to erase the flash of .* is not known"):
        make(NETS["mlp"], tmp_path / "other", keep_every=1, target="cortex-m55")


@emulated
def test_the_linker_leaves_the_copies_their_pages(tmp_path: Path) -> None:
    exported = make(NETS["mlp"], tmp_path / "fw", keep_every=10, target="stm32f405")
    assert exported.project.kept_bytes == 2 * 131072
    script = (tmp_path / "fw/board/link.ld").read_text()
    assert f"LENGTH = {1048576 - 2 * 131072} " in script
    assert "__flash_bytes = 1048576;" in script
    assert "FLASH_START 0x080c0000u" in (tmp_path / "fw/board/flash_layout.h").read_text()
    assert build(tmp_path / "fw").flash_bytes < 1048576 - exported.project.kept_bytes


# ---- a driver of real flash


@emulated
def test_the_controller_of_nordics_chips_keeps_copies_through_a_reset(tmp_path: Path) -> None:
    """QEMU's microbit has the flash of an nRF51 with its controller, whose registers are those of the nRF52840."""
    device = (FOLDER / "mkr1000.toml").read_text().replace('target = "mkr1000"', 'target = "nrf51"')
    device = re.sub(r"page_bytes = .*", 'page_bytes = { value = 1024, source = "nRF51 reference manual" }', device)
    (tmp_path / "nrf51.toml").write_text(device.rstrip() + '\nflash_driver = "flash_nvmc.c"\n')
    exported = make(NETS["mlp"], tmp_path / "fw", optimizer=sgd, keep_every=2, target=str(tmp_path / "nrf51.toml"))
    main = tmp_path / "fw/main.c"
    text = main.read_text()
    reset = "*(volatile uint32_t *)0xe000ed0cu = 0x05fa0004u;"  # once, after it has trained
    last = text.rindex("    board_exit(EXIT_DONE);")
    main.write_text(
        f"{text[:last]}    if (before == 0) {{\n        {reset}\n        for (;;) {{\n        }}\n    }}\n{text[last:]}"
    )
    subprocess.run(["make", "-s", "-C", str(tmp_path / "fw"), "board"], check=True)
    described = load_project(tmp_path / "fw")
    write_batches(tmp_path / "batches.bin", described, exported.batches(5))
    words = command(described, (tmp_path / "fw/build/firmware_board").resolve())
    subprocess.run(words, cwd=tmp_path, check=True, timeout=60)
    done, _, _, before = struct.unpack("<IIII", (tmp_path / "report.bin").read_bytes())
    assert (done, before) == (5, 5)
    assert (tmp_path / "losses.bin").read_bytes() == b""  # there was nothing left to train
    reference = make(NETS["mlp"], tmp_path / "here", optimizer=sgd)
    assert not (tmp_path / "flash.bin").exists()
    shutil.copy(tmp_path / "batches.bin", tmp_path / "here")
    program = build(reference.project.folder).program.resolve()
    subprocess.run([str(program)], cwd=tmp_path / "here", check=True)
    assert (tmp_path / "here/trained.bin").read_bytes() == (tmp_path / "trained.bin").read_bytes()


@emulated
def test_a_board_without_a_driver_says_so_when_it_is_built_and_nordics_builds(tmp_path: Path) -> None:
    for target, code, said in (("nrf52840", 0, ""), ("stm32f405", 2, "no driver for the flash of this board")):
        make(NETS["mlp"], tmp_path / target, keep_every=2, target=target)
        done = subprocess.run(["make", "-s", "-C", str(tmp_path / target), "board"], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert said in done.stdout


def test_a_flash_driver_that_is_not_there_is_refused(tmp_path: Path) -> None:
    device = (FOLDER / "nrf52840.toml").read_text().replace("flash_nvmc.c", "flash_magic.c")
    (tmp_path / "own.toml").write_text(device)
    with pytest.raises(UserError, match=r"flash_nvmc\.c"):
        load_target(tmp_path / "own.toml")
