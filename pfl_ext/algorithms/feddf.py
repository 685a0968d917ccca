"""FedDF: FedAvg whose server distils the clients' models into their average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Server, Steps, Uploads

from .server_distillation import DistillingMethod, distil

__all__ = ["FedDF"]


@dataclass(frozen=True)
class FedDF(DistillingMethod):
    r"""FedDF (Lin et al., 2020), Algorithm 1, for clients with one kind of network.

    .. math::
        w_k &\leftarrow \text{E epochs of SGD on } L_k \text{ from } w \\
        w &\leftarrow \sum_k \tfrac{n_k}{n} w_k \\
        w &\leftarrow w - \eta\, \nabla_w \mathrm{KL}\big(\sigma(\tfrac1M \sum_k h_k),\, \sigma(g)\big)
            \quad \text{R steps of Adam on unlabelled data}

    with the logits :math:`h_k` of the clients' models and g of w. The paper's early stopping is ``kd_keep_best``, its
    schedule ``kd_schedule="cosine"``. Its authors allow R = 10,000 steps and stop when 1,000 bring nothing; without a
    labelled hold-out there is nothing to stop by, so ``kd_steps`` is 100 unless it is given.
    """

    name = "feddf"
    private = True

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self).train()
        return {"model": client.model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average, weighted by samples; distil."""
        server["model"] = distil(server, self, uploads.average(), uploads)
