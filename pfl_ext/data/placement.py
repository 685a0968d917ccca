"""Bringing what was drawn or chosen on the host to where the data is."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["placed"]


def placed(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on that device. The host does not wait for a GPU: what it copies from is pinned, and torch keeps it
    until the copy is done.
    """
    if tensor.device == device:
        return tensor
    if tensor.is_cpu and device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
