"""The papers' networks, each for any number of classes: the small ones, and all of them by name.

===============  ==========================================================  ==========================================
``mlp``          784-100-10 on MNIST, 79,510 parameters                      PersFL on MNIST
``lenet``        conv 6 - pool - conv 16 - pool - 120 - 84, 62,006 on CIFAR  PersFL on CIFAR-10; PLGU, SCD in small
``cnn``          conv 32 - pool - conv 64 - pool - 512, 582,026 on MNIST     the CNN of FedAvg's paper, as PFLlib's
``resnet18``     11,181,642 for 3 channels and 10 classes                    PerAda, SCD
``resnet34``     21,289,802                                                  PerAda on Office-Home
``resnet50``     23,528,522                                                  SCD on iNaturalist
``wide-resnet``  28-10, 36,479,194                                           PLGU on CIFAR-100, TinyImageNet
``vit``          ViT-S/16, 21,669,514 at 224 px                              PerAda under differential privacy
``char-...``     ``char-transformer``, 113,609 for 73 characters             text, for all of them
===============  ==========================================================  ==========================================

Every one of them takes the options of :func:`build`: weights from a file, adapters, a frozen backbone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .adapters import add_adapters, freeze_backbone
from .fused import FusedSequential
from .libraries import library_network
from .pretrained import load_pretrained, read_weights
from .resnet import resnet18, resnet34, resnet50, wide_resnet
from .text import char_transformer
from .vit import vit

__all__ = ["NETWORKS", "build", "cnn", "lenet", "mlp"]


def _image(shape: Sequence[int], network: str) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise ValueError(f"{network} takes images [channels, height, width]; the inputs are {list(shape)}")
    return shape[0], shape[1], shape[2]


def _after_two_stages(side: int, network: str) -> int:
    """The side of an image after twice a 5x5 convolution without padding and a 2x2 pooling."""
    for _ in range(2):
        side = (side - 4) // 2
        if side < 1:
            raise ValueError(f"{network} needs images of at least 16x16; use the network mlp for smaller ones")
    return side


def mlp(
    input_shape: Sequence[int],
    classes: int,
    *,
    hidden: Annotated[int, "hidden units"] = 100,
    hidden_layers: Annotated[int, "hidden layers"] = 1,
) -> nn.Sequential:
    """Hidden layers with ReLU, one by default, for inputs of any shape."""
    if hidden_layers < 1:
        raise ValueError(f"hidden_layers is {hidden_layers}; accepted is 1 or more")
    sizes = [math.prod(input_shape), *[hidden] * hidden_layers]
    linear = [layer for inputs, outputs in pairwise(sizes) for layer in (nn.Linear(inputs, outputs), nn.ReLU())]
    return FusedSequential(nn.Flatten(), *linear, nn.Linear(hidden, classes))


def _two_stages(shape: Sequence[int], network: str, first: int, second: int) -> tuple[list[nn.Module], int]:
    """The convolutional part that lenet and cnn share but for its widths, and the number of features it gives."""
    channels, height, width = _image(shape, network)
    features = second * _after_two_stages(height, network) * _after_two_stages(width, network)
    layers: list[nn.Module] = []
    for inputs, outputs in ((channels, first), (first, second)):
        # The papers have the ReLU first. The two may change places, to the bit, and then it has a quarter of the work.
        layers += [nn.Conv2d(inputs, outputs, 5), nn.MaxPool2d(2), nn.ReLU()]
    return [*layers, nn.Flatten()], features


def lenet(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Two convolutions and three linear layers; 62,006 parameters for 3x32x32 and 10 classes."""
    convolutions, features = _two_stages(input_shape, "lenet", 6, 16)
    linear = (nn.Linear(features, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes))
    return FusedSequential(*convolutions, *linear)


