"""Files and names that no reader can take: one error in bounded time, nothing written through a link, nothing run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import re
import stat
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from edgetrain import files
from edgetrain.cli import app, main
from edgetrain.costs.table import Costs
from edgetrain.devices import device
from edgetrain.errors import UserError
from edgetrain.files import write_atomic
from edgetrain.firmware.build import build, load_project
from edgetrain.firmware.emulate import COMMIT, run_firmware
from edgetrain.graph.ir import Graph
from edgetrain.measure import picture
from edgetrain.measure.counts import load_counts
from edgetrain.measure.record import RunFolder, new_record
from edgetrain.measure.samples import read_samples
from edgetrain.plan.micro_batches import MicroPlan
from edgetrain.plan.plan import Plan
from edgetrain.report.html import _saved_charts
from edgetrain.run import metrics_file
from edgetrain.run.checkpoint import State, latest, save
from edgetrain.run.weights import load_weights
from edgetrain.saved import read_object
from edgetrain.zoo import datasets
from edgetrain.zoo.datasets import bearings

SEEDS = 1 + int(os.environ.get("EDGETRAIN_EXAMPLES", "60")) // 1000
LIMIT_S = 10.0
VICTIM = b"what must not be touched"


def weights(path: Path) -> object:
    return load_weights(nn.Linear(2, 2), path)


def in_folder(name: str, read: Callable[[Path], object]) -> Callable[[Path], object]:
    """For a reader of a folder: the file under the name that it has there."""

    def go(path: Path) -> object:
        folder = path.parent / "folder"
        folder.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(path)
        return read(folder)

    return go


READERS: dict[str, Callable[[Path], object]] = {
    "plan": Plan.load, "micro plan": MicroPlan.load, "costs": Costs.load, "graph": Graph.load, "counts": load_counts,
    "record": in_folder("record.json", lambda folder: RunFolder(folder).load()), "json": read_object,
    "project": in_folder("project.json", load_project), "memory": in_folder("memory.json", picture.load),
    "charts": in_folder("charts.json", lambda folder: list(_saved_charts(RunFolder(folder)))),
    "samples": in_folder("samples.bin", read_samples), "device": device.load, "weights": weights,
    "bearings": in_folder("x.npz", bearings.load),

    "cifar": in_folder("x.bin", lambda f: datasets.load(str(f / "x.bin"))),
    "packed": in_folder("x.txt.gz", lambda f: datasets.load(str(f / "x.txt.gz"))),
    "idx": in_folder("train-images-idx3-ubyte", lambda f: datasets.load(str(f))),
}  # fmt: skip
ENDINGS = {"device": "mine.toml"}


def zipped(*members: tuple[str, bytes], packed: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", packed) as archive:
        for name, data in members:
            archive.writestr(name, data)
    return out.getvalue()


def saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def cycle() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["model"] = {"state_dict": found}
    return found


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(depth):
        found = {"state_dict": found}
    return found


def header(shape: str, descr: str = "<f8") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def contents(seed: int) -> Iterator[tuple[str, bytes]]:
    drawn = random.Random(seed)
    yield from (
        ("empty", b""),
        ("zeros", bytes(5000)),
        ("noise", drawn.randbytes(3000)),
        ("latin", b"\xff\xfe\xe9" * 50),
    )
    yield from (("deep list", b"[" * 100_000), ("deep object", b'{"a":' * 100_000), ("deep both", b'[{"a":' * 50_000))
    yield from (
        ("nan", b'{"schema": NaN}'),
        ("infinite", b'{"schema": 1e999}'),
        ("twice", b'{"schema": 1, "schema": 1}'),
    )
    yield from (
        ("long number", b'{"schema": ' + b"9" * 6000 + b"}"),
        ("large number", b'{"schema": ' + b"9" * 300 + b"}"),
    )
    yield from (
        (name, data) for name, data in (("list", b"[]"), ("text", b'"a"'), ("null", b"null"), ("true", b"true"))
    )
    yield "deep table", b"a = " + b"[" * 10_000 + b"]" * 10_000
    yield "deep inline", b"a = " + b"{b=" * 10_000 + b"1" + b"}" * 10_000
    yield "deep key", b"name" + b".a" * 10_000 + b" = 1"
    yield "toml number", b"name = " + b"9" * 6000
    yield "key twice", b'name = "a"\nname = "b"'
    yield from (
        ("cyclic", saved(cycle())),
        ("nested", saved(nested(300))),
        ("tuple key", saved({("a",): torch.ones(1)})),
    )
    yield "pickle", pickle.dumps({"a": [1] * 100})
    yield "code", pickle.dumps({"model": os.getcwd})
    yield "bomb", zipped(("archive/data.pkl", bytes(20_000_000)), packed=zipfile.ZIP_DEFLATED)
    yield "npz bomb", zipped(("DE.npy", header("(600, 1000000)") + bytes(20_000_000)), packed=zipfile.ZIP_DEFLATED)
    yield from (
        ("npz huge", zipped(("DE.npy", header("(1000000000000000,)")))),
        ("npz negative", zipped(("DE.npy", header("(-5,)")))),
    )
    yield from (
        ("npz object", zipped(("DE.npy", header("(3,)", "|O") + b"x"))),
        ("npz deep", zipped(("DE.npy", header("(" * 60)))),
    )
    yield "npz complex", npz(np.ones(2000, dtype=np.complex128))
    yield "npz text", npz(np.array(["a"] * 2000))
    yield "npz nan", npz(np.full(2000, np.nan))
    whole = saved({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    yield "cut off", whole[: drawn.randrange(10, len(whole) - 10)]
    length = drawn.choice((2**63, 2**40, 10**6))
    yield (
        "safetensors",
        length.to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [99999999999], "data_offsets": [0, 4]}}',
    )
    yield "gzip", b"\x1f\x8b\x08" + drawn.randbytes(200)


def npz(array: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, DE=array)
    return out.getvalue()


@pytest.mark.parametrize("reader", READERS)
def test_content(reader: str, tmp_path: Path) -> None:
    for seed in range(SEEDS):
        for name, data in contents(seed):
            file = tmp_path / ENDINGS.get(reader, "file")
            file.write_bytes(data)
            if (reader, name) in TAKEN:
                continue
            begin = time.monotonic()
            with pytest.raises(UserError) as told:
                READERS[reader](file)
            assert time.monotonic() - begin < LIMIT_S, name
            assert len(str(told.value)) < 3000, (name, str(told.value)[:200])
            assert not PYTHON.search(str(told.value).replace(str(file), "")), (name, str(told.value))


PYTHON = re.compile(r"NoneType|[a-z]Error\b|codec|recursion|received: (dict|list|int|str|float)\b")

# What is well for a reader that asks for no more than text or JSON.
TAKEN = {("charts", "list"), ("json", "large number"), ("json", "infinite")}


# ---- things that are no files, and names that no file has


def things(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "empty folder").mkdir()
    yield from ((name, tmp_path / name) for name in ("pipe", "loop", "dangling", "empty folder", "missing"))
    yield from (("zero", Path("/dev/zero")), ("null", Path("/dev/null")), ("random", Path("/dev/urandom")))


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file(reader: str, tmp_path: Path) -> None:
    for name, thing in things(tmp_path):
        path = thing
        if reader in ENDINGS:
            path = tmp_path / f"{name}.toml"
            path.symlink_to(thing)
        begin = time.monotonic()
        with pytest.raises(UserError):
            READERS[reader](path)
        assert time.monotonic() - begin < LIMIT_S, name


NAMES = ["x" * 300, "é" * 200, "a/" * 3000, "line\nbreak", "tab\t", "nul\0", "\x1b[31mred", "bell\a", "\ud800", ""]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names(name: str) -> None:
    with pytest.raises(UserError) as told:
        files.checked_path(name)
    assert str(told.value).isprintable() or "\n  " in str(told.value)
    assert len(str(told.value)) < 500
    with pytest.raises(UserError):
        device.load(f"{name}.toml")
    readers: list[Callable[[Any], object]] = [Plan.load, weights, datasets.load, RunFolder.create]
    for read in readers:
        with pytest.raises(UserError):
            read(name)


@pytest.mark.parametrize(
    "words",
    [["train", "lenet", "--data", "{}"], ["train", "lenet", "--out", "{}"], ["train", "lenet", "--weights", "{}"],
     ["train", "{}.py:build"], ["plan", "lenet", "--load", "{}"],
     ["plan", "lenet", "--device", "{}.toml", "--memory", "1MB"],
     ["export", "lenet", "--target", "nrf52840", "--out", "{}"], ["export", "lenet", "--target", "{}", "--out", "fw"],
     ["emulate", "{}"], ["devices", "{}"], ["report", "{}"], ["compare", "{}", "{}"],
     ["graph", "lenet", "--out", "{}"]],
    ids=" ".join,
)  # fmt: skip
def test_commands(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("n" * 300, "line\nbreak", "/dev/zero"):
        given = [word.replace("{}", name) for word in words]
        monkeypatch.setattr("sys.argv", ["edgetrain", *given])
        begin = time.monotonic()
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code in (1, 2)
        assert time.monotonic() - begin < LIMIT_S
        assert "Traceback" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["timeline.json", "memory.json", "samples.bin", "charts.json", "metrics.jsonl"])
def test_a_link_that_leads_to_itself(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.save(new_record(["x"], it=name))
    (folder.path / name).symlink_to(name)
    for words in (["-o", "page"], ["--csv", "csv", "--trace", "trace"], ["-o", f"run/{name}"]):
        monkeypatch.setattr("sys.argv", ["edgetrain", "report", "run", *words])
        monkeypatch.chdir(tmp_path)
        with contextlib.suppress(SystemExit):
            main()
        assert "Traceback" not in capsys.readouterr().err
        assert (folder.path / name).is_symlink()


@pytest.mark.parametrize("kind", ["a folder of images", "cifar"])
def test_a_file_of_a_data_set_that_cannot_be_read_is_not_left_out(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in "ab":
        (folder / name).mkdir()
        for place in range(3):
            Image.new("L", (8, 8)).save(folder / name / f"{place}.png")
    broken = folder / "a" / "3.PNG"
    if kind == "cifar":
        (folder / "data_batch_1.bin").write_bytes(bytes(3073 * 12))
        broken = folder / "data_batch_2.bin"
    datasets.load(str(folder))
    (tmp_path / "things").mkdir()
    for name, thing in things(tmp_path / "things"):
        if name != "empty folder":
            broken.symlink_to(thing)
            with pytest.raises(UserError, match=broken.name):
                datasets.load(str(folder))
            broken.unlink()


# ---- links in folders of ours

STATE = State(1, 0, 0, 10, 2, 0, {}, None, {})


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(2, 2)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "name", ["record.json", ".tmp-record.json", "metrics.jsonl", ".lock", "checkpoints", "plan.json", "samples.bin",
             "timeline.bin", "memory.json", "config.json", "report.html", "anything"]
)  # fmt: skip
@pytest.mark.parametrize("folder_too", [False, True])
def test_nothing_is_written_through_a_link_in_a_run_folder(name: str, folder_too: bool, tmp_path: Path) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    if folder_too:
        victim.mkdir()
        (victim / "kept").write_bytes(VICTIM)
    else:
        victim.write_bytes(VICTIM)
    (run / name).symlink_to(victim)
    before = state_of(tmp_path)
    folder = RunFolder(run)
    with pytest.raises(UserError, match="symbolic link"):
        RunFolder.create(run)
    with pytest.raises(UserError, match="symbolic link"), folder.locked():
        pass
    if name == "checkpoints" and folder_too:
        (victim / "step-00000001").symlink_to(tmp_path)
        with pytest.raises(UserError, match="symbolic link"):
            save(run / name, *model_and_optimizer(), STATE)
        (victim / "step-00000001").unlink()
    writers: list[Callable[[Path], None]] = [
        lambda path: write_atomic(path, b"x"), lambda path: files.write_text(path, "x"),
        lambda path: metrics_file.append(path, {}), lambda path: metrics_file.cut(path, -1),
    ]  # fmt: skip
    for write in writers:
        with pytest.raises(UserError):
            write(run / name)
    if name == ".tmp-record.json" and not folder_too:
        folder.save(new_record(["x"]))  # such a file is one that a killed process left: it is replaced
        assert victim.read_bytes() == VICTIM
        return
    assert state_of(tmp_path) == before


def state_of(folder: Path) -> dict[str, tuple[int, bytes]]:
    every = sorted(folder.rglob("*"))
    return {str(p): (stat.S_IFMT(p.lstat().st_mode), p.read_bytes() if p.is_file() else b"") for p in every}


@pytest.fixture(scope="module")
def keeps_copies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "fw"
    words = ["export", "lenet", "--target", "linux-x86_64", "--keep-every", "1", "--out", str(folder)]
    assert CliRunner().invoke(app, words).exit_code == 0
    return folder


@pytest.mark.parametrize("content", [VICTIM, VICTIM * 10_000, bytes(5000), b"\xff\xd8\xff" * 4000], ids=len)
def test_a_file_that_is_no_flash_is_not_written_over(content: bytes, keeps_copies: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(content)
    (tmp_path / "link").symlink_to("mine")
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "loop").symlink_to("loop")
    before = state_of(tmp_path)
    for name in ("mine", "link", "dangling", "loop"):
        with pytest.raises(UserError, match=r"no flash of a firmware|symbolic link"):
            run_firmware(keeps_copies, [], flash=tmp_path / name)
        assert state_of(tmp_path) == before


def test_flash_that_was_used_or_is_new_is_taken(keeps_copies: Path, tmp_path: Path) -> None:
    batch = (torch.ones(1, 1, 28, 28), torch.zeros(1, dtype=torch.int64))
    assert f"COMMIT = {int.from_bytes(COMMIT, 'little'):#x}u" in (keeps_copies / "checkpoint.c").read_text()
    flash = tmp_path / "flash"
    for content in (b"", b"\xff" * 9000, b"\xff" * 500 + b"the first copy, not whole"):
        flash.write_bytes(content)
        assert run_firmware(keeps_copies, [batch] * 2, flash=flash).steps_before == 0
    assert run_firmware(keeps_copies, [batch] * 3, flash=flash).steps_before == 2


@pytest.mark.parametrize("place", ["/dev/null", "/dev/zero", "."])
def test_devices_and_folders_are_not_replaced(place: str, tmp_path: Path) -> None:
    path = Path(place) if place != "." else tmp_path
    before = path.stat().st_mode
    with pytest.raises(UserError):
        write_atomic(path, b"x")
    with pytest.raises(UserError):
        files.write_text(path, "x")
    assert path.stat().st_mode == before


def test_links_elsewhere_are_followed_where_one_reads(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    save(RunFolder.create(tmp_path / "link").checkpoints, *model_and_optimizer(), STATE)
    assert latest(real / "checkpoints")[0] is not None


# ---- a project runs what is known, and nothing else

PROJECT: dict[str, Any] = {
    "edgetrain firmware": 3, "target": "nrf52840", "graph_key": "k", "compiler": "gcc", "emulator": [],
    "is_board": False,
    "inputs": [{"name": "x", "shape": [1, 4], "dtype": "float32", "position": 0}], "tensors": [], "gradients": [],
    "sides": [], "calls": [], "keep_every": 0, "kept_bytes": 0, "arena_bytes": 4, "lasting_bytes": 4,
}  # fmt: skip
COMMANDS: list[tuple[str, Any]] = [
    ("emulator", ["sh", "-c", "touch owned"]), ("emulator", ["./evil"]), ("emulator", ["qemu-arm", "./evil"]),
    ("emulator", ["qemu-arm", "-cpu", "max", "-plugin", "evil.so"]), ("emulator", ["/tmp/qemu-arm"]),
    ("emulator", ["qemu-system-arm", "-machine", "virt,dumpdtb=x"]), ("emulator", ["qemu-system-arm", "-machine"]),
    ("emulator", ["qemu-aarch64", "-L", "/usr/../tmp"]), ("emulator", "qemu-arm"), ("emulator", [[]]),
    ("emulator", None),
    ("compiler", "evil-gcc"), ("compiler", "/tmp/gcc"), ("compiler", "gcc; touch owned"), ("compiler", ""),
    ("compiler", 3),
    ("target", "../../x"), ("target", "a b"), ("is_board", "yes"), ("arena_bytes", "4"), ("arena_bytes", None),
    ("inputs", [{"name": "x", "shape": [10**9, 10**9], "dtype": "float32", "position": 0}]),
    ("inputs", [{"name": "x", "shape": [1] * 100, "dtype": "float32", "position": 0}]), ("inputs", []),
    ("inputs", [{"name": "x", "shape": [2], "dtype": "object", "position": 0}]), ("calls", [{}]), ("sides", [1]),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), COMMANDS, ids=lambda value: str(value)[:40])
def test_a_project_that_asks_for_more(key: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project.json").write_text(json.dumps(PROJECT))
    load_project(tmp_path)
    (tmp_path / "project.json").write_text(json.dumps({**PROJECT, key: value}))
    (tmp_path / "Makefile").write_text("build/%:\n\ttouch owned\n")
    for use in (load_project, build):
        with pytest.raises(UserError):
            use(tmp_path)
    assert not (tmp_path / "owned").exists()


def test_a_project_with_a_link_is_not_built(tmp_path: Path) -> None:
    project, victim = tmp_path / "fw", tmp_path / "victim"
    project.mkdir()
    victim.mkdir()
    (project / "project.json").write_text(json.dumps(PROJECT))
    (project / "build").symlink_to(victim)
    with pytest.raises(UserError, match="symbolic link"):
        build(project)
    assert not list(victim.iterdir())


@pytest.mark.parametrize(
    "line",
    [
        'compiler = "sh"',
        'emulator = ["sh", "-c", "x"]',
        'flags = ["-fplugin=evil.so"]',
        'flags = ["-mcpu=x", "-o/etc/x"]',
    ],
)
def test_a_device_file_that_asks_for_more(line: str, tmp_path: Path) -> None:
    key = line.split()[0]
    text = (device.FOLDER / "nrf52840.toml").read_text()
    lines = [line if row.split(" = ")[0] == key else row for row in text.splitlines()]
    (tmp_path / "mine.toml").write_text("\n".join(lines))
    with pytest.raises(UserError):
        device.load(tmp_path / "mine.toml")
    assert device.load("nrf52840").firmware is not None


# ---- weights under the right names that are no numbers for the model

W = torch.arange(12.0).reshape(3, 4)
NO_NUMBERS: dict[str, Callable[[], torch.Tensor]] = {
    "sparse": W.to_sparse, "csr": W.to_sparse_csr, "meta": lambda: W.to("meta"),
    "quantised": lambda: torch.quantize_per_tensor(W, 0.1, 0, torch.qint8),
    "by channel": lambda: torch.quantize_per_channel(W, torch.ones(3), torch.zeros(3), 0, torch.quint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(4)] * 3),
    "nan": lambda: W * float("nan"), "inf": lambda: (W + 1) / 0, "too large": lambda: W.double() * 1e300,
    "half inf": lambda: (1e6 * W).half(), "conj": lambda: W.to(torch.complex64).conj(),
    **{str(t): lambda t=t: W.to(t) for t in  # type: ignore[misc]
       (torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.complex128)},
}  # fmt: skip
NO_ROWS = ("sparse", "csr", "quantised", "by channel", "nested")  # can be taken from these


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("nest", [(), ("state_dict",), ("model", "state_dict")], ids=str)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "0.weight") for kind in NO_NUMBERS),
        *((kind, "1.running_mean") for kind in NO_NUMBERS if kind not in NO_ROWS),
    ],
)
def test_weights_that_are_no_numbers(kind: str, name: str, nest: tuple[str, ...], tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    wrong = NO_NUMBERS[kind]()
    if name == "1.running_mean":
        wrong = wrong[2, :3]
    state: Any = {**model.state_dict(), name: wrong}
    for key in nest:
        state = {key: state}
    torch.save(state, tmp_path / "w.pt")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(UserError, match=name):
        load_weights(model, tmp_path / "w.pt")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_weights_of_other_floating_types_are_converted(kind: torch.dtype, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    torch.save({**model.state_dict(), "0.weight": W.to(kind)}, tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt")
    assert torch.equal(model.get_parameter("0.weight"), W)
    assert model.get_parameter("0.weight").dtype == torch.float32


def test_a_mask_that_is_infinite_in_the_model_may_be_so_in_the_file(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
    torch.save(model.state_dict(), tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt")


@pytest.mark.parametrize("seed", range(4 * SEEDS))
def test_no_file_of_weights_is_told_to_be_loaded_unsafely(seed: int, tmp_path: Path) -> None:
    for name, data in [*contents(seed), ("text", b"hello weights")]:
        (tmp_path / "w.pt").write_bytes(data)
        with pytest.raises(UserError) as told:
            load_weights(nn.Linear(2, 2), tmp_path / "w.pt")
        assert "weights_only" not in str(told.value), name
