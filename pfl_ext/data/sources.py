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
from .chexpert import FOLDERS as CHEXPERT_FOLDERS
from .chexpert import read_chexpert
from .cifar import CIFAR, read_cifar
from .dataset import Dataset
from .folder import read_folder
from .leaf import read_leaf
from .mnist import FILES, read_mnist
from .pfllib import read_pfllib
from .shifts import CIFAR10_1, LABELS, read_cifar10_1, read_cifar10_c
from .stl10 import FILES as STL10_FILES
from .stl10 import FOLDER as STL10_FOLDER
from .stl10 import UNLABELLED_FILES, read_stl10, read_stl10_unlabelled
from .text import read_speeches, read_text

__all__ = ["SOURCES", "TEST_SOURCES", "load", "load_test"]

SOURCES = {
    "digits": "1,797 handwritten digits of 8 x 8 pixels, 10 classes; part of this package, no download",
    "mnist": "70,000 digits of 28 x 28 pixels, 10 classes",
    "fashion-mnist": "70,000 pieces of clothing of 28 x 28 pixels, 10 classes",
    "cifar10": "60,000 photographs of 32 x 32 pixels, 10 classes",
    "cifar100": "60,000 photographs of 32 x 32 pixels, 100 classes",
    "stl10": "13,000 photographs of 96 x 96 pixels, 10 classes",
    "stl10-unlabelled": "105,000 photographs of 96 x 96 pixels without labels, for auxiliary",
    "chexpert": "223,414 X-rays with five labels, scaled to 64 x 64 pixels, uncertain labels positive; chexpert@224 "
    "scales them to 224, chexpert:PATH and chexpert:PATH@224 name the folder",
    "folder:PATH": "images in PATH/<class>, PATH/train/<class>, PATH/<domain>/<class>, or TinyImageNet; folder:PATH@64 "
    "scales them to 64 x 64",
    "leaf:PATH": "LEAF's JSON files (FEMNIST, Shakespeare) in PATH/train and PATH/test; --partition by_domain: by user",
    "pfllib:PATH": "a folder that PFLlib made, with config.json, train and test; --partition by_domain: its clients",
    "speeches": "what twelve presidents wrote to Congress before 1900, in windows of 64 characters, or as many as "
    "speeches@128 says; part of this package, no download; --partition by_domain: by speaker",
    "text:PATH": "texts in PATH/<speaker>.txt as windows of 64 characters; text:PATH@128 for longer ones",
    "npz:PATH": "a NumPy archive with x_<domain> and y_<domain>, or x_train, y_train, x_test, y_test",
}

TEST_SOURCES = {
    "cifar10.1": "2,000 new photographs of CIFAR-10's classes (Recht et al., 2018); cifar10.1:PATH names the folder",
    "cifar10-c": "CIFAR-10's test images, corrupted (Hendrycks and Dietterich, 2019), all severities; cifar10-c@5 for "
    "one; cifar10-c:PATH, cifar10-c:PATH@5 name the folder",
}
"""What :func:`load_test` knows beside :data:`SOURCES`."""

READERS: dict[str, Callable[[Path], Dataset]] = {"leaf": read_leaf, "npz": read_npz, "pfllib": read_pfllib}
STL10 = {"stl10": (STL10_FILES, read_stl10), "stl10-unlabelled": (UNLABELLED_FILES, read_stl10_unlabelled)}
"""The files of each, and their reader."""
MNIST_FOLDERS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}  # torchvision's


