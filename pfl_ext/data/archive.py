"""NumPy archives (``.npz``): sets by domain, and sets with a training and a test part."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from .dataset import Dataset, channel_statistics

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
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (ValueError, OSError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no .npz archive of plain arrays, or damaged: {error}") from error

    domains: tuple[str, ...] = ()
    for style in STYLES:
        parts = [part for part in style if part[0] in arrays]
        if parts and not parts[0][2]:
            break
    else:
        found = [key.removeprefix("x_") for key in arrays if key.startswith("x_")]
        domains = tuple(str(domain) for domain in arrays.get("domains", found))
        parts = [(f"x_{domain}", f"y_{domain}", False) for domain in domains]
    missing = [key for part in parts for key in part[:2] if key not in arrays]
    if not parts or missing:
        lacking = f", and lacks {', '.join(missing)}" if missing else ""
        raise ValueError(
            f"{path} has {', '.join(sorted(arrays)) or 'nothing in it'}{lacking}; accepted are "
            "x_<domain> with y_<domain>, x_train with y_train, or train_images with train_labels"
        )
    inputs = [_channels_first(arrays[x]) for x, _, _ in parts]
    targets = [_labels(arrays[y]) for _, y, _ in parts]
    for (x, y, _), part, numbers in zip(parts, inputs, targets, strict=True):
        if len(part) != len(numbers) or part.shape[1:] != inputs[0].shape[1:] or part.dtype != inputs[0].dtype:
            raise ValueError(
                f"{path}: {x} is {part.dtype} {part.shape} with {len(numbers)} entries in {y}; {parts[0][0]} is "
                f"{inputs[0].dtype} {inputs[0].shape}"
            )
    sizes = torch.tensor([len(part) for part in inputs])
    is_test = torch.tensor([part[2] for part in parts]).repeat_interleave(sizes)
    samples, labels = torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(np.concatenate(targets))
    count = labels.shape[1] if labels.ndim > 1 else int(labels.max()) + 1
    classes = tuple(str(name) for name in arrays["classes"]) if "classes" in arrays else tuple(map(str, range(count)))
    mean, std = channel_statistics(samples[~is_test]) if samples.dtype == torch.uint8 else (None, None)
    return Dataset(
        name=path.stem,
        inputs=samples,
        targets=labels,
        classes=classes,
        is_test=is_test,
        domain=torch.arange(len(domains)).repeat_interleave(sizes) if domains else None,
        domains=domains,
        mean=mean,
        std=std,
    )


def _channels_first(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint8 and array.ndim == 3:
        array = array[:, None]
    elif array.dtype == np.uint8 and array.ndim == 4 and array.shape[3] in (1, 3, 4) and array.shape[1] > 4:
        array = array.transpose(0, 3, 1, 2)
    return np.ascontiguousarray(array)


def _labels(array: np.ndarray) -> np.ndarray:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    return array.astype(np.int64) if array.ndim == 1 else np.ascontiguousarray(array)
