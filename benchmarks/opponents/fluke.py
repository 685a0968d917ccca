"""Rounds of FedAvg and of Ditto, the way of fluke.

What fluke does in a round was read in its sources of 2024 and 2025 (``client.py``, ``server.py``, ``comm.py``,
``data/__init__.py``, ``evaluation.py``, ``algorithms/ditto.py``), and is re-typed here from that:

- A client's samples are tensors in memory. Its loader permutes all of them before a pass, and batches are slices.
- Everything is sent as a message, of which the channel keeps a deep copy: the server's model to every client of the
  round, each client's model back.
- A client has a model and an ``SGD`` of its own for as long as the run, and reads the loss of each step as a number.
- The server averages state by state: for each name a weighted clone of each client's tensor is added up.
- The evaluation goes over a client's loader in batches of the training's size.
- Its Ditto holds the personal model near the received one by the sum of the norms (not of their squares) of the
  differences of its weights (not of its biases), in the loss that autograd differentiates.

So its global model is Ditto's, its personal ones are others'. Left out, to its advantage: precision, recall and F1 by
torchmetrics in every batch of an evaluation, observers, the cache that it can spill clients to, its progress bars.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Ditto", "FedAvg", "Loader"]


class Loader:
    """A client's samples, in batches.

    Args:
        x, y: the samples.
        batch_size: of a batch.
        orders: how the first passes are permuted; the others by torch's generator.
    """

    def __init__(self, x: Tensor, y: Tensor, batch_size: int, orders: Sequence[Tensor] = ()) -> None:
        self.tensors, self._batch_size, self._orders = (x, y), batch_size, list(orders)
        self._placed = torch.arange(len(x))

    def __len__(self) -> int:
        return len(self.tensors[1])

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Permute the samples, and give their batches."""
        if self._orders:  # as positions in the tensors that were given; these have been permuted since
            order = self._placed.argsort()[self._orders.pop(0)]
        else:
            order = torch.randperm(len(self))
        self._placed = self._placed[order]
        x, y = self.tensors = (self.tensors[0][order], self.tensors[1][order])
        for i in range(0, len(self), self._batch_size):
            yield x[i : i + self._batch_size], y[i : i + self._batch_size]


@dataclass
class _Message:
    payload: Any
    sender: int


class _Channel:
    """Keeps a deep copy of everything that is sent until it is received."""

    def __init__(self) -> None:
        self._boxes: dict[int, list[_Message]] = {}

    def send(self, payload: Any, sender: int, to: int) -> None:
        self._boxes.setdefault(to, []).append(_Message(copy.deepcopy(payload), sender))

    def receive(self, box: int, sender: int) -> Any:
        for i, message in enumerate(self._boxes[box]):
            if message.sender == sender:
                return self._boxes[box].pop(i).payload
        raise ValueError(f"{box} has no message of {sender}")


_SERVER = -1


class _Client:
    def __init__(self, index: int, train: Loader, test: Loader | None, lr: float, channel: _Channel) -> None:
        self.index, self.train, self.test, self._lr, self._channel = index, train, test, lr, channel
        self.model: Any = None
        self._optimizer: Any = None

    def receive(self) -> None:
        model = self._channel.receive(self.index, _SERVER)
        if self.model is None:
            self.model = model
        else:
            self.model.load_state_dict(model.state_dict())

    def local_update(self) -> None:
        self.receive()
        self.fit()
        self._channel.send(self.model, self.index, _SERVER)

    def fit(self) -> float:
        self.model.train()
        if self._optimizer is None:
            self._optimizer = torch.optim.SGD(self.model.parameters(), lr=self._lr)
        total = 0.0
        for x, y in self.train:
            self._optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self._optimizer.step()
            total += loss.item()
        return total


