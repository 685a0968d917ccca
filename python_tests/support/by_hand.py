"""What the tests by hand share: the gradient of the labels' loss as one vector, by autograd on a plain module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.federation import Client, Server

Turn = Callable[..., tuple[Any, Client]]
LR = 0.1


def gradient(client: Client, state: Tensor, batch: Any) -> Tensor:
    """The gradient of the mean cross-entropy in the parameters at a state, zero for buffers."""
    client.model.load(state)
    module = client.model.module.train()
    parameters = list(module.parameters())
    found = torch.autograd.grad(F.cross_entropy(module(batch.inputs), batch.targets), parameters)
    flat = torch.cat([g.flatten() for g in found])
    return F.pad(flat, (0, len(state) - len(flat)))


def server_of(network: nn.Module, clients: int = 4, **vectors: Tensor) -> Server:
    """A server that holds these vectors, in its second round."""
    server = Server(vectors, network, 7, clients)
    server.round = 2
    return server
