"""SCAFFOLD: control variates take out of a client's steps what is its own, and put in what is everybody's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Stage, Steps, Uploads, WorkingModel, option

__all__ = ["SCAFFOLD"]


@dataclass(frozen=True)
class SCAFFOLD(Method):
    r"""SCAFFOLD (Karimireddy et al., 2020), Algorithm 1: control variates against client drift.

    With N clients that can be selected, of which those in S are:

    .. math::
        y_k &\leftarrow y_k - \eta\, (\nabla L_k(y_k) - c_k + c) \quad \text{K steps from } x \text{, line 10} \\
        c_k^+ &= \text{(I) } \nabla L_k(x) \quad \text{or (II) } c_k - c + \tfrac{1}{K \eta} (x - y_k)
            \quad \text{line 12} \\
        x &\leftarrow x + \eta_g \tfrac{1}{|S|} \sum_{k \in S} (y_k - x) \quad \text{lines 16 and 17} \\
        c &\leftarrow c + \tfrac{1}{N} \sum_{k \in S} (c_k^+ - c_k), \quad c_k \leftarrow c_k^+

    All control variates start at zero; where N grows, c stays their mean. (II) is the mean of the gradients that the
    steps saw and costs nothing; (I) takes one more pass over the data.

    Readings. Clients count alike, as in the paper. The control variate is added to every gradient, before momentum
    and weight decay. With momentum a gradient is in :math:`x - y_k` more than once, so (II) divides by
    :math:`\eta \|a_k\|_1` of FedNova in place of :math:`\eta K`: it stays the mean of gradients. Weight decay counts as
    part of the loss, in (I) too. Buffers are averaged and not corrected. A client sends :math:`y_k`, from which
    the server knows :math:`y_k - x`.

    PFLlib and FL-bench have (II) alone, without momentum. FL-bench's client takes as many steps as it is given epochs,
    one batch each. An older PFLlib divides by the batches of one pass, however many passes there are.
    """

    name = "scaffold"
    private = True
    refuses = (
        ("optimizer", "its equations take a change of the model for a sum of gradients, which it is of SGD"),
        ("weighting", "its equations count clients alike"),
    )

    server_lr: float = option(1.0, "eta_g, step size of the server")
    control: str = option(
        "change",
        "a client's new control variate: from the change of its model (option II), or the gradient of its loss at the "
        "received model (option I)",
        choices=("change", "gradient"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("server_lr", self.server_lr > 0, "above 0")

    def set_up(self, server: Server) -> None:
        """The server keeps the model x, and c for its parameters."""
        super().set_up(server)
        server["control"] = torch.zeros_like(server["model"][: server.model.parameters])

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps its control variate c_k, which starts at zero."""
        return {"control": model.state()[: model.parameters].zero_()}

    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """x, and c to those that train."""
        return {name: server[name] for name in (("model", "control") if stage == "train" else ("model",))}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model along corrected gradients, and bring c_k up to date."""
        model, x, c, own = client.model, received["model"], received["control"], client["control"]
        parameters = slice(model.parameters)
        if self.control == "gradient":
            new = self._gradient(client, x)
        correction = torch.zeros_like(x)
        correction[parameters] = c - own
        model.load(x)
        steps = Steps(client, self, add=model.tensors(correction))
        client.report["loss"] = steps.train()
        y = model.state()
        if self.control == "change":
            weight = self.lr * steps.accumulated
            new = own - c + (x - y)[parameters] / weight if weight else own
        client["control"] = new
        return {"model": y, "control": new - own}

    def _gradient(self, client: Client, x: Tensor) -> Tensor:
        """The gradient of L_k at x, over all of the client's data."""
        if client.privacy is not None:
            raise ValueError("control is 'gradient', which has no differentially private form; 'change' has one")
        model = client.model
        model.load(x)
        model.module.train()
        steps, total, samples = Steps(client, self), torch.zeros_like(client["control"]), 0
        for batch in client.batches(self.batch_size, name="control"):
            _, gradients = steps.gradients(batch)
            total += len(batch.rows) * torch.cat([g.reshape(-1) for g in gradients])
            samples += len(batch.rows)
        return total / max(samples, 1) + self.weight_decay * x[: model.parameters]

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Step towards the mean model; c becomes the mean of all clients' control variates."""
        mean, parameters = uploads.average(equally=True), slice(server.model.parameters)
        if self.server_lr != 1:
            x = server["model"][parameters]
            mean[parameters] = x + self.server_lr * (mean[parameters] - x)
        server["model"] = mean
        share, before = len(uploads) / server.members, 1 - server.joined / server.members
        server["control"] = before * server["control"] + share * uploads.average("control", equally=True)
