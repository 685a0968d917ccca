"""FedCAC: parameters that matter to a client are mixed among clients alike, the others among all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Stage, Steps, Uploads, WorkingModel, option
from pfl_ext.ops import weighted_average

from .components import kept_buffers

__all__ = ["FedCAC"]


@dataclass(frozen=True)
class FedCAC(Method):
    r"""FedCAC (Wu et al., 2023): critical parameters are collaborated on with similar clients.

    .. math::
        \theta_k &\leftarrow \text{E epochs of SGD on } L_k \text{ from } \bar\theta_k, \quad
            M_k = \text{the fraction } \tau \text{ of each tensor with the largest }
            |\theta_k - \bar\theta_k| \odot |\theta_k| \\
        O_{kj} &= 1 - \frac{\|M_k - M_j\|_1}{2 \|M_k\|_1}, \quad
            C_k = \{k\} \cup \{j : O_{kj} \ge O_{avg} + \tfrac{t}{\beta} (O_{max} - O_{avg})\} \\
        \theta &\leftarrow \sum_k \tfrac{n_k}{n} \theta_k, \quad
            \bar\theta_k \leftarrow M_k \odot \mathrm{mean}_{j \in C_k} \theta_j + (1 - M_k) \odot \theta

    The threshold rises with the round t: at :math:`t = \beta` none but the most similar pairs are left, and beyond it
    critical parameters are a client's own.

    Readings. t is the round whose uploads are compared. An entry that did not change is not critical, so that there may
    be fewer than the fraction :math:`\tau`. The server mixes the newest model of each client that ever took part;
    averages of O are over pairs of these. A client sends :math:`\theta_k`; the server, which knows
    :math:`\bar\theta_k`, finds :math:`M_k` by itself, so that it is not sent. Buffers are those of :math:`\theta`. A
    client's last :math:`\theta_k` is its personal model; one that never took part has :math:`\theta`.

    In PFLlib t is one more, the number of the round in which the mixture is trained. Where less than :math:`\tau` of a
    tensor changed, all entries that did are critical there too; a tensor of which :math:`\tau` is less than one entry
    has none. It evaluates :math:`\bar\theta_k`, before it is trained, and cannot work with partial participation: it
    has no mask of clients that never took part. FL-bench does not have the method.
    """

    name = "fedcac"
    private = True

    tau: float = option(0.5, "tau, the fraction of a tensor's entries that is critical")
    beta: int = option(100, "beta, the round beyond which critical parameters are a client's own")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("tau", 0 < self.tau <= 1, "above 0, up to 1")
        self.check("beta", self.beta >= 1, "at least 1")

    def set_up(self, server: Server) -> None:
        """theta; a row for each client: theta_k, M_k, C_k; and who has sent something so far."""
        super().set_up(server)
        clients, model = server.clients, server.model
        server["models"] = server["model"].repeat(clients, 1)
        server["critical"] = torch.zeros(clients, model.parameters, dtype=torch.bool, device=model.device)
        server["partners"] = torch.eye(clients, dtype=torch.bool)
        server["known"] = torch.zeros(clients, dtype=torch.bool)

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """The mixture for the client; for the evaluation theta_k, which a client has that took part."""
        if not server["known"][client]:
            return {"model": server["model"]}
        if stage == "evaluate":
            return {"model": server["models"][client]}
        partners = server["partners"][client].nonzero().flatten().tolist()
        critical = server["critical"][client]
        mixed, found = weighted_average([[server["models"][j]] for j in partners])[0], server["model"].clone()
        found[: len(critical)] = torch.where(critical, mixed[: len(critical)], found[: len(critical)])
        return {"model": found}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train the model that the server mixed for this client."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self).train()
        return {"model": client.model.state()}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average; find critical parameters and who has the same."""
        # All are compared with what they began from before one of these mixtures changes: there is one copy of models.
        models, critical = server["models"], server["critical"].clone()
        for k, state in uploads.one_by_one("model"):
            critical[k] = self.critical(server.model, self.sends(server, k, "train")["model"], state)
        for k, state in uploads.one_by_one("model"):
            models[k] = kept_buffers(server, models[k], state)
            server["known"][k] = True
        server["critical"], server["model"] = critical, uploads.average()
        server["partners"] = self.partners(critical, server["known"], server.round)

    def critical(self, model: WorkingModel, start: Tensor, end: Tensor) -> Tensor:
        """M_k of a turn's first and last state."""
        masks = []
        count = len(model.trained)
        for a, b in zip(model.pieces(start)[:count], model.pieces(end)[:count], strict=True):
            worth = ((b - a) * b).abs()
            least = worth.topk(max(1, int(self.tau * len(worth)))).values[-1]
            masks.append((worth >= least) & (worth > 0))
        return torch.cat(masks)

    def partners(self, critical: Tensor, known: Tensor, round: int) -> Tensor:
        """The clients C_k to collaborate with, one row for each client."""
        found = torch.eye(len(known), dtype=torch.bool)
        clients = known.nonzero().flatten().tolist()
        if len(clients) < 2:
            return found
        overlap = torch.zeros(len(known), len(known), dtype=torch.float64)
        for k in clients:
            own = max(int(critical[k].sum()), 1)  # a client that no step has changed
            for j in clients:
                overlap[k, j] = 1 - int((critical[k] ^ critical[j]).sum()) / (2 * own)
        pairs = ~torch.eye(len(known), dtype=torch.bool) & known & known[:, None]
        mean, most = overlap[pairs].mean(), overlap[pairs].max()
        return found | (pairs & (overlap >= mean + round / self.beta * (most - mean)))

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's last theta_k, which the server has."""
        return {"personal": received["model"]}
