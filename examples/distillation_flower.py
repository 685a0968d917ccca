"""A Flower strategy that distils the clients' models on the server instead of only averaging them (FedDF, PerAda)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flower_weights
import torch
from flwr.common import FitRes, Parameters, Scalar
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from torch import Tensor, nn

from pfl_ext.ops import ensemble_distillation_loss, ensemble_logits


class DistillingFedAvg(FedAvg):
    """FedAvg, then steps of distillation from this round's clients on unlabelled data."""

    def __init__(self, model: Callable[[], nn.Module], unlabelled: Tensor, steps: int = 100, **fedavg: Any) -> None:
        """``model`` makes the network whose state dict the clients send."""
        super().__init__(**fedavg)
        self.model, self.unlabelled, self.steps = model, unlabelled, steps

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Average, distil, and send the student."""
        average, metrics = super().aggregate_fit(server_round, results, failures)
        if average is None:
            return None, metrics
        student = flower_weights.load(self.model(), average)
        with torch.no_grad():
            clients = [flower_weights.load(self.model(), fit.parameters).eval() for _, fit in results]
            targets = ensemble_logits([client(self.unlabelled) for client in clients])
        optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
        for _ in range(self.steps):
            batch = torch.randint(len(self.unlabelled), (min(128, len(self.unlabelled)),))
            optimizer.zero_grad()
            loss = ensemble_distillation_loss(student(self.unlabelled[batch]), [targets[batch]])
            loss.backward()
            optimizer.step()
        return flower_weights.parameters_of(student), {**metrics, "distillation_loss": loss.item()}
