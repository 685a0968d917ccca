"""kNN-Per: the global model, and what the client's own nearest samples say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_ext.data import Inputs
from pfl_ext.federation import Client, Features, Models, WorkingModel, option

from .fedavg import FedAvg

__all__ = ["KNNPer"]


@dataclass(frozen=True)
class KNNPer(FedAvg):
    r"""kNN-Per (Marfoq et al., 2022): personalisation by memorisation, without any training of its own.

    FedAvg gives a global model with outputs h and features :math:`\phi` (of d numbers). Of the :math:`K` training
    samples of client k whose features are nearest to those of x, :math:`N_k(x)`:

    .. math::
        p^{knn}_k(c | x) &\propto \sum_{i \in N_k(x),\, y_i = c}
            \exp\Big(-\frac{\|\phi(x) - \phi(x_i)\|_2^2}{\sigma d}\Big) \\
        p_k(c | x) &= \lambda_k\, p^{knn}_k(c | x) + (1 - \lambda_k)\, \mathrm{softmax}(h(x))_c

    Readings. The paper writes the distance in the exponent, the authors' code its square over :math:`\sigma d`, as
    here. Features and memory are those of the model as it is now. With ``tune`` a client chooses
    :math:`\lambda_k` among 0, 0.1, ..., 1 by the accuracy on its validation data, as in the paper; one that has none
    takes ``weight``. The outputs of the evaluated model are logarithms of :math:`p_k`. On the training data each sample
    is its own neighbour, so that metrics of it say little.

    FL-bench adds :math:`p^{knn}` to logits, two different scales, and compares its memory's capacity with the number
    of batches, so that with more of them than that it remembers the first samples alone. PFLlib does not have the
    method.
    """

    name = "knn-per"
    needs = "classes"
    private = False

    head: str = option("", "module whose inputs are the features; empty: the last layer")
    neighbours: int = option(10, "K, how many samples are asked")
    weight: float = option(0.5, "lambda, weight of what they say; 0: the global model")
    scale: float = option(1.0, "sigma, by which squared distances per feature are measured")
    tune: bool = option(False, "let each client choose its lambda on its validation data")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("neighbours", self.neighbours >= 1, "at least 1")
        self.check("weight", 0 <= self.weight <= 1, "from 0 to 1")
        self.check("scale", self.scale > 0, "above 0")

    def models(self, client: Client, received: Mapping[str, Tensor]) -> Models:
        """A predictor of log p_k: the received model mixed with the nearest training samples."""
        state = received["model"]
        client.model.load(state)
        memory, labels = client.features(client.train, self.head)
        weight = self._tuned(client, memory, labels) if self.tune and len(client.validation) else self.weight

        def predict(model: WorkingModel, inputs: Inputs) -> Tensor:
            model.load(state)
            with Features(model, self.head) as features:
                network = F.softmax(model(inputs), 1)
                neighbours = self.neighbours_say(features.last, memory, labels, network.shape[1])
            return _log(weight * neighbours + (1 - weight) * network)

        return {"personal": predict}

    def neighbours_say(self, features: Tensor, memory: Tensor, labels: Tensor, classes: int) -> Tensor:
        """The class probabilities p_knn of the nearest neighbours, for each row of features."""
        squared = torch.cdist(features, memory, compute_mode="donot_use_mm_for_euclid_dist").square()
        near, which = squared.topk(min(self.neighbours, len(memory)), dim=1, largest=False)
        likeness = torch.softmax(-near / (self.scale * memory.shape[1]), 1)
        return torch.zeros(len(features), classes, dtype=memory.dtype, device=memory.device).scatter_add_(
            1, labels[which], likeness
        )

    def _tuned(self, client: Client, memory: Tensor, labels: Tensor) -> float:
        """The weight with the highest accuracy on the validation data, the lowest of several."""
        features, targets = client.features(client.validation, self.head)
        network = F.softmax(client.outputs(client.validation)[0], 1)
        neighbours = self.neighbours_say(features, memory, labels, network.shape[1])
        weights = [i / 10 for i in range(11)]
        right = [int(((w * neighbours + (1 - w) * network).argmax(1) == targets).sum()) for w in weights]
        return weights[right.index(max(right))]


def _log(p: Tensor) -> Tensor:
    """Logarithms of probabilities; of 0 that of the smallest number, as infinity is no loss."""
    return p.clamp(min=torch.finfo(p.dtype).tiny).log()