def cnn(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Two wide convolutions and two linear layers; 582,026 parameters for 1x28x28 and 10 classes."""
    convolutions, features = _two_stages(input_shape, "cnn", 32, 64)
    return FusedSequential(*convolutions, nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, classes))


@dataclass(frozen=True)
class ScaledInput:
    """Scales the images that enter a network, before its first layer; a hook, so that no tensor changes its name."""

    size: int = 0
    """Height and width; 0: as they are."""
    channels: int = 0
    """How many channels images of one channel get, all alike; 0: as they are."""

    def shape(self, shape: Any) -> Any:
        """The shape of an image inside."""
        if not (self.size or self.channels):
            return shape
        if len(shape) != 3 or self.size < 0 or (self.channels and shape[0] not in (1, self.channels)):
            raise ValueError(
                f"images {list(shape)} to {self.channels} channels and the size {self.size}; accepted are images "
                "[channels, height, width] with one channel, or as many"
            )
        return self.channels or shape[0], self.size or shape[1], self.size or shape[2]

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        (x,) = inputs
        if self.size and x.shape[-1] != self.size:
            x = F.interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False)
        return x.expand(-1, self.channels, -1, -1) if self.channels and x.shape[1] != self.channels else x


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "lenet": lenet,
    "cnn": cnn,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "wide-resnet": wide_resnet,
    "vit": vit,
    "char-transformer": char_transformer,
}
"""A network's name and the function of (input shape without the batch, number of classes) that builds it.

Keyword arguments are the network's own options, explained in ``typing.Annotated``."""


def build(
    name: str,
    input_shape: Any,
    classes: int,
    generator: torch.Generator,
    weights: Mapping[str, Tensor] | None = None,
    *,
    input_size: Annotated[
        int, "scale images to this height and width on their way into the network; 0: as they are"
    ] = 0,
    input_channels: Annotated[
        int, "how many equal channels grey images are given (3 for pretrained weights); 0: leave as is"
    ] = 0,
    pretrained: Annotated[
        str | None,
        "weights to begin with: a safetensors or torch file, the folder of a run (its global model), or "
        "torchvision:ResNet18_Weights.IMAGENET1K_V1",
    ] = None,
    pretrained_statistics: Annotated[bool, "load running statistics too (PerAda's official code: no)"] = True,
    adapters: Annotated[bool, "put residual adapters into the blocks"] = False,
    adapter_dropout: Annotated[float, "dropout inside the adapters"] = 0.3,
    adapter_width: Annotated[int, "features inside the adapters of a vit"] = 64,
    freeze: Annotated[
        Literal["none", "backbone"],
        "what is not trained: all but adapters, normalisation and head (PerAda), or nothing",
    ] = "none",
    frozen_statistics: Annotated[
        bool, "frozen batch normalisation keeps its statistics (PerAda's official code: no)"
    ] = True,
    **own: Any,
) -> nn.Module:
    """The network of that name with weights drawn from ``generator``, torch's own random state left as it was.

    Adapters are drawn last, so the network's own weights are the same with and without.

    Args:
        name: one of :data:`NETWORKS`, ``torchvision:NAME`` or ``timm:NAME``.
        input_shape: without the batch; of several tensors a nest of shapes.
        classes: how many; or how many numbers are predicted.
        generator: gives the weights.
        weights: those that ``pretrained`` names, where the caller has read them.
        input_size, input_channels: see :class:`ScaledInput`. Data stay as they are: CIFAR-10 at 224 px takes 9 GB.
        pretrained, pretrained_statistics: see :func:`load_pretrained`.
        adapters, adapter_dropout, adapter_width: see :func:`add_adapters`.
        freeze, frozen_statistics: see :func:`freeze_backbone`.
        own: the options of that network.
    """
    if freeze == "backbone" and pretrained is not None and frozen_statistics and not pretrained_statistics:
        raise ValueError(
            "without the pretrained statistics those of frozen batch normalisation would stay at 0 and 1: "
            "use frozen_statistics=false with pretrained_statistics=false"
        )
    if freeze == "backbone" and pretrained is None:
        warnings.warn(
            "the backbone is frozen with random weights, so that results mean little: name weights to begin with "
            "(pretrained, --network-pretrained FILE)",
            stacklevel=2,
        )
    scaled = ScaledInput(input_size, input_channels)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        make = library_network(name) or NETWORKS[name]
        network = make(scaled.shape(input_shape), classes, **own)
        if weights is None and pretrained is not None:
            weights = read_weights(pretrained)
        adapted = adapters and any(".adapter." in tensor for tensor in weights or ())  # it was saved with adapters
        if weights is not None and not adapted:
            load_pretrained(network, weights, pretrained_statistics, str(pretrained))
        if adapters:
            add_adapters(network, adapter_dropout, adapter_width)
        if weights is not None and adapted:
            load_pretrained(network, weights, pretrained_statistics, str(pretrained))
    if input_size or input_channels:
        network.register_forward_pre_hook(scaled)
    return freeze_backbone(network, frozen_statistics) if freeze == "backbone" else network
