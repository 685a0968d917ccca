"""Residual adapters: small layers put into a network whose own weights stay frozen."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn

__all__ = [
    "AdaptedConv2d",
    "FrozenBatchNorm2d",
    "ResidualAdapter",
    "TokenAdapter",
    "adapter_parameters",
    "add_adapters",
    "freeze_backbone",
    "head_of",
]

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm)


class ResidualAdapter(nn.Module):
    r""":math:`x + \mathrm{Conv}_{1 \times 1}(\mathrm{Dropout}(\mathrm{Norm}(x)))`, from channels to as many channels.

    The weights begin as :math:`N(0, 10^{-4})`, the number being the standard deviation: nearly the identity.
    """

    def __init__(self, channels: int, dropout: float, norm: nn.Module) -> None:
        """``norm`` is a layer for that many channels."""
        super().__init__()
        self.norm = norm
        self.dropout = nn.Dropout(dropout)
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)
        nn.init.normal_(self.conv.weight, std=1e-4)

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's output to the feature maps."""
        return x + self.conv(self.dropout(self.norm(x)))


class TokenAdapter(nn.Module):
    r""":math:`x + U\, \mathrm{GELU}(D\, \mathrm{Dropout}(\mathrm{LayerNorm}(x)))` for tokens, narrow between D and U.

    U begins as :math:`N(0, 10^{-4})`. The paper does not say what its adapters in a ViT are; the bottleneck of Houlsby
    et al. (2019) is what the work it follows puts into transformers.
    """

    def __init__(self, features: int, width: int, dropout: float) -> None:
        """``width`` features between the two linear layers."""
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(features, width)
        self.activation = nn.GELU()
        self.up = nn.Linear(width, features)
        nn.init.normal_(self.up.weight, std=1e-4)
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Add the adapter's output to the tokens."""
        return x + self.up(self.activation(self.down(self.dropout(self.norm(x)))))


class AdaptedConv2d(nn.Conv2d):
    """A convolution and the adapter after it.

    A convolution itself, so that its weights keep their names, and the block around it its forward pass.
    """

    adapter: nn.Module

    @staticmethod
    def around(conv: nn.Conv2d, adapter: nn.Module) -> AdaptedConv2d:
        """One with the weights of ``conv``: the tensors themselves, no copies."""
        made = AdaptedConv2d(
            conv.in_channels,
            conv.out_channels,
            cast("tuple[int, int]", conv.kernel_size),
            cast("tuple[int, int]", conv.stride),
            cast("tuple[int, int]", conv.padding),
            cast("tuple[int, int]", conv.dilation),
            conv.groups,
            conv.bias is not None,
            conv.padding_mode,
            device="meta",
        )
        made.weight, made.bias = conv.weight, conv.bias
        made.adapter = adapter.to(conv.weight.device, conv.weight.dtype)
        return made

    def forward(self, x: Tensor) -> Tensor:
        """The adapted convolution of x."""
        return self.adapter(super().forward(x))


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """Batch normalisation that stays in evaluation mode: its statistics are as frozen as its parameters."""

    @staticmethod
    def of(norm: nn.BatchNorm2d) -> FrozenBatchNorm2d:
        """A frozen layer that shares the tensors of ``norm``."""
        made = FrozenBatchNorm2d(norm.num_features, norm.eps, norm.momentum, norm.affine, device="meta")
        made.weight, made.bias = norm.weight, norm.bias
        made.running_mean, made.running_var = norm.running_mean, norm.running_var
        made.num_batches_tracked = norm.num_batches_tracked
        return made.eval()

    def train(self, mode: bool = True) -> FrozenBatchNorm2d:
        """Stay in evaluation mode, whatever ``mode`` says."""
        return super().train(False)


def _blocks(network: nn.Module) -> Iterator[nn.Module]:
    """The residual and encoder blocks, ours or torchvision's: both are known by what they consist of."""
    for module in network.modules():
        parts = dict(module.named_children())
        residual = isinstance(parts.get("conv1"), nn.Conv2d) and isinstance(parts.get("conv2"), nn.Conv2d)
        if (residual and hasattr(module, "downsample")) or {"self_attention", "mlp", "ln_1", "dropout"} <= parts.keys():
            yield module


