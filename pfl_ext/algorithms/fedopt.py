"""FedAdagrad, FedAdam and FedYogi: the server's step has a size of its own for every weight."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import Client, Method, Server, Steps, Uploads, option

__all__ = ["AdaptiveServer", "FedAdagrad", "FedAdam", "FedYogi"]


@dataclass(frozen=True)
class AdaptiveServer(Method):
    r"""What FedAdagrad, FedAdam and FedYogi share (Reddi et al., 2021, Algorithm 2): everything but v.

    .. math::
        w_k &\leftarrow \text{E epochs of SGD on } L_k \text{ from } w \\
        \Delta &= \sum_k \tfrac{n_k}{n} (w_k - w) \\
        m &\leftarrow \beta_1 m + (1 - \beta_1) \Delta \\
        v &\leftarrow \text{what the method makes of } v \text{ and } \Delta^2 \\
        w &\leftarrow w + \eta_s \frac{m}{\sqrt v + \tau}

    m starts at zero and v at :math:`\tau^2`, the least that the algorithm accepts. There is no correction of their
    bias.

    Readings. Clients are weighed by their samples; Algorithm 2 has equal weights. Buffers are averaged: steps of a
    size of their own would make a running variance negative.

    The defaults of :math:`\beta` and :math:`\tau` are those of the paper's experiments, which choose :math:`\eta_s` for
    each task by a grid and so have no value for all; 0.1 is FL-bench's.

    FL-bench's v starts at zero, and its ``beta2`` is 0.999. PFLlib has none of the three.
    """

    private = True

    server_lr: float = option(0.1, "eta_s, step size of the server")
    beta1: float = option(0.9, "how much of the mean change m stays in a round")
    tau: float = option(1e-3, "how far steps adapt: the less the further")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("server_lr", self.server_lr > 0, "above 0")
        self.check("beta1", 0 <= self.beta1 < 1, "from 0 to below 1")
        self.check("tau", self.tau > 0, "above 0")

    def set_up(self, server: Server) -> None:
        """w, and m and v for its parameters."""
        super().set_up(server)
        parameters = server["model"][: server.model.parameters]
        server["mean"] = torch.zeros_like(parameters)
        server["square"] = torch.full_like(parameters, self.tau**2)

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train a copy of the global model."""
        client.model.load(received["model"])
        client.report["loss"] = Steps(client, self).train()
        return {"model": client.model.state()}

    @abc.abstractmethod
    def square(self, v: Tensor, squared: Tensor) -> Tensor:
        r"""The new v, of the old one and :math:`\Delta^2`."""

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """A step along m, each weight's as long as its v says."""
        model = uploads.average()
        parameters = slice(len(server["mean"]))
        w = server["model"][parameters]
        change = model[parameters] - w
        server["mean"] = self.beta1 * server["mean"] + (1 - self.beta1) * change
        server["square"] = self.square(server["square"], change.square())
        model[parameters] = w + self.server_lr * server["mean"] / (server["square"].sqrt() + self.tau)
        server["model"] = model


@dataclass(frozen=True)
class FedAdagrad(AdaptiveServer):
    r"""FedAdagrad (Reddi et al., 2021), Algorithm 2: the more a weight has changed, the shorter its steps become.

    .. math:: v \leftarrow v + \Delta^2

    The rest is in :class:`AdaptiveServer`. The paper runs it without momentum.
    """

    name = "fedadagrad"

    beta1: float = option(0.0, "how much of the mean change m stays in a round")

    def square(self, v: Tensor, squared: Tensor) -> Tensor:
        """The sum of all squares."""
        return v + squared


@dataclass(frozen=True)
class FedAdam(AdaptiveServer):
    r"""FedAdam (Reddi et al., 2021), Algorithm 2: steps are shorter where weights have changed much lately.

    .. math:: v \leftarrow \beta_2 v + (1 - \beta_2) \Delta^2

    The rest is in :class:`AdaptiveServer`.
    """

    name = "fedadam"

    beta2: float = option(0.99, "how much of the mean square v stays in a round")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("beta2", 0 <= self.beta2 < 1, "from 0 to below 1")

    def square(self, v: Tensor, squared: Tensor) -> Tensor:
        """The mean of squares, older ones counting less."""
        return self.beta2 * v + (1 - self.beta2) * squared


@dataclass(frozen=True)
class FedYogi(AdaptiveServer):
    r"""FedYogi (Reddi et al., 2021), Algorithm 2: as FedAdam, but v falls slowly where changes become small.

    .. math:: v \leftarrow v - (1 - \beta_2) \Delta^2 \operatorname{sign}(v - \Delta^2)

    The rest is in :class:`AdaptiveServer`.
    """

    name = "fedyogi"

    beta2: float = option(0.99, "1 - beta2 is how far v goes towards a square, in units of that square")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("beta2", 0 <= self.beta2 < 1, "from 0 to below 1")

    def square(self, v: Tensor, squared: Tensor) -> Tensor:
        """Towards the square, by a part of it."""
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)
