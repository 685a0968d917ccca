"""pFedHN: the server's hypernetwork makes each client's model out of the client's embedding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl_ext.federation import (
    Client,
    Method,
    Server,
    SideModule,
    Stage,
    Steps,
    Uploads,
    WorkingModel,
    option,
)
from pfl_ext.nn import HyperNetwork

__all__ = ["PFedHN", "PFedHNPC"]

_HYPERNETWORK, _EMBEDDINGS, _BUFFERS, _MOMENTUM = "hypernetwork", "embeddings", "buffers", "momentum/"


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
    buffers are averaged. What the server does has the authors' defaults. What a client does has those of all methods,
    so that methods compare on the same batches: the authors take 50 steps (``local_steps``) of batches of 64, with the
    step size 0.005 and weight decay 5e-5.

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
        super().__post_init__()
        for name in ("embedding", "hidden_layers", "embedding_lr", "server_weight_decay"):
            self.check(name, getattr(self, name) >= 0, "not negative")
        self.check("width", self.width >= 1, "at least 1")
        self.check("server_lr", self.server_lr > 0, "above 0")
        self.check("server_momentum", 0 <= self.server_momentum < 1, "from 0 to below 1")

    # ---- the hypernetwork --------------------------------------------------------------------------------------------

    def _hypernetwork(self, inputs: int, outputs: int) -> SideModule:
        return SideModule(lambda: HyperNetwork(inputs, outputs, self.width, self.hidden_layers))

    def _of(self, server: Mapping[str, Tensor]) -> SideModule:
        """The hypernetwork that these vectors are of: a row of its heads has ``width`` numbers and one more."""
        length = server[_EMBEDDINGS].shape[1]
        beyond = len(server[_HYPERNETWORK]) - self._hypernetwork(length, 1).size
        return self._hypernetwork(length, 1 + beyond // (self.width + 1))

    def generated(self, model: WorkingModel) -> Tensor:
        """Which numbers of a state the hypernetwork makes: all that is trained."""
        return torch.arange(model.parameters, device=model.device)

    def set_up(self, server: Server) -> None:
        """Draw hypernetwork and embeddings; buffers, where there are such, are the network's."""
        model, length = server.model, self.embedding or 1 + server.clients // 4
        state, own = model.state(), server.stream("hypernetwork")
        weights, buffers = state[self.generated(model)], state[model.parameters :]
        if len(buffers):
            server[_BUFFERS] = buffers
        hypernetwork = self._hypernetwork(length, len(weights))
        vector = hypernetwork.drawn(own, model)
        if self.start == "network":
            hypernetwork.pieces(vector)["heads.bias"].copy_(weights)
        embeddings = torch.randn(server.clients, length, generator=own, dtype=model.dtype).to(model.device)
        server |= {_HYPERNETWORK: vector, _EMBEDDINGS: embeddings}
        if self.server_momentum:
            server |= {_MOMENTUM + name: torch.zeros_like(server[name]) for name in (_HYPERNETWORK, _EMBEDDINGS)}

    # ---- a round -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sends(self, server: Mapping[str, Tensor], client: int, stage: Stage) -> dict[str, Tensor]:
        """Send the generated weights theta_k, with the buffers behind them."""
        weights = self._of(server)(server[_HYPERNETWORK], server[_EMBEDDINGS][client])
        return {"model": torch.cat([weights, server[_BUFFERS]]) if _BUFFERS in server else weights}

    def state_of(self, client: Client, received: Mapping[str, Tensor]) -> Tensor:
        """The received model as a state."""
        return received["model"]

    def train_generated(self, client: Client) -> float:
        """E epochs of SGD; returns the mean loss."""
        return Steps(client, self).train()

    def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Train the received model and send how it has changed."""
        model, made = client.model, self.generated(client.model)
        model.load(self.state_of(client, received))
        client.report["loss"] = self.train_generated(client)
        state = model.state()
        sent = {"difference": received["model"][: len(made)] - state[made]}
        return sent | ({_BUFFERS: state[model.parameters :]} if model.size > model.parameters else {})

    def aggregate(self, server: Server, uploads: Uploads) -> None:
        """A step of hypernetwork and embeddings by what the clients' changes are worth to them."""
        hypernetwork, vectors = self._of(server), {name: server[name] for name in (_HYPERNETWORK, _EMBEDDINGS)}
        leaves = hypernetwork.leaves(vectors[_HYPERNETWORK])
        embeddings = vectors[_EMBEDDINGS].detach().requires_grad_()
        weights = hypernetwork(leaves, embeddings[uploads.clients])
        difference = torch.stack(uploads.each("difference")) / len(uploads)
        gradients = torch.autograd.grad(weights, [*leaves.values(), embeddings], difference)
        norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
        server.report["gradient_norm"] = norm
        scale = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0  # as torch's clip_grad_norm_
        into = [*hypernetwork.pieces(vectors[_HYPERNETWORK]).values(), vectors[_EMBEDDINGS]]
        kept: list[Tensor] = []
        if self.server_momentum:
            momenta = hypernetwork.pieces(server[_MOMENTUM + _HYPERNETWORK])
            kept = [*momenta.values(), server[_MOMENTUM + _EMBEDDINGS]]
        for i, (vector, gradient) in enumerate(zip(into, gradients, strict=True)):
            step = gradient.mul_(scale).add_(vector, alpha=self.server_weight_decay)
            if kept:
                step = kept[i].mul_(self.server_momentum).add_(step)
            lr = self.embedding_lr if vector is vectors[_EMBEDDINGS] and self.embedding_lr else self.server_lr
            vector.add_(step, alpha=-lr)  # in place, as all of this may be gigabytes
        if _BUFFERS in server:
            server[_BUFFERS] = uploads.average(_BUFFERS)

    def models(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model theta_k that the hypernetwork makes for the client."""
        return {"personal": self.state_of(client, received)}


@dataclass(frozen=True)
class PFedHNPC(PFedHN):
    r"""pFedHN-PC (Shamsian et al., 2021): pFedHN with a personal classifier.

    The hypernetwork makes the representation :math:`\theta_k = h(v_k; \varphi)`; the head :math:`\omega_k` stays with
    the client, which trains both by the E epochs and sends the change of :math:`\theta_k` alone. So clients whose
    labels mean different things need not share a head.

    Reading: the paper's objective minimises over :math:`\omega_k` in an inner problem; as in the authors' code the
    head goes on from the client's last turn, in the same steps as :math:`\theta_k`.
    """

    name = "pfedhn-pc"

    head: str = option("", "module that stays with the client; empty: the last layer")

    def generated(self, model: WorkingModel) -> Tensor:
        """All that is trained but the head."""
        own, size = model.part(self.head), model.dtype
        inside = model.whole((own, torch.ones(own.size, dtype=size)), (~own, torch.zeros((~own).size, dtype=size)))
        return (inside[: model.parameters] == 0).nonzero().flatten().to(model.device)

    def keeps(self, model: WorkingModel) -> dict[str, Tensor]:
        """The client keeps its head omega_k, which starts from the common initial weights."""
        return {"head": model.part(self.head).read()}

    def state_of(self, client: Client, received: Mapping[str, Tensor]) -> Tensor:
        """The received representation under the client's head."""
        model, made = client.model, self.generated(client.model)
        representation, buffers = received["model"].tensor_split((len(made),))
        state = received["model"].new_zeros(model.size)
        state[made], state[model.parameters :] = representation, buffers
        own = model.part(self.head)
        return model.whole((own, client["head"]), (~own, (~own).of(state)))

    def train_generated(self, client: Client) -> float:
        """E epochs of SGD of both parts; the head is kept."""
        loss = super().train_generated(client)
        client["head"] = client.model.part(self.head).read()
        return loss
