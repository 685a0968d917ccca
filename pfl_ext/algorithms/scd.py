"""Spectral co-distillation: generic (global) and personal model teach each other through their spectra."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import (
    Batch,
    Client,
    Method,
    Server,
    Stage,
    Steps,
    Uploads,
    WorkingModel,
    option,
)
from pfl_ext.federation.steps import Loss
from pfl_ext.ops import SpectralTeacher, spectral_divergence

from .new_clients import NewClients

__all__ = ["SCD"]

_FORMS = ("normalized", "mean", "paper", "generalized")


@dataclass(frozen=True)
class SCD(NewClients, Method):
    r"""Spectral co-distillation (Chen et al., 2023), Algorithm 1: two models that teach each other spectra.

    With :math:`s(w) = |\mathrm{DFT}(w)|` of the trained weights in a row and :math:`\hat s` its first
    :math:`\lceil \tau d \rceil` entries, client k of a round takes

    .. math::
        w_{G,k} &\leftarrow E_G \text{ epochs of SGD from } w_G \text{ on }
            \mathrm{CE} + \lambda_g D(\hat s(w_{G,k}) \,\|\, \hat s(w_{p,k})) \\
        w_{p,k} &\leftarrow E_p \text{ epochs of SGD on } \mathrm{CE} + \lambda_p D(s(w_{p,k}) \,\|\, s(w_{G,k}))

    and the server averages the :math:`w_{G,k}`, weighted by samples. The teacher of each step is fixed, so its spectrum
    is transformed once a turn.

    The second line runs while :math:`w_{G,k}` is on its way to the server and the new :math:`w_G` on its way back: the
    wait-free protocol (:mod:`pfl_ext.federation.clock`).

    Readings. D is a true KL of normalised spectra (:mod:`pfl_ext.ops.spectral` says why). ``"mean"`` is the same KL as
    many times larger as entries are compared: the scale at which the paper's weights matter. The personal model is
    taught at that scale (``form_p``), which lifts it; the generic one is not (``form_g``), which would cost it points
    (docs/scd.md). Both models see the same batches. :math:`\tau = 0` compares nothing: no generic term. The official
    code's spectral term has no gradient; this one has. What has one there is :math:`\beta \|w_{p,k} - w_{G,k}\|_2`, not
    squared, which the paper does not mention (``beta``); its generic training begins from the same tensors as the
    personal one, and the personal accuracy that it logs is the last client's. Without selection of all clients
    (Appendix F) those that are not selected rest, or train their personal models against the generic one that is
    broadcast; a step cap is the setting ``personal_cap``.
    """

    name = "scd"

    momentum: float = option(0.5, "momentum of the local SGD; it starts anew in each round")
    lam_g: float = option(0.05, "lambda_g, weight of the spectral term of the global model; 0: w/o SCD-GM")
    lam_p: float = option(0.01, "lambda_p, weight of the spectral term of the personal model; 0: w/o SCD-PM")
    tau: float = option(0.4, "part of the spectrum that the global model is taught")
    form_g: str = option(
        "normalized",
        "form of the global model's divergence: spectra divided by their sums or means, or the printed one, or its "
        "generalised KL",
        choices=_FORMS,
    )
    form_p: str = option("mean", "form of the personal model's divergence, out of the same", choices=_FORMS)
    beta: float = option(
        0.0, "weight of the distance |w_p - w_G| of the official code's personal loss (there 0.2); 0: none"
    )
    scope: str = option(
        "model", "one transform of all weights, as in the paper, or one of each tensor", choices=("model", "tensor")
    )
    personal_epochs: int = option(1, "E_p, passes over a client's data for the personal model in a round")
    broadcast: bool = option(
        False, "clients that were not selected receive the global model too and train their personal one against it"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("lam_g", self.lam_g >= 0, "not negative")
        self.check("lam_p", self.lam_p >= 0, "not negative")
        self.check("beta", self.beta >= 0, "not negative")
        self.check("tau", 0 <= self.tau <= 1, "from 0 to 1")
        self.check("personal_epochs", self.personal_epochs >= 0, "not negative")

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Beside the upload; of clients that were not selected too, if the generic model is broadcast."""
        return (*super().stages, "rest") if self.broadcast else super().stages

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps its personal model w_p, which starts from the common initial weights."""
        return {"personal": model.state()}

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """GMUpdate: the generic model, taught by the client's personal one."""
        client.model.load(received["model"])
        loss = self._taught(client, client["personal"], self.form_g, self.lam_g, self.tau)
        client.report["loss"] = Steps(client, self).train(loss)
        return {"model": client.model.state()}

    def personalize(self, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]) -> None:
        """PMUpdate: the personal model, taught by the generic one that was sent, or broadcast (Appendix F)."""
        if client.stage == "finish":  # Figure 3
            return self.fine_tune_if_new(client, received["model"])
        client.model.load(client["personal"])
        generic = sent["model"] if client.stage == "personal" else received["model"]
        loss = self._near(client, generic, self._taught(client, generic, self.form_p, self.lam_p, 1.0))
        client.report["personal_loss"] = Steps(client, self).train(loss, epochs=self.personal_epochs)
        client["personal"] = client.model.state()

    def _taught(self, client: Client, teacher: Tensor, form: str, lam: float, tau: float) -> Loss:
        """CE + lam D(first tau of the working model's spectrum || that of the teacher's)."""
        if lam == 0 or tau == 0:
            return lambda logits, batch: client.task.loss(logits, batch.targets)
        spectrum = SpectralTeacher(client.model.tensors(teacher), tau=tau, scope=self.scope)  # type: ignore[arg-type]

        def loss(logits: Tensor, batch: Batch) -> Tensor:
            divergence = spectral_divergence(client.model.trained, spectrum, form=form)  # type: ignore[arg-type]
            return client.task.loss(logits, batch.targets) + lam * divergence

        return loss

    def _near(self, client: Client, generic: Tensor, loss: Loss) -> Loss:
        """That loss with beta times the distance of the working model from the generic one, which is not squared."""
        if self.beta == 0:
            return loss
        fixed = client.model.tensors(generic)

        def nearer(logits: Tensor, batch: Batch) -> Tensor:
            apart = [torch.linalg.vector_norm(w - g) for w, g in zip(client.model.trained, fixed, strict=True)]
            distance: Tensor = torch.linalg.vector_norm(torch.stack(apart))
            return loss(logits, batch) + self.beta * distance

        return nearer

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Average the clients' models, weighted by samples."""
        server["model"] = uploads.average()

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The client's personal model."""
        return {"personal": self.personal_of(client, received["model"])}
