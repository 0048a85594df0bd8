"""Numbers and names that no option can take: one message, exit code 1 or 2, in time, and nothing is written."""

from __future__ import annotations

import inspect
import io
import json
import os
import random
import re
import time
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from edgetrain import ranges, zoo
from edgetrain.cli import app, main
from edgetrain.cli.output import in_words_of_commands, readable
from edgetrain.closest import closest
from edgetrain.devices import device
from edgetrain.errors import Infeasible, UserError
from edgetrain.measure import picture
from edgetrain.measure.record import RunFolder, new_record
from edgetrain.plan import registry
from edgetrain.plan.budget import parse_bytes
from edgetrain.ranges import Range
from edgetrain.run.trainer import TrainConfig

SEEDS = 1 + int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 1000
ARGUMENTS = {
    "train": ["lenet"], "plan": ["lenet"], "profile": ["lenet"], "graph": ["lenet"], "emulate": ["nowhere"],
    "export": ["lenet", "--target", "nrf52840", "--out", "fw"], "compare": ["a", "b"], "calibrate": [], "demo": [],
}  # fmt: skip
NOT_NUMBERS = ["nan", "inf", "abc", "", "1e400", "9" * 5000, "½"]
LIMIT_S = 5.0  # alone it takes milliseconds


def numeric_options() -> Iterator[tuple[str, str, bool]]:
    """(command, option, is whole) of every option whose annotation is a number, maybe None."""
    for command in app.registered_commands:
        assert command.callback is not None
        function = inspect.unwrap(command.callback)
        for name, hint in typing.get_type_hints(function).items():
            kinds = set(typing.get_args(hint)) | {hint}
            if kinds & {int, float}:
                yield command.name or function.__name__, f"--{name.replace('_', '-')}", int in kinds


OPTIONS = list(numeric_options())


def refused(command: str, *words: str) -> str:
    """The one message of a command that is wrong use."""
    begin = time.monotonic()
    ended = CliRunner().invoke(app, [command, *ARGUMENTS[command], *words])
    assert time.monotonic() - begin < LIMIT_S
    assert ended.exit_code in (1, 2), (words, ended.output, ended.exception)
    assert ended.exception is None or isinstance(ended.exception, SystemExit | UserError), repr(ended.exception)
    told = ended.output + (str(ended.exception) if isinstance(ended.exception, UserError) else "")
    assert "Traceback" not in told
    assert told.lower().count("error") <= 1, told
    return told


def bad_numbers(whole: bool, seed: str) -> Iterator[str]:
    drawn = random.Random(seed)
    yield from drawn.sample(NOT_NUMBERS, 3)
    yield f"{drawn.randrange(10**24, 10 ** drawn.choice((25, 400)))}"
    yield f"-{drawn.randrange(1, 10 ** drawn.choice((1, 25, 400)))}"
    if whole:
        yield drawn.choice(("1.5", "1e3"))


def test_digits_are_those_of_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reads these as numbers."""
    monkeypatch.chdir(tmp_path)
    for command, option, _ in OPTIONS:
        for value in ("٣", "1_0", " 3 ", "３"):
            assert option in refused(command, option, value), (option, value)
    for option, value in (("--sweep", "٣"), ("--sweep", "0.3,0.٥"), ("--micro-batches", "٣"), ("--memory", "٣MB")):
        assert option in refused("plan", "--memory", "1MB", option, value)
    assert "cores" in refused("profile", "--cores", "٠")
    assert not list(tmp_path.iterdir())


def string_options() -> Iterator[tuple[str, str]]:
    """Those that take a word or a path."""
    for command in app.registered_commands:
        assert command.callback is not None
        function = inspect.unwrap(command.callback)
        options = set(inspect.signature(function).parameters) - {"model", "runs", "first", "second", "folder", "name"}
        for name, hint in typing.get_type_hints(function).items():
            if name in options and {str, Path} & (set(typing.get_args(hint)) | {hint}):
                yield command.name or function.__name__, f"--{name.replace('_', '-')}"


@pytest.mark.parametrize(("command", "option"), list(string_options()), ids=str)
def test_an_empty_word_is_wrong_use(command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--out "$OUT"` where OUT is not set: as a path it would be the folder that one is in."""
    monkeypatch.chdir(tmp_path)
    arguments = ARGUMENTS.get(command, ["x"])
    for words in ([*arguments, option, ""], [*arguments, f"{option}="]):
        ended = CliRunner().invoke(app, [command, *words])
        assert ended.exit_code == 2
        assert f"Invalid value for {option}: it is empty" in ended.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["plan", "graph", "train", "export", "emulate", "report", "compare"])
