"""FedNova: clients that take more steps do not pull the global model further their way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Steps, Uploads, option

__all__ = ["FedNova"]


@dataclass(frozen=True)
class FedNova(Method):
    r"""FedNova (Wang et al., 2020): normalised averaging.

    .. math::
        w_k &\leftarrow \tau_k \text{ steps of SGD on } L_k \text{ from } w \\
        d_k &= (w - w_k) / \|a_k\|_1 \\
        w &\leftarrow w - \tau_\text{eff} \sum_k \tfrac{n_k}{n} d_k,
            \quad \tau_\text{eff} = \sum_k \tfrac{n_k}{n} \|a_k\|_1

    :math:`a_k` says how often each gradient is in the change :math:`w - w_k` (``Steps.accumulated``), so that
    :math:`d_k` is a mean of gradients times the step size, however many steps there were. Clients send it and
    :math:`\|a_k\|_1`. Where all take as many steps it is FedAvg.

    Readings. n is the sum over the clients that sent something. Weight decay counts as part of the loss. Buffers are
    sent as they are and averaged. The paper's momentum at the server is left out; ``server_lr`` scales its step.
    Neither PFLlib nor FL-bench has the method.
    """

    name = "fednova"
    private = True
    refuses = (("optimizer", "its equations take a change of the model for a sum of gradients, which it is of SGD"),)

    server_lr: float = option(1.0, "step size of the server, in units of the mean number of steps")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("server_lr", self.server_lr > 0, "above 0")

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model; send its change for one step, and for how many it stands."""
        model, w = client.model, received["model"]
        model.load(w)
        steps = Steps(client, self)
        client.report["loss"] = steps.train()
        norm, parameters = steps.accumulated, slice(model.parameters)
        direction = model.state()
        direction[parameters] = (w[parameters] - direction[parameters]) / (norm or 1.0)
        return {"direction": direction, "norm": w.new_tensor([norm])}

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Step along the mean direction, as far as clients went in the mean."""
        model, w, parameters = uploads.average("direction"), server["model"], server.model.parameters
        effective = self.server_lr * uploads.average("norm")
        model[:parameters] = w[:parameters] - effective * model[:parameters]
        # Buffers that the clients do not send stay as they are.
        model[parameters:] = torch.where(server.model.stays, w, model)[parameters:]
        server["model"] = model
