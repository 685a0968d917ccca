"""Texts as windows of characters, each with the character that follows every place in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from .dataset import Dataset

__all__ = ["LENGTH", "of_texts", "read_speeches", "read_text"]

LENGTH = 64
"""Characters in a window, where nobody says."""
_TEST = 0.2  # of each text, its end


def of_texts(texts: Mapping[str, str], length: int | None = None, name: str = "texts") -> Dataset:
    """Texts by whom they are, in windows that do not overlap, for the task ``next-token``.

    The domain of a window is its text, so that ``by_domain`` makes each speaker or document a client. The last fifth of
    each text is the test part. ``dataset.classes`` are the characters, in the order of their codes.

    Args:
        texts: whose each is, and the text; what is shorter than a window and a character is refused.
        length: of a window, 64 by default.
        name: of the dataset.
    """
    length = LENGTH if length is None else length
    short = [whose for whose, text in texts.items() if len(text) <= 2 * length]
    if not texts or short:
        raise ValueError(
            f"{name!r} has {len(texts)} texts, of which {len(short)} are too short ({', '.join(short[:3])}): each "
            f"needs more than two windows of {length} characters"
        )
    characters = sorted(set().union(*texts.values()))
    number = {character: i for i, character in enumerate(characters)}
    inputs, targets, tests, domain = [], [], [], []
    for d, text in enumerate(texts.values()):
        codes = torch.tensor([number[character] for character in text], dtype=torch.int16)
        windows = (len(codes) - 1) // length
        test = min(max(1, round(_TEST * windows)), windows - 1)
        inputs.append(codes[: windows * length].view(windows, length))
        targets.append(codes[1 : windows * length + 1].view(windows, length).long())
        tests.append(torch.arange(windows) >= windows - test)
        domain.append(torch.full((windows,), d))
    return Dataset(
        name=name,
        inputs=torch.cat(inputs),
        targets=torch.cat(targets),
        classes=tuple(characters),
        is_test=torch.cat(tests),
        domain=torch.cat(domain),
        domains=tuple(texts),
    )


def read_text(folder: Path, length: int | None = None) -> Dataset:
    """Text files of a folder, ``<speaker>.txt`` each, as :func:`of_texts` makes a dataset of them."""
    files = sorted(folder.glob("*.txt")) if folder.is_dir() else []
    if not files:
        raise FileNotFoundError(f"there is no folder {folder} with <speaker>.txt files")
    try:
        texts = {file.stem: file.read_text(encoding="utf-8") for file in files}
    except UnicodeDecodeError as error:
        raise ValueError(f"a file of {folder} is no text in UTF-8: {error}") from error
    return of_texts(texts, length, folder.resolve().name)


def read_speeches(length: int | None = None) -> Dataset:
    """The twelve speakers of this package (speeches.md says whose they are)."""
    whole = Path(__file__).with_name("speeches.txt").read_text(encoding="utf-8")
    found = re.findall(r"^# (.+?), [\d, ]+\n(.*)$", whole, re.M)
    return of_texts(dict(found), length, "speeches")
