"""A phone behind adb, played by an `adb` on PATH that runs the same shell script against a recorded tree."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

from edgetrain.errors import UserError
from edgetrain.measure.sensors import android, find
from edgetrain.measure.sensors.android import Phone
from edgetrain.measure.sensors.recording import FORMAT, Recording, Stage, parse
from tests.measure.sensors.trees import lay, values, write

# Everything of the phone's own folder is in $PHONE_TMP here; what adb does beyond that is not needed.
ADB = """#!/bin/sh
if [ "$1" = devices ]; then
    printf 'List of devices attached\\n%b' "$PHONE_STATE"
    exit 0
fi
[ "$1 $2" = "-s 0123456789ABCDEF" ] || exit 9
[ -e "$PHONE_TMP/unplugged" ] && { echo "adb: device '0123456789ABCDEF' not found" >&2; exit 1; }
shift 2
here() { printf '%s' "$1" | sed "s#/data/local/tmp#$PHONE_TMP#g"; }
case $1 in
    shell) exec sh -c "$(here "$2")" ;;
    push) cp "$2" "$(here "$3")" && echo "1 file pushed" ;;
    *) exit 9 ;;
esac
"""


@pytest.fixture
def phone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of its recorded tree."""
    for folder in ("bin", "tmp", "root"):
        (tmp_path / folder).mkdir()
    adb = tmp_path / "bin/adb"
    adb.write_text(ADB)
    adb.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setenv("PHONE_TMP", str(tmp_path / "tmp"))
    monkeypatch.setenv("PHONE_STATE", "0123456789ABCDEF\\tdevice\\n")
    return lay(tmp_path / "root", "phone")


def test_a_phone_is_found_and_read_by_the_same_sources(phone: Path) -> None:
    finding, source = android.find(root=str(phone))
    assert finding.readable
    assert source is not None
    source.open()
    found = values(source)
    assert found["phone_usb_power_w"] == pytest.approx(0.483670 * 4.849566)
    assert found["phone_supply_power_w"] == pytest.approx(0.240722 * 4.315174 + 0.483670 * 4.849566)
    assert found["phone_cpu4_frequency_hz"] == 1_708_800_000
    assert found["phone_temp_cpu_0_0_usr_c"] == pytest.approx(45.7)
    assert found["phone_cpu_time_s"] == pytest.approx((250000 + 1000 + 90000 + 8000 + 2000) / 100)
    assert "phone_temp_xo_therm_c" not in found
    parts = {channel.part_of for channel in source.channels if channel.unit == "W"}
    assert parts == {None, "phone_supply_power_w"}
    write(phone, "sys/class/power_supply/usb/input_current_now", "100000\n")
    assert values(source)["phone_usb_power_w"] == pytest.approx(0.4849566)
    unplugged = phone.parent / "tmp/unplugged"
    unplugged.touch()
    assert set(source.read()) == {None}
    unplugged.unlink()
    assert values(source)["phone_usb_power_w"] == pytest.approx(0.4849566)
    source.close()


def test_the_sampler_runs_by_itself_and_is_collected(phone: Path) -> None:
    own = Phone("0123456789ABCDEF", root=str(phone))
    own.start(period_s=0.01, count=6, pid=777)
    deadline = time.monotonic() + 20
    found = Recording("", (), {})
    while len(found.times_s) < 6 and time.monotonic() < deadline:
        time.sleep(0.05)
        found = own.collect()
    assert len(found.times_s) == 6
    assert found.files["sys/class/power_supply/battery/current_now"] == ("-240722",) * 6
    assert found.files["proc/777/task/777/schedstat"] == ("900000000 1000 10",) * 6
    assert found.constant["sys/class/power_supply/usb/type"] == "USB"
    assert found.files["proc/stat"][0] == "cpu  250000 1000 90000 900000 500 8000 2000 0 0 0"
    own.stop()
    assert not (phone.parent / "tmp/edgetrain").exists()


