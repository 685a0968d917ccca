"""Networks of the papers, adapters, pretrained weights."""

from .adapters import FrozenBatchNorm2d, adapter_parameters, add_adapters, freeze_backbone, head_of
from .fused import FusedSequential
from .hypernetwork import HyperNetwork
from .libraries import library_network
from .networks import NETWORKS, build, cnn, lenet, mlp
from .pretrained import load_pretrained, read_weights
from .resnet import ResNet, WideResNet, resnet18, resnet34, resnet50, wide_resnet
from .vit import VisionTransformer, vit

__all__ = [
    "NETWORKS",
    "FrozenBatchNorm2d",
    "FusedSequential",
    "HyperNetwork",
    "ResNet",
    "VisionTransformer",
    "WideResNet",
    "adapter_parameters",
    "add_adapters",
    "build",
    "cnn",
    "freeze_backbone",
    "head_of",
    "lenet",
    "library_network",
    "load_pretrained",
    "mlp",
    "read_weights",
    "resnet18",
    "resnet34",
    "resnet50",
    "vit",
    "wide_resnet",
]
