"""A Flower strategy that distils the clients' models on the server instead of only averaging them (FedDF, PerAda)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from flwr.common import FitRes, Parameters, Scalar, ndarrays_to_parameters, parameters_to_ndarrays
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

    def _load(self, parameters: Parameters) -> nn.Module:
        model = self.model()
        arrays = parameters_to_ndarrays(parameters)
        names = list(model.state_dict())
        model.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in zip(names, arrays, strict=True)})
        return model

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
        student = self._load(average)
        with torch.no_grad():
            targets = ensemble_logits([self._load(fit.parameters).eval()(self.unlabelled) for _, fit in results])
        optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)
        for _ in range(self.steps):
            batch = torch.randint(len(self.unlabelled), (min(128, len(self.unlabelled)),))
            optimizer.zero_grad()
            loss = ensemble_distillation_loss(student(self.unlabelled[batch]), [targets[batch]])
            loss.backward()
            optimizer.step()
        arrays = [x.numpy() for x in copy.deepcopy(student).state_dict().values()]
        return ndarrays_to_parameters(arrays), {**metrics, "distillation_loss": loss.item()}
