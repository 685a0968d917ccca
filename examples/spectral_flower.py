"""Spectral co-distillation over Flower: clients whose two models teach each other, a strategy that watches spectra.

Flower makes a client anew for every message. The personal model is in ``context.state``, which lasts and stays there.
"""

from __future__ import annotations

import flower_data
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from pfl_ext.flower import FusedFedAvg, codistill, load_kept, read_arrays, save_kept, write_arrays
from pfl_ext.ops import SpectralTeacher, spectral_divergence

LAMBDA_GENERIC, LAMBDA_PERSONAL, TAU = 0.05, 0.01, 0.4
server, client = ServerApp(), ClientApp()


def vector_of(model: dict[str, Tensor]) -> Tensor:
    """A model in one row, without what counts batches."""
    return torch.cat([x.reshape(-1) for x in model.values() if x.is_floating_point()])


class SpectralFedAvg(FusedFedAvg):
    """FedAvg that also reports how far the clients' spectra are from that of their average."""

    def combine(
        self, average: dict[str, Tensor], models: list[dict[str, Tensor]], weights: list[float]
    ) -> dict[str, Tensor]:
        """One teacher, the average, serves all clients in one call."""
        teacher = SpectralTeacher(vector_of(average), tau=TAU)
        divergences = spectral_divergence(torch.stack([vector_of(model) for model in models]), teacher)
        self.report["mean_divergence"] = divergences.mean().item()
        self.report["largest_divergence"] = divergences.max().item()
        return average


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Three rounds, with an evaluation of the personal models after each."""
    SpectralFedAvg().start(grid, initial_arrays=write_arrays(flower_data.network()), num_rounds=3)


@client.train()
def train(message: Message, context: Context) -> Message:
    """Train the generic model towards the low end of the personal spectrum, then the personal one towards it."""
    generic, personal = flower_data.network(), flower_data.network()
    generic.load_state_dict(read_arrays(message.content["arrays"]))
    personal.load_state_dict(load_kept(context) or generic.state_dict())
    x, y = flower_data.points(context)
    batches = [(x, y)] * 20
    shared = codistill(generic, personal, batches, lr=0.1, weight=LAMBDA_GENERIC, tau=TAU, momentum=0.5)
    own = codistill(personal, generic, batches, lr=0.1, weight=LAMBDA_PERSONAL, momentum=0.5)
    save_kept(context, personal.state_dict())
    metrics = MetricRecord({"num-examples": len(x), "generic_loss": shared, "personal_loss": own})
    return Message(RecordDict({"arrays": write_arrays(generic), "metrics": metrics}), reply_to=message)


@client.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """The personal model on the client's points."""
    personal, (x, y) = flower_data.network(), flower_data.points(context)
    personal.load_state_dict(load_kept(context) or read_arrays(message.content["arrays"]))
    metrics = MetricRecord({"num-examples": len(x), "accuracy": flower_data.accuracy(personal, x, y)})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server, client, num_supernodes=2)
