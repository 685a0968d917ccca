"""LWSAM over Flower: the strategy scores the layers by how far the clients drift apart, clients perturb by the scores.

The personalisation score of PLGU compares a personal layer with the global one. Here the server does it for each
upload, and sends the mean along with the next round's weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import flower_data
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from pfl_ext.flower import FusedFedAvg, lwsam_steps, read_arrays, write_arrays
from pfl_ext.ops import personalization_scores

server, client = ServerApp(), ClientApp()


class ScoredFedAvg(FusedFedAvg):
    """FedAvg that tells its clients the scores of the layers, as ``config["scores"]``."""

    def __init__(self, model: Callable[[], nn.Module], **fedavg: Any) -> None:
        """``model`` makes the network whose state dict the clients send."""
        super().__init__(**fedavg)
        self.model = model
        self.scores: list[float] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send the scores of the last round; there are none in the first."""
        config["scores"] = self.scores
        return super().configure_train(server_round, arrays, config, grid)

    def combine(
        self, average: dict[str, Tensor], models: list[dict[str, Tensor]], weights: list[float]
    ) -> dict[str, Tensor]:
        """Score each client's layers against the average."""
        shared = self._loaded(average)
        scores = torch.stack([personalization_scores(self._loaded(model), shared) for model in models])
        self.scores = scores.mean(0).tolist()
        return average

    def _loaded(self, state: dict[str, Tensor]) -> nn.Module:
        model = self.model()
        model.load_state_dict(state)
        return model


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Three rounds."""
    strategy = ScoredFedAvg(flower_data.network, fraction_evaluate=0.0)
    strategy.start(grid, initial_arrays=write_arrays(flower_data.network()), num_rounds=3)


@client.train()
def train(message: Message, context: Context) -> Message:
    """Some steps of LWSAM from the server's weights; all layers have the same score while the server has sent none."""
    model, (x, y) = flower_data.network(), flower_data.points(context)
    model.load_state_dict(read_arrays(message.content["arrays"]))
    scores = [float(score) for score in message.content["config"]["scores"]]
    loss = lwsam_steps(model, [(x, y)] * 10, lr=0.1, rho=0.05, scores=scores)
    metrics = MetricRecord({"num-examples": len(x), "loss": loss})
    return Message(RecordDict({"arrays": write_arrays(model), "metrics": metrics}), reply_to=message)


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server, client, num_supernodes=2)
