"""PerAda: personal adapters, held near a global one that the server distils (Xie et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from pfl_ext.federation import Client, Server, Stage, Steps, Uploads, WorkingModel, option

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

    With ``theory`` a run measures what the paper's theorems are about, with the layers in evaluation mode and over all
    of the clients' training samples:

    * Theorem 1: ``local_error``, :math:`\tfrac1n \sum_j 1 - h_m(x_j)_{y_j}` of each local adapter (ERR there);
    * Theorem 3: ``gradient_norm_squared`` of the server, :math:`\|\tfrac1M \sum_m \nabla L_m(w)\|^2` at the received w:
      the first of the E points of each round that the theorem has a mean over (the others would cost a message a step);
    * Theorem 4: ``personal_gradient_norm_squared``, :math:`\|\nabla L_m(v_m) + \lambda (v_m - w)\|^2`, likewise at the
      first of S points.

    For Theorem 3 clients send a gradient beside their adapters, which counts as communication.
    """

    name = "perada"
    private = True

    lam: float = option(1.0, "lambda, how strongly the personal adapter is held near the global one")
    official_lambda: bool = option(False, "lambda |v - w|^2 as in the official code, in place of half of it")
    personal_epochs: int = option(1, "S as passes over a client's data for the personal adapter in a round")
    personal_lr: float = option(0.0, "step size of the personal adapter; 0: lr")
    theory: bool = option(
        False,
        "report the gradient norms of Theorems 3 and 4 and the errors of local adapters of Theorem 1; clients send a "
        "gradient too",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("lam", self.lam >= 0, "not negative")
        self.check("personal_epochs", self.personal_epochs >= 0, "not negative")
        self.check("personal_lr", self.personal_lr >= 0, "not negative")

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Clients train their personal adapters while their uploads are on the way."""
        return ("personal",)

    def set_up(self, server: Server) -> None:
        """The model; refuses a theory that speaks of classes where there are none."""
        if self.theory and not (server.task.has_logits and server.task.one_class):
            raise ValueError(f"theory measures errors of classes; the task {server.task.name} has none: leave it out")
        super().set_up(server)

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps its personal adapter v_m, which starts from the common initial weights."""
        return {"personal": model.state()}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train the local adapter, from the received w, and send it."""
        client.model.load(received["model"])  # line 12
        measured = {"gradient": client.gradient(client.train, self.batch_size)} if self.theory else {}
        client.report["loss"] = Steps(client, self).train()  # lines 13 to 15
        if self.theory:
            logits, targets = client.outputs(client.train)
            right = client.task.rows(logits).softmax(-1).gather(-1, targets.reshape(-1, 1))
            client.report["local_error"] = float(1 - right.mean())
        return {"model": client.model.state(), **measured}  # line 16

    def personalize(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        """Train the personal adapter, which is held near the received w."""
        client.model.load(client["personal"])  # line 7
        lam = 2 * self.lam if self.official_lambda else self.lam
        if self.theory:
            apart = (client["personal"] - received["model"])[: client.model.parameters]
            gradient = client.gradient(client.train, self.batch_size) + lam * apart
            client.report["personal_gradient_norm_squared"] = float(gradient.square().sum())
        steps = Steps(client, self, anchor=received["model"], lam=lam, lr=self.personal_lr or self.lr)
        client.report["personal_loss"] = steps.train(epochs=self.personal_epochs, batches="personal")  # lines 8 to 10
        client["personal"] = client.model.state()  # line 11

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the local adapters, distil them into the average."""
        if self.theory:
            gradient = uploads.average("gradient", equally=True)
            server.report["gradient_norm_squared"] = float(gradient.square().sum())
        w = uploads.average(equally=True)  # line 18
        server["model"] = distil(server, self, [w], [uploads])[0]  # lines 19 to 22

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """(u, v_m); (u, w) for a client that never took part."""
        return {"personal": client["personal"] if "personal" in client else received["model"]}
