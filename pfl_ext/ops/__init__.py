"""The fused ops, one family a module. Each works on any device; ``pfl-ext info`` shows which kernel serves it."""

from .averaging import StreamingAverage, server_update, weighted_average
from .spectral import SpectralTeacher, spectral_divergence, spectrum

__all__ = [
    "SpectralTeacher",
    "StreamingAverage",
    "server_update",
    "spectral_divergence",
    "spectrum",
    "weighted_average",
]
