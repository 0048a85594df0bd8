"""From what the caller names to the data: `load`, and the messages for what is no data set.

In: "digits", or the path of a folder or file in one of the public formats. Out: `Data`.
Promised: the format is recognised from what lies there; nothing is downloaded, written or unpickled; whatever
is wrong is a UserError that names the file.

    spec                                         module
    digits                                       digits.py   shipped with edgetrain
    folder with train-images-idx3-ubyte …        idx.py      MNIST, Fashion-MNIST
    folder with data_batch_1.bin …               cifar.py    CIFAR-10, binary version
    folder with kws01_mfcc_int8_1000.tar.xz      keywords.py MLPerf Tiny's keywords
    folder with a sub-folder of photos a class   folder.py
    FILE.txt, FILE.txt.gz                        text.py     next character
"""

from __future__ import annotations

from pathlib import Path

from edgetrain.closest import closest
from edgetrain.errors import UserError
from edgetrain.files import checked_path
from edgetrain.ranges import CHANNELS, SIDE, shown, whole
from edgetrain.zoo.datasets import cifar, digits, folder, idx, keywords, text
from edgetrain.zoo.datasets.base import Data

PUBLIC = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/ (the four .gz files)",
    "fashion-mnist": "https://github.com/zalandoresearch/fashion-mnist (the four .gz files)",
    "cifar10": "https://www.cs.toronto.edu/~kriz/cifar.html (the binary version, unpacked)",
    "keywords": "https://github.com/eembc/energyrunner (datasets/kws01, as kws01_mfcc_int8_1000.tar.xz)",
    "flowers": "http://download.tensorflow.org/example_images/flower_photos.tgz (unpacked)",
    "tinyshakespeare": "https://github.com/karpathy/char-rnn (data/tinyshakespeare/input.txt)",
}
POSSIBLE = """one of
    digits                 1,797 hand-written digits, shipped with edgetrain
    a folder of photos     with a sub-folder of .jpg or .png files for each class
    a folder of idx files  as MNIST and Fashion-MNIST come, plain or .gz
    a folder of .bin files as CIFAR-10's binary version comes, plain, .gz or .xz
    keywords as MFCCs      kws01_mfcc_int8_1000.tar.xz of MLPerf Tiny
    a text file            .txt or .txt.gz, UTF-8"""


def load(
    spec: str,
    *,
    input_size: int | None = None,
    channels: int | None = None,
    sequence: int = 64,
    seed: int = 0,
) -> Data:
    """The data set called `spec`, or lying at that path.

    input_size: height and width of the images; if None, as they are stored (for a folder of photos: 224)
    channels:   1 or 3; if None, as they are stored (for a folder of photos: 3)
    sequence:   characters in a window of text
    seed:       chooses the test part of digits and of a folder of photos; the other sets come divided
    """
    _check_options(input_size, channels, sequence)
    if spec == "digits":
        return digits.load(input_size=input_size, channels=channels, seed=seed)
    if not spec:
        raise _not_there(spec)
    path = _expanded(spec)
    if not path.exists():
        raise _not_there(spec)
    try:
        return _load_path(path, input_size, channels, sequence, seed)
    except OSError as error:
        raise UserError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error


def _expanded(spec: str) -> Path:
    try:
        return checked_path(spec, "data set").expanduser()
    except (UserError, RuntimeError):  # no name of a file; ~somebody who has no home here
        raise _not_there(spec) from None


def _check_options(input_size: int | None, channels: int | None, sequence: int) -> None:
    if input_size is not None:
        whole("input_size", input_size, SIDE)
    if channels is not None and (channels not in CHANNELS or channels == 2):
        raise UserError("images are grey or coloured", expected="channels 1 or 3", received=shown(channels))
    whole("sequence", sequence, SIDE)


def _load_path(path: Path, input_size: int | None, channels: int | None, sequence: int, seed: int) -> Data:
    # Text and idx before sub-folders: what a known name says outweighs what the folder looks like.
    if text.recognises(path):
        return text.load(path, sequence=sequence)
    if idx.recognises(path):
        return idx.load(path, input_size=input_size, channels=channels)
    if cifar.recognises(path):
        return cifar.load(path, input_size=input_size, channels=channels)
    if keywords.recognises(path):
        return keywords.load(path, input_size=input_size, channels=channels, seed=seed)
    if folder.recognises(path):
        return folder.load(path, input_size=input_size, channels=channels, seed=seed)
    raise UserError(f"{path} is no data set that edgetrain knows", expected=POSSIBLE, next_step=_advice(path))


def _advice(path: Path) -> str:
    """What most likely helps with a path that is none of the formats."""
    names = sorted(p.name for p in path.iterdir()) if path.is_dir() else [path.name]
    texts = [name for name in names if text.recognises(path / name)]
    if any(name.lower().endswith(folder.SUFFIXES) for name in names):
        return "Put the images of each class into a sub-folder named after it, and give the folder above."
    if "data_batch_1" in names:
        return f"These are Python pickles, which are not read. CIFAR-10 in binary: {PUBLIC['cifar10']}."
    if path.is_file() and path.name.lower().endswith((".zip", ".tar", ".tgz", ".tar.gz", ".tar.xz")):
        return "Unpack the archive, and give the folder with its files."
    if texts:
        return f"If you mean the text in it, give {path / texts[0]}."
    return _sources()


def _sources() -> str:
    return "Public data sets are at\n" + "\n".join(f"    {name:<22} {place}" for name, place in PUBLIC.items())


def _not_there(spec: str) -> UserError:
    """The error for a path that does not exist; with the data set meant, where it reads like a name."""
    what = f"There is no file or folder {shown(spec)}."
    match = closest(spec, ("digits", *PUBLIC))
    if match == "digits":
        return UserError(what, expected=POSSIBLE, next_step="did you mean digits?")
    if match is not None:
        advice = f"{match} is not shipped. Get it from {PUBLIC[match]} and give its folder or file."
        return UserError(what, expected=POSSIBLE, next_step=advice)
    return UserError(what, expected=POSSIBLE, next_step=_sources())
