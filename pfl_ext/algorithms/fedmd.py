"""FedMD: clients with networks of their own agree on what public samples are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_ext.federation import (
    Batch,
    Client,
    Method,
    Server,
    Stage,
    Steps,
    Uploads,
    WorkingModel,
    mean_loss,
    option,
    outputs_of,
)

__all__ = ["FedMD"]


@dataclass(frozen=True)
class FedMD(Method):
    r"""FedMD (Li and Wang, 2019), Algorithm 1: consensus on the outputs for public samples.

    With the network :math:`f_k`, which may have another shape at each client, its weights :math:`w_k` and m clients
    that take part on public samples :math:`D_t`, drawn anew in each round:

    .. math::
        \bar f(x) &= \tfrac1m \sum_k f_k(x), \quad x \in D_t && \text{communicate, aggregate, distribute} \\
        w_k &\leftarrow \text{public epochs of SGD on } \mathrm{mean}_{x, c}\, |f_k(x)_c - \bar f(x)_c|
            && \text{digest} \\
        w_k &\leftarrow \text{E epochs of SGD on } L_k && \text{revisit}

    No weights are sent, and there is no global model.

    Readings. A turn digests the consensus of the round before, revisits, and sends the outputs on the next samples:
    the same steps, cut where the server waits. In the first round there is no consensus, and ``first_epochs`` may
    train longer on the client's own data. The paper's clients begin with the labels of the public samples; here
    these are the run's unlabelled data, whose classes may be others, so that there is nothing of that. Outputs are
    taken before the softmax and in evaluation mode. Their distance is the authors' code's, as are the 5,000 samples,
    batches of 256 and one epoch; it trains by Adam. A client that rests digests, when it takes part again, the newest
    consensus.

    FL-bench's distance is squared. Its list of public samples grows and is read from its beginning, so that those of
    the first round are digested in every round; all its clients have one network. PFLlib does not have the method.
    """

    name = "fedmd"
    private = True
    several_networks = True
    public = True

    public_samples: int = option(5000, "public samples of a round; as many as there are, where these are fewer; 0: all")
    public_epochs: int = option(1, "passes over them to digest the consensus")
    public_batch_size: int = option(256, "public samples a step of digestion takes")
    public_lr: float = option(0.0, "step size of digestion; 0: lr")
    distance: str = option(
        "absolute",
        "how far outputs are from the consensus: mean difference or its square",
        choices=("absolute", "squared"),
    )
    first_epochs: int = option(0, "passes over a client's own data before those of its first turn")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("public_samples", "public_epochs", "first_epochs"):
            self.check(name, getattr(self, name) >= 0, "not negative")
        self.check("public_batch_size", self.public_batch_size >= 1, "at least 1")
        self.check("public_lr", self.public_lr >= 0, "not negative")

    def set_up(self, server: Server) -> None:
        """The samples of the first round; no consensus yet, but room for it."""
        if server.auxiliary is None:
            raise ValueError(
                "fedmd needs public samples, and the run has no unlabelled data: name some (auxiliary, such as "
                "cifar100, or server where the partition leaves it a part)"
            )
        server["rows"] = self._drawn(server)
        shape = outputs_of(server.model, server.model.state(), server.auxiliary, server["rows"][:2]).shape[1:]
        server["consensus"] = server.model.state().new_zeros(len(server["rows"]), *shape)
        server["consensus_rows"], server["agreed"] = server["rows"].clone(), torch.zeros(1)

    def _drawn(self, server: Server) -> Tensor:
        """The rows of the public samples D_t, drawn for this round."""
        assert server.auxiliary is not None
        samples = len(server.auxiliary)
        rows = torch.randperm(samples, generator=server.stream("public"))[: self.public_samples or samples]
        return rows.to(server.auxiliary.device)

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """w_k, from the initial weights of the client's network."""
        return {"personal": model.state()}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """The next samples; the consensus on those before, once there is one."""
        if stage != "train":
            return {}
        agreed = ("consensus", "consensus_rows") if bool(server["agreed"]) else ()
        return {name: server[name] for name in ("rows", *agreed)}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Digest, revisit, and say what the next samples are."""
        client.model.load(client["personal"])
        if "consensus" in received:
            self._digest(client, received["consensus_rows"], received["consensus"])
        if self.first_epochs and "personal" not in client:
            Steps(client, self).train(epochs=self.first_epochs, batches="first")
        client.report["loss"] = Steps(client, self).train()
        client["personal"] = client.model.state()
        return {"outputs": outputs_of(client.model, client["personal"], client.public, received["rows"])}

    def _digest(self, client: Client, rows: Tensor, consensus: Tensor) -> None:
        """Train the client's model on the public samples towards the consensus."""
        apart = F.l1_loss if self.distance == "absolute" else F.mse_loss

        def loss(outputs: Tensor, batch: Batch) -> Tensor:
            return apart(outputs, consensus[batch.rows])

        client.model.module.train()
        expected = self.public_epochs * -(-len(rows) // self.public_batch_size)
        steps = Steps(client, self, lr=self.public_lr or None, expected=expected)
        batches = client.public_batches(rows, self.public_batch_size, epochs=self.public_epochs, name="public")
        client.report["public_loss"] = mean_loss(steps.take(batch, loss) for batch in batches)

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the clients' outputs, and draw the public samples of the next round."""
        server["consensus"], server["consensus_rows"] = uploads.average("outputs", equally=True), server["rows"]
        server["rows"], server["agreed"] = self._drawn(server), torch.ones(1)

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's own model w_k."""
        return {"personal": client["personal"]}
