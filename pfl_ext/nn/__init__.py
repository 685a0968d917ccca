"""Networks of the papers."""

from .networks import NETWORKS, build, cnn, lenet, mlp

__all__ = ["NETWORKS", "build", "cnn", "lenet", "mlp"]
