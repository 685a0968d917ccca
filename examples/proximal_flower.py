"""The proximal step over Flower: FedProx clients, and a server whose own step is held near the model it began with."""

from __future__ import annotations

from typing import Any

import flower_weights
import torch
from flwr.client import NumPyClient
from flwr.common import FitRes, NDArrays, Parameters, Scalar
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg
from torch import Tensor, nn

from pfl_ext.ops import proximal_sgd_step_, squared_distance
from pfl_ext.optim import ProximalSGD


class AnchoredFedAvg(FedAvg):
    """Takes server - average as the gradient of a step with momentum, and stays near a given (pretrained) model."""

    def __init__(self, server: nn.Module, lr: float = 1.0, lam: float = 0.1, momentum: float = 0.5, **fedavg: Any):
        """``server`` is where it begins and what it is held near."""
        super().__init__(initial_parameters=flower_weights.parameters_of(server), **fedavg)
        self.server, self.lr, self.lam, self.momentum = server, lr, lam, momentum
        self.anchor = [x.detach().clone() for x in server.parameters()]
        self.buffers: list[Tensor] | None = None

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Average, step towards the average, and say how far from the anchor that led."""
        average, metrics = super().aggregate_fit(server_round, results, failures)
        if average is None:
            return None, metrics
        params = [x.detach() for x in self.server.parameters()]
        names = [name for name, _ in self.server.named_parameters()]
        state = flower_weights.state_of(self.server, average)
        grads = [x - state[name] for name, x in zip(names, params, strict=True)]
        first = self.buffers is None
        self.buffers = self.buffers or [torch.zeros_like(x) for x in params]
        proximal_sgd_step_(
            *(params, grads, self.anchor, self.lr, self.lam),
            momentum=self.momentum, momentum_buffers=self.buffers, first=first,
        )  # fmt: skip
        distance = squared_distance(params, self.anchor).item()
        return flower_weights.parameters_of(self.server), {**metrics, "squared_distance": distance}


class FedProxClient(NumPyClient):
    """Trains near the weights that it received."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, mu: float = 0.1) -> None:
        """The client's network and data, and FedProx's mu."""
        self.model, self.x, self.y, self.mu = model, x, y, mu

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Some proximal steps from the server's weights."""
        flower_weights.load(self.model, parameters)
        optimizer = ProximalSGD(self.model.parameters(), lr=0.1, lam=self.mu)
        optimizer.set_anchors()  # where the parameters are now: the server's
        for _ in range(10):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
            loss.backward()
            optimizer.step()
        return flower_weights.arrays_of(self.model), len(self.x), {"loss": loss.item()}
