"""FedEM: a client's data is a mixture of distributions that all share, each with a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_ext.data import Inputs
from pfl_ext.federation import Batch, Client, Method, Models, Server, Stage, Steps, Uploads, WorkingModel, option

from .components import drawn_states, kept_buffers, sent_states, states

__all__ = ["FedEM"]


@dataclass(frozen=True)
class FedEM(Method):
    r"""FedEM (Marfoq et al., 2021), Algorithm 1: federated expectation-maximisation.

    With components :math:`\theta_m` that all clients share and mixture weights :math:`\pi_k` of each:

    .. math::
        q_{ki}(m) &\propto \pi_{km} \exp(-l(h_{\theta_m}(x_i), y_i)) \quad \text{E-step} \\
        \pi_{km} &\leftarrow \tfrac{1}{n_k} \sum_i q_{ki}(m) \\
        \theta_{km} &\leftarrow \text{E epochs of SGD on } \mathrm{mean}_i\, q_{ki}(m)\, l(h(x_i), y_i)
            \text{ from } \theta_m \quad \text{M-step} \\
        \theta_m &\leftarrow \sum_k \tfrac{n_k}{n} \theta_{km}

    The personal model is the mixture :math:`\sum_m \pi_{km}\, \mathrm{softmax}(h_{\theta_m}(x))`: of probabilities, not
    of weights. Everything is sent M times.

    Readings. l is the cross-entropy, q is found in evaluation mode on all training data, and all components see the
    same batches. The components begin as different draws of the network's weights, the first as the network came. A
    client that never took part has the weights that its first turn would find.

    FL-bench evaluates a mixture of logits in place of probabilities, and in its M-step gives the samples of a shuffled
    batch the q of its samples in the order of the data. PFLlib does not have the method.
    """

    name = "fedem"
    needs = "classes"

    components: int = option(3, "M, how many components; 1 is FedAvg")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("components", self.components >= 1, "at least 1")

    def set_up(self, server: Server) -> None:
        """The server keeps the components theta_m as the rows of one tensor."""
        server["models"] = drawn_states(server, self.components)

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps its mixture weights pi_k, all alike at first."""
        return {"weights": torch.full((self.components,), 1 / self.components, dtype=torch.float64)}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send every component to every client."""
        return sent_states(server["models"])

    def responsibilities(self, client: Client, models: list[Tensor]) -> Tensor:
        """q, a row for each training sample."""
        losses = []
        for state in models:
            client.model.load(state)
            losses.append(F.cross_entropy(*client.outputs(client.train), reduction="none").double())
        return torch.softmax(client["weights"].to(losses[0].device).log() - torch.stack(losses, 1), 1)

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Find the mixture weights (E-step), then train every component (M-step)."""
        models = states(received)
        q = self.responsibilities(client, models)
        client["weights"] = q.mean(0).cpu()
        sent, losses = {}, torch.zeros(len(models))
        for m, state in enumerate(models):
            client.model.load(state)
            share = q[:, m].to(client.model.dtype)

            def loss(outputs: Tensor, batch: Batch, share: Tensor = share) -> Tensor:
                each = F.cross_entropy(outputs, batch.targets, reduction="none")
                return (share[batch.rows] * each).mean()

            losses[m] = Steps(client, self).train(loss)
            sent[f"model/{m}"] = client.model.state()
        client.report |= {"loss": float(losses.sum()), "largest_weight": float(client["weights"].max())}
        return sent

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average each component, weighted by samples."""
        old = server["models"]
        new = [kept_buffers(server, old[m], uploads.average(f"model/{m}")) for m in range(len(old))]
        server["models"] = torch.stack(new)

    def models(self, client: Client, received: Mapping[str, Tensor]) -> Models:
        """The mixture of the components by the client's weights pi_k."""
        models = states(received)
        found = client["weights"] if "weights" in client else self.responsibilities(client, models).mean(0)
        weights = found.to(client.model.dtype).tolist()

        def mixture(model: WorkingModel, inputs: Inputs) -> Tensor:
            terms = []
            for weight, state in zip(weights, models, strict=True):
                model.load(state)
                terms.append(weight * F.softmax(model(inputs), 1))
            p = torch.stack(terms).sum(0)
            return p.clamp(min=torch.finfo(p.dtype).tiny).log()

        return {"personal": mixture}
