"""Datasets by name, from files that are there, or downloaded when that is allowed."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .archive import read_npz
from .cifar import CIFAR, read_cifar
from .dataset import Dataset
from .folder import read_folder
from .mnist import FILES, read_mnist
from .shifts import CIFAR10_1, LABELS, read_cifar10_1, read_cifar10_c

__all__ = ["SOURCES", "TEST_SOURCES", "load", "load_test"]

SOURCES = {
    "digits": "1,797 handwritten digits of 8 x 8 pixels, 10 classes; part of this package, no download",
    "mnist": "70,000 digits of 28 x 28 pixels, 10 classes",
    "fashion-mnist": "70,000 pieces of clothing of 28 x 28 pixels, 10 classes",
    "cifar10": "60,000 photographs of 32 x 32 pixels, 10 classes",
    "cifar100": "60,000 photographs of 32 x 32 pixels, 100 classes",
    "folder:PATH": "images in PATH/<class>, PATH/train/<class>, PATH/<domain>/<class>, or TinyImageNet; folder:PATH@64 "
    "scales them to 64 x 64",
    "npz:PATH": "a NumPy archive with x_<domain> and y_<domain>, or x_train, y_train, x_test, y_test",
}

TEST_SOURCES = {
    "cifar10.1": "2,000 new photographs of CIFAR-10's classes (Recht et al., 2018); cifar10.1:PATH names the folder",
    "cifar10-c": "CIFAR-10's test images, corrupted (Hendrycks and Dietterich, 2019), all severities; cifar10-c@5 for "
    "one; cifar10-c:PATH, cifar10-c:PATH@5 name the folder",
}
"""What :func:`load_test` knows beside :data:`SOURCES`."""

MNIST_FOLDERS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}  # torchvision's


def load(name: str, root: Path | str | None = None, download: bool = False) -> Dataset:
    """A dataset by its name; :data:`SOURCES` lists them.

    Args:
        name: one of the names, or ``folder:PATH``, ``folder:PATH@SIZE``, ``npz:PATH``.
        root: the folder with the files of MNIST, Fashion-MNIST and CIFAR; by default what the environment variable
            ``PFL_EXT_DATA`` names, else ``data``.
        download: let torchvision download what is not there into ``root``.
    """
    kind, _, argument = name.partition(":")
    if kind == "npz" and argument:
        return read_npz(Path(argument).expanduser())
    if kind == "folder" and argument:
        path, _, size = argument.rpartition("@")
        if path and size.isdigit() and int(size) > 0:
            return read_folder(Path(path).expanduser(), int(size))
        return read_folder(Path(argument).expanduser())
    if name == "digits":
        return _digits()
    root = _root(root)
    if name in MNIST_FOLDERS:
        return _found(name, root, download, _mnist, _download_mnist)
    if name in CIFAR:
        return _found(name, root, download, _cifar, _download_cifar)
    raise ValueError(f"there is no dataset {name!r}; known are {', '.join(SOURCES)}")


def load_test(name: str, root: Path | str | None = None, download: bool = False) -> tuple[Dataset, ...]:
    """A labelled test set by its name, in parts, over which results are averaged: the corruptions of CIFAR-10-C.

    Args:
        name: one of :data:`TEST_SOURCES`, or whatever :func:`load` takes: its test part, where it has none all of it.
        root, download: as for :func:`load`.
    """
    found = re.fullmatch(r"(cifar10\.1|cifar10-c)(?::(.+?))?(?:@(\d+))?", name)
    if found is None:
        whole = load(name, root, download)
        part = whole.subset(whole.is_test.nonzero().flatten()) if bool(whole.is_test.any()) else whole
        return (dataclasses.replace(part, is_test=torch.ones_like(part.is_test)),)
    kind, folder, severity = found.groups()
    if kind == "cifar10-c":
        where = _test_folder(kind, folder, root, ("CIFAR-10-C",), f"{LABELS} and a file for each corruption")
        return read_cifar10_c(where, None if severity is None else int(severity))
    if severity is not None:
        raise ValueError(f"{name}: CIFAR-10.1 has no severities; cifar10.1 or cifar10.1:PATH is accepted")
    folders = ("CIFAR-10.1", "CIFAR-10.1/datasets", "cifar10.1")
    return (read_cifar10_1(_test_folder(kind, folder, root, folders, " and ".join(CIFAR10_1))),)


def _test_folder(kind: str, given: str | None, root: Path | str | None, folders: tuple[str, ...], files: str) -> Path:
    if given is not None:
        return Path(given).expanduser()
    root = _root(root)
    for folder in folders:
        if any((root / folder).glob("*.npy")):
            return root / folder
    raise FileNotFoundError(
        f"{kind} is not in {root.absolute()}. Expected there: {' or '.join(folders)}, with {files}. "
        f"Name the folder that has them, in root, in the environment variable PFL_EXT_DATA, or as {kind}:PATH."
    )


def _root(root: Path | str | None) -> Path:
    return Path(root if root is not None else os.environ.get("PFL_EXT_DATA", "data")).expanduser()


def _digits() -> Dataset:
    """The embedded default. It has no official test part; every fifth sample is one here, in every class alike."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as archive:  # digits.md: whose they are
        inputs = torch.from_numpy(archive["images"])[:, None]  # 0 to 16
        targets = torch.from_numpy(archive["labels"]).to(torch.int64)
    order = targets.sort(stable=True).indices
    is_test = torch.zeros(len(targets), dtype=torch.bool)
    is_test[order[4::5]] = True
    return Dataset.from_tensors(
        inputs[~is_test],
        targets[~is_test],
        inputs[is_test],
        targets[is_test],
        name="digits",
        classes=tuple("0123456789"),
    )


