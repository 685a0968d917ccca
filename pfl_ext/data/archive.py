"""NumPy archives (``.npz``): sets by domain, and sets with a training and a test part."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .dataset import Dataset
from .statistics import channel_statistics
from .targets import class_names

__all__ = ["read_npz"]

# (inputs, targets, is it the test part), as they are usually called; MedMNIST's validation part is training data here:
# a partition cuts its own.
STYLES = (
    (("x_train", "y_train", False), ("x_val", "y_val", False), ("x_test", "y_test", True)),
    (
        ("train_images", "train_labels", False),
        ("val_images", "val_labels", False),
        ("test_images", "test_labels", True),
    ),
)


def read_npz(path: Path) -> Dataset:
    """A dataset from an archive, in one of three layouts; optional ``classes`` name the classes.

    * ``x_<domain>`` and ``y_<domain>`` for each domain, in the order of ``domains`` if that is there;
    * ``x_train``, ``y_train`` and optionally ``x_test``, ``y_test``;
    * ``train_images``, ``train_labels``, ``val_...``, ``test_...`` (MedMNIST).

    uint8 arrays of three or four dimensions are images, channels last unless they are clearly first. Labels of shape
    ``[n, 1]`` are class numbers, ``[n, labels]`` are multi-label.
    """
    if not path.is_file():
        raise FileNotFoundError(f"there is no archive at {path}")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is no .npz archive, or damaged; numpy.savez(FILE, x_train=X, y_train=Y) writes one")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return _dataset(path, archive)
    except Exception as error:  # a damaged archive can raise nearly anything
        raise ValueError(f"{path}: {error}") from error


def _dataset(path: Path, archive: Any) -> Dataset:
    names, domains = set(archive.files), tuple[str, ...]()
    for style in STYLES:
        parts = [part for part in style if names & set(part[:2])]  # one without the other is told, not left out
        if parts and not parts[0][2]:
            break
    else:
        samples_first = sorted(archive.files, key=lambda name: not name.startswith("x_"))
        found = dict.fromkeys(name[2:] for name in samples_first if name.startswith(("x_", "y_")))
        domains = _names(archive, "domains") if "domains" in names else tuple(found)
        parts = [(f"x_{domain}", f"y_{domain}", False) for domain in domains]
    missing = [name for part in parts for name in part[:2] if name not in names]
    if not parts or missing:
        lacking = f", and lacks {', '.join(missing)}" if missing else ""
        raise ValueError(
            f"it has {', '.join(sorted(names)) or 'nothing in it'}{lacking}; accepted are x_<domain> with y_<domain>, "
            "x_train with y_train, or train_images with train_labels"
        )
    inputs = [_inputs(archive, x) for x, _, _ in parts]
    targets = [_labels(archive, y) for _, y, _ in parts]
    for (x, y, _), part, numbers in zip(parts, inputs, targets, strict=True):
        if len(part) != len(numbers) or part.shape[1:] != inputs[0].shape[1:] or part.dtype != inputs[0].dtype:
            raise ValueError(
                f"{x} is {part.dtype} {part.shape} with {len(numbers)} entries in {y}; {parts[0][0]} is "
                f"{inputs[0].dtype} {inputs[0].shape}"
            )
    sizes = torch.tensor([len(part) for part in inputs])
    is_test = torch.tensor([part[2] for part in parts]).repeat_interleave(sizes)
    samples, labels = torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(np.concatenate(targets))
    mean, std = channel_statistics(samples[~is_test]) if samples.dtype == torch.uint8 else (None, None)
    return Dataset(
        name=path.stem,
        inputs=samples,
        targets=labels,
        classes=_names(archive, "classes") if "classes" in names else class_names(labels),
        is_test=is_test,
        domain=torch.arange(len(domains)).repeat_interleave(sizes) if domains else None,
        domains=domains,
        mean=mean,
        std=std,
    )


def _array(archive: Any, name: str) -> np.ndarray:
    try:
        array = archive[name]
    except Exception as error:
        raise ValueError(f"{name} is no plain array, or damaged: {type(error).__name__}: {error}") from error
    if not isinstance(array, np.ndarray) or array.size == 0:
        held = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else "no array"
        raise ValueError(f"{name} is {held}; an array with something in it is accepted")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _names(archive: Any, name: str) -> tuple[str, ...]:
    array = _array(archive, name)
    if array.ndim != 1 or array.dtype.kind not in "USiu":
        raise ValueError(f"{name} is {array.dtype} {array.shape}; a list of names is accepted")
    return tuple(str(entry) for entry in (np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array))


def _inputs(archive: Any, name: str) -> np.ndarray:
    """Samples, images with their channels first."""
    array = _array(archive, name)
    if array.ndim < 2 or str(array.dtype) not in ("uint8", "float16", "float32", "float64"):
        raise ValueError(f"{name} is {array.dtype} {array.shape}; uint8 or floating samples, [n, ...], are accepted")
    if array.dtype == np.uint8 and array.ndim == 3:
        array = array[:, None]
    elif array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] in (1, 3, 4) and array.shape[1] > 4:
        array = array.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(array)


def _labels(archive: Any, name: str) -> np.ndarray:
    """Class numbers [n], or multi-label targets [n, labels]."""
    array = _array(archive, name)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    whole = array.dtype.kind in "biu" or (array.dtype.kind == "f" and bool((array == np.floor(array)).all()))
    if array.ndim == 1 and whole:
        return array.astype(np.int64)
    if array.ndim != 2 or array.dtype.kind not in "biuf":
        raise ValueError(f"{name} is {array.dtype} {array.shape}; class numbers [n] or labels [n, labels] are accepted")
    return np.ascontiguousarray(array)
