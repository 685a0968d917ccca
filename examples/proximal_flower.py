"""The proximal step over Flower: FedProx clients, and a server whose own step is held near the model it began with."""

from __future__ import annotations

from typing import Any

import flower_data
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor, nn

from pfl_ext.flower import FusedFedAvg, proximal_steps, read_arrays, write_arrays
from pfl_ext.ops import proximal_sgd_step_, squared_distance

server, client = ServerApp(), ClientApp()


class AnchoredFedAvg(FusedFedAvg):
    """Takes server - average as the gradient of a step with momentum, and stays near a given (pretrained) model.

    What is no parameter, such as the running statistics of BatchNorm, has no gradient: it is the clients' average.
    """

    def __init__(self, start: nn.Module, step: float = 1.0, lam: float = 0.1, momentum: float = 0.5, **fedavg: Any):
        """``start`` is where it begins and what it is held near."""
        super().__init__(**fedavg)
        self.step, self.lam, self.momentum = step, lam, momentum
        self.anchor = {name: x.detach().clone() for name, x in start.named_parameters()}
        self.velocity = {name: torch.zeros_like(x) for name, x in self.anchor.items()}
        self.first = True

    def combine(
        self, average: dict[str, Tensor], models: list[dict[str, Tensor]], weights: list[float]
    ) -> dict[str, Tensor]:
        """Step towards the average, and say how far from the anchor that led."""
        before = self.server
        params = [before[name].clone() for name in self.anchor]
        grads = [before[name] - average[name] for name in self.anchor]
        anchors, velocity = list(self.anchor.values()), list(self.velocity.values())
        proximal_sgd_step_(
            *(params, grads, anchors, self.step, self.lam),
            momentum=self.momentum, momentum_buffers=velocity, first=self.first,
        )  # fmt: skip
        self.first = False
        self.report["squared_distance"] = squared_distance(params, anchors).item()
        return {**average, **dict(zip(self.anchor, params, strict=True))}


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Three rounds from an untrained model."""
    start = flower_data.network()
    AnchoredFedAvg(start, fraction_evaluate=0.0).start(grid, initial_arrays=write_arrays(start), num_rounds=3)


@client.train()
def train(message: Message, context: Context) -> Message:
    """FedProx: steps that are held near the weights that were received."""
    model, (x, y) = flower_data.network(), flower_data.points(context)
    model.load_state_dict(read_arrays(message.content["arrays"]))
    loss = proximal_steps(model, [(x, y)] * 10, lr=0.1, lam=0.1)
    metrics = MetricRecord({"num-examples": len(x), "loss": loss})
    return Message(RecordDict({"arrays": write_arrays(model), "metrics": metrics}), reply_to=message)


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server, client, num_supernodes=2)