@pytest.mark.parametrize("shell", [name for name in ("sh", "dash", "bash", "mksh", "busybox") if shutil.which(name)])
def test_the_script_is_posix(phone: Path, shell: str) -> None:
    words = [shell, *(["sh"] if shell == "busybox" else []), str(android.SCRIPT), str(phone), "0", "2"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert len(parse(done.stdout, "here").times_s) == 2


def test_phones_that_are_not_ready_say_what_to_do(phone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for state, fix in (("unauthorized", "USB debugging"), ("offline", "adb reconnect"), ("no permissions", "plugdev")):
        monkeypatch.setenv("PHONE_STATE", f"0123456789ABCDEF\\t{state}\\n")
        finding, source = android.find()
        assert (finding.found, finding.readable, source) == (True, False, None)
        assert fix in (finding.fix or "")
    monkeypatch.setenv("PHONE_STATE", "")
    assert "plug it in" in (android.find()[0].fix or "")
    monkeypatch.setenv("PATH", "/nowhere")
    assert "apt install adb" in (android.find()[0].fix or "")
    assert "android" not in {finding.name for finding, _ in find(phone)}
    assert "android" in {finding.name for finding, _ in find(phone, phones=True)}


def test_a_failing_adb_is_one_message(phone: Path) -> None:
    with pytest.raises(UserError, match="adb failed on phone other"):
        Phone("other").collect()
    with pytest.raises(UserError, match="does not answer"):
        Phone("other", adb=str(phone / "no-adb")).collect()


# ---- the text of a recording

HEADER = f"{FORMAT}\n#sys/a/type\tUSB\nuptime_s\twall_s\tsys/a/now\n"


def test_a_recording_that_was_cut_off_is_read_up_to_there() -> None:
    found = parse(HEADER + "1.00\t100.001\t5\n1.50\t100.502\t?\n2.00\t101.0", "cut")
    assert found.files == {"sys/a/now": ("5", None)}
    assert found.constant == {"sys/a/type": "USB"}
    assert found.times_s[1] - found.times_s[0] == pytest.approx(0.501)


def test_a_wall_clock_that_was_set_is_not_believed() -> None:
    found = parse(HEADER + "1.00\t100.0\t5\n1.50\t3700.5\t6\n2.00\t3701.0\t7\n", "set")
    assert found.times_s == (1.0, 1.5, 2.0)
    assert parse(HEADER + "1.00\t?\t5\n", "no wall clock").times_s == (1.0,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not written by"),
        ("PNG\n", "not written by"),
        (f"{FORMAT}\n", "no header"),
        (f"{FORMAT}\nuptime_s\twall_s\t../../etc/passwd\n", "outside of its root"),
        (f"{FORMAT}\nuptime_s\twall_s\t/etc/passwd\n", "outside of its root"),
        (f"{FORMAT}\n#/etc/passwd\tx\nuptime_s\twall_s\n", "outside of its root"),
        (HEADER + "1.00\t2\n", "different lengths"),
        (HEADER + "soon\t2\t3\n", "no number"),
        (HEADER + "2.00\t?\t3\n1.00\t?\t3\n", "backwards"),
    ],
)
def test_a_text_that_is_no_recording_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(text, "this")


def test_a_stage_shows_moments_in_files_that_stay_the_same(tmp_path: Path) -> None:
    stage = Stage(tmp_path, Recording("r", (0.0, 1.0, 2.0), {"a/b": ("1", None, "3")}, {"a/type": "USB"}))
    stage.show(0)
    held = open(tmp_path / "a/b")  # noqa: SIM115 (as a source holds it)
    assert held.read() == "1\n"
    stage.show(1)
    held.seek(0)
    assert held.read() == ""
    assert not (tmp_path / "a/b").exists()
    stage.show(2)
    assert (tmp_path / "a/b").read_text() == "3\n"
    assert (tmp_path / "a/type").read_text() == "USB\n"
    held.close()
