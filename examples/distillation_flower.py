"""A Flower strategy that distils the clients' models on the server instead of only averaging them (FedDF, PerAda)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flower_data
import torch
from averaging_flower import client
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from pfl_ext.flower import FusedFedAvg, distill, write_arrays

server = ServerApp()


class DistillingFedAvg(FusedFedAvg):
    """FedAvg, then steps of distillation from this round's clients on unlabelled data."""

    def __init__(self, model: Callable[[], nn.Module], unlabelled: Tensor, steps: int = 100, **fedavg: Any) -> None:
        """``model`` makes the network whose state dict the clients send."""
        super().__init__(**fedavg)
        self.model, self.unlabelled, self.steps = model, unlabelled, steps

    def combine(
        self, average: dict[str, Tensor], models: list[dict[str, Tensor]], weights: list[float]
    ) -> dict[str, Tensor]:
        """Distil into the average, and send that."""
        student = self._loaded(average)
        teachers = (self._loaded(model) for model in models)
        self.report["distillation_loss"] = distill(student, teachers, self.unlabelled, steps=self.steps)
        return dict(student.state_dict())

    def _loaded(self, state: dict[str, Tensor]) -> nn.Module:
        model = self.model()
        model.load_state_dict(state)
        return model


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Three rounds, with unlabelled points of the server's own."""
    unlabelled = torch.randn(200, 4, generator=torch.Generator().manual_seed(9)) + 1.0
    strategy = DistillingFedAvg(flower_data.network, unlabelled, fraction_evaluate=0.0)
    strategy.start(grid, initial_arrays=write_arrays(flower_data.network()), num_rounds=3)


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server, client, num_supernodes=2)
