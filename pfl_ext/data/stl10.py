"""STL-10's official binary files: photographs of ten classes, and many more without labels."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .dataset import Dataset

__all__ = ["FILES", "FOLDER", "UNLABELLED_FILES", "read_stl10", "read_stl10_unlabelled"]

FOLDER = "stl10_binary"
FILES = ("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin")
UNLABELLED_FILES = ("unlabeled_X.bin", "train_X.bin")
CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
_SHAPE = (3, 96, 96)


def read_stl10(folder: Path) -> Dataset:
    """The labelled images: 5,000 for training and 8,000 for testing."""
    parts = []
    for part in ("train", "test"):
        images, labels = _images(folder / f"{part}_X.bin"), _labels(folder / f"{part}_y.bin")
        if len(images) != len(labels):
            raise ValueError(f"{folder} has {len(images)} {part} images and {len(labels)} labels: a file is cut off")
        parts += [images, labels]
    return Dataset.from_tensors(*parts, name="stl10", classes=CLASSES)


def read_stl10_unlabelled(folder: Path) -> Dataset:
    """The images without labels and those for training, of which nobody is told a label: for distillation."""
    images = torch.cat([_images(folder / file) for file in UNLABELLED_FILES])
    none = torch.zeros(len(images), dtype=torch.int64)
    # Whoever takes them normalises them as its own images; statistics of 2.9 GB would be for nothing.
    mean, std = torch.full((3,), 127.5), torch.full((3,), 127.5)
    return Dataset.from_tensors(images, none, name="stl10-unlabelled", classes=("unlabelled",), mean=mean, std=std)


def _images(path: Path) -> Tensor:
    """Images [n, 3, 96, 96] of a file that has each channel column by column."""
    size = path.stat().st_size
    if size == 0 or size % math.prod(_SHAPE):
        raise ValueError(f"{path} has {size} bytes, not a multiple of {math.prod(_SHAPE)}: it is cut off or damaged")
    channels, height, width = _SHAPE
    mapped = np.memmap(path, np.uint8, "c").reshape(-1, channels, width, height)
    return torch.from_numpy(mapped).transpose(2, 3).contiguous()


def _labels(path: Path) -> Tensor:
    """Classes from 0, which the file counts from 1."""
    labels = np.fromfile(path, np.uint8).astype(np.int64)
    if labels.size == 0 or labels.min() < 1 or labels.max() > len(CLASSES):
        raise ValueError(f"{path} is damaged: labels from 1 to {len(CLASSES)}, a byte each, are accepted")
    return torch.from_numpy(labels - 1)
