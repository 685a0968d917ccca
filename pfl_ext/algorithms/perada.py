"""PerAda: personal adapters, held near a global one that the server distils (Xie et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Server, Uploads, WorkingModel, local_sgd, option

from .fedavg import average
from .server_distillation import DistillingMethod, distil

__all__ = ["PerAda"]


@dataclass(frozen=True)
class PerAda(DistillingMethod):
    r"""PerAda (Xie et al., 2024), Algorithm 1: personal adapters near a global one that the server distils.

    u are the frozen weights; w, :math:`v_m` and :math:`\theta_m` are what the network trains: its adapters,
    normalisation and head (``adapters`` and ``freeze="backbone"`` of the network). A selected client m

    .. math::
        v_m &\leftarrow v_m - \eta_p \big(\nabla L_m(u, v_m) + \lambda (v_m - w)\big)
            && \text{S steps, line 10} \\
        \theta_m &\leftarrow \theta_m - \eta_l \nabla L_m(u, \theta_m) && \text{E steps from } w \text{, line 15}

    and sends :math:`\theta_m`. The server averages without weights (line 18) and distils (line 21, see
    :func:`~pfl_ext.algorithms.server_distillation.distil`):

    .. math:: w \leftarrow \tfrac{1}{|S_t|} \sum_m \theta_m, \qquad
              w \leftarrow w - \eta_g \nabla_w \mathrm{KL}\big(\sigma(\overline{h}), \sigma(g)\big)
              \quad \text{R steps}

    with :math:`\overline h` the mean of the logits of :math:`(u, \theta_m)` and g those of (u, w). With
    ``kd_steps=0`` it is the paper's PerAda w/o KD.

    Readings. S and E are passes over the data, as Table 8 has them. Personal and local steps see different batches.
    Neither sees what the other does, so the personal ones, which the algorithm has first, may run while
    :math:`\theta_m` is on its way.
    What is kept and sent are the trained numbers, and running statistics of batch normalisation that is not frozen:
    those of :math:`\theta_m` are averaged with it, those of :math:`v_m` are its own. Official code takes
    :math:`\lambda \|v - w\|^2` for the term: twice the gradient (``official_lambda``).
    """

    name = "perada"
    private = True

    lam: float = option(1.0, "lambda, how strongly the personal adapter is held near the global one")
    official_lambda: bool = option(False, "lambda |v - w|^2 as in the official code, in place of half of it")
    personal_epochs: int = option(1, "S as passes over a client's data for the personal adapter in a round")
    personal_lr: float = option(0.0, "step size of the personal adapter; 0: lr")

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.check("lam", self.lam >= 0, "not negative")
        self.check("personal_epochs", self.personal_epochs >= 0, "not negative")
        self.check("personal_lr", self.personal_lr >= 0, "not negative")

    def server_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """w."""
        if bool((model.local & model.changing).any()):
            raise ValueError("PerAda's adapters travel with their running statistics: buffers cannot be local with it")
        return {"adapter": model.read(model.changing)}

    def client_state(self, model: WorkingModel) -> dict[str, Tensor]:
        """v_m, from the common initial weights."""
        return {"personal": model.read(model.changing)}

    def received(self) -> tuple[str, ...]:
        """w."""
        return ("adapter",)

    def trained_parameters(self, model: WorkingModel) -> int:
        """Those of two adapters."""
        return 2 * super().trained_parameters(model)

    def client_round(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The local adapter, from w."""
        model, part, w = client.model, client.model.changing, received["adapter"]
        model.write(part, w)  # line 12
        client.report["loss"] = local_sgd(client, self)  # lines 13 to 15
        stays = model.server[part]  # buffers that stay as the server has them
        return {"adapter": torch.where(stays, w, model.read(part))}  # line 16

    def personal_round(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        """The personal adapter, towards w."""
        model, part = client.model, client.model.changing
        model.write(part, client["personal"])  # line 7
        client.report["personal_loss"] = local_sgd(  # lines 8 to 10
            client,
            self,
            anchor=model.whole((part, received["adapter"])),
            lam=2 * self.lam if self.official_lambda else self.lam,
            epochs=self.personal_epochs,
            lr=self.personal_lr or self.lr,
            batches="personal",
        )
        client["personal"] = model.read(part)  # line 11

    def server_round(self, server: Server, uploads: Uploads) -> None:
        """Average the local adapters, distil them into the average."""
        model = server.model
        part = model.changing
        start = model.whole((part, average(uploads, "adapter", equally=True)))  # line 18
        distilled = distil(  # lines 19 to 22
            server, self, start, lambda: (model.whole((part, theta)) for theta in uploads["adapter"])
        )
        server["adapter"] = distilled[part]

    def evaluated(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(u, w) and (u, v_m)."""
        model, part = client.model, client.model.changing
        return {
            "global": model.whole((part, received["adapter"])),
            "personal": model.whole((part, client["personal"])),
        }
