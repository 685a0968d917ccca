"""The fused ops, one family a module. Each works on any device; ``pfl-ext info`` shows which kernel serves it."""

from .averaging import StreamingAverage, server_update, weighted_average
from .distillation import distillation_loss, ensemble_distillation_loss, ensemble_logits

__all__ = [
    "StreamingAverage",
    "distillation_loss",
    "ensemble_distillation_loss",
    "ensemble_logits",
    "server_update",
    "weighted_average",
]
