"""Whole rounds of FedAvg: PFLlib's way, and the loop a skilled user would write.

Both are given the order in which each client sees its samples, so that what they end with can be compared. Clients hold
whole batches: PFLlib leaves out an incomplete last one.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import label_binarize
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

__all__ = ["ClientData", "Reported", "pfllib_network", "pfllib_round", "tensor_round"]

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


def _samples(x: Tensor, y: Tensor) -> Any:
    # A list is no torch Dataset for the type checker, though a DataLoader takes it.
    return list(zip(x, y, strict=True))


def pfllib_network(network: nn.Sequential) -> nn.Sequential:
    """A copy of our network with the layers in PFLlib's order: the ReLU before the pooling, not after it."""
    layers = list(copy.deepcopy(network))
    for i, layer in enumerate(layers):
        if isinstance(layer, nn.MaxPool2d) and isinstance(layers[i + 1], nn.ReLU):
            layers[i], layers[i + 1] = layers[i + 1], layer
    return nn.Sequential(*layers)


# ---- PFLlib --------------------------------------------------------------------------------------------------------


def pfllib_round(
    server: nn.Module,
    models: Sequence[nn.Module],
    clients: Sequence[ClientData],
    batch_size: int,
    lr: float,
    classes: int,
) -> tuple[nn.Module, Reported]:
    """A round in which every client has a model, and its data are a Python list of samples made anew for each use.

    PFLlib reads that list from the client's file every time; here the samples are in memory, which spares it that.

    Args:
        server: the global model.
        models: a copy of it for each client; trained.
        clients: their data.
        batch_size: of training, and of evaluation as there.
        lr: step size.
        classes: how many.

    Returns:
        The new global model, and what is reported of it.
    """
    _send(server, models)
    for model, client in zip(models, clients, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        model.train()
        samples = _samples(client.x, client.y)
        for x, y in DataLoader(samples, batch_size, sampler=client.order.tolist(), drop_last=True):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    total = sum(len(client.x) for client in clients)
    new = copy.deepcopy(models[0])
    for p in new.parameters():
        p.data.zero_()
    for model, client in zip(models, clients, strict=True):
        for p, q in zip(new.parameters(), model.parameters(), strict=True):
            p.data += q.data.clone() * (len(client.x) / total)

    _send(new, models)
    tests = [_pfllib_test(model, client, batch_size, classes) for model, client in zip(models, clients, strict=True)]
    losses = [_pfllib_train_loss(model, client, batch_size) for model, client in zip(models, clients, strict=True)]
    tested = sum(len(client.test_y) for client in clients)
    accuracy = sum(right for right, _ in tests) / tested
    auc = sum(auc * len(client.test_y) for (_, auc), client in zip(tests, clients, strict=True)) / tested
    return new, Reported(accuracy, auc, sum(losses) / total)


def _send(server: nn.Module, models: Sequence[nn.Module]) -> None:
    for model in models:
        for p, q in zip(model.parameters(), server.parameters(), strict=True):
            p.data = q.data.clone()


@torch.no_grad()
def _pfllib_test(model: nn.Module, client: ClientData, batch_size: int, classes: int) -> tuple[int, float]:
    """Right answers, and the AUC over all pairs of sample and class ("micro")."""
    model.eval()
    right, scores, labels = 0, [], []
    for x, y in DataLoader(_samples(client.test_x, client.test_y), batch_size, shuffle=True):
        logits = model(x)
        right += int((logits.argmax(1) == y).sum())
        scores.append(logits.numpy())
        labels.append(label_binarize(y.numpy(), classes=np.arange(classes)))
    return right, float(roc_auc_score(np.concatenate(labels), np.concatenate(scores), average="micro"))


@torch.no_grad()
def _pfllib_train_loss(model: nn.Module, client: ClientData, batch_size: int) -> float:
    model.eval()
    total = 0.0
    for x, y in DataLoader(_samples(client.x, client.y), batch_size, shuffle=True, drop_last=True):
        total += F.cross_entropy(model(x), y).item() * len(y)
    return total


# ---- a skilled user ------------------------------------------------------------------------------------------------


def tensor_round(
    server: nn.Module, clients: Sequence[ClientData], batch_size: int, lr: float, classes: int
) -> tuple[nn.Module, Reported]:
    """The same round on tensors: batches by indexing, one model trained in turn, larger batches where nothing trains.

    Args and result are those of :func:`pfllib_round`.
    """
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
