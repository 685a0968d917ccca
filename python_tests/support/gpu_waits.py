"""How often the host waited for the GPU in a block."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Ops of torch that wait inside, where a simulated GPU has put another in their place.
_WAITING = ("aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2", "aten::bincount")


class Waits:
    count = 0


@contextmanager
def counted_waits() -> Iterator[Waits]:
    """On a simulated GPU from its record; on a real one from torch, which warns before it waits."""
    found = Waits()
    try:
        import fakegpu
    except ImportError:
        fakegpu = None
    if fakegpu is not None and fakegpu.active():
        with fakegpu.Recording() as record:
            yield found
        found.count = len(record.of("sync")) + sum(op.split(".")[0] in _WAITING for op in record.torch_ops)
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.count = sum("called a synchronizing CUDA operation" in str(warning.message) for warning in told)
