"""FedALA: each client learns, weight by weight, how much of the global model it takes over."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Steps, Uploads, WorkingModel, mean_loss, option

__all__ = ["FedALA"]

_LOSSES = 10  # passes whose losses decide whether the weights have converged, as in the authors' code


@dataclass(frozen=True)
class FedALA(Method):
    r"""FedALA (Zhang et al., 2023), Algorithm 1: adaptive local aggregation.

    A client with a model :math:`\theta_k` of its own begins its turn between that and the received :math:`\theta`:

    .. math::
        \hat\theta_k &= \theta_k + (\theta - \theta_k) \odot [1, \dots, 1, W_k], \quad W_k \in [0, 1] \\
        W_k &\leftarrow \operatorname{clip}\big(W_k - \eta\, \nabla_{W_k} L_k(\hat\theta_k), 0, 1\big)
            \quad \text{on batches of a sample of its data} \\
        \theta_k &\leftarrow \text{E epochs of SGD on } L_k \text{ from } \hat\theta_k \\
        \theta &\leftarrow \sum_k \tfrac{n_k}{n} \theta_k

    :math:`W_k`, an entry for each weight of the last p layers, begins at 1 and is kept. It is learnt until it converges
    the first time, and by one pass over the sample in later turns. All other layers, and all buffers, are the
    received ones. In its first turn a client has no model of its own and begins at :math:`\theta`.

    Readings. The sample is drawn anew in each turn, in whole batches. Converged is when the losses of the last ten
    passes deviate by less than ``threshold``, as in the authors' code, or after ``most_passes``: their loop has no end
    where the losses keep swinging. A layer is a module with something to train.

    PFLlib, of the same authors, counts tensors where we count layers (its ``layer_idx`` 2 is our p = 1 where a layer
    has weight and bias), takes a run of neighbouring samples, watches the loss of a pass's last batch, leaves a client
    its own buffers, and evaluates :math:`\hat\theta_k` before it is trained; we evaluate :math:`\theta_k`.
    FL-bench's clients that share a process share :math:`W` and whether it has converged.
    """

    name = "fedala"

    aggregated_layers: int = option(1, "p, how many of the last layers have weights of their own; 0: all")
    weight_lr: float = option(1.0, "eta, step size of the weights")
    sample: float = option(0.8, "the fraction of a client's data that the weights are learnt on")
    threshold: float = option(0.1, "deviation of the loss below which the weights have converged the first time")
    most_passes: int = option(100, "passes over the sample after which they have in any case")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("aggregated_layers", self.aggregated_layers >= 0, "not negative")
        self.check("weight_lr", self.weight_lr > 0, "above 0")
        self.check("sample", 0 < self.sample <= 1, "above 0, up to 1")
        self.check("threshold", self.threshold >= 0, "not negative")
        self.check("most_passes", self.most_passes >= 1, "at least 1")

    def _first(self, model: WorkingModel) -> int:
        """Which trained parameter is the first one of the last p layers."""
        groups = model.layers().groups
        below = max(groups) + 1 - self.aggregated_layers if self.aggregated_layers else 0
        return next(i for i, layer in enumerate(groups) if layer >= below)

    def _higher(self, model: WorkingModel) -> slice:
        """Where the last p layers' parameters are in a state."""
        return slice(sum(p.numel() for p in model.trained[: self._first(model)]), model.parameters)

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """theta_k, and W_k for the last layers."""
        state = model.state()
        return {"personal": state, "weights": torch.ones_like(state[self._higher(model)])}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Begin between one's own model and the received one, and train."""
        start = self._aggregated(client, received["model"]) if "personal" in client else received["model"]
        client.model.load(start)
        client.report["loss"] = Steps(client, self).train()
        client["personal"] = client.model.state()
        return {"model": client.model.state()}

    def _aggregated(self, client: Client, received: Tensor) -> Tensor:
        """The model that a turn begins with; W_k is learnt and kept."""
        model, higher = client.model, self._higher(client.model)
        own, weights = client["personal"][higher], client["weights"]
        difference = received[higher] - own
        steps = Steps(client, self, params=model.trained[self._first(model) :])
        client.trains(steps.params)
        batches = math.ceil(self.sample * client.samples / self.batch_size)
        start, losses = received.clone(), list[float]()
        start[higher] = own + difference * weights
        model.module.train()
        while not self._converged(losses, first="weights" not in client):
            seen = []
            # The stream begins anew: every pass is over the same sample.
            for batch in client.batches(self.batch_size, steps=batches, name="aggregation"):
                model.load(start)
                loss, gradients = steps.gradients(batch)
                slope = torch.cat([g.reshape(-1) for g in gradients]) * difference
                weights = (weights - self.weight_lr * slope).clamp(0, 1)
                start[higher] = own + difference * weights
                seen.append(loss)
            losses.append(mean_loss(seen))
        client["weights"] = weights
        client.report |= {"aggregation_loss": losses[-1], "aggregation_weight": float(weights.mean())}
        return start

    def _converged(self, losses: list[float], *, first: bool) -> bool:
        """Whether the weights are learnt, by the losses of all passes so far."""
        if not first or len(losses) >= self.most_passes:
            return len(losses) > 0
        return len(losses) > _LOSSES and statistics.pstdev(losses[-_LOSSES:]) < self.threshold

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the clients' models, weighted by samples."""
        server["model"] = uploads.average()

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """theta_k; theta for a client that never took part."""
        return {"personal": client["personal"] if "personal" in client else received["model"]}
