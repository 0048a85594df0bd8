"""CIFAR-10's binary version: what is read, and each way in which a file can be wrong."""

from __future__ import annotations

import gzip
import logging
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from edgetrain.errors import UserError
from edgetrain.zoo.datasets import cifar, load
from edgetrain.zoo.datasets.pixels import LUMA


def plain(content: bytes) -> bytes:
    return content


PACKERS: dict[str, Callable[[bytes], bytes]] = {".bin": plain, ".bin.gz": gzip.compress, ".bin.xz": lzma.compress}


def records(labels: list[int]) -> bytes:
    """A record for each label; its red is the label, its green 100, its blue 200."""
    return b"".join(bytes([n]) + bytes([n]) * 1024 + bytes([100]) * 1024 + bytes([200]) * 1024 for n in labels)


@pytest.mark.parametrize("suffix", list(PACKERS))
def test_folder_with_a_test_batch(tmp_path: Path, suffix: str) -> None:
    for name, labels in (("data_batch_1", [1, 2]), ("data_batch_2", [3]), ("test_batch", [9, 8])):
        (tmp_path / (name + suffix)).write_bytes(PACKERS[suffix](records(labels)))
    data = load(str(tmp_path))
    assert (data.kind, data.shape, data.classes) == ("images", (3, 32, 32), cifar.CLASSES)
    assert (len(data.train), len(data.test)) == (3, 2)
    x, y = data.train.batch(torch.tensor([2, 0]))
    assert y.tolist() == [3, 1]
    mean, std = torch.tensor(cifar.NORMALISATION.mean), torch.tensor(cifar.NORMALISATION.std)
    expected = (torch.tensor([3.0, 100.0, 200.0]) / 255 - mean) / std
    torch.testing.assert_close(x[0], expected[:, None, None].expand(3, 32, 32))
    assert data.test.batch(torch.arange(2))[1].tolist() == [9, 8]


def test_without_a_test_batch_the_last_sixth_is_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(records([0] * 10 + [1, 2]))
    with caplog.at_level(logging.WARNING):
        data = load(str(tmp_path))
    assert (len(data.train), len(data.test)) == (10, 2)
    assert data.test.batch(torch.arange(2))[1].tolist() == [1, 2]
    assert "the last 2 training records are the test part" in caplog.text


def test_a_batch_lying_there_twice_is_read_once(tmp_path: Path) -> None:
    for suffix, pack in PACKERS.items():
        (tmp_path / f"data_batch_1{suffix}").write_bytes(pack(records([1] * 6)))
    data = load(str(tmp_path))
    assert len(data.train) + len(data.test) == 6


def test_single_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.bin.xz"
    path.write_bytes(lzma.compress(records([1] * 12)))
    data = load(str(path))
    assert (data.name, len(data.train), len(data.test)) == ("mine", 10, 2)


def test_grey_and_resize(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(records([5, 5]))
    data = load(str(path), channels=1, input_size=16)
    x, _ = data.train.batch(torch.arange(1))
    assert x.shape == (1, *data.shape) == (1, 1, 16, 16)
    luma = torch.tensor(LUMA)
    mean, std = torch.tensor(cifar.NORMALISATION.mean) @ luma, torch.tensor(cifar.NORMALISATION.std) @ luma
    grey = (torch.tensor([5.0, 100.0, 200.0]) / 255 @ luma - mean) / std
    torch.testing.assert_close(x, grey.expand(1, 1, 16, 16))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("data_batch_1.bin", b"", "received: 0 bytes"),
        ("data_batch_1.bin", records([1, 2])[:-1], "a multiple of 3,073 bytes"),
        ("data_batch_1.bin", records([1, 2, 10]), "wrong label in record 2"),
        ("data_batch_1.bin", records([1]), "single record"),
        ("data_batch_1.bin.gz", gzip.compress(records([1, 2]), mtime=0)[:-9], "a complete gz file"),
        ("data_batch_1.bin.xz", lzma.compress(records([1, 2]))[:-9], "a complete xz file"),
        ("data_batch_1.bin.xz", lzma.compress(records([1, 2])) + b"more", "bytes after the end"),
        ("data_batch_1.bin.xz", records([1, 2]), "a complete xz file"),
        ("data_batch_1.bin.xz", b"", "ends before the end of its xz stream"),
    ],
)
def test_wrong_file(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(str(path))
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_more_than_all_of_cifar_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "MAX_RECORDS", 4)
    (tmp_path / "data_batch_1.bin").write_bytes(records([1, 2, 3]))
    (tmp_path / "data_batch_2.bin.gz").write_bytes(gzip.compress(records([1, 2, 3]), mtime=0))
    with pytest.raises(UserError, match="too long") as caught:
        load(str(tmp_path))
    assert "data_batch_2" in str(caught.value)


def test_xz_that_asks_for_much_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1.bin.xz"
    greedy = lzma.compress(records([1, 2]), filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 2**20}])
    # The dictionary size is one byte of the block header, which a checksum covers: 40 stands for 4 GiB.
    block = bytearray(greedy[12:24])
    assert block[2:4] == b"\x21\x01"
    block[4] = 40
    block[8:12] = _crc32(bytes(block[:8]))
    path.write_bytes(greedy[:12] + bytes(block) + greedy[24:])
    with pytest.raises(UserError, match="Memory usage limit exceeded"):
        load(str(path))


def _crc32(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(4, "little")


def test_nothing_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "test_batch.bin").write_bytes(records([1, 2]))
    with pytest.raises(UserError, match="nothing to train on"):
        load(str(tmp_path))
