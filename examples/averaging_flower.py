"""A Flower app with the fused average: a server learning rate, and clients that diverged are left out."""

from __future__ import annotations

import flower_data
import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from pfl_ext.flower import FusedFedAvg, read_arrays, write_arrays

server, client = ServerApp(), ClientApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """In place of Flower's FedAvg, with all of its options."""
    strategy = FusedFedAvg(lr=0.9, nonfinite="skip", fraction_evaluate=0.0)
    strategy.start(grid, initial_arrays=write_arrays(flower_data.network()), num_rounds=3)


@client.train()
def train(message: Message, context: Context) -> Message:
    """Some steps of SGD from the server's weights."""
    model, (x, y) = flower_data.network(), flower_data.points(context)
    model.load_state_dict(read_arrays(message.content["arrays"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": len(x), "loss": loss.item()})
    return Message(RecordDict({"arrays": write_arrays(model), "metrics": metrics}), reply_to=message)


if __name__ == "__main__":
    from flwr.simulation import run_simulation

    run_simulation(server, client, num_supernodes=2)
