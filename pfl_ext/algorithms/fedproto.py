"""FedProto: clients share what the classes look like, and nothing of their networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.data import Inputs
from pfl_ext.federation import (
    Batch,
    Client,
    Features,
    Method,
    Models,
    Server,
    Stage,
    Steps,
    Uploads,
    WorkingModel,
    option,
)

from .prototypes import class_means, head_sizes, pull

__all__ = ["FedProto"]


@dataclass(frozen=True)
class FedProto(Method):
    r"""FedProto (Tan et al., 2022), Algorithm 1: prototypes in place of models.

    With features z of the client's own model :math:`\omega_k` and :math:`N_c` the clients that have class c:

    .. math::
        \omega_k &\leftarrow \text{E epochs of SGD on } L_k + \lambda\, \mathrm{mean}_x\,
            \tfrac1d \|z(x) - \bar C^{y(x)}\|_2^2 \quad \text{from } \omega_k \\
        C_k^c &= \mathrm{mean}\, \{z(x) : x \text{ of client k, of class c}\} \\
        \bar C^c &\leftarrow \tfrac{1}{|N_c|} \sum_{k \in N_c} C_k^c \\
        \hat y(x) &= \arg\min_c \|z(x) - \bar C^c\|_2

    A client sends a prototype for each class it has, so clients send different amounts. Their networks may differ, as
    in the paper, if they have as many features.

    Readings. Equation 6 divides by :math:`|N_c|` and weighs by samples; as in the authors' code it is the plain mean
    over clients (``weights="samples"``: the mean over samples). The distance is the mean square over features and the
    samples of a batch, as in their code, not that of a batch's own prototypes. Prototypes are taken after training, in
    evaluation mode; theirs are the mean over features from all along the last epoch. A class that nobody sent in a
    round keeps its prototype. The outputs of the evaluated model are minus the squared distances; a class without a
    prototype is further away than all others. Before there are any, the network itself is evaluated.

    PFLlib loses the prototypes of classes that nobody sent in a round, and has no loss, as it has no outputs; FL-bench
    evaluates the network's own head.
    """

    name = "fedproto"
    needs = "classes"
    several_networks = True
    refuses = (("weighting", "it averages no models"),)

    head: str = option("", "module whose inputs are the features; empty: the last layer")
    lam: float = option(1.0, "lambda, how strongly features are drawn to the prototypes")
    weights: str = option("clients", "who counts alike in a prototype", choices=("clients", "samples"))
    predict: str = option(
        "prototypes",
        "what is evaluated: the nearest prototype, or the network's own head",
        choices=("prototypes", "head"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("lam", self.lam >= 0, "not negative")

    def set_up(self, server: Server) -> None:
        """A prototype for each class, and whether there is one."""
        sizes = [head_sizes(model, self.head, "FedProto") for model in server.models]
        if len(set(sizes)) > 1:
            told = "; ".join(f"network {n} has {width} features" for n, (width, _) in enumerate(sizes))
            raise ValueError(f"{told}: FedProto compares features, so that all networks need as many")
        features, classes = sizes[0]
        server["prototypes"] = server.model.state().new_zeros(classes, features)
        server["known"] = server.model.state().new_zeros(classes)

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps its network omega_k, which starts from the common initial weights."""
        return {"personal": model.state()}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send the prototypes of the classes that have one."""
        return {"prototypes": server["prototypes"][server["known"] > 0], "known": server["known"]}

    def _table(self, received: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """A row for each class, and which of them are prototypes."""
        known = received["known"] > 0
        table = received["prototypes"].new_zeros(len(known), received["prototypes"].shape[1])
        table[known] = received["prototypes"]
        return table, known

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train one's own model towards the prototypes, and send one's own."""
        table, known = self._table(received)
        client.model.load(client["personal"])
        with Features(client.model, self.head) as features:

            def loss(outputs: Tensor, batch: Batch) -> Tensor:
                away = pull(features.last, batch.targets, table, known)
                return client.task.loss(outputs, batch.targets) + self.lam * away

            client.report["loss"] = Steps(client, self).train(loss)
        client["personal"] = client.model.state()
        means, counts = class_means(*client.features(client.train, self.head), classes=len(known))
        return {"prototypes": means[counts > 0], "counts": counts}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """The mean of each class over those that have it."""
        total, weight = torch.zeros_like(server["prototypes"]), torch.zeros_like(server["known"])
        for rows, counts in zip(uploads.each("prototypes"), uploads.each("counts"), strict=True):
            there = counts > 0
            share = counts if self.weights == "samples" else there.to(counts.dtype)
            total[there] += share[there, None] * rows
            weight += share
        sent = weight > 0
        prototypes = server["prototypes"].clone()
        prototypes[sent] = total[sent] / weight[sent, None]
        server["prototypes"], server["known"] = prototypes, torch.where(sent, 1.0, server["known"])

    def models(self, client: Client, received: Mapping[str, Tensor]) -> Models:
        """The nearest prototype to the features of omega_k."""
        state = client["personal"]
        if self.predict == "head" or not bool(received["known"].any()):
            return {"personal": state}
        table, known = self._table(received)

        def nearest(model: WorkingModel, inputs: Inputs) -> Tensor:
            model.load(state)
            with Features(model, self.head) as features:
                z = features(inputs)
            near = -torch.cdist(z, table, compute_mode="donot_use_mm_for_euclid_dist").square()
            furthest = near[:, known].amin(1, keepdim=True)
            return torch.where(known, near, furthest - 1)

        return {"personal": nearest}
