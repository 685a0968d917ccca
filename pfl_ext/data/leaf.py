"""LEAF's JSON files (Caldas et al., 2018): FEMNIST, Shakespeare, the synthetic set; samples by user."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .dataset import Dataset
from .targets import class_names

__all__ = ["read_leaf"]


def read_leaf(folder: Path) -> Dataset:
    """All samples of all users; the domain of a sample is its user, so that ``by_domain`` gives each user a client.

    * Lists of numbers are floating inputs; a square number of them, from 64 on, is a grey image (FEMNIST: 28 x 28).
    * Texts of one length with one character each to predict (Shakespeare) are numbers of characters. The classes
      are all the characters that occur, in the order of their codes, and number the inputs too.

    Args:
        folder: with ``train`` and, if there is one, ``test``, each with JSON files of ``users``, ``num_samples`` and
            ``user_data``; or with these in ``data``. Users of the test files alone are nobody's local test.
    """
    if not (folder / "train").is_dir() and (folder / "data" / "train").is_dir():
        folder = folder / "data"
    users: dict[str, int] = {}
    samples: list[tuple[np.ndarray, np.ndarray]] = []
    owners: list[int] = []
    tests: list[bool] = []
    for part in ("train", "test"):
        files = sorted((folder / part).glob("*.json"))
        for file in files:
            for name, x, y in _read(file):
                first = samples[0][0] if samples else x
                if (x.dtype, x.shape[1:]) != (first.dtype, first.shape[1:]):
                    raise ValueError(f"{file}: samples of {name!r} have another form than those of the first user")
                samples.append((x, y))
                owners.append(users.setdefault(name, len(users)))
                tests.append(part == "test")
        if not samples:
            raise FileNotFoundError(f"{folder} has no samples in train/*.json, LEAF's files after its preprocess.sh")
    inputs, targets, classes = _encoded(*(np.concatenate(arrays) for arrays in zip(*samples, strict=True)))
    sizes = torch.tensor([len(y) for _, y in samples])
    return Dataset(
        name=folder.resolve().parent.name if folder.name == "data" else folder.resolve().name,
        inputs=inputs,
        targets=targets,
        classes=classes,
        is_test=torch.tensor(tests).repeat_interleave(sizes),
        domain=torch.tensor(owners).repeat_interleave(sizes),
        domains=tuple(users),
    )


def _encoded(x: np.ndarray, y: np.ndarray) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Inputs, targets and classes of a dataset."""
    if x.dtype == np.uint8:  # characters
        known = np.flatnonzero(np.bincount(x.reshape(-1), minlength=256) + np.bincount(y, minlength=256))
        number = np.zeros(256, np.uint8)
        number[known] = np.arange(len(known))
        targets = torch.from_numpy(number[y].astype(np.int64))
        return torch.from_numpy(number[x].astype(np.int16)), targets, tuple(chr(code) for code in known)
    side = math.isqrt(x.shape[1])
    if side >= 8 and side * side == x.shape[1]:
        x = x.reshape(-1, 1, side, side)
    targets = torch.from_numpy(y)
    return torch.from_numpy(x), targets, class_names(targets)


def _read(path: Path) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Each user of a file that has samples: name, inputs, targets."""
    found = []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for name, count in zip(content["users"], content["num_samples"], strict=True):
            data = content["user_data"].pop(name)  # what is converted is not needed twice
            x, y = _form(data["x"], data["y"]) if data["y"] else (np.empty(0), np.empty(0))
            if not len(x) == len(y) == count:
                raise ValueError(f"user {name!r} has {len(x)} x and {len(y)} y, num_samples says {count}")
            if count:
                found.append((str(name), x, y))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        kind = type(error).__name__
        raise ValueError(f"{path} is no file of LEAF that can be used, or damaged: {kind}: {error}") from error
    return found


def _form(x: list[Any], y: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(x[0], str):
        lengths = {len(text) for text in x}
        if len(lengths) > 1 or {len(character) for character in y} != {1}:
            raise ValueError("texts are accepted that have one length, with one character each in y (Shakespeare)")
        return _codes("".join(x)).reshape(len(x), -1), _codes("".join(y))
    samples, labels = np.asarray(x), np.asarray(y)
    if samples.ndim != 2 or samples.dtype.kind not in "iuf" or labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError("x is accepted that has equally long lists of numbers, and y that has class numbers")
    return samples.astype(np.float32), labels.astype(np.int64)


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("latin-1"), np.uint8)
