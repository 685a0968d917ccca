"""Image files as tensors."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from .cache import cached, too_large
from .stored import StoredTensor

__all__ = ["read_images"]

PIXELS = 89_478_485
"""Of the largest image that is decoded: Pillow warns beyond, 256 MB in three channels."""


def read_images(
    paths: list[Path], size: int | None = None, cache: Path | None = None, name: str = "images"
) -> Tensor | StoredTensor:
    """Image files as one uint8 tensor ``[n, 3, height, width]``, grey ones with three equal channels.

    Args:
        paths: the files, one at least.
        size: scale the shorter side to this many pixels and cut the middle square; needed where the sizes differ.
        cache: a folder in which images stay that take more than a quarter of the memory; None: all are read.
        name: of the cache.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise ImportError("reading images needs Pillow: pip install 'pfl_ext[images]'") from error

    def decode(path: Path) -> np.ndarray:
        try:
            with Image.open(path) as file:
                if file.width * file.height > PIXELS:
                    raise ValueError(f"it has {file.width}x{file.height} pixels; up to {PIXELS:,} are accepted")
                image = file.convert("RGB")
        except Exception as error:  # a damaged image can raise nearly anything; so does Pillow for a far too large one
            raise ValueError(f"{path} cannot be read as an image: {error}") from error
        if size is not None:
            image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
        return np.asarray(image).transpose(2, 0, 1)

    first = decode(paths[0])

    def checked(i: int) -> np.ndarray:
        image = decode(paths[i])
        if image.shape != first.shape:
            sizes = [f"{shape[2]}x{shape[1]}" for shape in (image.shape, first.shape)]
            raise ValueError(
                f"{paths[i]} has {sizes[0]} pixels, {paths[0]} {sizes[1]}; name a common size, as in folder:PATH@64"
            )
        return image

    if cache is not None and too_large(len(paths) * first.nbytes):
        states = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
        digest = hashlib.sha256(json.dumps(states).encode()).hexdigest()
        found, _ = cached(
            cache, [size, digest], len(paths), lambda i: (torch.from_numpy(checked(i).copy()), None), name=name
        )
        return cast(StoredTensor, found)
    try:
        inputs = np.empty((len(paths), *first.shape), dtype=np.uint8)
    except MemoryError:
        raise ValueError(
            f"{len(paths):,} images of {first.shape[2]}x{first.shape[1]} pixels do not fit into memory; name a smaller "
            "size, as in folder:PATH@64"
        ) from None

    def fill(i: int) -> None:
        inputs[i] = checked(i)

    with ThreadPoolExecutor() as threads:  # decoding releases the interpreter lock
        for _ in threads.map(fill, range(len(paths))):
            pass
    return torch.from_numpy(inputs)
