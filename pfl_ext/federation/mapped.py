"""Tensors in files, mapped or read in parts: larger than memory, or seen by several processes."""

from __future__ import annotations

import contextlib
import fcntl
import math
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

__all__ = ["LARGE", "MappedTensor", "RemoteTensor", "opened", "scratch_folder"]

LARGE = 1 << 16
"""Bytes from which a tensor is worth a file of its own."""
_PREFIX, _LOCK = "pfl_ext-", "owner.lock"


@dataclass(frozen=True)
class MappedTensor:
    """Where a mapped tensor is. This, not the tensor, goes to another process, which opens the same memory."""

    path: Path
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def create(cls, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> MappedTensor:
        """A new file of zeros. It is sparse: what is never written takes no space."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with _named(path), path.open("wb") as file:
            file.truncate(math.prod(shape) * dtype.itemsize)
        return cls(path, shape, dtype)

    @classmethod
    def copy(cls, tensor: Tensor, path: Path) -> MappedTensor:
        """A file with what ``tensor`` holds."""
        mapped = cls.create(path, tuple(tensor.shape), tensor.dtype)
        mapped.write(0, tensor.reshape(-1))
        return mapped

    def numel(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.numel() * self.dtype.itemsize

    # Mapped pages count as memory of the process for as long as they are mapped, and a mapped write to a full disk
    # kills it. So what is used once goes through the file: all see it the same, and a full disk is an OSError.

    def read(self, begin: int, count: int) -> Tensor:
        """A copy of ``count`` numbers from number ``begin`` on."""
        result = torch.empty(count, dtype=self.dtype)
        with self.path.open("rb", buffering=0) as file:
            file.seek(begin * self.dtype.itemsize)
            if file.readinto(result.view(torch.uint8).numpy().data) != result.nbytes:
                raise OSError(f"{self.path} ends before number {begin + count}")
        return result

    def write(self, begin: int, values: Tensor) -> None:
        """Replace the numbers from number ``begin`` on by those of a vector."""
        content = values.detach().cpu().contiguous().view(torch.uint8).numpy()
        with _named(self.path), self.path.open("r+b") as file:
            file.seek(begin * self.dtype.itemsize)
            file.write(content.data)

    def open(self) -> Tensor:
        """The tensor; what one process writes, the others see."""
        size = self.numel()
        if size == 0:  # an empty file cannot be mapped
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.from_file(str(self.path), shared=True, size=size, dtype=self.dtype).view(self.shape)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error of the block names the file: that of a full disk, or of a limit on sizes, does not by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@dataclass(frozen=True)
class RemoteTensor:
    """Where a tensor is that stays in another process of the run. The engine brings it, or computes there."""

    rank: int
    """The rank of the process that has it."""
    number: int
    """The number by which that process knows it."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    def numel(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The tensor's size in bytes."""
        return self.numel() * self.dtype.itemsize

    def open(self) -> Tensor:
        """Raise a TypeError: its numbers are in another process, and the engine brings them."""
        raise TypeError(f"vector {self.number} is at rank {self.rank}; the engine fetches it")


def opened(vector: Tensor | MappedTensor | RemoteTensor) -> Tensor:
    """The tensor itself, where this process sees it."""
    return vector if isinstance(vector, Tensor) else vector.open()


def scratch_folder(owner: object, size: int) -> Path:
    """A folder for files of ``size`` bytes that lives as long as ``owner``, in memory where that much is free.

    What processes that were killed have left there is removed.
    """
    memory, disk = Path("/dev/shm"), Path(tempfile.gettempdir())
    for place in (memory, disk):
        _remove_abandoned(place)
    # Containers often have 64 MB there, and writing beyond it kills the process.
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 2 * size
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=memory if roomy else disk))
    # The lock ends with the process, however that ends. A process id would not tell: another container may share
    # this memory and have other ids.
    # Named once it is locked: a process that begins at this moment takes an unlocked one for abandoned.
    new = folder / f"{_LOCK}.new"
    lock = new.open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    new.rename(folder / _LOCK)
    weakref.finalize(owner, _remove, folder, lock)
    return folder


def _remove(folder: Path, lock: TextIO) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    lock.close()


def _remove_abandoned(place: Path) -> None:
    """Remove the folders whose owners are dead: nobody holds their lock."""
    for folder in place.glob(f"{_PREFIX}*"):
        # A folder without a lock is being made, or is not ours.
        with contextlib.suppress(OSError), (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
