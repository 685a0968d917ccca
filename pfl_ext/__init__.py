"""Fused C++/CUDA ops for personalised federated learning, and the algorithms built on them."""

from . import _native, ops

__all__ = ["__version__", "ops"]
__version__ = "0.1.0"

_native.load()
