"""What the tests by hand share: a client's turn, and what it comes to by autograd on a plain module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.federation import Client, ClientRuntime, Server, Settings, WorkingModel
from pfl_ext.tasks import Classification

Turn = Callable[..., tuple[ClientRuntime, Client]]
LR = 0.1


def gradient(client: Client, state: Tensor, batch: Any, loss: Callable[..., Tensor] = F.cross_entropy) -> Tensor:
    """The gradient of a loss of logits and targets, by default the mean cross-entropy, at a state; zero for buffers."""
    client.model.load(state)
    module = client.model.module.train()
    parameters = [p for p in module.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss(module(batch.inputs), batch.targets), parameters)
    flat = torch.cat([g.flatten() for g in found])
    return F.pad(flat, (0, len(state) - len(flat)))


def features_of(w: Tensor, x: Tensor) -> Tensor:
    """What enters the head of the tests' network, 4 - 5 - 3, of a state w."""
    return F.relu(F.linear(x, w[:20].view(5, 4), w[20:25]))


def logits_of(w: Tensor, x: Tensor) -> Tensor:
    """The outputs of that network."""
    return F.linear(features_of(w, x), w[25:40].view(3, 5), w[40:43])


def slope(loss: Callable[..., Tensor], *at: Tensor) -> tuple[Tensor, ...]:
    """The gradient of a function of vectors, in each of them."""
    leaves = [x.detach().clone().requires_grad_() for x in at]
    return torch.autograd.grad(loss(*leaves), leaves, materialize_grads=True)


def samples(client: Client, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a client's samples."""
    return client._dataset.batch(rows)


def entries(model: WorkingModel, *modules: str) -> Tensor:
    """Which numbers of a state belong to these modules."""
    inside = torch.tensor([name.rpartition(".")[0] in modules for name in model.names])
    return inside.repeat_interleave(torch.tensor([shape.numel() for shape in model.shapes]))


def joined(chosen: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """A state of what is chosen and what is not."""
    state = inside.new_empty(len(chosen))
    state[chosen], state[~chosen] = inside, outside
    return state


def personalize(
    runtime: ClientRuntime, client: Client, received: Mapping[str, Tensor], sent: Mapping[str, Tensor]
) -> None:
    """What the client does for its own model while its upload is on the way."""
    client.begin_personal()
    runtime.method.personalize(client, received, sent)


def models(runtime: ClientRuntime, client: Client, **published: Tensor) -> dict[str, Tensor]:
    """The models that are evaluated at a client, once the server has published these vectors."""
    runtime.server = {**runtime.server, **published}
    return runtime.models(client, runtime.method.sends(runtime.server, client.index, "evaluate"))


def server_of(network: nn.Module, clients: int = 4, **vectors: Tensor) -> Server:
    """A server that holds these vectors, in its second round."""
    server = Server(Classification(), network, Settings(seed=7), clients)
    server.update(vectors)
    server.round = 2
    return server
