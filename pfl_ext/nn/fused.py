"""Layers one after the other, of which some are run as one."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from pfl_ext.ops import conv_pool_relu, linear_relu

__all__ = ["FusedSequential", "Row", "row_of_layers"]


def _is_convolution(layers: list[nn.Module]) -> bool:
    """Whether these begin with a convolution, a 2x2 max-pooling and ReLU as :func:`conv_pool_relu` has them."""
    if [type(layer) for layer in layers[:3]] != [nn.Conv2d, nn.MaxPool2d, nn.ReLU]:
        return False
    convolution, pooling = layers[:2]
    assert isinstance(convolution, nn.Conv2d) and isinstance(pooling, nn.MaxPool2d)
    plain = (
        convolution.stride,
        convolution.padding,
        convolution.dilation,
        convolution.groups,
        convolution.bias is None,
    )
    cells = [pooling.kernel_size, pooling.stride, pooling.padding, pooling.dilation, pooling.ceil_mode]
    return plain == ((1, 1), (0, 0), (1, 1), 1, False) and cells == [2, 2, 0, 1, False]


def _is_linear(layers: list[nn.Module]) -> bool:
    """Whether these begin with a linear layer and ReLU as :func:`linear_relu` has them."""
    return [type(layer) for layer in layers[:2]] == [nn.Linear, nn.ReLU] and layers[0].bias is not None


class FusedSequential(nn.Sequential):
    """``nn.Sequential`` that runs layers that follow each other as one op.

    These are a convolution, a 2x2 max-pooling and ReLU, and a linear layer and ReLU. Names and weights are those of
    ``nn.Sequential``, and so are results and gradients but for the order of sums. Hooks of the fused layers do not run.
    """

    _looked_at: tuple[int, ...] = ()
    _convolutions: frozenset[int] = frozenset()
    _linear: frozenset[int] = frozenset()

    def _find_blocks(self, layers: list[nn.Module]) -> None:
        """Where blocks begin: looked for when the layers are other ones, as it would take a while in each step."""
        looked_at = tuple(map(id, layers))
        if looked_at != self._looked_at:
            self._convolutions = frozenset(i for i in range(len(layers)) if _is_convolution(layers[i:]))
            self._linear = frozenset(i for i in range(len(layers)) if _is_linear(layers[i:]))
            self._looked_at = looked_at

    def forward(self, input: Tensor) -> Tensor:
        """The output of the last layer."""
        layers = [layer for layer in self._modules.values() if layer is not None]
        self._find_blocks(layers)
        x, i = input, 0
        while i < len(layers):
            layer: Any = layers[i]
            if i in self._convolutions:
                x = conv_pool_relu(x, layer.weight, layer.bias)
                i += 3
            elif i in self._linear:
                x = linear_relu(x, layer.weight, layer.bias)
                i += 2
            else:
                x = layer(x)
                i += 1
        return x


class Row(NamedTuple):
    """A network that is a row of layers, as :func:`~pfl_ext.ops.train_steps_` takes them."""

    layers: list[str]
    flattens: bool
    """Whether it takes inputs of any shape before its linear layers."""
    modules: list[nn.Module]

    def is_plain(self) -> bool:
        """Whether nothing is hooked to it."""
        return not any(
            m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in self.modules
        )


def row_of_layers(module: nn.Module) -> Row | None:
    """The network as a row of layers; None for any other network.

    Such a network is an ``nn.Sequential`` of convolutions with pooling and ReLU, a ``Flatten``, linear layers with
    ReLU, and one without at the end; or that one alone.
    """
    if type(module) not in (nn.Sequential, FusedSequential, nn.Linear):
        return None
    layers, flattens = list(module.children()) or [module], False
    found: list[str] = []
    while layers:
        first = layers[0]
        if _is_convolution(layers) and not flattens:
            found.append("conv_pool_relu")
            layers = layers[3:]
        elif type(first) is nn.Flatten and (first.start_dim, first.end_dim) == (1, -1) and "linear_relu" not in found:
            flattens = True
            layers = layers[1:]
        elif "conv_pool_relu" in found and not flattens:
            return None
        elif _is_linear(layers):
            found.append("linear_relu")
            layers = layers[2:]
        elif type(first) is nn.Linear and len(layers) == 1 and first.bias is not None:
            found.append("linear")
            layers = []
        else:
            return None
    whole = found[-1:] == ["linear"] and len(list(module.parameters())) == 2 * len(found)
    return Row(found, flattens, list(module.modules())) if whole else None
