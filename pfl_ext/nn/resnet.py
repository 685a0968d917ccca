"""Residual networks: ResNet-18, 34 and 50 in torchvision's form, and Wide ResNet.

A ResNet with the ImageNet stem and batch normalisation has the tensors of torchvision's, name by name, so weights made
for the one load into the other. torchvision itself does not import beside every torch, hence these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from torch import Tensor, nn

__all__ = ["Norm", "ResNet", "Stem", "WideResNet", "resnet18", "resnet34", "resnet50", "wide_resnet"]

Stem = Annotated[
    Literal["imagenet", "small"], "the first layers: 7x7 with stride 2 and pooling, or 3x3 for images of 32x32"
]
Norm = Annotated[Literal["batch", "group"], "normalisation of batches, or of (up to 32) groups of channels"]


def _normalisation(norm: str) -> Callable[[int], nn.Module]:
    if norm == "batch":
        return nn.BatchNorm2d
    return lambda channels: nn.GroupNorm(math.gcd(32, channels), channels)


def _conv3x3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(
        self,
        inputs: int,
        planes: int,
        stride: int,
        downsample: nn.Module | None,
        normalisation: Callable[[int], nn.Module],
    ) -> None:
        """``downsample`` is the shortcut where shapes differ."""
        super().__init__()
        self.conv1 = _conv3x3(inputs, planes, stride)
        self.bn1 = normalisation(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv3x3(planes, planes)
        self.bn2 = normalisation(planes)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """Add the shortcut to what the convolutions make of ``x``."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return self.relu(out + shortcut)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones, beside a shortcut; the stride is on the 3x3 one."""

    expansion = 4

    def __init__(
        self,
        inputs: int,
        planes: int,
        stride: int,
        downsample: nn.Module | None,
        normalisation: Callable[[int], nn.Module],
    ) -> None:
        """``downsample`` is the shortcut where shapes differ."""
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, planes, 1, bias=False)
        self.bn1 = normalisation(planes)
        self.conv2 = _conv3x3(planes, planes, stride)
        self.bn2 = normalisation(planes)
        self.conv3 = nn.Conv2d(planes, 4 * planes, 1, bias=False)
        self.bn3 = normalisation(4 * planes)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        """Add the shortcut to what the convolutions make of ``x``."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return self.relu(out + shortcut)


class ResNet(nn.Module):
    """A residual network of four stages (He et al., 2016).

    Args:
        block: :class:`BasicBlock` or :class:`Bottleneck`.
        depths: blocks of each stage.
        channels: of the images.
        classes: of the head.
        stem, norm: see :data:`Stem` and :data:`Norm`. Layers keep torchvision's names (``bn1``) with either norm.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        depths: Sequence[int],
        channels: int,
        classes: int,
        stem: str = "imagenet",
        norm: str = "batch",
    ) -> None:
        super().__init__()
        normalisation = _normalisation(norm)
        if stem == "imagenet":
            self.conv1 = nn.Conv2d(channels, 64, 7, 2, 3, bias=False)
            self.maxpool: nn.Module = nn.MaxPool2d(3, 2, 1)
        else:
            self.conv1 = _conv3x3(channels, 64)
            self.maxpool = nn.Identity()
        self.bn1 = normalisation(64)
        self.relu = nn.ReLU(inplace=True)
        inputs, stages = 64, []
        for stage, depth in enumerate(depths):
            planes, blocks = 64 << stage, []
            for number in range(depth):
                stride = 2 if stage > 0 and number == 0 else 1
                outputs, downsample = planes * block.expansion, None
                if stride != 1 or inputs != outputs:
                    downsample = nn.Sequential(
                        nn.Conv2d(inputs, outputs, 1, stride, bias=False), normalisation(outputs)
                    )
                blocks.append(block(inputs, planes, stride, downsample, normalisation))
                inputs = outputs
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inputs, classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.avgpool(x).flatten(1))