def _found(
    name: str,
    root: Path,
    download: bool,
    read: Callable[[str, Path], Dataset | str],
    fetch: Callable[[str, Path], None],
) -> Dataset:
    result = read(name, root)
    if isinstance(result, str) and download:
        fetch(name, root)
        result = read(name, root)
    if isinstance(result, str):
        raise FileNotFoundError(
            f"{name} is not in {root.absolute()}. Expected there: {result}. Name the folder that has them, in root or "
            "the environment variable PFL_EXT_DATA, or allow the download (download=True), which fetches them with "
            "torchvision into that folder."
        )
    return result


def _mnist(name: str, root: Path) -> Dataset | str:
    for folder in (root / MNIST_FOLDERS[name] / "raw", root / MNIST_FOLDERS[name]):
        paths = [
            next((path for path in (folder / file, folder / f"{file}.gz") if path.is_file()), None) for file in FILES
        ]
        if all(paths):
            return read_mnist(name, tuple(path for path in paths if path is not None))
    return f"{MNIST_FOLDERS[name]}/raw/ with {', '.join(FILES)} (each also as .gz)"


def _cifar(name: str, root: Path) -> Dataset | str:
    layout = CIFAR[name]
    files = (*layout.train, layout.test)
    for folder, suffix in ((layout.binary_folder, ".bin"), (layout.python_folder, "")):
        if all((root / folder / f"{file}{suffix}").is_file() for file in files):
            return read_cifar(name, root / folder)
    return (
        f"{layout.binary_folder}/ with {', '.join(f'{file}.bin' for file in files)} (the official binary version), or "
        f"{layout.python_folder}/ with {', '.join(files)} (the Python version, as torchvision downloads it)"
    )


def _download_mnist(name: str, root: Path) -> None:
    datasets = _torchvision()
    getattr(datasets, MNIST_FOLDERS[name])(root, download=True)


def _download_cifar(name: str, root: Path) -> None:
    datasets = _torchvision()
    source = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[name]
    # Not through the class: that would unpickle the files; its reader does not limit what they may name.
    datasets.utils.download_and_extract_archive(source.url, root, filename=source.filename, md5=source.tgz_md5)


def _torchvision() -> Any:
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:  # RuntimeError: beside a torch that it was not built for
        raise ImportError(f"downloading needs a torchvision that works with this torch ({error})") from error
    return datasets
