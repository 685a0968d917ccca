"""Power-of-choice: FedAvg that selects the clients with the highest losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Server, Uploads, option

from .fedavg import FedAvg

__all__ = ["PowerOfChoice"]


@dataclass(frozen=True)
class PowerOfChoice(FedAvg):
    """Power-of-choice (Cho, Wang and Joshi, 2022), the variant rpow-d: FedAvg by biased selection.

    Of d candidates, drawn without replacement with probabilities by their samples, those take part whose losses were
    highest when they last trained. A client that never did comes first.

    Readings. The loss is the mean over the steps of a client's last turn, as in the paper for this variant, which costs
    one number to send. Models are averaged by samples, as in FedAvg. With d the number of clients it is the highest of
    all; with d the number selected it is sampling by size.
    """

    name = "power-of-choice"
    private = False  # the losses are sent as they are

    candidates: int = option(0, "d, how many are drawn of whom the worst are selected; 0: twice as many")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("candidates", self.candidates >= 0, "not negative")

    def set_up(self, server: Server) -> None:
        """The model, and each client's last loss and samples, as far as they are known."""
        super().set_up(server)
        server["losses"] = torch.full((server.clients,), torch.inf, dtype=torch.float64)
        server["samples"] = torch.zeros(server.clients, dtype=torch.float64)

    def select(self, server: Server, count: int) -> list[int]:
        """Draw candidates, and select those with the highest losses."""
        samples = server["samples"][: server.members]
        known = samples > 0
        mean = samples[known].mean() if bool(known.any()) else torch.ones(())
        most = min(server.members, max(count, self.candidates or 2 * count))
        drawn = torch.multinomial(torch.where(known, samples, mean), most, generator=server.stream("candidates"))
        losses = server["losses"][drawn]
        return drawn[losses.argsort(descending=True, stable=True)[:count]].tolist()

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model, and tell the loss."""
        sent = super().train(client, received)
        loss = torch.tensor([client.report["loss"]], dtype=torch.float64).nan_to_num(0.0)  # NaN: it took no step
        return sent | {"loss": loss}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average, weighted by samples; note the losses."""
        super().aggregate(server, uploads)
        for k, loss, samples in zip(uploads.clients, uploads.each("loss"), uploads.samples, strict=True):
            server["losses"][k], server["samples"][k] = float(loss), samples
