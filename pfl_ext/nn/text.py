"""A small transformer on characters or other tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .vit import EncoderBlock, SelfAttention

__all__ = ["CharTransformer", "char_transformer"]


class CausalSelfAttention(SelfAttention):
    """Self-attention in which a token sees itself and those before it."""

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n, tokens, width] that have looked back."""
        n, tokens, width = x.shape
        joined = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = joined.view(n, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
        scores = (q * (width // self.heads) ** -0.5) @ k.transpose(-2, -1)
        attention = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.out_proj((attention @ v).transpose(1, 2).reshape(n, tokens, width))


class CharTransformer(nn.Module):
    """A causal transformer (as GPT-2's blocks, without dropout) with learnt positions.

    Its blocks are those of :class:`~pfl_ext.nn.vit.EncoderBlock`, so that :func:`~pfl_ext.nn.add_adapters` finds them.

    Args:
        length: the longest sequence.
        tokens: size of the vocabulary.
        width, depth, heads: features of a token, number of blocks, attention heads.
        last: logits of what follows the last place alone, [n, tokens], in place of all places, [n, length, tokens].
    """

    def __init__(
        self, length: int, tokens: int, width: int = 64, depth: int = 2, heads: int = 4, last: bool = False
    ) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ValueError(f"heads is {heads}; accepted is a number that divides the width, {width}")
        self.last = last
        self.embedding = nn.Embedding(tokens, width)
        self.positions = nn.Parameter(torch.empty(length, width).normal_(std=0.02))
        blocks = [EncoderBlock(width, heads, 4 * width) for _ in range(depth)]
        for block in blocks:
            block.self_attention = CausalSelfAttention(width, heads)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, tokens)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next token."""
        encoded = self.norm(self.blocks(self.embedding(x) + self.positions[: x.shape[1]]))
        return self.head(encoded[:, -1] if self.last else encoded)


def char_transformer(
    input_shape: Sequence[int],
    classes: int,
    *,
    width: Annotated[int, "features of a token"] = 64,
    depth: Annotated[int, "number of blocks"] = 2,
    heads: Annotated[int, "attention heads"] = 4,
    last: Annotated[
        bool, "logits of what follows the whole text alone (LEAF's Shakespeare), not of every place"
    ] = False,
) -> nn.Module:
    """A causal transformer on tokens; 113,609 parameters for windows of 64 and 73 characters."""
    if len(input_shape) != 1:
        raise ValueError(f"char-transformer takes tokens [length]; the inputs are {list(input_shape)}")
    return CharTransformer(input_shape[0], classes, width, depth, heads, last)
