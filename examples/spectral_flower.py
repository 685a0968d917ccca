"""Spectral co-distillation over Flower: clients whose two models teach each other, a strategy that watches spectra."""

from __future__ import annotations

import copy

import flower_weights
import torch
from flwr.client import NumPyClient
from flwr.common import FitRes, NDArrays, Parameters, Scalar, parameters_to_ndarrays
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from torch import Tensor, nn

from pfl_ext.ops import SpectralTeacher, spectral_divergence

LAMBDA_GENERIC, LAMBDA_PERSONAL, TAU = 0.05, 0.01, 0.4


def vector_of(arrays: NDArrays) -> Tensor:
    """Weights that were sent, in one row."""
    return torch.cat([torch.from_numpy(array.copy()).reshape(-1) for array in arrays])


class SpectralFedAvg(FedAvg):
    """FedAvg that also reports how far the clients' spectra are from that of their average."""

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Average; one teacher, the average, serves all clients in one call."""
        average, metrics = super().aggregate_fit(server_round, results, failures)
        if average is None:
            return None, metrics
        teacher = SpectralTeacher(vector_of(parameters_to_ndarrays(average)), tau=TAU)
        clients = torch.stack([vector_of(parameters_to_ndarrays(fit.parameters)) for _, fit in results])
        divergences = spectral_divergence(clients, teacher)
        spread = {"mean_divergence": divergences.mean().item(), "largest_divergence": divergences.max().item()}
        return average, {**metrics, **spread}


class CoDistillationClient(NumPyClient):
    """Keeps a personal model; sends the generic one."""

    def __init__(self, model: nn.Module, points: Tensor, labels: Tensor, steps: int = 20) -> None:
        """The network that both models have, the client's data, and the steps of each model in a round."""
        self.generic, self.personal = model, copy.deepcopy(model)
        self.points, self.labels, self.steps = points, labels, steps

    def _train(self, model: nn.Module, teacher: SpectralTeacher, weight: float) -> float:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        for _ in range(self.steps):
            loss = nn.functional.cross_entropy(model(self.points), self.labels)
            loss = loss + weight * spectral_divergence(model.parameters(), teacher)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train the generic model towards the low end of the personal spectrum, then the personal one towards it."""
        flower_weights.load(self.generic, parameters)
        generic = self._train(self.generic, SpectralTeacher(self.personal.parameters(), tau=TAU), LAMBDA_GENERIC)
        personal = self._train(self.personal, SpectralTeacher(self.generic.parameters()), LAMBDA_PERSONAL)
        return (
            flower_weights.arrays_of(self.generic),
            len(self.labels),
            {"generic_loss": generic, "personal_loss": personal},
        )
