"""The fused ops, one family a module. Each works on any device; ``pfl-ext info`` shows which kernel serves it."""

from .averaging import StreamingAverage, all_finite, server_update, weighted_average
from .convolution import conv_pool_relu
from .distillation import distillation_loss, ensemble_distillation_loss, ensemble_logits
from .linear import linear_relu
from .prepared import Prepared, prepare
from .proximal import proximal_sgd_step_, squared_distance
from .sharpness import layer_groups, lwsam_perturb_, personalization_scores, restore_
from .spectral import SpectralTeacher, spectral_divergence, spectrum
from .training import loss_and_gradients, train_steps_

__all__ = [
    "Prepared",
    "SpectralTeacher",
    "StreamingAverage",
    "all_finite",
    "conv_pool_relu",
    "distillation_loss",
    "ensemble_distillation_loss",
    "ensemble_logits",
    "layer_groups",
    "linear_relu",
    "loss_and_gradients",
    "lwsam_perturb_",
    "personalization_scores",
    "prepare",
    "proximal_sgd_step_",
    "restore_",
    "server_update",
    "spectral_divergence",
    "spectrum",
    "squared_distance",
    "train_steps_",
    "weighted_average",
]