def add_adapters(network: nn.Module, dropout: float = 0.3, width: int = 64) -> nn.Module:
    """Put adapters into a ResNet, a wide ResNet or a vision transformer, ours or torchvision's; it is changed.

    Two in each block: in a residual block after ``conv1`` and after ``conv2``, before the normalisation that follows;
    none at the stem or on the shortcut. In a transformer's block after the attention and after the perceptron. The
    network's own tensors keep their names. With the weights adapters begin with, the network computes nearly the same.

    Args:
        network: one with such blocks.
        dropout: inside the adapters (PerAda: 0.3).
        width: features inside the adapters of a transformer.

    Raises:
        ValueError: it has no such blocks, or has adapters already.
    """
    if not 0 <= dropout < 1 or width < 1:
        raise ValueError(f"adapters with dropout {dropout} and width {width}; accepted is 0 to below 1, and 1 or more")
    if any(isinstance(module, (ResidualAdapter, TokenAdapter)) for module in network.modules()):
        raise ValueError(f"this {type(network).__name__} has adapters already")
    blocks = list(_blocks(network))
    if not blocks:
        raise ValueError(
            f"there is no place for adapters in a {type(network).__name__}: residual blocks with conv1 and conv2, or "
            "encoder blocks with self_attention and mlp are accepted, as resnet18 and vit have them"
        )
    for block in blocks:
        if hasattr(block, "conv1"):
            for name in ("conv1", "conv2"):
                conv = cast(nn.Conv2d, getattr(block, name))
                setattr(block, name, AdaptedConv2d.around(conv, _residual(block, conv.out_channels, dropout)))
        else:
            example = cast(Tensor, block.ln_1.weight)  # type: ignore[union-attr]
            after_attention, after_mlp = (
                TokenAdapter(len(example), width, dropout).to(example.device, example.dtype) for _ in range(2)
            )
            inner = cast(nn.Module, block.dropout)
            block.dropout = nn.Sequential(OrderedDict([("dropout", inner), ("adapter", after_attention)]))
            cast(nn.Sequential, block.mlp).add_module("adapter", after_mlp)
    return network


def _residual(block: nn.Module, channels: int, dropout: float) -> ResidualAdapter:
    """An adapter that normalises as its block does."""
    like = block.bn1
    if isinstance(like, nn.GroupNorm):
        return ResidualAdapter(channels, dropout, nn.GroupNorm(math.gcd(like.num_groups, channels), channels))
    return ResidualAdapter(channels, dropout, nn.BatchNorm2d(channels))


def head_of(network: nn.Module) -> str:
    """The name of the last module with parameters of its own."""
    return [name for name, _ in network.named_parameters()][-1].rpartition(".")[0]


def adapter_parameters(network: nn.Module) -> list[str]:
    """The parameters that PerAda trains: the adapters, the normalisation of every block and of the stem, the head.

    Convolutions, and everything on the shortcuts, are not among them. For a ResNet-18 with 10 classes these are
    1,400,320 + 7,808 + 5,130 numbers.
    """
    modules = dict(network.named_modules())
    shortcuts = [name for name in modules if name.rpartition(".")[2] == "downsample"]
    chosen = [head_of(network)]
    for name, module in modules.items():
        on_shortcut = any(name == path or name.startswith(f"{path}.") for path in shortcuts)
        if isinstance(module, (ResidualAdapter, TokenAdapter)) or (isinstance(module, _NORMS) and not on_shortcut):
            chosen.append(name)
    return [name for name, _ in network.named_parameters() if any(name.startswith(f"{path}.") for path in chosen)]


def freeze_backbone(network: nn.Module, statistics: bool = True) -> nn.Module:
    """Let only :func:`adapter_parameters` be trained; the network is changed.

    Args:
        network: usually one with adapters.
        statistics: batch normalisation whose parameters are frozen keeps its running statistics too, and normalises by
            them also in training. False, as in PerAda's official code: it goes on with statistics of the batches.
    """
    trained = set(adapter_parameters(network))
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in trained)
    if statistics:
        for name, module in list(network.named_modules()):
            if isinstance(module, nn.BatchNorm2d) and not any(p.requires_grad for p in module.parameters()):
                parent, _, child = name.rpartition(".")
                setattr(network.get_submodule(parent), child, FrozenBatchNorm2d.of(module))
    return network
