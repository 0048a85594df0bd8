"""Texts in windows, and each way in which a text can be wrong."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
import torch

from edgetrain.errors import UserError
from edgetrain.zoo.datasets import Split, load, text


def all_of(part: Split) -> tuple[torch.Tensor, ...]:
    return part.batch(torch.arange(len(part)))


@pytest.mark.parametrize("name", ["poem.txt", "poem.txt.gz", "POEM.TXT"])
def test_windows(tmp_path: Path, name: str) -> None:
    content = ("abcdefghij" * 10).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
    data = load(str(path), sequence=4)
    assert (data.kind, data.shape, data.classes) == ("characters", (4,), tuple("abcdefghij"))
    assert data.name.lower() == "poem"
    assert (len(data.train), len(data.test)) == ((90 - 1) // 4, (10 - 1) // 4)
    x, y = data.train.batch(torch.tensor([1, 0]))
    assert x.tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert y.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous()
    assert y.is_contiguous()


def test_windows_do_not_overlap_and_stay_in_their_part(tmp_path: Path) -> None:
    content = "".join(chr(0x4E00 + i) for i in range(1000))
    path = tmp_path / "long.txt"
    path.write_text(content, encoding="utf-8")
    data = load(str(path), sequence=7)
    (train_x, train_y), (test_x, test_y) = all_of(data.train), all_of(data.test)
    assert train_x.flatten().tolist() == list(range(128 * 7))
    assert torch.equal(train_y, train_x + 1)
    assert torch.equal(test_y, test_x + 1)
    assert int(test_x[0, 0]) == 900
    assert "".join(data.classes) == content


def test_line_ends_stay_and_a_byte_order_mark_goes(tmp_path: Path) -> None:
    path = tmp_path / "dos.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"a\r\n" * 50)
    assert load(str(path), sequence=4).classes == ("\n", "\r", "a")


def test_a_text_of_just_two_windows(tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    path.write_text("abcd" * 5)
    data = load(str(path), sequence=9)
    assert (len(data.train), len(data.test)) == (1, 1)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("short.txt", b"abcd" * 4, "shorter than two windows"),
        ("empty.txt", b"", "shorter than two windows"),
        ("latin.txt", b"caf\xe9 " * 100, "the byte 0xe9 at position 3"),
        ("cut.txt.gz", gzip.compress(b"abcd" * 100, mtime=0)[:-9], "a complete gz file"),
        ("plain.txt.gz", b"abcd" * 100, "a complete gz file"),
    ],
)
def test_wrong_text(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load(str(path), sequence=9)
    assert str(path) in str(caught.value)
    assert said in str(caught.value)


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "MAX_BYTES", 1000)
    path = tmp_path / "bomb.txt.gz"
    path.write_bytes(gzip.compress(bytes(10_000_000), mtime=0))
    with pytest.raises(UserError, match="too long"):
        load(str(path))
