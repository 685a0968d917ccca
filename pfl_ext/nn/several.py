"""Networks of different shapes in one federation, and which client has which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import nn

__all__ = ["Networks"]


class Networks(nn.Module):
    """Several networks in the place of one: ``Federation(FedProto(), Networks([lenet, mlp]), ...)``.

    Clients have them in turn, or as ``clients`` says. It is a module, so that whatever copies or moves the network of
    a run does so with all of them; it computes nothing itself.

    Args:
        networks: they, each with its initial weights.
        clients: the number of each client's network; empty: client k has network k modulo their number.

    Attributes:
        each: the networks.
        clients: as given.
    """

    def __init__(self, networks: Sequence[nn.Module], clients: Sequence[int] = ()) -> None:
        super().__init__()
        if not networks or len({id(network) for network in networks}) < len(networks):
            raise ValueError(f"{len(networks)} networks, some of them the same object; accepted are different ones")
        wrong = [n for n in clients if n not in range(len(networks))]
        if wrong:
            raise ValueError(f"a client has network {wrong[0]}; the run has networks 0 to {len(networks) - 1}")
        self.each, self.clients = nn.ModuleList(networks), tuple(clients)

    @classmethod
    def of(cls, module: nn.Module) -> Networks:
        """The networks of a run that was given one module: itself, or a single one that all clients have."""
        return module if isinstance(module, Networks) else cls([module])

    def check(self, clients: int) -> None:
        """Raise a ValueError unless each of ``clients`` clients has a network, and each network a client."""
        if self.clients and len(self.clients) != clients:
            raise ValueError(f"{len(self.clients)} clients are given a network; the partition has {clients}")
        unused = set(range(len(self.each))) - {self.network(k) for k in range(clients)}
        if unused:
            raise ValueError(f"no client has network {min(unused)} of {len(self.each)}; name those that clients have")

    def network(self, client: int) -> int:
        """The number of a client's network."""
        return self.clients[client] if self.clients else client % len(self.each)

    def forward(self, *inputs: object) -> NoReturn:
        """Refused: a client computes with its own network."""
        raise TypeError("several networks are no function of their own; a client's is one of them")
