"""FedAsync: each upload is mixed into the global model when it arrives; personal models as in Ditto."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Server, Steps, Uploads, option

from .ditto import Ditto

__all__ = ["FedAsync"]


@dataclass(frozen=True)
class FedAsync(Ditto):
    r"""FedAsync (Xie et al., 2019), combined with Ditto as in Table 9 of spectral co-distillation.

    A client trains :math:`w_k` from the :math:`w_\tau` it received, by SGD on
    :math:`L_k(\cdot) + \frac{\rho}{2} \|\cdot - w_\tau\|^2`, and :math:`v_k` near it as in Ditto. When its upload
    arrives the server has changed its model :math:`t - \tau` times and takes

    .. math:: w_{t+1} = (1 - \alpha_t)\, w_t + \alpha_t\, w_k, \qquad \alpha_t = \alpha\, s(t - \tau)

    with :math:`s(x) = 1`, :math:`(x + 1)^{-a}` (polynomial), or 1 up to b and :math:`1 / (a (x - b) + 1)` beyond it
    (hinge). A round is one upload. Personal epochs 0 is FedAsync alone.
    """

    name = "fedasync"
    refuses = (("weighting", "it averages no models"),)

    alpha: float = option(0.6, "alpha, how much of an upload without staleness is mixed in")
    staleness: str = option("polynomial", "s, how staleness counts", choices=("constant", "polynomial", "hinge"))
    a: float | None = option(None, "a of the polynomial and of the hinge (default: the paper's, 0.5 and 10)")
    b: float = option(4.0, "b of the hinge")
    rho: float = option(0.005, "weight of the proximal term of the local training")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("alpha", 0 < self.alpha <= 1, "above 0, up to 1")
        for name in ("b", "rho"):
            self.check(name, getattr(self, name) >= 0, "not negative")
        self.check("a", self.a is None or self.a >= 0, "not negative")

    @property
    def buffer(self) -> int:
        """One: every upload changes the server's model."""
        return 1

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model, held near it."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self, anchor=received["model"], lam=self.rho).train()
        return {"model": client.model.state()}

    def weight(self, staleness: int) -> float:
        """The factor s of an upload whose model is ``staleness`` changes of the server's model old."""
        if self.staleness == "constant":
            return 1.0
        if self.staleness == "polynomial":
            return float((staleness + 1) ** -(0.5 if self.a is None else self.a))
        return 1.0 if staleness <= self.b else 1 / ((10.0 if self.a is None else self.a) * (staleness - self.b) + 1)

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """Mix what has arrived into the model."""
        for model, staleness in zip(uploads.each("model"), uploads.staleness, strict=True):
            server["model"] = torch.lerp(server["model"], model, self.alpha * self.weight(staleness))
