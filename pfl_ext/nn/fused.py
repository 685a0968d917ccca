"""Layers one after the other, of which some are run as one."""

from __future__ import annotations

from torch import Tensor, nn

from pfl_ext.ops import conv_pool_relu

__all__ = ["FusedSequential"]


def _is_block(layers: list[nn.Module]) -> bool:
    """Whether these are a convolution, a 2x2 max-pooling and ReLU as :func:`conv_pool_relu` has them."""
    if len(layers) < 3 or not isinstance(layers[0], nn.Conv2d) or not isinstance(layers[1], nn.MaxPool2d):
        return False
    convolution, pooling, relu = layers[:3]
    assert isinstance(convolution, nn.Conv2d) and isinstance(pooling, nn.MaxPool2d)
    plain = (
        convolution.stride,
        convolution.padding,
        convolution.dilation,
        convolution.groups,
        convolution.bias is None,
    )
    cells = [pooling.kernel_size, pooling.stride, pooling.padding, pooling.dilation, pooling.ceil_mode]
    return plain == ((1, 1), (0, 0), (1, 1), 1, False) and cells == [2, 2, 0, 1, False] and type(relu) is nn.ReLU


class FusedSequential(nn.Sequential):
    """``nn.Sequential`` that runs each convolution, 2x2 max-pooling and ReLU that follow each other as one op.

    Names, weights and results are those of ``nn.Sequential``, and so are the gradients but for the order of sums. Hooks
    of the three layers do not run.
    """

    _looked_at: tuple[int, ...] = ()
    _blocks: frozenset[int] = frozenset()

    def _find_blocks(self, layers: list[nn.Module]) -> frozenset[int]:
        """Where the blocks begin: looked for when the layers are other ones, as it would take a while in each step."""
        looked_at = tuple(map(id, layers))
        if looked_at != self._looked_at:
            self._blocks = frozenset(i for i in range(len(layers)) if _is_block(layers[i : i + 3]))
            self._looked_at = looked_at
        return self._blocks

    def forward(self, input: Tensor) -> Tensor:
        """The output of the last layer."""
        layers = [layer for layer in self._modules.values() if layer is not None]
        blocks = self._find_blocks(layers)
        x, i = input, 0
        while i < len(layers):
            layer = layers[i]
            if i in blocks:
                assert isinstance(layer, nn.Conv2d) and layer.bias is not None
                x = conv_pool_relu(x, layer.weight, layer.bias)
                i += 3
            else:
                x = layer(x)
                i += 1
        return x
