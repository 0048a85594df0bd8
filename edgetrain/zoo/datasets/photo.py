"""One image file that is not trusted: its header checked, its pixels decoded.

In: the path of a .jpg or .png file. Out: uint8 [3,S,S], upright, shorter side resized to S, centre cut out.
Promised: only the JPEG and PNG decoders see the file; an image of more than MAX_PIXELS is refused by its
header, before its pixels are unpacked; whatever is wrong is a UserError that names the file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from edgetrain.errors import UserError

# Pillow's own limit, which it only warns of; and which any import may have lifted.
MAX_PIXELS = 89_478_485
# What Pillow's parsers, written in Python, may raise on damaged files. MemoryError is not the file's fault.
_DAMAGE = (
    OSError,
    EOFError,
    SyntaxError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)


def check_header(path: Path) -> None:
    """Refuses what is no JPEG or PNG, or too large; reads the header only."""
    with _opened(path):
        pass


def decode(path: Path, size: int) -> torch.Tensor:
    """The image as uint8 [3,size,size]."""
    with _opened(path) as image:
        # JPEG can be decoded at a half to an eighth of its size, where that is enough. A phone's 12-megapixel
        # photo takes 36 MB otherwise.
        image.draft("RGB", (2 * size, 2 * size))
        upright = ImageOps.exif_transpose(_rgb(image))
        # As resizing the shorter side and then cutting out the centre, without the long image in between.
        square = ImageOps.fit(upright, (size, size), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(square)).permute(2, 0, 1)


@contextmanager
def _opened(path: Path) -> Generator[Image.Image, None, None]:
    """The image, opened and not yet decoded; what goes wrong inside is said with the file's name."""
    try:
        with Image.open(path, formats=("JPEG", "PNG")) as image:
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"{image.width:,}×{image.height:,} pixels are more than {MAX_PIXELS:,}")
            yield image
    except _DAMAGE as error:
        raise UserError(
            f"{path} cannot be read as an image: {error}",
            expected=f"a whole JPEG or PNG file of at most {MAX_PIXELS:,} pixels",
            next_step="replace the file, or remove it from the folder",
        ) from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow would cut 16-bit grey off at 255 instead of scaling it.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return image.convert("RGB")
