"""Whole rounds of FedAvg: PFLlib's way, and the loop a skilled user would write.

Both are given the order in which each client sees its samples, so that what they end with can be compared. Clients hold
whole batches: PFLlib leaves out an incomplete last one.

What PFLlib does in a round was read in its sources of 2024 and 2025 (``clientbase.py``, ``clientavg.py``,
``serverbase.py``, ``serveravg.py``, ``data_utils.py``, ``dataset_utils.py``, and the CNN in ``models.py``), and is
re-typed here from that:

- A client's samples are in two compressed ``.npz`` files, normalised, in float32. A client opens its file three times
  a round: to train, for the test metrics and for the training loss. Each time the arrays become tensors, the tensors a
  Python list of pairs, and a ``DataLoader`` with the default collation takes batches of 10 from the list.
- Every client has a model of its own and an ``SGD`` that lives as long as the run. The server sends by cloning each
  parameter, once a round to every client, and averages by adding ``clone() * weight`` parameter by parameter.
- The test metrics are right answers, counted batch by batch, and scikit-learn's micro-averaged AUC over labels that are
  binarised batch by batch; the training loss is another pass over the training data.
- The network has its ReLUs in place, before the pooling.

Two things differ, neither to its disadvantage: the files hold plain arrays where PFLlib pickles a dictionary of them,
and it evaluates at the beginning of the next round, which is the same work.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

__all__ = ["ClientData", "PFLlib", "Reported", "pfllib_network", "tensor_round"]

_EVALUATION_BATCH = 256


@dataclass(frozen=True)
class ClientData:
    """A client's samples as floating-point tensors, and the order in which it trains on them."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    order: Tensor


@dataclass(frozen=True)
class Reported:
    """What a round reports of the averaged model, over all clients and weighted by their samples."""

    accuracy: float
    auc: float
    train_loss: float


def pfllib_network(network: nn.Sequential) -> nn.Sequential:
    """A copy of our network with PFLlib's layers: torch's own, each ReLU in place and before the pooling."""
    layers = list(copy.deepcopy(network))
    for i, layer in enumerate(layers):
        if isinstance(layer, nn.MaxPool2d) and isinstance(layers[i + 1], nn.ReLU):
            layers[i], layers[i + 1] = layers[i + 1], layer
    return nn.Sequential(*(nn.ReLU(inplace=True) if isinstance(layer, nn.ReLU) else layer for layer in layers))


