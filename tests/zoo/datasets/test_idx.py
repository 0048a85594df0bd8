"""MNIST's format: what is read, and each way in which a file can be wrong."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgetrain.errors import UserError
from edgetrain.zoo.datasets import idx, load

NAMES = (*idx.TRAIN, *idx.TEST)


def idx_bytes(values: torch.Tensor) -> bytes:
    header = bytes((0, 0, 8, values.dim())) + struct.pack(f">{values.dim()}I", *values.shape)
    return header + bytes(values.flatten().tolist())


def images(count: int, rows: int = 5, columns: int = 4) -> torch.Tensor:
    return (torch.arange(count * rows * columns) % 256).to(torch.uint8).view(count, rows, columns)


def write_set(folder: Path, *, packed: bool = False, train: int = 6, test: int = 3) -> None:
    parts = {
        NAMES[0]: images(train),
        NAMES[1]: torch.arange(train, dtype=torch.uint8) % 3,
        NAMES[2]: images(test),
        NAMES[3]: torch.arange(test, dtype=torch.uint8) % 3,
    }
    for name, values in parts.items():
        content = idx_bytes(values)
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("packed", [False, True])
def test_four_files(tmp_path: Path, packed: bool) -> None:
    write_set(tmp_path, packed=packed)
    data = load(str(tmp_path))
    assert (data.kind, data.name, data.shape) == ("images", tmp_path.name, (1, 5, 4))
    assert (len(data.train), len(data.test), data.classes) == (6, 3, ("0", "1", "2"))
    x, y = data.train.batch(torch.tensor([4, 1]))
    expected = (images(6)[[4, 1]].float()[:, None] / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(x, expected)
    assert y.tolist() == [1, 1]


def test_one_file_stands_for_its_folder_and_a_dot_is_allowed(tmp_path: Path) -> None:
    write_set(tmp_path)
    dotted = tmp_path / "train-images.idx3-ubyte"
    (tmp_path / NAMES[0]).rename(dotted)
    assert len(load(str(dotted)).train) == 6


def test_resize_and_colour(tmp_path: Path) -> None:
    write_set(tmp_path)
    data = load(str(tmp_path), input_size=8, channels=3)
    x, _ = data.train.batch(torch.arange(2))
    assert x.shape == (2, 3, 8, 8)
    assert data.shape == (3, 8, 8)


def test_missing_file_is_named(tmp_path: Path) -> None:
    write_set(tmp_path)
    (tmp_path / NAMES[3]).unlink()
    with pytest.raises(UserError, match="lacks t10k-labels-idx1-ubyte"):
        load(str(tmp_path))


def wrong(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    """`load` of a good set whose file `name` has `content` must name that file and say `said`."""
    write_set(tmp_path)
    (tmp_path / name.removesuffix(".gz")).unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(str(tmp_path))
    assert str(tmp_path / name) in str(caught.value)
    assert said in str(caught.value)


GOOD_IMAGES = idx_bytes(images(6))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "an empty file"),
        (b"\x00\x00\x08", "does not start like an idx file of images"),
        (b"\x00\x00\x0d" + GOOD_IMAGES[3:], "does not start like an idx file of images"),
        (idx_bytes(torch.zeros(6, dtype=torch.uint8)), "does not start like an idx file of images"),
        (GOOD_IMAGES[:-1], "cut off"),
        (GOOD_IMAGES + b"x", "too long"),
        (bytes((0, 0, 8, 3)) + struct.pack(">3I", 0, 5, 4), "header that cannot be right"),
        (bytes((0, 0, 8, 3)) + struct.pack(">3I", 2**20, 2**10, 2**10), "header that cannot be right"),
        (bytes((0, 0, 8, 3)) + struct.pack(">3I", 2**32 - 1, 2**32 - 1, 2**32 - 1), "cannot be right"),
        (idx_bytes(images(7)), "7 images and 6 labels"),
    ],
)
def test_wrong_images(tmp_path: Path, content: bytes, said: str) -> None:
    wrong(tmp_path, NAMES[0], content, said)


def test_wrong_labels(tmp_path: Path) -> None:
    wrong(tmp_path, NAMES[1], idx_bytes(images(6)), "does not start like an idx file of labels")


@pytest.mark.parametrize("content", [gzip.compress(GOOD_IMAGES, mtime=0)[:-12], GOOD_IMAGES, b"\x1f\x8b"])
def test_wrong_gz(tmp_path: Path, content: bytes) -> None:
    wrong(tmp_path, NAMES[0] + ".gz", content, "a complete gz file")


def test_damaged_gz(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(bytes(range(256)) * 50))
    content[40:60] = bytes(20)
    wrong(tmp_path, NAMES[0] + ".gz", bytes(content), "cannot be read to its end")


def test_a_bomb_is_refused_as_soon_as_it_passes_its_header(tmp_path: Path) -> None:
    wrong(tmp_path, NAMES[0] + ".gz", gzip.compress(GOOD_IMAGES + bytes(50_000_000)), "too long")


def test_parts_of_different_sizes(tmp_path: Path) -> None:
    wrong_size = idx_bytes(images(3, rows=6))
    write_set(tmp_path)
    (tmp_path / NAMES[2]).write_bytes(wrong_size)
    with pytest.raises(UserError, match="differ in size"):
        load(str(tmp_path))


@settings(max_examples=60, deadline=None)
@given(start=st.integers(0, 16), noise=st.binary(max_size=40))
def test_any_bytes_give_data_or_a_user_error(
    tmp_path_factory: pytest.TempPathFactory, start: int, noise: bytes
) -> None:
    folder = tmp_path_factory.mktemp("noise")
    write_set(folder)
    (folder / NAMES[0]).write_bytes(GOOD_IMAGES[:start] + noise)
    with pytest.raises(UserError):
        load(str(folder))