class WideBlock(nn.Module):
    """Normalisation and ReLU before each of two 3x3 convolutions, beside a shortcut."""

    def __init__(self, inputs: int, planes: int, stride: int, normalisation: Callable[[int], nn.Module]) -> None:
        """A shortcut of its own only where shapes differ; it then starts from the normalised input."""
        super().__init__()
        self.bn1 = normalisation(inputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv1 = _conv3x3(inputs, planes, stride)
        self.bn2 = normalisation(planes)
        self.conv2 = _conv3x3(planes, planes)
        differs = stride != 1 or inputs != planes
        self.downsample = nn.Conv2d(inputs, planes, 1, stride, bias=False) if differs else None

    def forward(self, x: Tensor) -> Tensor:
        """Add the shortcut to what the convolutions make of ``x``."""
        out = self.relu(self.bn1(x))
        shortcut = x if self.downsample is None else self.downsample(out)
        out = self.conv2(self.relu(self.bn2(self.conv1(out))))
        return out + shortcut


class WideResNet(nn.Module):
    """Wide ResNet (Zagoruyko and Komodakis, 2016): three stages of (depth - 4) / 6 blocks, 16, 32, 64 times ``width``.

    28 layers, 10 times as wide: 36,479,194 parameters for 3 channels and 10 classes.
    """

    def __init__(self, channels: int, classes: int, depth: int = 28, width: int = 10, norm: str = "batch") -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6 or width < 1:
            raise ValueError(f"a wide ResNet of depth {depth} and width {width}; 10, 16, 22, 28, ... and 1 or more are")
        normalisation = _normalisation(norm)
        self.conv1 = _conv3x3(channels, 16)
        inputs, stages = 16, []
        for stage in range(3):
            planes, blocks = (16 << stage) * width, []
            for number in range((depth - 4) // 6):
                blocks.append(WideBlock(inputs, planes, 2 if stage > 0 and number == 0 else 1, normalisation))
                inputs = planes
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3 = stages
        self.bn1 = normalisation(inputs)
        self.relu = nn.ReLU(inplace=True)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inputs, classes)
        _initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        x = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        x = self.relu(self.bn1(x))
        return self.fc(self.avgpool(x).flatten(1))


def _initialise(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _channels(shape: Sequence[int], network: str) -> int:
    if len(shape) != 3:
        raise ValueError(f"{network} takes images [channels, height, width]; the inputs are {list(shape)}")
    return shape[0]


def resnet18(input_shape: Sequence[int], classes: int, *, stem: Stem = "imagenet", norm: Norm = "batch") -> nn.Module:
    """ResNet-18; 11,181,642 parameters for 3 channels and 10 classes with the ImageNet stem."""
    return ResNet(BasicBlock, (2, 2, 2, 2), _channels(input_shape, "resnet18"), classes, stem, norm)


def resnet34(input_shape: Sequence[int], classes: int, *, stem: Stem = "imagenet", norm: Norm = "batch") -> nn.Module:
    """ResNet-34; 21,289,802 parameters for 3 channels and 10 classes with the ImageNet stem."""
    return ResNet(BasicBlock, (3, 4, 6, 3), _channels(input_shape, "resnet34"), classes, stem, norm)


def resnet50(input_shape: Sequence[int], classes: int, *, stem: Stem = "imagenet", norm: Norm = "batch") -> nn.Module:
    """ResNet-50; 23,528,522 parameters for 3 channels and 10 classes with the ImageNet stem."""
    return ResNet(Bottleneck, (3, 4, 6, 3), _channels(input_shape, "resnet50"), classes, stem, norm)


def wide_resnet(
    input_shape: Sequence[int],
    classes: int,
    *,
    depth: Annotated[int, "layers: 10, 16, 22, 28, ..."] = 28,
    width: Annotated[int, "how many times wider than the plain one"] = 10,
    norm: Norm = "batch",
) -> nn.Module:
    """Wide ResNet, by default 28-10."""
    return WideResNet(_channels(input_shape, "wide-resnet"), classes, depth, width, norm)
