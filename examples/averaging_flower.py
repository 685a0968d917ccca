"""A Flower strategy with the fused average: a server learning rate, and clients that diverged are left out."""

from __future__ import annotations

from typing import Any

import flower_weights
from flwr.common import FitRes, Parameters, Scalar
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from torch import nn

from pfl_ext.ops import server_update


class FusedFedAvg(FedAvg):
    """server + lr * average(client - server), weighted by the clients' numbers of samples, in one pass."""

    def __init__(self, server: nn.Module, lr: float = 1.0, **fedavg: Any) -> None:
        """``server`` holds the global model from round to round."""
        super().__init__(initial_parameters=flower_weights.parameters_of(server), **fedavg)
        self.server, self.lr = server, lr

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Average what the clients sent into the server's model."""
        if not results or (failures and not self.accept_failures):
            return None, {}
        clients = [flower_weights.state_of(self.server, fit.parameters) for _, fit in results]
        samples = [fit.num_examples for _, fit in results]
        server = self.server.state_dict()  # the model's own memory
        server_update(server, clients, samples, lr=self.lr, nonfinite="skip", out=server)
        return flower_weights.parameters_of(self.server), {}
