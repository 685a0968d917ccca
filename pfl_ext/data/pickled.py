"""Arrays in pickles, of which nothing is run or believed: plain values and arrays of numbers, and nothing else.

CIFAR's Python version and PFLlib's partitions are pickles. An ordinary unpickler runs whatever code a file names. To
allow NumPy's own functions alone does not make it safe: NumPy believes what a file says of a dtype, and a file that
calls objects plain bytes makes it follow addresses of the file's choice. So NumPy rebuilds nothing here: what it would
be asked to do is written down, checked, and then done by hand.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any, ClassVar

import numpy as np

__all__ = ["PickledArray", "read_pickle"]

NUMBERS = re.compile(r"b1|[iu][1248]|f[248]")
INSTRUCTIONS = """
PROTO FRAME STOP MARK POP MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET
NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT
STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BINBYTES8
EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM SETITEMS
GLOBAL STACK_GLOBAL REDUCE BUILD
"""


def read_pickle(data: bytes, encoding: str = "ASCII") -> Any:
    """What the pickle holds: dictionaries, lists, tuples, text, bytes, numbers, and each array a :class:`PickledArray`.

    ``encoding`` is of text that Python 2 wrote; ``"bytes"`` leaves it as bytes.

    Raises:
        pickle.UnpicklingError: it asks for anything else. A damaged one can raise nearly any other exception.
    """
    return _Reader(io.BytesIO(data), encoding=encoding).load()


class _Reader(pickle._Unpickler):
    """The unpickler in Python, with the instructions alone that such files need.

    The one in C, and some instructions in this one, reserve as much memory as a damaged number asks for.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in INSTRUCTIONS.split())
    }

    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _reconstruct
        if (module, name) in _STANDINS:
            return _STANDINS[module, name]
        raise pickle.UnpicklingError(f"it asks for {module[:40]}.{name[:40]}")

    def load_build(self) -> None:
        """Give what was just made its state; the functions of this file are not to be changed by a pickle."""
        if not isinstance(self.stack[-2], (PickledArray, _Dtype)):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it gives a state to what is no array")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


class PickledArray:
    """An array of numbers in ``numbers``, or one of objects: a list of them in ``objects``, None for numbers."""

    def __init__(self) -> None:
        """An empty one, before its state is read."""
        self.numbers = np.empty(0)
        self.objects: list[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        """Take what NumPy writes of an array: version, shape, dtype, whether in Fortran's order, bytes or objects."""
        _version, shape, dtype, fortran, data = state
        if not isinstance(dtype, _Dtype):
            raise pickle.UnpicklingError("it has an array without a dtype")
        if dtype.code == "O":
            self.objects = list(data) if isinstance(data, list) else None
            return
        if not isinstance(data, bytes) or NUMBERS.fullmatch(dtype.code) is None:
            raise pickle.UnpicklingError(f"it has an array of {dtype.code[:20]!r}, not of numbers")
        flat = np.frombuffer(data, np.dtype(dtype.order + dtype.code))
        array = flat.reshape([int(size) for size in shape], order="F" if fortran else "C")
        self.numbers = array.astype(flat.dtype.newbyteorder("="), order="C")  # a copy that can be written to


class _Dtype:
    """A dtype's code, as ``f4``, and its byte order."""

    def __init__(self, code: str | bytes, align: bool = False, copy: bool = False) -> None:
        self.code = _text(code).removesuffix("8") if _text(code).startswith("O") else _text(code)
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        self.order = _text(state[1])
        if self.order not in "<>=|" or any(part is not None for part in state[2:5]):
            raise pickle.UnpicklingError("it has an array of records")


def _text(value: str | bytes) -> str:
    return value.decode("ascii") if isinstance(value, bytes) else value


def _reconstruct(subtype: Any, shape: Any, typecode: Any) -> PickledArray:
    """An array whose state comes next; what ``shape`` and ``typecode`` say of it now is without meaning."""
    return PickledArray()


def _ndarray() -> None:
    """Stands for the type that :func:`_reconstruct` is given."""


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


_STANDINS = {("numpy", "ndarray"): _ndarray, ("numpy", "dtype"): _Dtype, ("_codecs", "encode"): _latin1}
