"""The papers' small networks, each for any number of classes.

=========  ===========================================================  =============================================
``mlp``    784-100-10 on MNIST, 79,510 parameters                       PersFL on MNIST
``lenet``  conv 6 - pool - conv 16 - pool - 120 - 84, 62,006 on CIFAR   PersFL on CIFAR-10; PLGU, SCD at small scale
``cnn``    conv 32 - pool - conv 64 - pool - 512, 582,026 on MNIST      the CNN of FedAvg's paper, as PFLlib runs it
=========  ===========================================================  =============================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

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


def mlp(input_shape: Sequence[int], classes: int, hidden: int = 100) -> nn.Sequential:
    """One hidden layer with ReLU, for inputs of any shape."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), hidden), nn.ReLU(), nn.Linear(hidden, classes))


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
    return nn.Sequential(*convolutions, *linear)


def cnn(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Two wide convolutions and two linear layers; 582,026 parameters for 1x28x28 and 10 classes."""
    convolutions, features = _two_stages(input_shape, "cnn", 32, 64)
    return nn.Sequential(*convolutions, nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, classes))


NETWORKS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {"mlp": mlp, "lenet": lenet, "cnn": cnn}
"""A network's name and the function of (input shape without the batch, number of classes) that builds it."""


def build(name: str, input_shape: Sequence[int], classes: int, generator: torch.Generator) -> nn.Module:
    """The network of that name with weights drawn from ``generator``, torch's own random state left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator)))
        return NETWORKS[name](input_shape, classes)
