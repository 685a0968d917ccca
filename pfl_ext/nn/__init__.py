"""Networks of the papers, adapters, pretrained weights."""

from .adapters import FrozenBatchNorm2d, adapter_parameters, add_adapters, freeze_backbone, head_of
from .fused import FusedSequential, Row, row_of_layers
from .hypernetwork import HyperNetwork
from .libraries import library_network
from .networks import NETWORKS, build, cnn, lenet, mlp
from .pretrained import load_pretrained, read_weights
from .resnet import ResNet, WideResNet, resnet18, resnet34, resnet50, wide_resnet
from .several import Networks
from .text import CharTransformer, char_transformer
from .vit import VisionTransformer, vit

__all__ = [
    "NETWORKS",
    "CharTransformer",
    "FrozenBatchNorm2d",
    "FusedSequential",
    "HyperNetwork",
    "Networks",
    "ResNet",
    "Row",
    "VisionTransformer",
    "WideResNet",
    "adapter_parameters",
    "add_adapters",
    "build",
    "char_transformer",
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
    "row_of_layers",
    "vit",
    "wide_resnet",
]
