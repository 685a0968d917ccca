"""Tensors in files of which samples are read when they are asked for: data larger than memory."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["StoredTensor"]

_HERE = torch.device("cpu")
_PART = 1 << 22  # bytes that are in memory at once where all samples are read


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor [n, ...] in a file; a leaf of a dataset's inputs, as a tensor in memory is.

    Samples are read, not mapped: mapped pages count as memory of the process for as long as they are mapped, a mapping
    of a file that ends early kills it, and the page cache holds what was read in either way. Sent to another process it
    is the file's name; all processes read the same file.

    Args:
        path: the file: the numbers, sample after sample.
        whole: the shape of all that is in it.
        dtype: of the numbers.
        rows: which samples these are, in their order; None: all.
        device: where samples go when they are read.
    """

    path: Path
    whole: tuple[int, ...]
    dtype: torch.dtype
    rows: Tensor | None = None
    device: torch.device = _HERE

    @property
    def shape(self) -> torch.Size:
        """The shape a tensor of these samples would have."""
        return torch.Size((len(self), *self.whole[1:]))

    @property
    def ndim(self) -> int:
        """The number of dimensions, that of the samples included."""
        return len(self.whole)

    @property
    def nbytes(self) -> int:
        """What these samples would take in memory."""
        return len(self) * self._each

    @property
    def _each(self) -> int:
        return math.prod(self.whole[1:]) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.whole[0] if self.rows is None else len(self.rows)

    def is_floating_point(self) -> bool:
        """Whether the samples are floating-point numbers."""
        return self.dtype.is_floating_point

    def to(self, device: torch.device | str) -> StoredTensor:
        """The same with samples on another device."""
        return replace(self, device=torch.device(device))

    def __getitem__(self, rows: Tensor) -> StoredTensor:
        """Some samples, which stay in the file."""
        chosen = (torch.arange(len(self)) if self.rows is None else self.rows)[rows.cpu()]
        return replace(self, rows=chosen)

    def index_select(self, dim: int, indices: Tensor) -> Tensor:
        """Read these samples from the file into a tensor; ``dim`` is taken as 0."""
        rows = indices.cpu() if self.rows is None else self.rows[indices.cpu()]
        found = torch.empty((len(rows), *self.whole[1:]), dtype=self.dtype)
        size, file = self._each, self._descriptor()
        memory = found.view(-1).view(torch.uint8).numpy().data
        for i, row in enumerate(rows.tolist() if size else ()):
            if not 0 <= row < self.whole[0]:
                raise IndexError(f"sample {row} of {self.whole[0]}")
            if os.preadv(file, [memory[i * size : (i + 1) * size]], row * size) != size:
                raise OSError(f"{self.path} ends before sample {row}: remove its folder, so that it is made anew")
        return found.to(self.device)

    def parts(self) -> Iterator[Tensor]:
        """All samples, some at a time."""
        step = max(1, _PART // max(1, self._each))
        for begin in range(0, len(self), step):
            yield self.index_select(0, torch.arange(begin, min(begin + step, len(self))))

    def _descriptor(self) -> int:
        """The open file; it is closed with the last of those who use it."""
        if "_file" not in self.__dict__:
            file = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, file)
            object.__setattr__(self, "_file", file)
        return int(self.__dict__["_file"])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the open file, which another process cannot use."""
        return {name: value for name, value in self.__dict__.items() if name != "_file"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The file is opened again when the first sample is read."""
        self.__dict__.update(state)
