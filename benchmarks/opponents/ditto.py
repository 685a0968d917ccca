"""Rounds of Ditto: PFLlib's way, FL-bench's way, and the loop a skilled user would write.

All are given the orders in which each client sees its samples in the first round, so that what they end with can be
compared; afterwards they shuffle by themselves. Clients hold whole batches.

PFLlib was read in its sources of 2024 and 2025 (``clientditto.py``, ``serverditto.py``, ``fedoptimizer.py``, and those
that :mod:`.federation` names). The server clones every parameter for every client of the run, selected or not. A client
reads its file twice a round, once for each model; the personal one is trained first, by an optimiser that adds the
proximal term to each gradient in turn.

FL-bench was read in its sources of 2024 (``client/ditto.py``, ``client/fedavg.py``, ``server/fedavg.py``,
``data/utils/datasets.py``), and works so:

- All samples are one tensor in memory. One of them is taken at a time, and normalised as torchvision does it; a
  ``DataLoader`` with the default collation makes batches of a ``Subset``.
- One model and one personal model serve all clients, and one ``SGD`` has the parameters of both. For each client states
  are loaded, and afterwards the personal state and the optimiser's are deep-copied.
- The personal gradients get the proximal term before the step, parameter by parameter.
- A client sends clones of its parameters. The server stacks those of a layer on a new last dimension, multiplies them
  with the weights and sums them.

Neither evaluates here: they evaluate different things at different times.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from .federation import ClientData, PFLlib

__all__ = ["DittoClients", "FLBench", "Images", "PFLlibDitto", "TensorDitto"]


class DittoClients:
    """The orders of the clients' first passes, by which everybody sees the same batches in the first round."""

    def __init__(self, orders: Sequence[Tensor], personal: Sequence[Tensor]) -> None:
        """For each client that of the global model's pass and of the personal one's."""
        self._orders = {"train": dict(enumerate(orders)), "personal": dict(enumerate(personal))}

    def order(self, client: int, what: str) -> Tensor | None:
        """The order of a client's next pass; None once the first is over."""
        return self._orders[what].pop(client, None)


def _loader(samples: Any, batch_size: int, order: Tensor | None) -> DataLoader[Any]:
    if order is None:
        return DataLoader(samples, batch_size, shuffle=True, drop_last=True)
    return DataLoader(samples, batch_size, sampler=order.tolist(), drop_last=True)


# ---- PFLlib --------------------------------------------------------------------------------------------------------


class _Perturbed(torch.optim.Optimizer):
    """PFLlib's optimiser of a personal model."""

    def __init__(self, params: Iterator[nn.Parameter], lr: float, mu: float) -> None:
        super().__init__(params, {"lr": lr, "mu": mu})

    @torch.no_grad()
    def step(self, received: Iterator[nn.Parameter]) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p, g in zip(group["params"], received, strict=True):
                assert p.grad is not None
                change = p.grad.data + group["mu"] * (p.data - g.data)
                p.data.add_(change, alpha=-group["lr"])


class PFLlibDitto(PFLlib):
    """PFLlib's federation with personal models.

    Args:
        network, clients, folder, batch_size, lr, classes: as there.
        orders: of the first passes.
        lam: how strongly personal models are held.
    """

    def __init__(
        self,
        network: nn.Module,
        clients: Sequence[ClientData],
        folder: Path,
        batch_size: int,
        lr: float,
        classes: int,
        *,
        orders: DittoClients,
        lam: float,
    ) -> None:
        super().__init__(network, clients, folder, batch_size, lr, classes)
        self._first = orders
        self.personal = [copy.deepcopy(network) for _ in clients]
        self._personal_optimizers = [_Perturbed(model.parameters(), lr, lam) for model in self.personal]

    def ditto_round(self, cohort: Sequence[int]) -> None:
        """Send to all clients, let those of the cohort train, average."""
        self._send()
        for k in cohort:
            self._train_personal(k)
            self._train_global(k)
        self._average(cohort)

    def _train_personal(self, client: int) -> None:
        model, optimizer = self.personal[client], self._personal_optimizers[client]
        model.train()
        loader = _loader(self._samples(client, "train"), self._batch_size, self._first.order(client, "personal"))
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step(self._models[client].parameters())

    def _train_global(self, client: int) -> None:
        model, optimizer = self._models[client], self._optimizers[client]
        model.train()
        loader = _loader(self._samples(client, "train"), self._batch_size, self._first.order(client, "train"))
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


# ---- FL-bench ------------------------------------------------------------------------------------------------------


@dataclass
class Images(Dataset[Any]):
    """All samples, normalised one by one."""

    data: Tensor
    targets: Tensor
    mean: list[float]
    std: list[float]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._normalized(self.data[index]), self.targets[index]

    def __len__(self) -> int:
        return len(self.targets)

    def _normalized(self, image: Tensor) -> Tensor:
        """As torchvision's ``Normalize``."""
        image = image.clone()
        mean = torch.as_tensor(self.mean, dtype=image.dtype, device=image.device)
        std = torch.as_tensor(self.std, dtype=image.dtype, device=image.device)
        if (std == 0).any():
            raise ValueError("std has a zero")
        return image.sub_(mean.view(-1, 1, 1)).div_(std.view(-1, 1, 1))


