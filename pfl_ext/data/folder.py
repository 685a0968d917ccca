"""Folders of images: class folders, training and test parts, domains (Office-Home), TinyImageNet."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from .dataset import Dataset
from .images import read_images
from .statistics import channel_statistics

__all__ = ["read_folder"]

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp"}
TRAIN = {"train", "training"}
TEST = {"test", "testing", "val", "valid", "validation"}


@dataclass(frozen=True)
class _Image:
    path: Path
    label: str
    is_test: bool = False
    domain: str = ""


def read_folder(path: Path, size: int | None = None, cache: Path | None = None) -> Dataset:
    """A dataset of the images in a folder, as uint8 RGB.

    The layout is recognised:

    * ``wnids.txt`` with ``train/<class>/images`` and ``val/val_annotations.txt``: TinyImageNet. Its validation part is
      the test part: the labels of its test part were never published.
    * ``train/<class>`` and ``test/<class>`` (or ``val``).
    * ``<domain>/<class>`` (Office-Home): folders of folders.
    * ``<class>``: folders of images.

    Args:
        path: the folder.
        size: scale the shorter side to this many pixels and cut the middle square; needed where the sizes differ.
        cache: a folder for images that are too large for memory; None: they must fit.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}")
    images = _find(path)
    if not images:
        raise ValueError(
            f"{path} has no images in <class>/, <domain>/<class>/ or train/<class>/ "
            f"with one of the endings {', '.join(sorted(SUFFIXES))}"
        )
    classes = tuple(sorted({image.label for image in images}))
    domains = tuple(sorted({image.domain for image in images} - {""}))
    inputs = read_images([image.path for image in images], size, cache, path.resolve().name)
    is_test = torch.tensor([image.is_test for image in images])
    if bool(is_test.all()):
        raise ValueError(f"{path} has a test part and no training part")
    mean, std = channel_statistics(inputs[(~is_test).nonzero().flatten()])
    names = _tiny_names(path)
    return Dataset(
        name=path.resolve().name + (f"@{size}" if size else ""),
        inputs=inputs,
        targets=torch.tensor([classes.index(image.label) for image in images]),
        classes=tuple(names.get(label, label) for label in classes),
        is_test=is_test,
        domain=torch.tensor([domains.index(image.domain) for image in images]) if domains else None,
        domains=domains,
        mean=mean,
        std=std,
    )


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _files(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.suffix.lower() in SUFFIXES and entry.is_file())


def _classes(path: Path, is_test: bool = False, domain: str = "") -> Iterable[_Image]:
    for folder in _folders(path):
        for file in _files(folder):
            yield _Image(file, folder.name, is_test, domain)


def _find(path: Path) -> list[_Image]:
    if (path / "wnids.txt").is_file():
        return _tiny(path)
    top = _folders(path)
    if any(folder.name.lower() in TRAIN for folder in top):
        train = [image for folder in top if folder.name.lower() in TRAIN for image in _classes(folder)]
        test = [image for folder in top if folder.name.lower() in TEST for image in _classes(folder, is_test=True)]
        return train + test
    if any(_files(folder) for folder in top):
        return list(_classes(path))
    return [image for folder in top for image in _classes(folder, domain=folder.name)]


def _tiny(path: Path) -> list[_Image]:
    train = [
        _Image(file, wnid, False)
        for wnid in _text(path / "wnids.txt").split()
        if (path / "train" / wnid / "images").is_dir()
        for file in _files(path / "train" / wnid / "images")
    ]
    annotations = path / "val" / "val_annotations.txt"
    if not annotations.is_file():
        return train
    rows = [line.split("\t") for line in _text(annotations).splitlines() if line.strip()]
    for number, row in enumerate(rows, 1):
        if len(row) < 2 or not row[1].strip():
            raise ValueError(f"{annotations} has no label in row {number}; a file, a tab and a class are accepted")
    return train + [_Image(path / "val" / "images" / row[0], row[1], True) for row in rows]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}") from error


def _tiny_names(path: Path) -> dict[str, str]:
    """What TinyImageNet's identifiers mean: the first word of words.txt, with the identifier where two are alike."""
    if not ((path / "wnids.txt").is_file() and (path / "words.txt").is_file()):
        return {}
    wanted = set(_text(path / "wnids.txt").split())
    rows = (line.partition("\t") for line in _text(path / "words.txt").splitlines())
    words = {wnid: text.split(",")[0].strip() for wnid, _, text in rows if wnid in wanted}
    repeated = {word for word in words.values() if list(words.values()).count(word) > 1}
    return {wnid: f"{word} ({wnid})" if word in repeated else word for wnid, word in words.items()}
