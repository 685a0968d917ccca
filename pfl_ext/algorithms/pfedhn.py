"""pFedHN: the server's hypernetwork makes each client's model out of the client's embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from pfl_ext.federation import Client, Method, Server, Stage, Steps, Uploads, option
from pfl_ext.nn import HyperNetwork

__all__ = ["PFedHN"]

_EMBEDDINGS, _BUFFERS, _MOMENTUM = "embeddings", "buffers", "momentum/"


@dataclass(frozen=True)
class PFedHN(Method):
    r"""pFedHN (Shamsian et al., 2021), Algorithm 1: a hypernetwork makes each client its model.

    .. math::
        \theta_k &= h(v_k; \varphi) \\
        \tilde\theta_k &\leftarrow \text{E epochs of SGD on } L_k \text{ from } \theta_k \\
        (\varphi, v) &\leftarrow (\varphi, v) - \alpha\, \frac1C \sum_k J_k^\top (\theta_k - \tilde\theta_k),
            \quad J_k = \frac{\partial \theta_k}{\partial (\varphi, v)}

    :math:`v_k` is client k's embedding, h the :class:`~pfl_ext.nn.HyperNetwork`. The server keeps both; what is sent
    is the generated weights :math:`\theta_k` down and their change up. The evaluated model of a client is
    :math:`\theta_k`, also of one that never took part, whose embedding is as it was drawn.

    Readings: the paper's rounds have one client; of several the mean of their gradients is taken, which is the gradient
    of its objective. As in the official code the server takes SGD steps with momentum and weight decay, and the norm
    of its gradient and of those of the clients' steps is cut at ``clip``. Only trained parameters are generated;
    buffers are averaged.

    The heads are large: see :class:`~pfl_ext.nn.HyperNetwork`.
    """

    name = "pfedhn"
    refuses = (("weighting", "its server takes a gradient, and averages no models"),)

    embedding: int = option(0, "length of a client's embedding; 0: 1 + a quarter of the number of clients")
    width: int = option(100, "width of the hypernetwork")
    hidden_layers: int = option(3, "hidden layers of the hypernetwork")
    server_lr: float = option(0.01, "alpha, step size of the hypernetwork")
    embedding_lr: float = option(0.0, "step size of the embeddings; 0: that of the hypernetwork")
    server_momentum: float = option(0.9, "momentum of hypernetwork and embeddings")
    server_weight_decay: float = option(1e-3, "weight decay of hypernetwork and embeddings")
    clip: float = option(50.0, "largest norm of a gradient, the server's and that of a client's step; 0: any")
    start: str = option(
        "linear",
        "how the heads begin: as torch's linear layers do (official code), or around the network's own initial weights",
        choices=("linear", "network"),
    )

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        for name in ("embedding", "hidden_layers", "embedding_lr", "server_weight_decay"):
            self.check(name, getattr(self, name) >= 0, "not negative")
        self.check("width", self.width >= 1, "at least 1")
        self.check("server_lr", self.server_lr > 0, "above 0")
        self.check("server_momentum", 0 <= self.server_momentum < 1, "from 0 to below 1")

    # ---- the hypernetwork --------------------------------------------------------------------------------------------

    def _hypernetwork(self, inputs: int, outputs: int) -> HyperNetwork:
        return HyperNetwork(inputs, outputs, self.width, self.hidden_layers)

    def _weights(self, vectors: Mapping[str, Tensor], clients: list[int]) -> Tensor:
        """h(v_k; phi) for these clients, [clients, weights]."""
        embeddings = vectors[_EMBEDDINGS]
        with torch.device("meta"):  # its numbers are the server's
            hypernetwork = self._hypernetwork(embeddings.shape[1], vectors["heads.bias"].numel())
        own = {name: vectors[name] for name, _ in hypernetwork.named_parameters()}
        weights = functional_call(hypernetwork, own, (embeddings[clients],))
        assert isinstance(weights, Tensor)
        return weights

    def set_up(self, server: Server) -> None:
        """Draw hypernetwork and embeddings; buffers, where there are such, are the network's."""
        model, length = server.model, self.embedding or 1 + server.clients // 4
        weights, buffers = model.state().tensor_split((model.parameters,))
        if len(buffers):
            server[_BUFFERS] = buffers
        own = server.stream("hypernetwork")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=own)))
            hypernetwork = self._hypernetwork(length, len(weights)).to(model.dtype)
        vectors = {name: p.detach().to(model.device) for name, p in hypernetwork.named_parameters()}
        if self.start == "network":
            vectors["heads.bias"] = weights
        vectors[_EMBEDDINGS] = torch.randn(server.clients, length, generator=own, dtype=model.dtype).to(model.device)
        server |= vectors
        if self.server_momentum:
            server |= {f"{_MOMENTUM}{name}": torch.zeros_like(vector) for name, vector in vectors.items()}

    # ---- a round -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """theta_k, as a state of the whole model."""
        weights = self._weights(server, [client])[0]
        return {"model": torch.cat([weights, server[_BUFFERS]]) if _BUFFERS in server else weights}

    def train_generated(self, client: Client) -> float:
        """E epochs of SGD; returns the mean loss."""
        return Steps(client, self).train()

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train the received model and send how it has changed."""
        model = client.model
        model.load(received["model"])
        client.report["loss"] = self.train_generated(client)
        state = model.state()
        weights, buffers = state.tensor_split((model.parameters,))
        sent = {"difference": received["model"][: model.parameters] - weights}
        return sent | {_BUFFERS: buffers} if len(buffers) else sent

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """A step of hypernetwork and embeddings by what the clients' changes are worth to them."""
        names = [name for name in server if name != _BUFFERS and not name.startswith(_MOMENTUM)]
        leaves = {name: server[name].detach().requires_grad_() for name in names}
        difference = torch.stack(uploads.each("difference")) / len(uploads)
        gradients = torch.autograd.grad(self._weights(leaves, uploads.clients), list(leaves.values()), difference)
        norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
        server.report["gradient_norm"] = norm
        scale = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0  # as torch's clip_grad_norm_
        for name, gradient in zip(names, gradients, strict=True):
            step = gradient.mul_(scale).add_(server[name], alpha=self.server_weight_decay)
            if self.server_momentum:
                step = server[_MOMENTUM + name].mul_(self.server_momentum).add_(step)
            lr = self.embedding_lr if name == _EMBEDDINGS and self.embedding_lr else self.server_lr
            server[name].add_(step, alpha=-lr)  # in place, as all of this may be gigabytes
        if _BUFFERS in server:
            server[_BUFFERS] = uploads.average(_BUFFERS)

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """theta_k."""
        return {"personal": received["model"]}