def load(name: str, root: Path | str | None = None, download: bool = False) -> Dataset:
    """A dataset by its name; :data:`SOURCES` lists them.

    Args:
        name: one of the names; PATH and SIZE are the user's, as in ``folder:photos@64``.
        root: the folder with the files; by default what the environment variable ``PFL_EXT_DATA`` names, else ``data``.
            A relative PATH is taken as it stands, or, where there is none, from that folder.
        download: let torchvision download what is not there into ``root``.
    """
    kind, _, argument = name.partition(":")
    if kind in READERS and argument:
        return READERS[kind](_place(argument, root))
    kind, path, size = _parsed(name)
    if kind == "folder" and path:
        return read_folder(_place(path, root), size, _cache(root))
    if kind == "chexpert":
        return read_chexpert(_place(path, root) if path else _chexpert_folder(_root(root)), size, _cache(root))
    if kind == "text" and path:
        return read_text(_place(path, root), size)
    if kind == "speeches" and not path:
        return read_speeches(size)
    if name == "digits":
        return _digits()
    root = _root(root)
    if name in MNIST_FOLDERS:
        return _found(name, root, download, _mnist, _download_mnist)
    if name in CIFAR:
        return _found(name, root, download, _cifar, _download_archive)
    if name in STL10:
        return _found(name, root, download, _stl10, _download_archive)
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
        return _place(given, root)
    root = _root(root)
    for folder in folders:
        if any((root / folder).glob("*.npy")):
            return root / folder
    raise FileNotFoundError(
        f"{kind} is not in {root.absolute()}. Expected there: {' or '.join(folders)}, with {files}. "
        f"Name the folder that has them, by root=PATH, in the environment variable PFL_EXT_DATA, or as {kind}:PATH."
    )


def _root(root: Path | str | None) -> Path:
    return Path(root if root is not None else os.environ.get("PFL_EXT_DATA", "data")).expanduser()


def _cache(root: Path | str | None) -> Path:
    """Where images are kept that do not fit into memory."""
    given = os.environ.get("PFL_EXT_CACHE")
    return Path(given).expanduser() if given else _root(root) / "pfl_ext-cache"


def _place(path: str, root: Path | str | None) -> Path:
    """Where something is that the user named: at the path as it stands, else in the root."""
    given = Path(path).expanduser()
    places = [given.absolute()] if given.is_absolute() else [given.absolute(), (_root(root) / given).absolute()]
    for place in places:
        if place.exists():
            return place
    raise FileNotFoundError(
        f"there is no {' and no '.join(map(str, places))}; name the folder that has {given} in root (--data-root) or "
        "in the environment variable PFL_EXT_DATA"
    )


def _parsed(name: str) -> tuple[str, str, int | None]:
    """``KIND``, ``KIND:PATH``, ``KIND@SIZE`` or ``KIND:PATH@SIZE`` as its parts, "" for no path."""
    found = re.fullmatch(r"([^:@]*)(?::(.+?))?(?:@([1-9][0-9]*))?", name)
    if found is None:
        return name, "", None
    return found[1], found[2] or "", None if found[3] is None else int(found[3])


def _chexpert_folder(root: Path) -> Path:
    for folder in CHEXPERT_FOLDERS:
        if (root / folder / "train.csv").is_file():
            return root / folder
    raise FileNotFoundError(
        f"chexpert is not in {root.absolute()}. Expected there: {' or '.join(CHEXPERT_FOLDERS)}, with train.csv and "
        "the images, which Stanford gives to those who register. Name the folder that has them, in root, in the "
        "environment variable PFL_EXT_DATA, or as chexpert:PATH."
    )


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
            f"{name} is not in {root.absolute()}. Expected there: {result}. Name the folder that has them, by "
            "root=PATH or the environment variable PFL_EXT_DATA, or allow the download (download=True), which fetches "
            "them with torchvision into that folder."
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


def _stl10(name: str, root: Path) -> Dataset | str:
    files, read = STL10[name]
    if all((root / STL10_FOLDER / file).is_file() for file in files):
        return read(root / STL10_FOLDER)
    return f"{STL10_FOLDER}/ with {', '.join(files)} (the official binary version)"


def _download_mnist(name: str, root: Path) -> None:
    datasets = _torchvision()
    getattr(datasets, MNIST_FOLDERS[name])(root, download=True)


def _download_archive(name: str, root: Path) -> None:
    datasets = _torchvision()
    # Not through the class: of CIFAR that would unpickle the files, and its reader does not limit what they may name.
    source = getattr(datasets, {"cifar10": "CIFAR10", "cifar100": "CIFAR100"}.get(name, "STL10"))
    datasets.utils.download_and_extract_archive(source.url, root, filename=source.filename, md5=source.tgz_md5)


def _torchvision() -> Any:
    try:
        from torchvision import datasets
    except (ImportError, RuntimeError) as error:  # RuntimeError: beside a torch that it was not built for
        raise ImportError(f"downloading needs a torchvision that works with this torch ({error})") from error
    return datasets
