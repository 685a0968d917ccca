"""A network that makes the weights of other networks."""

from __future__ import annotations

from itertools import chain

from torch import Tensor, nn

__all__ = ["HyperNetwork"]


class HyperNetwork(nn.Module):
    """From a client's embedding to all weights of its network: the hypernetwork of pFedHN (Shamsian et al., 2021).

    A perceptron of ``hidden`` ReLU layers gives ``width`` features, and linear heads turn these into weights. pFedHN
    has a head for each tensor of the target. A row of a head has ``width`` numbers and begins alike for every tensor,
    so all heads are the rows of one matrix here.

    That matrix has ``width`` numbers for each weight of the target: 1.1 billion, or 4.5 GB, for a ResNet-18, and a
    gradient and a momentum of the same size while it is trained.

    Args:
        inputs: length of an embedding.
        outputs: how many weights the target has.
        width, hidden: see above.
    """

    def __init__(self, inputs: int, outputs: int, width: int = 100, hidden: int = 3) -> None:
        super().__init__()
        deeper = chain.from_iterable((nn.ReLU(), nn.Linear(width, width)) for _ in range(hidden))
        self.features = nn.Sequential(nn.Linear(inputs, width), *deeper)
        self.heads = nn.Linear(width, outputs)

    def forward(self, embeddings: Tensor) -> Tensor:
        """The weights for each of the embeddings [n, inputs], as [n, outputs]."""
        weights = self.heads(self.features(embeddings))
        assert isinstance(weights, Tensor)
        return weights
