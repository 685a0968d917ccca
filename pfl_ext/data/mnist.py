"""MNIST's IDX files, and Fashion-MNIST's, which have the same names."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .dataset import Dataset

__all__ = ["CLASSES", "FILES", "read_idx", "read_mnist"]

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
}


def read_idx(path: Path) -> Tensor:
    """An IDX file of bytes, gzipped or not: two zeros, the type 8, the number of dimensions, big-endian sizes, data."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is no IDX file of bytes: it starts with {data[:4].hex() or 'nothing'}")
    start = 4 + 4 * data[3]
    shape = [int.from_bytes(data[place : place + 4], "big") for place in range(4, start, 4)]
    if len(data) - start != math.prod(shape):
        raise ValueError(f"{path} is cut off or damaged: {len(data)} bytes for a header of {start} and {shape}")
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape).copy())


def read_mnist(name: str, paths: tuple[Path, ...]) -> Dataset:
    """A dataset from the four files, in the order of :data:`FILES`."""
    train_x, train_y, test_x, test_y = (read_idx(path) for path in paths)
    if train_x.ndim != 3 or test_x.ndim != 3 or train_y.ndim != 1 or test_y.ndim != 1:
        raise ValueError(f"the files in {paths[0].parent} have swapped roles: images have three dimensions, labels one")
    return Dataset.from_tensors(train_x[:, None], train_y, test_x[:, None], test_y, name=name, classes=CLASSES[name])