def _scikit_learn() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Its AUC and its binarised labels. It is imported here because nothing but this race needs it."""
    try:
        from sklearn.metrics import roc_auc_score
        from sklearn.preprocessing import label_binarize
    except ImportError as error:
        raise ImportError(f"PFLlib's metrics are scikit-learn's: pip install 'pfl_ext[dev]' ({error})") from None
    return roc_auc_score, label_binarize


# ---- PFLlib --------------------------------------------------------------------------------------------------------


class PFLlib:
    """A federation of clients that each have a model, an optimiser and two files. The module says what is re-typed.

    Args:
        network: the global model before the first round; a copy is trained.
        clients: their data, which are written to the files.
        folder: where to.
        batch_size: of training, and of evaluation as there.
        lr: step size.
        classes: how many.
    """

    def __init__(
        self,
        network: nn.Module,
        clients: Sequence[ClientData],
        folder: Path,
        batch_size: int,
        lr: float,
        classes: int,
    ) -> None:
        self._auc, self._binarize = _scikit_learn()
        self.server = copy.deepcopy(network)
        self._folder, self._batch_size, self._classes = folder, batch_size, classes
        self._models = [copy.deepcopy(network) for _ in clients]
        self._optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for model in self._models]
        self._orders = [client.order.tolist() for client in clients]
        self._train_samples = [len(client.x) for client in clients]
        for k, client in enumerate(clients):
            for part, x, y in (("train", client.x, client.y), ("test", client.test_x, client.test_y)):
                path = self._file(k, part)
                path.parent.mkdir(parents=True, exist_ok=True)
                np.savez_compressed(path, x=x.numpy(), y=y.numpy())

    def round(self) -> Reported:
        """Train all clients, average, send the average to all and evaluate it."""
        for k in range(len(self._models)):
            self._train(k)
        self._average(range(len(self._models)))
        self._send()
        tests = [self._test(k) for k in range(len(self._models))]
        losses = [self._train_loss(k) for k in range(len(self._models))]
        tested = sum(samples for _, samples, _ in tests)
        return Reported(
            sum(right for right, _, _ in tests) / tested,
            sum(auc * samples for _, samples, auc in tests) / tested,
            sum(losses) / sum(self._train_samples),
        )

    def _send(self) -> None:
        for model in self._models:
            for p, q in zip(model.parameters(), self.server.parameters(), strict=True):
                p.data = q.data.clone()

    def _file(self, client: int, part: str) -> Path:
        return self._folder / part / f"{client}.npz"

    def _samples(self, client: int, part: str) -> Any:
        # A list is no torch Dataset for the type checker, though a DataLoader takes it.
        with self._file(client, part).open("rb") as file:
            arrays = np.load(file)
            x, y = torch.Tensor(arrays["x"]), torch.Tensor(arrays["y"]).type(torch.int64)
        return list(zip(x, y, strict=True))

    def _train(self, client: int) -> None:
        model, optimizer = self._models[client], self._optimizers[client]
        samples = self._samples(client, "train")
        model.train()
        for x, y in DataLoader(samples, self._batch_size, sampler=self._orders[client], drop_last=True):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def _average(self, cohort: Sequence[int]) -> None:
        total = sum(self._train_samples[k] for k in cohort)
        self.server = copy.deepcopy(self._models[cohort[0]])
        for p in self.server.parameters():
            p.data.zero_()
        for k in cohort:
            for p, q in zip(self.server.parameters(), self._models[k].parameters(), strict=True):
                p.data += q.data.clone() * (self._train_samples[k] / total)

    @torch.no_grad()
    def _test(self, client: int) -> tuple[int, int, float]:
        """Right answers, samples, and the AUC over all pairs of sample and class ("micro")."""
        model = self._models[client]
        loader = DataLoader(self._samples(client, "test"), self._batch_size, shuffle=True)
        model.eval()
        right, tested, scores, labels = 0, 0, [], []
        for x, y in loader:
            logits = model(x)
            right += int((logits.argmax(1) == y).sum())
            tested += len(y)
            scores.append(logits.numpy())
            labels.append(self._binarize(y.numpy(), classes=np.arange(self._classes)))
        auc = self._auc(np.concatenate(labels), np.concatenate(scores), average="micro")
        return right, tested, float(auc)

    @torch.no_grad()
    def _train_loss(self, client: int) -> float:
        model = self._models[client]
        loader = DataLoader(self._samples(client, "train"), self._batch_size, shuffle=True, drop_last=True)
        model.eval()
        total = 0.0
        for x, y in loader:
            total += F.cross_entropy(model(x), y).item() * len(y)
        return total


# ---- a skilled user ------------------------------------------------------------------------------------------------


def tensor_round(
    server: nn.Module, clients: Sequence[ClientData], batch_size: int, lr: float, classes: int
) -> tuple[nn.Module, Reported]:
    """The same round on tensors: batches by indexing, one model trained in turn, larger batches where nothing trains.

    Args:
        server: the global model.
        clients: their data.
        batch_size: of training.
        lr: step size.
        classes: how many.

    Returns:
        The new global model, and what is reported of it.
    """
    roc_auc_score, _ = _scikit_learn()
    total = sum(len(client.x) for client in clients)
    model = copy.deepcopy(server)
    start = [p.detach() for p in server.parameters()]
    params: list[Tensor] = list(model.parameters())
    average = [torch.zeros_like(p) for p in start]
    optimizer = torch.optim.SGD(params, lr=lr)
    for client in clients:
        with torch.no_grad():
            torch._foreach_copy_(params, start)
        model.train()
        for rows in client.order.split(batch_size):
            optimizer.zero_grad()
            F.cross_entropy(model(client.x[rows]), client.y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            torch._foreach_add_(average, params, alpha=len(client.x) / total)

    with torch.no_grad():
        torch._foreach_copy_(params, average)
        model.eval()
        right, area, loss, tested = 0, 0.0, 0.0, sum(len(client.test_y) for client in clients)
        for client in clients:
            logits = torch.cat([model(x) for x in client.test_x.split(_EVALUATION_BATCH)])
            right += int((logits.argmax(1) == client.test_y).sum())
            labels = F.one_hot(client.test_y, classes)
            area += len(labels) * float(roc_auc_score(labels.numpy(), logits.numpy(), average="micro"))
            logits = torch.cat([model(x) for x in client.x.split(_EVALUATION_BATCH)])
            loss += float(F.cross_entropy(logits, client.y, reduction="sum"))
    return model, Reported(right / tested, area / tested, loss / total)
