"""Tensors to and from Flower's arrays, the bytes of ``.npy`` files. Nothing that is read can run code."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

__all__ = ["copied", "record_of", "records_in", "viewed"]

_Kind = TypeVar("_Kind", ArrayRecord, ConfigRecord, MetricRecord)

_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '(?P<type>[<|][a-z]\d)', 'fortran_order': (?P<fortran>True|False), "
    rb"'shape': \((?P<shape>(?:\d{1,15},? ?){0,64})\), \} *\n",
    re.DOTALL,
)
"""Of a .npy file with numbers of one type: what numpy writes for all that :func:`record_of` sends."""
_KINDS = {
    np.dtype(name).str: getattr(torch, name)
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


def records_in(content: RecordDict, kind: type[_Kind]) -> dict[str, _Kind]:
    """The records of a kind by their names.

    Flower's own properties for it (``content.array_records``) make a dict that refers to itself and to the content, so
    that all that a client sent would stay in memory until Python's collector looks for such circles.
    """
    return {name: record for name, record in content.items() if isinstance(record, kind)}


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
            except (ValueError, RuntimeError) as error:  # torch's, where a product of sizes is more than it can count
                raise ValueError(f"{name} is no array of numbers: {error}") from None
    return found


def copied(record: Mapping[str, Array]) -> dict[str, Tensor]:
    """The tensors of a record in memory of torch's own: a matrix product rounds by where its operands begin."""
    return {name: tensor.clone() for name, tensor in viewed(record).items()}


def _view(array: Array) -> Tensor:
    # Not np.load: it makes room for what a header claims before it looks whether the bytes are there, and its parser
    # of headers is Python's own, which raises what it likes on what a stranger sends.
    if array.stype != "numpy.ndarray":
        raise ValueError(f"it is stored as {array.stype!r}")
    header = _HEADER.match(array.data)
    if header is None or header.end() != 10 + int.from_bytes(array.data[8:10], "little"):
        raise ValueError("it does not begin as a .npy file of numbers does")
    shape = tuple(int(size) for size in header["shape"].decode().split(",") if size.strip())
    kind, count, begin = _KINDS.get(header["type"].decode()), math.prod(shape), header.end()
    if kind is None or len(array.data) - begin != count * kind.itemsize:
        raise ValueError(f"{len(array.data) - begin} bytes for the shape {list(shape)} of {header['type'].decode()}")
    if count == 0:
        return torch.empty(shape, dtype=kind)
    flat = torch.frombuffer(array.data, dtype=kind, count=count, offset=begin)
    if header["fortran"] == b"False":
        return flat.view(shape)
    return flat.view(shape[::-1]).permute(*range(len(shape))[::-1])
