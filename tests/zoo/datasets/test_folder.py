"""Folders of photos: classes, splits, decoding, and each way in which a folder or a file can be wrong."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from edgetrain.errors import UserError
from edgetrain.zoo.datasets import folder, load, photo
from edgetrain.zoo.datasets.folder import FolderSplit
from edgetrain.zoo.datasets.pixels import LUMA

RED, GREEN = (200, 0, 0), (0, 200, 0)


def write_class(path: Path, count: int, colour: tuple[int, int, int], suffix: str = ".png") -> None:
    path.mkdir(parents=True)
    for i in range(count):
        Image.new("RGB", (12 + i, 10), colour).save(path / f"{path.name}{i}{suffix}")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_class(tmp_path / "red", 10, RED)
    write_class(tmp_path / "green", 5, GREEN, ".JPG")
    return tmp_path


def names(part: object) -> list[str]:
    assert isinstance(part, FolderSplit)
    return [path.name for path in part.paths]


def test_classes_split_and_values(photos: Path) -> None:
    data = load(str(photos), input_size=8)
    assert (data.kind, data.name, data.classes, data.shape) == (
        "images",
        photos.name,
        ("green", "red"),
        (3, 8, 8),
    )
    assert (len(data.train), len(data.test)) == (12, 3)
    assert not set(names(data.train)) & set(names(data.test))
    x, y = data.train.batch(torch.tensor([11, 0]))
    assert y.tolist() == [1, 0]
    mean, std = torch.tensor(folder.NORMALISATION.mean), torch.tensor(folder.NORMALISATION.std)
    red = (torch.tensor(RED) / 255 - mean) / std
    torch.testing.assert_close(x[0], red[:, None, None].expand(3, 8, 8))
    assert x.is_contiguous()


def test_batches_are_deterministic_and_the_size_is_224_by_default(photos: Path) -> None:
    data = load(str(photos))
    indices = torch.tensor([3, 9, 3])
    first, second = data.train.batch(indices), load(str(photos)).train.batch(indices)
    assert first[0].shape == (3, 3, 224, 224)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert data.train.batch(torch.arange(0))[0].shape == (0, 3, 224, 224)


def test_seed_chooses_the_test_part(photos: Path) -> None:
    parts = [sorted(names(load(str(photos), seed=seed).test)) for seed in (0, 0, 1, 2, 3)]
    assert parts[0] == parts[1]
    assert len({tuple(part) for part in parts}) > 1


def test_grey(photos: Path) -> None:
    data = load(str(photos), input_size=4, channels=1)
    x, _ = data.train.batch(torch.tensor([11]))
    luma = torch.tensor(LUMA)
    mean, std = torch.tensor(folder.NORMALISATION.mean), torch.tensor(folder.NORMALISATION.std)
    grey = (torch.tensor(RED) / 255 @ luma - mean @ luma) / (std @ luma)
    torch.testing.assert_close(x, grey.expand(1, 1, 4, 4))


@pytest.mark.parametrize("test_name", ["test", "val"])
def test_a_folder_that_is_divided_already(tmp_path: Path, test_name: str) -> None:
    for part, count in (("train", 3), (test_name, 1)):
        write_class(tmp_path / part / "red", count, RED)
        write_class(tmp_path / part / "green", count, GREEN)
    data = load(str(tmp_path), input_size=8)
    assert (len(data.train), len(data.test), data.classes) == (6, 2, ("green", "red"))


def test_divided_folder_with_other_classes(tmp_path: Path) -> None:
    for name in ("train/red", "train/green", "test/red", "test/blue"):
        write_class(tmp_path / name, 1, RED)
    with pytest.raises(UserError, match="only in one of them: blue, green"):
        load(str(tmp_path))


def test_hidden_and_other_files_are_passed_over(photos: Path) -> None:
    (photos / ".cache").mkdir()
    (photos / "__MACOSX").mkdir()
    (photos / "README.md").write_text("about")
    (photos / "red" / "._red0.png").write_bytes(b"no image")
    (photos / "red" / "Thumbs.db").write_bytes(b"no image")
    data = load(str(photos))
    assert data.classes == ("green", "red")
    assert len(data.train) + len(data.test) == 15


def test_shorter_side_is_resized_and_the_centre_cut_out(tmp_path: Path) -> None:
    pixels = np.zeros((20, 60, 3), dtype=np.uint8)
    pixels[:, 20:40] = 255
    path = tmp_path / "wide.png"
    Image.fromarray(pixels).save(path)
    # Beside the white square is black; only the filter's reach lets some of it in.
    square = photo.decode(path, 10)
    assert square.shape == (3, 10, 10)
    assert square[:, :, 1:-1].min() == 255
    assert photo.decode(path, 40)[:, :, 2:-2].min() == 255


def test_photos_are_turned_upright(tmp_path: Path) -> None:
    pixels = np.zeros((32, 32, 3), dtype=np.uint8)
    pixels[:16] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held turned: to be shown turned clockwise by 90 degrees
    for name in ("a.jpg", "a.png"):
        Image.fromarray(pixels).save(tmp_path / name, exif=exif)
        square = photo.decode(tmp_path / name, 32).float()
        assert square[:, :, 24:].mean() > 250
        assert square[:, :, :8].mean() < 5


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "1"])
def test_other_kinds_of_png(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.png"
    Image.new("RGB", (9, 9), (255, 255, 255)).convert(mode).save(path)
    assert photo.decode(path, 4).tolist() == torch.full((3, 4, 4), 255).tolist()


def test_16_bit_grey_is_scaled_not_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.fromarray(np.full((9, 9), 0x8000, dtype=np.uint16)).save(path)
    assert set(photo.decode(path, 4).flatten().tolist()) == {0x80}


def test_large_jpeg_decodes_to_the_same_picture(tmp_path: Path) -> None:
    ramp = np.linspace(0, 255, 1024).astype(np.uint8)
    Image.fromarray(np.repeat(np.tile(ramp, (1024, 1))[..., None], 3, axis=2)).save(tmp_path / "a.jpg", quality=95)
    square = photo.decode(tmp_path / "a.jpg", 16).float()
    expected = torch.linspace(0, 255, 33)[1::2].expand(3, 16, 16)
    torch.testing.assert_close(square, expected, atol=3, rtol=0)


def test_empty_class_folder(photos: Path) -> None:
    (photos / "blue").mkdir()
    with pytest.raises(UserError, match="has no images") as caught:
        load(str(photos))
    assert str(photos / "blue") in str(caught.value)


def test_class_folder_with_other_files_only(photos: Path) -> None:
    (photos / "blue").mkdir()
    for i in range(4):
        (photos / "blue" / f"{i}.webp").write_bytes(b"x")
    with pytest.raises(UserError, match=r"received: 0.webp, 1.webp, 2.webp, …"):
        load(str(photos))


def test_single_class(tmp_path: Path) -> None:
    write_class(tmp_path / "red", 3, RED)
    with pytest.raises(UserError, match="has a single class") as caught:
        load(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_no_classes(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "test").mkdir()
    with pytest.raises(UserError, match="has no classes") as caught:
        load(str(tmp_path))
    assert str(tmp_path / "train") in str(caught.value)


def test_class_with_a_single_image(photos: Path) -> None:
    write_class(photos / "blue", 1, (0, 0, 200))
    with pytest.raises(UserError, match="has a single image") as caught:
        load(str(photos))
    assert str(photos / "blue") in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no image at all", b"GIF89a" + bytes(100), b"\xff\xd8\xff"])
def test_a_file_that_is_no_image_is_named_by_load(photos: Path, content: bytes) -> None:
    (photos / "red" / "bad.jpg").write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as an image") as caught:
        load(str(photos))
    assert str(photos / "red" / "bad.jpg") in str(caught.value)


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_a_truncated_image_is_named_by_its_batch(tmp_path: Path, suffix: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(2):
            path = tmp_path / name / f"{i}{suffix}"
            Image.fromarray(noise).save(path)
            path.write_bytes(path.read_bytes()[:-2000])
    data = load(str(tmp_path))
    with pytest.raises(UserError, match="cannot be read as an image") as caught:
        data.train.batch(torch.tensor([1]))
    assert str(tmp_path / "b") in str(caught.value)


def png_header(width: int, height: int) -> bytes:
    body = b"IHDR" + struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + body + struct.pack(">I", zlib.crc32(body)) + bytes(12)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("size", [(2**31 - 1, 2**31 - 1), (10_000, 9_000)])
def test_an_image_of_too_many_pixels_is_refused_by_load(photos: Path, size: tuple[int, int]) -> None:
    (photos / "red" / "bomb.png").write_bytes(png_header(*size))
    with pytest.raises(UserError, match="at most 89,478,485 pixels") as caught:
        load(str(photos))
    assert "bomb.png" in str(caught.value)


def test_a_long_thin_image_takes_no_more_than_its_square(tmp_path: Path) -> None:
    path = tmp_path / "thin.png"
    Image.new("RGB", (100_000, 1), RED).save(path)
    assert photo.decode(path, 64).shape == (3, 64, 64)


def test_a_photo_that_vanished_is_named(photos: Path) -> None:
    data = load(str(photos))
    (photos / "green" / names(data.train)[0]).unlink()
    with pytest.raises(UserError, match="No such file"):
        data.train.batch(torch.tensor([0]))