class _DittoClient(_Client):
    def __init__(self, *args: Any, network: nn.Module, lam: float) -> None:
        super().__init__(*args)
        self.personal, self._lam = copy.deepcopy(network), lam
        self._personal_optimizer: Any = None

    def fit(self) -> float:
        received = copy.deepcopy(self.model)
        total = super().fit()
        self.personal.train()
        if self._personal_optimizer is None:
            self._personal_optimizer = torch.optim.SGD(self.personal.parameters(), lr=self._lr)
        for x, y in self.train:
            self._personal_optimizer.zero_grad()
            loss = F.cross_entropy(self.personal(x), y)
            loss = loss + self._lam * self._apart(received)
            loss.backward()
            self._personal_optimizer.step()
        return total

    def _apart(self, received: nn.Module) -> Any:
        total: Any = 0.0
        for name, p in self.personal.named_parameters():
            if "weight" in name:
                total = total + (p - received.get_parameter(name)).norm(2)
        return total


class FedAvg:
    """A server and its clients.

    Args:
        network: the global model before the first round; a copy is trained.
        train: a loader for each client.
        test: the same of their tests; None without.
        lr: step size.
    """

    def __init__(
        self, network: nn.Module, train: Sequence[Loader], test: Sequence[Loader] | None = None, *, lr: float
    ) -> None:
        self.model, self._channel = copy.deepcopy(network), _Channel()
        tests: Sequence[Loader | None] = [None] * len(train) if test is None else test
        self.clients = [
            self._client(k, *loaders, lr, self._channel) for k, loaders in enumerate(zip(train, tests, strict=True))
        ]

    def _client(self, *args: Any) -> _Client:
        return _Client(*args)

    def round(self, cohort: Sequence[int]) -> None:
        """One round: the model goes to these clients, each trains, the server averages."""
        for k in cohort:
            self._channel.send(self.model, _SERVER, k)
        for k in cohort:
            self.clients[k].local_update()
        self._aggregate(cohort)

    @torch.no_grad()
    def _aggregate(self, cohort: Sequence[int]) -> None:
        states = [self._channel.receive(_SERVER, k).state_dict() for k in cohort]
        samples = [len(self.clients[k].train) for k in cohort]
        weights = [n / sum(samples) for n in samples]
        average: dict[str, Tensor] = {}
        for name in self.model.state_dict():
            for weight, state in zip(weights, states, strict=True):
                if name not in average:
                    average[name] = weight * state[name].clone()
                else:
                    average[name] += weight * state[name].clone()
        self.model.load_state_dict(average)

    def evaluate(self) -> tuple[float, float]:
        """The global model on every client: accuracy on all tests together, and mean loss on the training data."""
        right = tested = trained = 0
        loss = 0.0
        for client in self.clients:
            if client.test is not None:
                right += self._evaluated(client.test)[0]
                tested += len(client.test)
            loss += self._evaluated(client.train)[1]
            trained += len(client.train)
        return right / max(tested, 1), loss / trained

    @torch.no_grad()
    def _evaluated(self, loader: Loader) -> tuple[int, float]:
        self.model.eval()
        right, loss = 0, 0.0
        for x, y in loader:
            logits = self.model(x)
            loss += F.cross_entropy(logits, y).item() * len(y)
            right += int((logits.argmax(1) == y).sum())
        return right, loss


class Ditto(FedAvg):
    """The same with personal models.

    Args:
        network, train, lr: as for FedAvg. A round passes over a client's loader twice, for the personal model last.
        lam: how strongly it is held.
    """

    def __init__(self, network: nn.Module, train: Sequence[Loader], *, lr: float, lam: float) -> None:
        self._network, self._lam = network, lam
        super().__init__(network, train, lr=lr)

    def _client(self, *args: Any) -> _Client:
        return _DittoClient(*args, network=self._network, lam=self._lam)

    def personal(self, client: int) -> nn.Module:
        """A client's personal model."""
        found = self.clients[client]
        assert isinstance(found, _DittoClient)
        return found.personal
