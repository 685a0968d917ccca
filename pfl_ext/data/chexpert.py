"""CheXpert (Irvin et al., 2019): chest X-rays and their labels in a table, ``train.csv``."""

from __future__ import annotations

import csv
from pathlib import Path, PurePosixPath

import torch

from .dataset import Dataset
from .images import read_images

__all__ = ["FOLDERS", "LABELS", "read_chexpert"]

FOLDERS = ("CheXpert-v1.0-small", "CheXpert-v1.0")
LABELS = ("Cardiomegaly", "Edema", "Consolidation", "Atelectasis", "Pleural Effusion")
"""The five that the data set's paper and PerAda evaluate."""
SIZE = 64
"""Pixels of a side in PerAda's code."""
# Of ImageNet, in units of bytes: PerAda begins with a network trained on that.
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
# Empty is "not mentioned" and -1 "uncertain", which counts as positive (U-Ones).
VALUES = {"": 0, "0": 0, "0.0": 0, "1": 1, "1.0": 1, "-1": 1, "-1.0": 1}


def read_chexpert(folder: Path, size: int | None = None, cache: Path | None = None) -> Dataset:
    """The images of ``train.csv`` with their five labels, several of which a sample may have; there is no test part.

    So are PerAda's data, whose tests are parts of what clients hold; the 234 images of ``valid.csv`` are not used.

    Args:
        folder: with ``train.csv`` and the images. A path in the table begins with the folder's official name, which is
            left away: the folder may be called otherwise.
        size: scale the shorter side to this many pixels, 64 if None, and cut the middle square.
        cache: a folder for images that are too large for memory; None: they must fit.
    """
    size = size or SIZE
    table = folder / "train.csv"
    if not table.is_file():
        raise FileNotFoundError(f"{folder} has no train.csv, CheXpert's table of images and labels")
    paths, targets = [], []
    try:
        with table.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in ("Path", *LABELS) if name not in (reader.fieldnames or ())]
            if missing:
                raise ValueError(f"it has no column {', '.join(missing)}")
            for row in reader:
                paths.append(folder / _below(row["Path"] or "", reader.line_num))
                targets.append([_positive(row[label], label, reader.line_num) for label in LABELS])
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{table} is no table of CheXpert, or damaged: {error}") from error
    if not paths:
        raise ValueError(f"{table} has no row")
    return Dataset(
        name="chexpert" if size == SIZE else f"chexpert@{size}",
        inputs=read_images(paths, size, cache, "chexpert"),
        targets=torch.tensor(targets, dtype=torch.uint8),
        classes=LABELS,
        is_test=torch.zeros(len(paths), dtype=torch.bool),
        mean=torch.tensor(MEAN),
        std=torch.tensor(STD),
    )


def _below(path: str, line: int) -> PurePosixPath:
    parts = PurePosixPath(path).parts
    if len(parts) < 2 or ".." in parts or parts[0] == "/":
        raise ValueError(f"line {line} has the path {path!r}; FOLDER/train/... is accepted")
    return PurePosixPath(*parts[1:])


def _positive(value: str | None, label: str, line: int) -> int:
    if value not in VALUES:
        raise ValueError(f"line {line} has {value!r} for {label}; 1, 0, -1 or nothing is accepted")
    return VALUES[value]
