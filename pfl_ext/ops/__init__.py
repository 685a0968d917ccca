"""The fused ops, one family a module. Each works on any device; ``pfl-ext info`` shows which kernel serves it."""

from .averaging import StreamingAverage, server_update, weighted_average
from .proximal import proximal_sgd_step_, squared_distance
from .sharpness import layer_groups, lwsam_perturb_, personalization_scores, restore_

__all__ = [
    "StreamingAverage",
    "layer_groups",
    "lwsam_perturb_",
    "personalization_scores",
    "proximal_sgd_step_",
    "restore_",
    "server_update",
    "squared_distance",
    "weighted_average",
]
