"""A folder of photos, one sub-folder a class: .jpg, .jpeg or .png.

In, either of:
    FOLDER/CLASS/*.jpg             split 80/20 in every class, by hash of the file name and the seed
    FOLDER/train/CLASS/*.jpg  and  FOLDER/test/CLASS/*.jpg  (or val/, where there is no test/)
Out: `Data` whose classes are the sub-folder names in alphabetical order. Other files are passed over.
Normalisation: pixel / 255, then ImageNet's mean (0.485, 0.456, 0.406), std (0.229, 0.224, 0.225), which
pretrained models expect. Images are turned upright as their camera says, their shorter side is resized to
`input_size` (224 if not given) and the centre is cut out.
Promised: photos stay on disk and are decoded a batch at a time. `load` reads every file's header, so a file
that is no image is named before training starts; one that breaks off is named when its batch is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from edgetrain import files
from edgetrain.errors import UserError
from edgetrain.zoo.datasets.base import Data, check_indices, held_out
from edgetrain.zoo.datasets.photo import check_header, decode
from edgetrain.zoo.datasets.pixels import Normalisation, Output, output_of, to_input

NORMALISATION = Normalisation(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
DEFAULT_SIZE = 224
SUFFIXES = (".jpg", ".jpeg", ".png")
TEST_SHARE = 0.2

Photos = dict[str, list[Path]]
"""The image files of each class, by class name; both in alphabetical order."""


@dataclass(frozen=True, eq=False)
class FolderSplit:
    """A part whose images lie on disk: their paths, `labels` int64 [N], and what they become."""

    paths: tuple[Path, ...]
    labels: torch.Tensor
    output: Output

    def __len__(self) -> int:
        return len(self.paths)

    def batch(self, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """(x float32 [B,C,H,W], y int64 [B]); a UserError names a photo that cannot be decoded."""
        check_indices(indices, len(self))
        size = self.output.height
        pixels = torch.empty(len(indices), 3, size, size, dtype=torch.uint8)
        for row, index in enumerate(indices.tolist()):
            pixels[row] = decode(self.paths[index], size)
        return to_input(pixels, self.output), self.labels[indices]


def recognises(path: Path) -> bool:
    """Whether `path` is a folder with sub-folders."""
    return path.is_dir() and bool(_sub_folders(path))


def load(path: Path, *, input_size: int | None, channels: int | None, seed: int) -> Data:
    """The photos in the folder `path`; `seed` chooses the test part where the folder does not."""
    train, test = _parts(path, seed)
    for photos in (*train.values(), *test.values()):
        for photo in photos:
            check_header(photo)
    size = input_size or DEFAULT_SIZE
    output = output_of((3, size, size), NORMALISATION, input_size=size, channels=channels)
    splits = [_split(photos, output) for photos in (train, test)]
    return Data(path.resolve().name, "images", splits[0], splits[1], tuple(train), output.shape)


def _sub_folders(folder: Path) -> list[Path]:
    """In alphabetical order, without hidden ones and what macOS adds to archives."""
    return [p for p in sorted(folder.iterdir()) if p.is_dir() and not p.name.startswith((".", "__MACOSX"))]


def _parts(folder: Path, seed: int) -> tuple[Photos, Photos]:
    """The photos to train on and those to test on, of the same classes."""
    test_folder = next((folder / name for name in ("test", "val") if (folder / name).is_dir()), None)
    if test_folder is None or not (folder / "train").is_dir():
        return _divide(_photos(folder), seed)
    train, test = _photos(folder / "train"), _photos(test_folder)
    if train.keys() != test.keys():
        raise UserError(
            f"{folder / 'train'} and {test_folder} do not have the same classes",
            expected="the same sub-folders in both",
            received=f"only in one of them: {', '.join(sorted(train.keys() ^ test.keys()))}",
        )
    return train, test


def _photos(folder: Path) -> Photos:
    """The image files of every class in the folder; a UserError if there are not two with images."""
    classes = {sub_folder.name: _images(sub_folder) for sub_folder in _sub_folders(folder)}
    if len(classes) < 2:
        raise UserError(
            f"{folder} has {'a single class' if classes else 'no classes'}",
            expected="at least two sub-folders, one for each class, with .jpg or .png files",
            received=f"the sub-folder {next(iter(classes))}" if classes else "no sub-folder",
            next_step="put the photos of each class into a sub-folder named after it",
        )
    return classes


def _images(folder: Path) -> list[Path]:
    """The image files in a class's folder, in alphabetical order, at least one."""
    visible = [p for p in sorted(folder.iterdir()) if not p.name.startswith(".")]
    images = [p for p in visible if p.suffix.lower() in SUFFIXES and not p.is_dir()]
    if not images:
        raise UserError(
            f"the class folder {folder} has no images",
            expected="one or more .jpg or .png files directly in it",
            received=", ".join(p.name for p in visible[:3]) + (", …" if len(visible) > 3 else "") or "nothing",
            next_step="add images, or remove the folder if it is no class",
        )
    for image in images:  # a link that leads nowhere is a sample that is missing, and not one less
        files.require_regular(image, "image")
    return images


def _divide(classes: Photos, seed: int) -> tuple[Photos, Photos]:
    """Every class divided 80/20; both parts get at least one photo."""
    train: Photos = {}
    test: Photos = {}
    for name, photos in classes.items():
        if len(photos) < 2:
            raise UserError(f"the class folder {photos[0].parent} has a single image", expected="at least two")
        held = held_out([photo.name for photo in photos], share=TEST_SHARE, seed=seed)
        train[name] = [photo for i, photo in enumerate(photos) if i not in held]
        test[name] = [photo for i, photo in enumerate(photos) if i in held]
    return train, test


def _split(classes: Photos, output: Output) -> FolderSplit:
    labelled = [(photo, label) for label, photos in enumerate(classes.values()) for photo in photos]
    return FolderSplit(tuple(p for p, _ in labelled), torch.tensor([label for _, label in labelled]), output)
