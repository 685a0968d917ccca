"""Tensors as the emulated CUDA kernels take them: arrays over the same memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_numpy(x: Tensor) -> np.ndarray:
    """The same memory; numpy has no bfloat16, so its bits."""
    x = x.detach()
    return x.view(torch.uint16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def arrays(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    return [as_numpy(x) for x in tensors]


def clones(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [x.clone() for x in tensors]


def same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    pairs = zip(arrays(a), arrays(b), strict=True)
    return all(np.array_equal(x.view(np.uint8), y.view(np.uint8)) for x, y in pairs)


def random_tensors(sizes: Sequence[int], dtype: torch.dtype, seed: int, offset: int = 0) -> list[Tensor]:
    """With an offset of some elements into their storage, to be had misaligned for vector access."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n + offset, generator=generator).to(dtype)[offset:] for n in sizes]