def test_an_empty_argument_is_wrong_use(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, [command, ""]).exit_code == 2
    assert not list(tmp_path.iterdir())


def test_there_are_options_to_try() -> None:
    names = {(command, option) for command, option, _ in OPTIONS}
    for known in ("--seed", "--width", "--threads", "--batch", "--epochs", "--checkpoint-every"):
        assert ("train", known) in names
    assert len(names) > 40


@pytest.mark.parametrize(("command", "option", "whole"), OPTIONS, ids=lambda value: str(value))
def test_what_is_no_number_in_the_range(
    command: str, option: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in range(SEEDS):
        for value in bad_numbers(whole, f"{seed}{command}{option}"):
            assert option in refused(command, option, value), (option, value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [(("train", "lenet", "--width", "900"), "memory"), (("graph", "mobilenet_v2", "--width", "700"), "memory"),
     (("graph", "lenet", "--classes", "99999999", "--width", "500"), "memory"),
     (("graph", "mobilenet_v2", "--batch", "9999999"), "memory"), (("plan", "lenet", "--batch", "9999999",
      "--input-size", "3000", "--memory", "1GB"), "memory"), (("profile", "vgg16", "--input-size", "65536", "--batch",
      "99"), "memory"), (("plan", "lenet", "--memory", "9" * 400 + "GB"), "--memory"),
     (("plan", "lenet", "--memory", "1GB", "--sweep", "9" * 5000), "--sweep"),
     (("plan", "lenet", "--memory", "1GB", "--sweep", "9" * 40), "--sweep"),
     (("plan", "lenet", "--memory", "1GB", "--micro-batches", "9" * 5000), "--micro-batches"),
     (("profile", "lenet", "--cores", "0-99999999999"), "cores"),
     (("profile", "lenet", "--cores", "9" * 5000), "cores")],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_what_could_never_fit(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    begin = time.monotonic()
    ended = CliRunner().invoke(app, list(words))
    assert time.monotonic() - begin < 4 * LIMIT_S
    assert ended.exit_code in (1, 2)
    told = ended.output + str(ended.exception)
    assert isinstance(ended.exception, SystemExit | UserError), repr(ended.exception)
    assert said in told
    assert not list(tmp_path.iterdir())


RANGES = [value for value in vars(ranges).values() if isinstance(value, Range)]


@pytest.mark.parametrize("allowed", RANGES, ids=str)
def test_a_range_holds_its_ends_and_no_more(allowed: Range) -> None:
    inside = [allowed.high, allowed.low + 1] if allowed.above else [allowed.low, allowed.high]
    assert all(value in allowed for value in inside)
    outside: list[object] = [float("nan"), float("inf"), -float("inf"), 10**400, -(10**400), True, None, "1", [1], 1j]
    outside += [torch.ones(2), allowed.low - 1] + ([allowed.low] if allowed.above else [])
    for value in outside:
        assert value not in allowed
        with pytest.raises(UserError) as told:
            ranges.number("it", value, allowed)
        assert len(str(told.value)) < 600


SETTINGS: list[tuple[str, Callable[[Any], object]]] = [
    *((name, lambda value, name=name: TrainConfig(**{"epochs": 1, "batch": 1, name: value}))
      for name in ("epochs", "batch", "seed", "warmup_steps", "eval_every", "checkpoint_every_steps", "keep", "lr")),
    ("width", lambda value: zoo.build("lenet", width=value)),
    ("classes", lambda value: zoo.build("lenet", classes=value)),
    ("input_size", lambda value: zoo.build("lenet", input_size=value)),
    ("batch", lambda value: zoo.get("lenet").example(value)),
    ("memory", parse_bytes),
]  # fmt: skip


@pytest.mark.parametrize(("name", "use"), SETTINGS, ids=lambda value: value if isinstance(value, str) else "")
def test_settings_in_python(name: str, use: Callable[[Any], object]) -> None:
    values: tuple[Any, ...] = (float("nan"), float("inf"), -1, 10**400, -(10**400), "many", [3], 1e300, {}, b"1")
    for value in values:
        with pytest.raises(UserError) as told:
            use(value)
        assert len(str(told.value)) < 600


@pytest.mark.parametrize("given", ["iphone", "esp32", "x", "", "huawei_honor_8" * 50, "gpu", "device", "\n"])
def test_nothing_far_is_suggested(given: str) -> None:
    with pytest.raises(UserError) as told:
        device.load(given)
    assert "did you mean" not in str(told.value)
    assert "rpi4" in str(told.value)


@pytest.mark.parametrize("seed", range(3 * SEEDS))
def test_a_slip_of_the_keyboard_is_understood(seed: int) -> None:
    drawn = random.Random(seed)
    for names in (device.names(), tuple(zoo.MODELS), registry.names()):
        name = drawn.choice([name for name in names if len(name) > 6])
        at = drawn.randrange(1, len(name) - 1)
        assert closest(name[:at] + name[at + 1 :], names) is not None
        assert closest(name.upper(), names) == name
    with pytest.raises(UserError, match="did you mean optimal"):
        registry.named("optmal")


def test_errors_of_commands_speak_of_options() -> None:
    told = in_words_of_commands("accept it with allow_inexact=True, memory=\"300MB\" or planner='fast'; see page_to")
    assert told == "accept it with --allow-inexact, --memory 300MB or --planner fast; see --page-to"
    assert in_words_of_commands("there is no folder /data/page_to/x") == "there is no folder /data/page_to/x"


@pytest.mark.parametrize("words", [("--page-to", "pages"), ("--memory", "10KB"), ("--planner", "optimal")], ids=str)
def test_a_run_that_is_refused_leaves_no_folder(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for out in ((), ("--out", "mine")):
        ended = CliRunner().invoke(app, ["train", "lenet", *words, *out])
        assert isinstance(ended.exception, UserError | Infeasible), repr(ended.exception)
        told = in_words_of_commands(str(ended.exception))
        assert not re.search(r"\w=|process_memory|give memory", told)
        assert not list(tmp_path.iterdir())
    (tmp_path / "mine").mkdir()
    CliRunner().invoke(app, ["train", "lenet", *words, "--out", "mine"])
    assert (tmp_path / "mine").is_dir()  # it was there before


# ---- options that contradict each other, and answers that are not there

CONTRADICTIONS = [
    (("plan", "lenet", "--memory", "1MB", "--objective", "space"), "--objective"),
    (("plan", "lenet", "--memory", "1MB", "--device", "rpi4", "--runtime", "magic"), "--runtime"),
    (("plan", "lenet", "--sweep", "3", "--memory", "1MB"), "--sweep"),
    (("plan", "lenet", "--sweep", "0.5", "--process-memory", "1GB"), "--sweep"),
    (("plan", "lenet", "--sweep", "3", "--save", "plan.json"), "--sweep"),
    (("plan", "lenet", "--sweep", "3", "--load", "plan.json"), "--sweep"),
    (("plan", "lenet", "--memory", "1MB", "--optimizer", "adam", "--momentum", "0.5"), "--momentum"),
    (("train", "lenet", "--resize-head"), "--resize-head"),
    (("train", "lenet", "--lr", "0"), "--lr"),
    (("train", "lenet", "--lr", "-0"), "--lr"),
    (("export", "lenet", "--target", "nrf52840", "--out", "fw", "--data", "digits", "--classes", "4"), "--classes"),
]


@pytest.mark.parametrize(("words", "option"), CONTRADICTIONS, ids=lambda value: " ".join(value)[:60])
def test_options_that_contradict_each_other(
    words: tuple[str, ...], option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, list(words))
    assert ended.exit_code == 2, ended.output
    assert option in ended.output
    assert not list(tmp_path.iterdir())


def test_a_width_for_a_model_of_ones_own_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from edgetrain import zoo\ndef net(classes):\n    return zoo.build('lenet')\n")
    for command in (["graph"], ["plan", "--memory", "1MB"], ["profile"], ["train"]):
        ended = CliRunner().invoke(app, [command[0], "mine.py:net", *command[1:], "--width", "0.5"])
        assert isinstance(ended.exception, UserError)
        assert "--width" in str(ended.exception)


@pytest.mark.parametrize("device", [(), ("--device", "rpi4")], ids=lambda words: " ".join(words) or "here")
def test_a_sweep_in_which_nothing_fits_fails(
    device: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for parts, code in (("0.01", 1), ("0.01,0.02", 1), ("0.01,1", 0)):
        ended = CliRunner().invoke(app, ["plan", "lenet", "--sweep", parts, "--planner", "fast", *device])
        assert ended.exit_code == code, ended.output
        assert ("no plan of this sweep fits" in ended.output) == bool(code)


def test_more_micro_batches_than_samples_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for batch, asked in ((4, 5), (2, 10_000_000)):
        words = ["plan", "lenet", "--batch", str(batch), "--memory", "9MB", "--device", "rpi4", "--runtime", "library"]
        ended = CliRunner().invoke(app, [*words, "--micro-batches", str(asked)])
        assert ended.exit_code == 0, ended.output
        assert f"taken as {batch}" in ended.output


def test_no_accuracy_is_told_of_a_net_without_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["train", "autoencoder", "--epochs", "1", "--batch", "500", "--out", "run"]
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    assert "accuracy" not in ended.output
    assert "test loss" in ended.output
    value = RunFolder(Path("run")).load().summary["test_accuracy"]
    assert (value.value, value.origin) == (None, "unavailable")
    again = CliRunner().invoke(app, [*words, "--resume", "--json"])
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["evaluation"]["accuracy"] is None


DAMAGED_RUNS = [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"schema": 99}']


@pytest.mark.parametrize("content", DAMAGED_RUNS, ids=range(len(DAMAGED_RUNS)))
def test_nothing_to_compare_is_not_worse(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 says that the second run is worse."""
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(Path("whole"))
    folder.save(new_record(["x"]))
    Path("damaged").mkdir()
    Path("damaged/record.json").write_bytes(content)
    Path("counts").write_bytes(content)
    Path("empty").mkdir()
    pairs = [("whole", "damaged"), ("damaged", "whole"), ("empty", "whole"), ("whole", "whole"), ("counts", "counts")]
    for first, second in (*pairs, ("counts", "whole"), ("nowhere", "whole"), ("n" * 300, "whole")):
        for more in ([], ["--json"], ["--figure", "magic"]):
            monkeypatch.setattr("sys.argv", ["edgetrain", "compare", first, second, *more])
            with pytest.raises(SystemExit) as ended:
                main()
            told = capsys.readouterr()
            assert (ended.value.code, told.out) == (2, ""), (first, second, told.err)


def test_json_is_alone_whatever_the_model_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["import torch", "print('at import')", "class Net(torch.nn.Linear):", "    def forward(self, x):",
             "        print('run')", "        return super().forward(x.mean((1, 2, 3)).unsqueeze(1))", "",
             "def net(classes):", "    print('made')", "    return Net(1, classes)"]  # fmt: skip
    Path("mine.py").write_text("\n".join(lines))
    for words in (["graph"], ["plan", "--memory", "9MB", "--device", "rpi4"], ["train", "--epochs", "1"]):
        ended = CliRunner().invoke(app, [words[0], "mine.py:net", *words[1:], "--json"])
        assert ended.exit_code == 0, ended.output
        json.loads(ended.stdout)
        assert "made" in ended.stderr
        assert "run" in ended.stderr


def test_an_error_gives_a_terminal_no_orders_and_ends() -> None:
    told = readable("a\nb \x1b[31mred\x07 \x9b2J \u202e " + "x" * 100_000)
    assert told.startswith("a\nb \\x1b[31mred\\x07 \\x9b2J \\u202e xxx")
    assert all(c == "\n" or c.isprintable() for c in told)
    assert len(told) < 5000


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "koi8-r"])
def test_a_terminal_that_knows_other_letters(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["devices", "rpi4"], ["devices"], ["models", "--notes"], ["devices", "rpi4", "--json"]):
        out = io.BytesIO()
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, encoding, write_through=True))
        monkeypatch.setattr("sys.argv", ["edgetrain", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (0, None)
        assert len(out.getvalue()) > 500


# ---- errors of commands have no words of Python, and name no option twice or that there is not

PYTHON = re.compile(r"\w=\w|\bet\.|weights_only|requires_grad|TypeError|argument after|--resume, or --resume|Traceback")


def test_what_errors_of_commands_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, ["train", "lenet", "--epochs", "1", "--batch", "500", "--out", "run"]).exit_code == 0
    project = ["export", "lenet", "--target", "linux-x86_64", "--out", "fw"]
    assert CliRunner().invoke(app, project).exit_code == 0
    (tmp_path / "w_txt.pt").write_text("hello weights")
    rpi4 = ["plan", "lenet", "--device", "rpi4", "--runtime", "library", "--memory", "1MB"]
    told = {}
    for words in (
        ["train", "lenet", "--out", "run"], ["train", "autoencoder", "--out", "run", "--resume"],
        ["train", "bert_small"], ["train", "ds_cnn"], ["train", "lenet", "--weights", "w_txt.pt"],
        ["emulate", "fw", "--flash", "flash.bin"], [*rpi4, "--objective", "energy", "--planner", "fast"],
        ["plan", "lenet", "--memory", "1MB", "--objective", "energy"],
        ["plan", "lenet", "--memory", "9MB", "--page-to", "no"],
        ["profile", "lenet", "--planner", "fast"],
    ):  # fmt: skip
        ended = CliRunner().invoke(app, words)
        assert isinstance(ended.exception, UserError), (words, repr(ended.exception), ended.output)
        told[" ".join(words)] = in_words_of_commands(str(ended.exception))
    for words, message in told.items():  # type: ignore[assignment]
        assert not PYTHON.search(message), (words, message)
        assert "another --model" not in message
        assert "Python with edgetrain" not in message
        assert not re.search(r"(--[\w-]+) \(\1", message), message
        assert message.count('"') % 2 == 0, message


DAMAGED: list[Callable[[dict[str, Any]], object]] = [
    lambda data: data.update(curves=[{**data["curves"][0], "instants": [1, 2]}]),
    lambda data: data.update(curves=[{**data["curves"][0], "instants": [[1, 2]]}]),
    lambda data: data.update(curves=3), lambda data: data.update(curves=[None]), lambda data: data.pop("title"),
    lambda data: data.update(tables=[{}]), lambda data: data.update(tables={"a": 1}), lambda data: data.update(note=3),
    lambda data: data.update(frontier=[]), lambda data: data.update(budget_bytes="1"),
]  # fmt: skip


@pytest.mark.parametrize("damage", range(len(DAMAGED)))
def test_a_damaged_picture_is_told_without_words_of_python(damage: int, tmp_path: Path) -> None:
    data = {
        "edgetrain memory": 1, "title": "t", "note": "n", "budget_bytes": None, "frontier": None, "tables": [],
        "frontier_table": None,
        "curves": [{"name": "a", "lasting_bytes": 1, "instants": [["op", "module", "forward", 1, False]]}],
    }  # fmt: skip
    (tmp_path / "memory.json").write_text(json.dumps(data))
    picture.load(tmp_path)
    DAMAGED[damage](data)
    (tmp_path / "memory.json").write_text(json.dumps(data))
    with pytest.raises(UserError) as told:
        picture.load(tmp_path)
    assert not re.search(
        r"Error|edgetrain\.\w|unpack|argument|NoneType|subscript|object is", str(told.value).partition("\n")[2]
    )


def test_a_report_does_not_write_over_itself_or_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["profile", "lenet", "--steps", "30", "--idle", "0", "--rounds", "0", "--out", "run"]
    assert CliRunner().invoke(app, words).exit_code == 0
    before = {path.name: path.read_bytes() for path in Path("run").iterdir()}
    for written in (
        ["-o", "f", "--trace", "f"], ["-o", "./f", "--trace", f"{tmp_path}/f"], ["--trace", "f", "--csv", "f"],
        ["-o", "c/ops.csv", "--csv", "c"], ["-o", "run/record.json"], ["--trace", "run/timeline.json"],
        ["--trace", "run/../run/samples.bin"],
    ):  # fmt: skip
        ended = CliRunner().invoke(app, ["report", "run", *written])
        assert ended.exit_code == 2, (written, ended.output)
        assert {path.name: path.read_bytes() for path in Path("run").iterdir()} == before
        assert {path.name for path in tmp_path.iterdir()} == {"run"}
    for _ in range(2):  # a second report takes the place of the first
        assert CliRunner().invoke(app, ["report", "run"]).exit_code == 0
