"""Networks of several inputs, in a module that worker processes can import."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Both(nn.Module):
    """Takes an image and a text with its mask, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.tokens, self.head = nn.Linear(12, 4), nn.Embedding(7, 4), nn.Linear(5, 3)

    def forward(self, image: Tensor, text: tuple[Tensor, Tensor], age: Tensor) -> dict[str, Tensor]:
        """Logits of three classes."""
        tokens, mask = text
        found = self.image(image.flatten(1)) + (self.tokens(tokens) * mask[..., None]).sum(1)
        return {"logits": self.head(torch.cat([found, age[:, None]], 1))}


class Pair(Both):
    """The same by place."""

    def forward(self, image: Tensor, text: tuple[Tensor, Tensor], age: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The same, in a tuple."""
        return super().forward(image, text, age)["logits"], age
