"""CIFAR-10.1 and CIFAR-10-C: labelled test images of CIFAR-10's classes that come from elsewhere or are corrupted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from .cifar import CIFAR
from .dataset import Dataset

__all__ = ["read_cifar10_1", "read_cifar10_c"]

CIFAR10_1 = ("cifar10.1_v6_data.npy", "cifar10.1_v6_labels.npy")
LABELS = "labels.npy"
SEVERITIES = 5


def read_cifar10_1(folder: Path) -> Dataset:
    """CIFAR-10.1, version 6, from a folder with the official two files."""
    images, labels = (_array(folder / file) for file in CIFAR10_1)
    return _test_set("cifar10.1", folder / CIFAR10_1[0], images, folder / CIFAR10_1[1], labels)


def read_cifar10_c(folder: Path, severity: int | None = None) -> tuple[Dataset, ...]:
    """CIFAR-10-C from its official folder: a dataset for each corruption that has a file there, in alphabetical order.

    Each is mapped from its file, ``<corruption>.npy``, and not read before it is used: all of them have 2.9 GB.

    Args:
        folder: with the files and ``labels.npy``, which are equal parts of the severities 1 to 5, one after the other.
        severity: the one to take; None for all.
    """
    if severity is not None and not 1 <= severity <= SEVERITIES:
        raise ValueError(f"severity {severity} of CIFAR-10-C; 1 to {SEVERITIES} is accepted")
    labels = _array(folder / LABELS)
    files = sorted(path for path in folder.glob("*.npy") if path.name != LABELS)
    if not files:
        raise FileNotFoundError(f"{folder} has no corruption: a file <corruption>.npy beside {LABELS} for each")
    if len(labels) % SEVERITIES:
        raise ValueError(f"{folder / LABELS} has {len(labels)} labels, which are not {SEVERITIES} equal parts")
    each = len(labels) // SEVERITIES
    rows = slice(None) if severity is None else slice((severity - 1) * each, severity * each)
    return tuple(
        _test_set(f"cifar10-c/{file.stem}", file, _array(file), folder / LABELS, labels, rows) for file in files
    )


def _array(path: Path) -> np.ndarray:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there")
    try:
        # Copy-on-write: nobody writes to it, but torch warns of memory that cannot be written to.
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file of a plain array, or damaged: {error}") from error
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} is an archive; a .npy file of one array is accepted")
    return array


def _test_set(
    name: str, path: Path, images: np.ndarray, labels_path: Path, labels: np.ndarray, rows: slice = slice(None)
) -> Dataset:
    classes = CIFAR["cifar10"].classes
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (32, 32, 3):
        raise ValueError(f"{path} is {images.dtype} {images.shape}; images, uint8 (n, 32, 32, 3), are accepted")
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{labels_path} is {labels.dtype} {labels.shape} for the {len(images)} images of {path.name}; "
            f"class numbers, ({len(images)},), are accepted"
        )
    if len(labels) == 0 or not 0 <= int(labels.min()) <= int(labels.max()) < len(classes):
        held = f"numbers from {labels.min()} to {labels.max()}" if len(labels) else "nothing"
        raise ValueError(f"{labels_path} has {held}; the classes of CIFAR-10, 0 to {len(classes) - 1}, are accepted")
    return Dataset(
        name=name,
        inputs=torch.from_numpy(images[rows]).permute(0, 3, 1, 2),
        targets=torch.from_numpy(labels[rows].astype(np.int64)),
        classes=classes,
        is_test=torch.ones(len(images[rows]), dtype=torch.bool),
    )