class FLBench:
    """One model for all clients, one after the other.

    Args:
        network: the global model before the first round; a copy is trained.
        images: the samples of all clients.
        rows: those of each client.
        batch_size: of training.
        lr: step size.
        lam: how strongly personal models are held.
        orders: of the first passes, as positions in a client's rows.
    """

    def __init__(
        self,
        network: nn.Module,
        images: Images,
        rows: Sequence[Tensor],
        batch_size: int,
        lr: float,
        lam: float,
        orders: DittoClients,
    ) -> None:
        self._set: Subset[Any] = Subset(images, [])
        self._rows, self._batch_size, self._lam, self._first = [x.tolist() for x in rows], batch_size, lam, orders
        self._model, self._personal = copy.deepcopy(network), copy.deepcopy(network)
        self._states = {k: copy.deepcopy(self._personal.state_dict()) for k in range(len(rows))}
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=lr)
        self._optimizer.add_param_group({"params": list(self._personal.parameters()), "lr": lr})
        self._initial = copy.deepcopy(self._optimizer.state_dict())
        self._optimizer_states: dict[int, Any] = {}
        self.model = {name: p.detach().clone() for name, p in network.named_parameters()}

    def round(self, cohort: Sequence[int]) -> None:
        """Let the clients of the cohort train, and average."""
        sent, samples = [], []
        for k in cohort:
            sent.append(self._train(k))
            samples.append(len(self._rows[k]))
        weights = torch.tensor(samples) / sum(samples)
        for name, old in self.model.items():
            stacked = torch.stack([state[name] for state in sent], dim=-1)
            old.copy_(torch.sum(stacked * weights, dim=-1))

    def personal(self, client: int) -> dict[str, Tensor]:
        """A client's personal state."""
        return self._states[client]

    def _train(self, client: int) -> dict[str, Tensor]:
        self._set.indices = self._rows[client]
        self._optimizer.load_state_dict(self._optimizer_states.get(client, self._initial))
        self._model.load_state_dict(self.model, strict=False)
        self._personal.load_state_dict(self._states[client])
        self._model.train()
        self._personal.train()
        for x, y in _loader(self._set, self._batch_size, self._first.order(client, "train")):
            loss = F.cross_entropy(self._model(x), y)
            self._optimizer.zero_grad()
            loss.backward()
            self._optimizer.step()
        for x, y in _loader(self._set, self._batch_size, self._first.order(client, "personal")):
            loss = F.cross_entropy(self._personal(x), y)
            self._optimizer.zero_grad()
            loss.backward()
            for p, received in zip(self._personal.parameters(), self.model.values(), strict=True):
                assert p.grad is not None
                p.grad.data += self._lam * (p.data - received.data)
            self._optimizer.step()
        self._optimizer_states[client] = copy.deepcopy(self._optimizer.state_dict())
        self._states[client] = copy.deepcopy(self._personal.state_dict())
        return {name: p.detach().clone() for name, p in self._model.named_parameters()}


# ---- a skilled user ------------------------------------------------------------------------------------------------


class TensorDitto:
    """The same on tensors: batches by indexing, one model trained in turn, list operations on all parameters.

    Args:
        network: the global model before the first round; a copy is trained.
        clients: their data.
        batch_size: of training.
        lr: step size.
        lam: how strongly personal models are held.
        orders: of the first passes.
    """

    def __init__(
        self,
        network: nn.Module,
        clients: Sequence[ClientData],
        batch_size: int,
        lr: float,
        lam: float,
        orders: DittoClients,
    ) -> None:
        self._model, self._clients, self._batch_size, self._lam, self._first = (
            copy.deepcopy(network),
            clients,
            batch_size,
            lam,
            orders,
        )
        self._params: list[Tensor] = list(self._model.parameters())
        self._lr = lr
        self.model = [p.detach().clone() for p in self._params]
        self.personal = [[p.clone() for p in self.model] for _ in clients]

    def round(self, cohort: Sequence[int]) -> None:
        """Let the clients of the cohort train, and average."""
        total = sum(len(self._clients[k].y) for k in cohort)
        average = [torch.zeros_like(p) for p in self.model]
        self._model.train()
        for k in cohort:
            self._train(k, self.model, "train", 0.0)
            with torch.no_grad():
                torch._foreach_add_(average, self._params, alpha=len(self._clients[k].y) / total)
            self._train(k, self.personal[k], "personal", self._lam)
            with torch.no_grad():
                torch._foreach_copy_(self.personal[k], self._params)
        self.model = average

    def _train(self, client: int, begin: list[Tensor], what: str, lam: float) -> None:
        data, order = self._clients[client], self._first.order(client, what)
        with torch.no_grad():
            torch._foreach_copy_(self._params, begin)
        for rows in (torch.randperm(len(data.y)) if order is None else order).split(self._batch_size):
            gradients = torch.autograd.grad(F.cross_entropy(self._model(data.x[rows]), data.y[rows]), self._params)
            with torch.no_grad():
                if lam:
                    torch._foreach_lerp_(self._params, self.model, self._lr * lam)
                torch._foreach_add_(self._params, gradients, alpha=-self._lr)
