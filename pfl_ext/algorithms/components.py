"""What methods with several models at the server share: how these begin, and how they are sent."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pfl_ext.federation import Server, WorkingModel

__all__ = ["drawn_states", "kept_buffers", "sent_states", "states"]

_NAME = "model/"  # before the number of a component


def drawn_states(server: Server, count: int) -> Tensor:
    """States of the network with different initial weights, a row each; the first is the network's own.

    Raises:
        ValueError: the network has no modules that could draw weights.
    """
    found = [server.model.state()]
    module: nn.Module = copy.deepcopy(server.model.module)
    trained = (m for m in module.modules() if any(p.requires_grad for p in m.parameters(recurse=False)))
    drawing: list[Any] = [m for m in trained if callable(getattr(m, "reset_parameters", None))]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(torch.randint(2**62, (), generator=server.stream("components"))))
        for _ in range(count - 1):
            for layer in drawing:
                layer.reset_parameters()
            found.append(WorkingModel(module).state())
    if count > 1 and torch.equal(found[0], found[1]):
        raise ValueError(
            "no trained module of the network has reset_parameters, by which several models could begin differently"
        )
    return torch.stack(found)


def sent_states(models: Tensor) -> dict[str, Tensor]:
    """The rows, each a vector of its own: what the run does with states it does with each."""
    return {f"{_NAME}{m}": state for m, state in enumerate(models)}


def states(received: Mapping[str, Tensor]) -> list[Tensor]:
    """The states in what a client received, in order."""
    return [received[f"{_NAME}{m}"] for m in range(sum(name.startswith(_NAME) for name in received))]


def kept_buffers(server: Server, old: Tensor, new: Tensor) -> Tensor:
    """A new state; buffers that the clients do not send stay as they are."""
    return torch.where(server.model.stays, old, new)
