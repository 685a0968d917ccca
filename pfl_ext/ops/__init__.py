"""The fused ops, one family a module. Each works on any device; ``pfl-ext info`` shows which kernel serves it."""

from .averaging import StreamingAverage, server_update, weighted_average
from .sharpness import layer_groups, lwsam_perturb_, personalization_scores, restore_

__all__ = [
    "StreamingAverage",
    "layer_groups",
    "lwsam_perturb_",
    "personalization_scores",
    "restore_",
    "server_update",
    "weighted_average",
]
