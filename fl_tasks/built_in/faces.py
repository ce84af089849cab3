"""CelebA's images as LEAF's program reads them: JPEG files, resized to 84x84, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import PIL
import torch
from PIL import Image
from torch import Tensor

from fl_tasks.built_in.image_blocks import cache_path, load_cached, save_cached
from fl_tasks.errors import TaskError

SIDE = 84
IMAGES = "img_align_celeba"
BLOCK = 4096
"""Images of a file of the cache: 87 MB."""


def images_folder(folder: Path) -> Path:
    """The folder of the images beside LEAF's files: LEAF's `raw`, or the folder itself."""
    return next((path for path in (folder / "raw" / IMAGES, folder / IMAGES) if path.is_dir()), folder / "raw" / IMAGES)


def read_faces(folder: Path, names: Sequence[str]) -> Tensor:
    """Images, uint8 [n, 3, 84, 84]. Raises TaskError for one that is missing or cannot be decoded."""
    faces = torch.empty(len(names), 3, SIDE, SIDE, dtype=torch.uint8)
    for place, name in enumerate(names):
        faces[place] = _face(folder / name)
    return faces


def cached_faces(folder: Path, names: Sequence[str]) -> list[Tensor]:
    """The same in blocks, each [k, 3, 84, 84]: mapped from the cache, or decoded once. Raises TaskError."""
    parts = [names[first : first + BLOCK] for first in range(0, len(names), BLOCK)]
    kind = f"CelebA, {SIDE}x{SIDE}, Pillow {PIL.__version__}"
    try:
        files = [
            cache_path(folder.parent, f"{IMAGES}-{SIDE}", [folder / name for name in part], kind) for part in parts
        ]
    except OSError as error:
        raise _unreadable(Path(error.filename or folder), error) from error
    return [_block(folder, part, file) for part, file in zip(parts, files, strict=True)]


def _block(folder: Path, names: Sequence[str], file: Path) -> Tensor:
    if (loaded := load_cached(file)) is None:
        faces = read_faces(folder, names)
        loaded = (save_cached(file, {"faces": faces}, {}) and load_cached(file)) or ({"faces": faces}, {})
    return loaded[0]["faces"]


def _face(path: Path) -> Tensor:
    try:
        with Image.open(path) as image:
            # LEAF's program leaves the filter to Pillow, which has had this one since 7.0.
            pixels = np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB"))
    except Exception as error:  # Pillow raises errors of many types for a file that is no image
        raise _unreadable(path, error) from error
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def _unreadable(path: Path, error: Exception) -> TaskError:
    why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be decoded: {error}"
    return TaskError(
        f"expected the image {path.name} that LEAF's files name in {path.parent}, which {why}. Unpack CelebA's"
        f" {IMAGES}.zip there again"
    )
