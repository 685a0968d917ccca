"""CIFAR-10 and CIFAR-100: the official binary version, and the Python version that torchvision downloads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .dataset import Dataset
from .pickled import read_pickle

__all__ = ["CIFAR", "Layout", "read_cifar"]

PIXELS = 3 * 32 * 32
FINE_LABELS = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant
flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate
poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider
squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""


@dataclass(frozen=True)
class Layout:
    """Where a version keeps its files and, in the binary one, how many label bytes precede an image."""

    binary_folder: str
    python_folder: str
    train: tuple[str, ...]
    test: str
    labels: int
    key: bytes
    classes: tuple[str, ...]


CIFAR = {
    "cifar10": Layout(
        "cifar-10-batches-bin",
        "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        "test_batch",
        1,
        b"labels",
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    "cifar100": Layout(
        "cifar-100-binary",
        "cifar-100-python",
        ("train",),
        "test",
        2,  # the coarse label, then the fine one
        b"fine_labels",
        tuple(FINE_LABELS.split()),
    ),
}


def read_python(path: Path, key: bytes) -> tuple[Tensor, Tensor]:
    """Images and labels of a batch of the Python version."""
    try:
        batch = read_pickle(path.read_bytes(), encoding="bytes")
        images, labels = batch[b"data"].numbers, np.array([int(label) for label in batch[key]], dtype=np.int64)
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"{path} is no batch of CIFAR's Python version, or damaged: {error!r}") from error
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != PIXELS or labels.shape != images.shape[:1]:
        raise ValueError(f"{path} has {images.dtype} {images.shape} images and {labels.shape} labels")
    return torch.from_numpy(images.reshape(-1, 3, 32, 32)), torch.from_numpy(labels)


def read_binary(path: Path, labels: int) -> tuple[Tensor, Tensor]:
    """Images and (fine) labels of a file of the binary version: records of label bytes and 3,072 pixels."""
    data = np.fromfile(path, dtype=np.uint8)
    if data.size == 0 or data.size % (labels + PIXELS):
        raise ValueError(f"{path} has {data.size} bytes, not a multiple of {labels + PIXELS}: it is cut off or damaged")
    records = data.reshape(-1, labels + PIXELS)
    images = np.ascontiguousarray(records[:, labels:]).reshape(-1, 3, 32, 32)
    return torch.from_numpy(images), torch.from_numpy(records[:, labels - 1].astype(np.int64))


def read_cifar(name: str, folder: Path) -> Dataset:
    """A dataset from a folder of either version."""
    layout = CIFAR[name]

    def read(file: str) -> tuple[Tensor, Tensor]:
        if folder.name == layout.binary_folder:
            return read_binary(folder / f"{file}.bin", layout.labels)
        return read_python(folder / file, layout.key)

    parts = [read(file) for file in layout.train]
    test_x, test_y = read(layout.test)
    train_x, train_y = (torch.cat(part) for part in zip(*parts, strict=True))
    return Dataset.from_tensors(train_x, train_y, test_x, test_y, name=name, classes=layout.classes)
