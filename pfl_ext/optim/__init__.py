"""Optimisers on the fused ops: SAM and LWSAM around any optimiser of torch, and SGD that is held near an anchor."""

from .proximal import ProximalSGD
from .sharpness import LWSAM, SAM

__all__ = ["LWSAM", "SAM", "ProximalSGD"]
