"""The fused ops, one family a module. Each works on any device; ``pfl-ext info`` shows which kernel serves it."""

from .averaging import StreamingAverage, server_update, weighted_average

__all__ = ["StreamingAverage", "server_update", "weighted_average"]
