"""FedDF: FedAvg whose server distils the clients' models into their average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Server, Stage, Steps, Uploads, WorkingModel, label_of

from .server_distillation import DistillingMethod, distil

__all__ = ["FedDF"]


@dataclass(frozen=True)
class FedDF(DistillingMethod):
    r"""FedDF (Lin et al., 2020), Algorithms 1 and 3: ensemble distillation, for networks of one or of several shapes.

    .. math::
        w_k &\leftarrow \text{E epochs of SGD on } L_k \text{ from } w \\
        w &\leftarrow \sum_k \tfrac{n_k}{n} w_k \\
        w &\leftarrow w - \eta\, \nabla_w \mathrm{KL}\big(\sigma(\tfrac1M \sum_k h_k),\, \sigma(g)\big)
            \quad \text{R steps of Adam on unlabelled data}

    with the logits :math:`h_k` of the clients' models and g of w. Where clients have networks of different shapes
    (Algorithm 3, its prototypes) there is a w for each: the average of the models of that shape, distilled from the
    ensemble of all. One of which no client took part in a round is distilled from where it was. A client is sent, and
    evaluated with, the w of its network; on the global test set the record has the mean over the networks.

    The paper's early stopping is ``kd_keep_best``, its
    schedule ``kd_schedule="cosine"``. Its authors allow R = 10,000 steps and stop when 1,000 bring nothing; without a
    labelled hold-out there is nothing to stop by, so ``kd_steps`` is 100 unless it is given.
    """

    name = "feddf"
    private = True
    several_networks = True

    def set_up(self, server: Server) -> None:
        """w, of each network, and who has which."""
        super().set_up(server)
        for model in server.models:
            server[label_of("model", model.network)] = model.state()
        server["network"] = torch.tensor(server.networks)

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send the model w of the client's network."""
        return {"model": server[label_of("model", int(server["network"][client]))]}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self).train()
        return {"model": client.model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average, weighted by samples, those of each network; distil."""
        names = [label_of("model", model.network) for model in server.models]
        groups = [
            uploads.of([k for k in uploads.clients if server.networks[k] == model.network]) for model in server.models
        ]
        pairs = zip(names, groups, strict=True)
        starts = [group.average() if len(group) else server[name] for name, group in pairs]
        server.update(zip(names, distil(server, self, starts, groups), strict=True))

    def global_model(self, server: Mapping[str, Tensor], model: WorkingModel) -> Tensor | None:
        """The model w of this network's shape."""
        return server[label_of("model", model.network)]
