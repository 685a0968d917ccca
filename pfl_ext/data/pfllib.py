"""PFLlib's partitions: a folder with ``config.json`` and a file for each client in ``train`` and in ``test``."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .dataset import Dataset
from .pickled import PickledArray, read_pickle
from .targets import CLASSES

__all__ = ["read_pfllib"]


def read_pfllib(folder: Path) -> Dataset:
    """All samples of all clients; the domain of a sample is its client, so that ``by_domain`` is PFLlib's partition.

    A file holds a dictionary of ``x`` and ``y`` in a pickled array of objects; :mod:`pfl_ext.data.pickled` reads it
    and runs nothing in it.
    """
    clients, classes = _config(folder / "config.json")
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for part in ("train", "test"):
        for client in range(clients):
            path = folder / part / f"{client}.npz"
            if not path.is_file():
                raise FileNotFoundError(f"there is no {path}; config.json says {clients} clients: 0 to {clients - 1}")
            x, y = _arrays(path)
            first = parts[0][0] if parts else x
            if x.dtype != first.dtype or x.shape[1:] != first.shape[1:]:
                raise ValueError(
                    f"{path} has samples {x.dtype} {x.shape[1:]}, the first client {first.dtype} {first.shape[1:]}"
                )
            parts.append((x, y))
    sizes = torch.tensor([len(y) for _, y in parts])
    inputs, targets = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    return Dataset(
        name=folder.resolve().name,
        inputs=inputs,
        targets=targets,
        classes=tuple(map(str, range(classes))),
        is_test=(torch.arange(2 * clients) >= clients).repeat_interleave(sizes),
        domain=(torch.arange(2 * clients) % clients).repeat_interleave(sizes),
        domains=tuple(f"client {client}" for client in range(clients)),
    )


def _config(path: Path) -> tuple[int, int]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}; PFLlib's folders have it beside train and test")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        clients, classes = config["num_clients"], config["num_classes"]
        if not (type(clients) is int and type(classes) is int and clients > 0 and 0 < classes <= CLASSES):
            raise ValueError(f"{clients!r} clients and {classes!r} classes")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        kind = type(error).__name__
        raise ValueError(f"{path} does not say num_clients and num_classes, or is damaged: {kind}: {error}") from error
    return clients, classes


def _arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive:
            member = io.BytesIO(archive.read("data.npy"))
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(member)
        if shape != () or dtype.kind != "O":
            raise ValueError(f"its data are {dtype} {shape}, not a dictionary")
        x, y = _numbers(read_pickle(member.read()))
    except Exception as error:  # a damaged archive or pickle can raise nearly anything
        kind = type(error).__name__
        raise ValueError(f"{path} is no file of PFLlib with arrays of numbers, or damaged: {kind}: {error}") from error
    usable = x.ndim >= 2 and (x.dtype == np.uint8 or x.dtype.kind == "f")
    if not usable or y.ndim != 1 or y.dtype.kind not in "iu" or len(x) != len(y):
        raise ValueError(
            f"{path} has x of {x.dtype} {x.shape} and y of {y.dtype} {y.shape}; uint8 or floating samples with a class "
            "number each are accepted"
        )
    return x, y.astype(np.int64)


def _numbers(found: Any) -> list[np.ndarray]:
    """``x`` and ``y`` of the array with one object, a dictionary."""
    if not isinstance(found, PickledArray) or found.objects is None or len(found.objects) != 1:
        raise ValueError("it holds no dictionary")
    arrays = [found.objects[0][key] for key in ("x", "y")]
    for key, array in zip(("x", "y"), arrays, strict=True):
        if not isinstance(array, PickledArray) or array.objects is not None:
            raise ValueError(f"{key} is no array of numbers")
    return [array.numbers for array in arrays]
