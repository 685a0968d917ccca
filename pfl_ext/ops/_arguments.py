"""What the ops have in common about their arguments: types, checks, and the words of errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = [
    "FLOATS",
    "accumulate_type",
    "check_dense",
    "check_device",
    "check_lists",
    "check_memory",
    "check_places",
    "describe",
    "one_of",
    "without_gradients",
]

# In the order of DType in csrc/common/numeric.h.
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def accumulate_type(dtype: torch.dtype) -> torch.dtype:
    """The type that values of ``dtype`` are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _GradientsOff(AbstractContextManager[None]):
    """``torch.no_grad()`` for where gradients are on: entering and leaving that takes 1 us, this 0.2."""

    def __enter__(self) -> None:
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(True)


_nothing: AbstractContextManager[object] = nullcontext()
_off = _GradientsOff()


def without_gradients() -> AbstractContextManager[object]:
    """Turns gradients off where they are on. Models have small tensors: it must not take longer than updating one."""
    if not torch.is_grad_enabled():
        return _nothing
    return torch.no_grad() if torch.compiler.is_compiling() else _off


def describe(x: object) -> str:
    """As in ``float32 [3, 4] on cpu``; what is not laid out by strides says so."""
    if not isinstance(x, Tensor):
        return f"a {type(x).__name__}"
    layout = "" if x.layout == torch.strided else f"{str(x.layout).removeprefix('torch.')} "
    return f"{layout}{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"


def check_dense(what: str, x: Tensor) -> None:
    """Raise an error for a sparse tensor, and for others that have no strides."""
    if x.layout != torch.strided:
        raise ValueError(f"{what} is {describe(x)}; dense tensors are accepted, as x.to_dense() gives them")


def one_of(name: str, value: str, accepted: Sequence[str]) -> None:
    """Raise an error that lists what is accepted, unless ``value`` is of it."""
    if value not in accepted:
        raise ValueError(f"{name}={value!r} is not known; accepted: {', '.join(map(repr, accepted))}")


def check_device(name: str, tensors: Sequence[Tensor], t: int) -> None:
    """Raise an error unless tensor ``t`` is on the device of the first one."""
    if tensors[t].device != tensors[0].device:
        raise ValueError(
            f"tensor {t} of {name} is {describe(tensors[t])}, tensor 0 is {describe(tensors[0])}; "
            "all tensors of one call must be on one device"
        )


def check_lists(**lists: Sequence[Tensor]) -> None:
    """Raise an error that names list and tensor, unless tensor t has one shape, type and device in all lists."""
    (first_name, first), *others = lists.items()
    for name, tensors in others:
        if len(tensors) != len(first):
            raise ValueError(f"{len(tensors)} {name} for {len(first)} {first_name}")
    for t, reference in enumerate(first):
        if not isinstance(reference, Tensor):
            raise TypeError(f"tensor {t} of {first_name} is {describe(reference)}, not a tensor")
        check_dense(f"tensor {t} of {first_name}", reference)
        if reference.dtype not in FLOATS:
            raise ValueError(
                f"tensor {t} of {first_name} is {describe(reference)}; "
                "float32, float64, float16 and bfloat16 are accepted"
            )
        check_device(first_name, first, t)
        for name, tensors in others:
            x = tensors[t]
            if not isinstance(x, Tensor):
                raise TypeError(f"tensor {t} of {name} is {describe(x)}, not a tensor")
            if (x.shape, x.dtype, x.device) != (reference.shape, reference.dtype, reference.device):
                raise ValueError(f"tensor {t} of {name} is {describe(x)}, of {first_name} {describe(reference)}")
            check_dense(f"tensor {t} of {name}", x)


def check_places(name: str, t: int | str, x: Tensor) -> None:
    """Raise an error if elements of a tensor to be written share one place in memory: expanded, or strided over it."""
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride < extent:
            raise ValueError(f"tensor {t} of {name} is expanded or overlaps itself: elements share one place in memory")
        extent += stride * (size - 1)


def check_memory(written: Mapping[str, Sequence[Tensor]], read: Mapping[str, Sequence[Tensor]]) -> None:
    """Raise an error where written tensors overlap each other, or a read one in another way than being the same one."""
    spans: list[tuple[int, int, int, str, Tensor]] = []
    for name, tensors in [*written.items(), *read.items()]:
        for t, x in enumerate(tensors):
            if x.numel() == 0:
                continue
            if name in written:
                check_places(name, t, x)
            extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
            spans.append((x.data_ptr(), x.data_ptr() + extent * x.element_size(), t, name, x))
    spans.sort(key=lambda span: span[0])
    for i, (_, end, t, name, x) in enumerate(spans):
        for begin, _, other_t, other_name, other in spans[i + 1 :]:
            if begin >= end:
                break
            if name in read and other_name in read:
                continue
            one_written = (name in written) != (other_name in written)
            same = (x.data_ptr(), x.dtype, x.shape, x.stride()) == (begin, other.dtype, other.shape, other.stride())
            if not (one_written and t == other_t and same):
                raise ValueError(f"tensor {t} of {name} and tensor {other_t} of {other_name} overlap in memory")
