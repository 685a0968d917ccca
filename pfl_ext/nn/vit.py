"""Vision transformers in torchvision's form, for images of any size; ViT-S/16 by default."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["VisionTransformer", "vit"]


class SelfAttention(nn.Module):
    """Multi-head self-attention with the tensors of ``nn.MultiheadAttention``.

    Of our own because it is plain tensor arithmetic that ``torch.func.vmap`` can follow: per-sample gradients need it.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n, tokens, width] that have looked at each other."""
        n, tokens, width = x.shape
        joined = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = joined.view(n, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        attention = ((q * (width // self.heads) ** -0.5) @ k.transpose(-2, -1)).softmax(-1)
        return self.out_proj((attention @ v).transpose(1, 2).reshape(n, tokens, width))


class EncoderBlock(nn.Module):
    """Attention and a two-layer perceptron, each after a layer normalisation and beside a shortcut."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = SelfAttention(width, heads)
        self.dropout: nn.Module = nn.Identity()
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        # The numbers are torchvision's names: its perceptron has a dropout at 2.
        self.mlp = nn.Sequential(
            OrderedDict([("0", nn.Linear(width, hidden)), ("1", nn.GELU()), ("3", nn.Linear(hidden, width))])
        )
        for name in ("0", "3"):
            layer = self.mlp.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then the perceptron, each added to its input."""
        x = x + self.dropout(self.self_attention(self.ln_1(x)))
        return x + self.mlp(self.ln_2(x))


class Encoder(nn.Module):
    """The position embedding, the blocks, a last layer normalisation."""

    def __init__(self, tokens: int, depth: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.empty(1, tokens, width).normal_(std=0.02))
        blocks = [(f"encoder_layer_{i}", EncoderBlock(width, heads, hidden)) for i in range(depth)]
        self.layers = nn.Sequential(OrderedDict(blocks))
        self.ln = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Add the position embeddings, and encode the tokens."""
        return self.ln(self.layers(x + self.pos_embedding))


class VisionTransformer(nn.Module):
    """A vision transformer (Dosovitskiy et al., 2021), without dropout; the class token gives the logits.

    Args:
        shape: of an image, [channels, height, width]; both sides are multiples of ``patch``.
        classes: of the head.
        patch: side of a patch.
        width, depth, heads: features of a token, number of blocks, attention heads.
    """

    def __init__(
        self, shape: Sequence[int], classes: int, patch: int = 16, width: int = 384, depth: int = 12, heads: int = 6
    ) -> None:
        super().__init__()
        if len(shape) != 3:
            raise ValueError(f"vit takes images [channels, height, width]; the inputs are {list(shape)}")
        if patch < 1 or shape[1] % patch or shape[2] % patch:
            raise ValueError(f"patch is {patch}; accepted is a number that divides the images' {shape[1]}x{shape[2]}")
        if heads < 1 or width % heads:
            raise ValueError(f"heads is {heads}; accepted is a number that divides the width, {width}")
        self.conv_proj = nn.Conv2d(shape[0], width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        tokens = (shape[1] // patch) * (shape[2] // patch) + 1
        self.encoder = Encoder(tokens, depth, width, heads, 4 * width)
        self.heads = nn.Sequential(OrderedDict([("head", nn.Linear(width, classes))]))
        nn.init.trunc_normal_(self.conv_proj.weight, std=(shape[0] * patch * patch) ** -0.5)
        nn.init.zeros_(self.conv_proj.bias)  # type: ignore[arg-type]
        # torchvision's head starts at zero; then no gradient would reach the other layers in the first step.

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a batch of images."""
        tokens = self.conv_proj(x).flatten(2).transpose(1, 2)
        encoded = self.encoder(torch.cat([self.class_token.expand(len(x), -1, -1), tokens], 1))
        return self.heads(encoded[:, 0])


def vit(
    input_shape: Sequence[int],
    classes: int,
    *,
    patch: Annotated[int, "side of a patch in pixels"] = 16,
    width: Annotated[int, "features of a token"] = 384,
    depth: Annotated[int, "number of blocks"] = 12,
    heads: Annotated[int, "attention heads"] = 6,
) -> nn.Module:
    """A vision transformer, by default ViT-S/16; 21,669,514 parameters for 3x224x224 and 10 classes."""
    return VisionTransformer(input_shape, classes, patch, width, depth, heads)
