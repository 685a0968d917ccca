"""LWSAM over Flower: the strategy scores the layers by how far the clients drift apart, clients perturb by the scores.

The personalisation score of PLGU compares a personal layer with the global one. Here the server does it for each
upload, and sends the mean along with the next round's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flower_weights
import torch
from flwr.client import NumPyClient
from flwr.common import FitIns, FitRes, NDArrays, Parameters, Scalar
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from torch import Tensor, nn

from pfl_ext.ops import personalization_scores
from pfl_ext.optim import LWSAM


class ScoredFedAvg(FedAvg):
    """FedAvg that tells its clients the scores of the layers, as ``config["score 0"]``, ``config["score 1"]``, ..."""

    def __init__(self, model: Callable[[], nn.Module], **fedavg: Any) -> None:
        """``model`` makes the network whose state dict the clients send."""
        super().__init__(**fedavg)
        self.model = model
        self.scores: list[float] = []

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Send the scores of the last round; there are none in the first."""
        chosen: list[tuple[ClientProxy, FitIns]] = super().configure_fit(server_round, parameters, client_manager)
        for _, instructions in chosen:
            instructions.config.update({f"score {layer}": score for layer, score in enumerate(self.scores)})
        return chosen

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Average, and score each client's layers against the average."""
        average, metrics = super().aggregate_fit(server_round, results, failures)
        if average is not None:
            server = flower_weights.load(self.model(), average)
            clients = [flower_weights.load(self.model(), fit.parameters) for _, fit in results]
            scores = torch.stack([personalization_scores(client, server) for client in clients])
            self.scores = scores.mean(0).tolist()
        return average, metrics


class LWSAMClient(NumPyClient):
    """Trains with the perturbation by layers; all have the same score while the server has sent none."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        """The client's network and data."""
        self.model, self.x, self.y = model, x, y

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Some steps of LWSAM from the server's weights."""
        flower_weights.load(self.model, parameters)
        optimizer = LWSAM(self.model.named_parameters(), torch.optim.SGD, rho=0.05, lr=0.1)
        scores = [float(value) for name, value in sorted(config.items(), key=_number) if name.startswith("score ")]
        if scores:
            optimizer.scores = torch.tensor(scores, dtype=torch.float64)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
            loss.backward()
            return loss

        for _ in range(10):
            loss = optimizer.step(closure)
        return flower_weights.arrays_of(self.model), len(self.x), {"loss": loss.item()}


def _number(item: tuple[str, Scalar]) -> int:
    """``score 10`` comes after ``score 9``."""
    last = item[0].rpartition(" ")[2]
    return int(last) if last.isdecimal() else -1
