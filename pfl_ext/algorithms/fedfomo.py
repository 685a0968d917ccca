"""FedFomo: each client weighs other clients' models by what they do for its own validation loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Stage, Steps, Uploads, WorkingModel, option
from pfl_ext.ops import squared_distance, weighted_average

__all__ = ["FedFomo"]

_MODEL = "model/"  # before the number of the client whose model it is


@dataclass(frozen=True)
class FedFomo(Method):
    r"""FedFomo (Zhang et al., 2021): first-order model optimisation.

    Client k receives the models of M others, which with its own are :math:`\theta_n`. :math:`\bar\theta_k` is what
    its last turn began to train from, and :math:`L^v_k` the loss of its validation data:

    .. math::
        w_{kn} &= \frac{L^v_k(\bar\theta_k) - L^v_k(\theta_n)}{\|\theta_n - \bar\theta_k\|}, \quad
            w^+_{kn} = \frac{\max(w_{kn}, 0)}{\sum_m \max(w_{km}, 0)} \\
        \bar\theta_k &\leftarrow \bar\theta_k + \sum_n w^+_{kn} (\theta_n - \bar\theta_k) = \sum_n w^+_{kn} \theta_n \\
        \theta_k &\leftarrow \text{E epochs of SGD on } L_k \text{ from } \bar\theta_k \\
        P_{kn} &\leftarrow P_{kn} + w_{kn}

    The server has the newest :math:`\theta_n` of all clients and their affinity P, and sends those of the highest
    :math:`P_{kn}`, or with the probability :math:`\epsilon` any other. There is no global model.

    Readings. Where no model is better than :math:`\bar\theta_k` a client goes on from its own. Norms are those of the
    parameters; buffers are mixed by the same weights. Only models of clients that took part are sent, at first none. A
    client that never took part is evaluated with what it would begin to train from.
    :math:`\epsilon` falls by a constant in each round, by the values of the authors' code.

    PFLlib and FL-bench never explore; PFLlib sends a client its own model too. FL-bench weighs against the client's
    newest model, so that this never has a weight and is lost as soon as another is better; it sends models of the
    round before alone.
    """

    name = "fedfomo"
    needs_validation = True
    refuses = (("weighting", "its weights are those of how much a model helps"),)

    downloads: int = option(5, "M, models of other clients that are sent to one")
    explore: float = option(0.3, "epsilon, the probability with which a model is not the next best but any")
    explore_decay: float = option(0.05, "by how much epsilon falls in a round")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("downloads", self.downloads >= 1, "at least 1")
        self.check("explore", 0 <= self.explore <= 1, "from 0 to 1")
        self.check("explore_decay", self.explore_decay >= 0, "not negative")

    def set_up(self, server: Server) -> None:
        """A row for each client: theta_k, P_k, whose models are sent next (-1: nobody's); and who has sent one."""
        clients, state = server.clients, server.model.state()
        server["models"] = state.repeat(clients, 1)
        server["affinity"] = torch.zeros(clients, clients, dtype=torch.float64)
        server["chosen"] = torch.full((clients, min(self.downloads, clients - 1)), -1)
        server["known"] = torch.zeros(clients, dtype=torch.bool)

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """theta_k, and what the last turn began to train from."""
        return {"personal": model.state(), "start": model.state()}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Some others' models; for the evaluation to those alone that have none."""
        if stage == "evaluate" and server["known"][client]:
            return {}
        return {f"{_MODEL}{n}": server["models"][n] for n in server["chosen"][client].tolist() if n >= 0}

    def _mixed(self, client: Client, received: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What a turn begins to train from, and w_kn of the received models."""
        model, start = client.model, client["start"]
        models = [client["personal"], *received.values()]
        before, *losses = [self._validation_loss(client, state) for state in (start, *models)]
        weights = torch.zeros(len(models), dtype=torch.float64)
        for n, (state, loss) in enumerate(zip(models, losses, strict=True)):
            squared = squared_distance([state[: model.parameters]], [start[: model.parameters]])
            if squared > 0:
                weights[n] = (before - loss) / float(squared) ** 0.5
        positive = weights.clamp(min=0)
        if not bool(positive.any()):
            return models[0], weights[1:]
        return weighted_average([[state] for state in models], positive.tolist())[0], weights[1:]

    def _validation_loss(self, client: Client, state: Tensor) -> float:
        client.model.load(state)
        return client.loss(client.validation)

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Mix the received models and one's own, and train."""
        start, weights = self._mixed(client, received)
        client.model.load(start)
        client.report["loss"] = Steps(client, self).train()
        client["start"], client["personal"] = start, client.model.state()
        return {"model": client.model.state(), "affinity": weights}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Take over models and affinities, and choose what everybody is sent next."""
        models, affinity, known = server["models"], server["affinity"], server["known"]
        for (k, state), weights in zip(uploads.one_by_one("model"), uploads.each("affinity"), strict=True):
            received = [n for n in server["chosen"][k].tolist() if n >= 0]
            affinity[k, received] += weights
            # Buffers that the clients do not send stay as they are.
            models[k] = torch.where(server.model.stays, models[k], state)
            known[k] = True
        server["chosen"] = self._chosen(server)

    def _chosen(self, server: Server) -> Tensor:
        """Whose models are sent to each client: those of the highest affinity, or with some probability any."""
        explore = self.explore - self.explore_decay * server.round
        random, chosen = server.stream("models"), torch.full_like(server["chosen"], -1)
        for k in range(server.clients):
            # In a random order, so that equal affinities do not favour the first clients.
            shuffled = torch.randperm(server.clients, generator=random)
            others = [n for n in shuffled.tolist() if n != k and server["known"][n]]
            best = sorted(others, key=lambda n: -float(server["affinity"][k, n]))
            dice = torch.rand(chosen.shape[1], generator=random).tolist()
            for place in range(min(len(others), len(dice))):
                n = (others if dice[place] < explore else best)[0]
                chosen[k, place] = n
                others.remove(n)
                best.remove(n)
        return chosen

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """theta_k; for a client that never took part the mixture of what it receives."""
        return {"personal": client["personal"] if "personal" in client else self._mixed(client, received)[0]}
