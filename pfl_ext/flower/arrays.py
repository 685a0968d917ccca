"""Tensors to and from Flower's arrays, the bytes of ``.npy`` files. Nothing that is read can run code."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

__all__ = ["copied", "record_of", "viewed"]

_HEADER = 10_000  # bytes of a .npy header at most, as numpy has it for what is not trusted
_KINDS = {
    np.dtype(name): getattr(torch, name)
    for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")
}


def record_of(tensors: Mapping[str, Tensor], known: dict[int, Array] | None = None) -> ArrayRecord:
    """Tensors as a record.

    Args:
        tensors: by their names.
        known: arrays by the ids of their tensors, to make each once where several messages carry it. The caller keeps
            those tensors alive.
    """
    known = {} if known is None else known
    record = ArrayRecord()
    for name, tensor in tensors.items():
        if id(tensor) not in known:
            known[id(tensor)] = _array_of(name, tensor)
        record[name] = known[id(tensor)]
    return record


def _array_of(name: str, tensor: Tensor) -> Array:
    if tensor.dtype not in _KINDS.values():
        raise TypeError(f"{name} is {tensor.dtype}; Flower's arrays are numpy's, which has no such type")
    return Array(tensor.detach().cpu().contiguous().numpy())


def viewed(record: Mapping[str, Array]) -> dict[str, Tensor]:
    """The tensors of a record without a copy, to be read and not written.

    Raises:
        ValueError: something is no array of numbers, or not as long as it says; the message names it.
    """
    found = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        for name, array in record.items():
            try:
                found[name] = _view(array)
            except (ValueError, TypeError, KeyError, EOFError, OverflowError) as error:
                raise ValueError(f"{name} is no array of numbers: {error}") from None
    return found


def copied(record: Mapping[str, Array]) -> dict[str, Tensor]:
    """The tensors of a record in memory of torch's own: a matrix product rounds by where its operands begin."""
    return {name: tensor.clone() for name, tensor in viewed(record).items()}


def _view(array: Array) -> Tensor:
    # Not np.load: it makes room for what a header claims before it looks whether the bytes are there.
    if array.stype != "numpy.ndarray":
        raise ValueError(f"it is stored as {array.stype!r}")
    file = io.BytesIO(array.data[: _HEADER + 16])
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, fortran, dtype = read(file, max_header_size=_HEADER)
    if dtype not in _KINDS:
        raise ValueError(f"it is of the type {dtype}")
    count, begin = math.prod(shape), file.tell()
    if any(size < 0 for size in shape) or len(array.data) - begin != count * dtype.itemsize:
        raise ValueError(f"{len(array.data) - begin} bytes for the shape {list(shape)} of {dtype}")
    if count == 0:
        return torch.empty(shape, dtype=_KINDS[dtype])
    flat = torch.frombuffer(array.data, dtype=_KINDS[dtype], count=count, offset=begin)
    return flat.view(shape[::-1]).permute(*range(len(shape))[::-1]) if fortran else flat.view(shape)
