"""`load`: options, names, and what is said about a spec that is no data set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from edgetrain.errors import UserError
from edgetrain.zoo.datasets import Data, Split, load


def test_digits_are_shipped_and_stratified() -> None:
    data = load("digits")
    assert (data.name, data.kind, data.shape, data.classes) == ("digits", "images", (1, 8, 8), tuple("0123456789"))
    assert (len(data.train), len(data.test)) == (1500, 297)
    _, labels = data.test.batch(torch.arange(297))
    assert set(torch.bincount(labels).tolist()) <= {29, 30}


def test_digits_are_normalised_and_keep_their_order() -> None:
    data = load("digits")
    x, y = data.train.batch(torch.arange(1500))
    assert x.dtype == torch.float32
    assert y.dtype == torch.int64
    assert abs(float(x.mean())) < 0.02
    assert abs(float(x.std()) - 1) < 0.02
    some = torch.tensor([7, 3, 3])
    assert torch.equal(data.train.batch(some)[0], x[some])
    assert torch.equal(data.train.batch(some)[1], y[some])


def test_seed_chooses_the_test_part_of_digits() -> None:
    everything = torch.arange(297)
    first, again, other = (load("digits", seed=seed).test.batch(everything)[0] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_digits_parts_hold_every_image_once() -> None:
    data = load("digits")
    parts = [part.batch(torch.arange(len(part)))[0].flatten(1) for part in (data.train, data.test)]
    assert len({tuple(image) for image in torch.cat(parts).tolist()}) == 1797


@pytest.mark.parametrize(("size", "channels"), [(16, 3), (4, 1), (None, 3), (32, None)])
def test_size_and_channels_of_digits(size: int | None, channels: int | None) -> None:
    data = load("digits", input_size=size, channels=channels)
    x, _ = data.train.batch(torch.arange(2))
    assert data.shape == (channels or 1, size or 8, size or 8)
    assert x.shape == (2, *data.shape)
    assert torch.equal(x[:, 0], x[:, -1])


def test_empty_batch() -> None:
    x, y = load("digits", input_size=16).train.batch(torch.arange(0))
    assert x.shape == (0, 1, 16, 16)
    assert y.shape == (0,)


@pytest.mark.parametrize(
    "indices", [torch.tensor([1500]), torch.tensor([-1]), torch.tensor([[0]]), torch.tensor([0.0])]
)
def test_wrong_indices(indices: torch.Tensor) -> None:
    with pytest.raises(UserError, match="expected"):
        load("digits").train.batch(indices)


@pytest.mark.parametrize("options", [{"input_size": 0}, {"channels": 2}, {"sequence": 0}])
def test_wrong_options(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match="expected"):
        load("digits", **options)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("digit", "did you mean digits"),
        ("MNIST", "mnist is not shipped. Get it from https://"),
        ("cifar-10", "cifar10 is not shipped"),
        ("/nowhere/at/all", "https://github.com/zalandoresearch/fashion-mnist"),
        ("", "There is no file or folder ''"),
        ("a\0b", "There is no file or folder"),
    ],
)
def test_path_that_does_not_exist(spec: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load(spec)
    assert said in str(caught.value)
    assert "a folder of photos" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("archive.tar.gz", "Unpack the archive"),
        ("table.csv", "Public data sets are at"),
        ("photo.jpg", "sub-folder"),
    ],
)
def test_file_of_no_known_kind(tmp_path: Path, name: str, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"x")
    with pytest.raises(UserError) as caught:
        load(str(path))
    assert f"{path} is no data set" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [("data_batch_1", "pickles, which are not read"), ("input.txt", "input.txt."), ("a.csv", "Public data")],
)
def test_folder_of_no_known_kind(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError) as caught:
        load(str(tmp_path))
    assert f"{tmp_path} is no data set" in str(caught.value)
    assert said in str(caught.value)


def test_flat_folder_of_photos_is_told_to_have_classes(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match="into a sub-folder named after it"):
        load(str(tmp_path))


def test_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("ab" * 100)
    assert load("~/a.txt").kind == "characters"


def test_an_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match="cannot be read: Permission denied") as caught:
        load(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_public_names() -> None:
    data: Data = load("digits")
    part: Split = data.train
    assert len(part) == 1500
