"""A server distils its clients' models into one student, and a client personalises it: both losses in a plain loop.

Five clients know three classes of ten each. Their plain average is poor; the student that starts from it and learns
from their mean logits on unlabelled data (PerAda, FedDF) is better. Then one client adapts the student to its labels
without forgetting it (PersFL).
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.ops import distillation_loss, ensemble_distillation_loss, ensemble_logits, weighted_average

CLASSES, FEATURES, CLIENTS = 10, 20, 5


def network() -> nn.Module:
    """A small classifier."""
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def samples(labels: Tensor, centres: Tensor) -> Tensor:
    """Points around the centre of each label."""
    return centres[labels] + 1.2 * torch.randn(len(labels), FEATURES)


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int = 200) -> None:
    """A client's local training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Share of correct predictions."""
    return (model(x).argmax(1) == y).float().mean().item()


def distil(student: nn.Module, teachers: list[nn.Module], unlabelled: Tensor, steps: int = 300) -> None:
    """The server's steps. The teachers are frozen: each sample's mean logits are computed once and kept."""
    with torch.no_grad():
        targets = ensemble_logits([teacher(unlabelled) for teacher in teachers])
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    for _ in range(steps):
        batch = torch.randint(len(unlabelled), (128,))
        optimizer.zero_grad()
        ensemble_distillation_loss(student(unlabelled[batch]), [targets[batch]]).backward()
        optimizer.step()


def personalise(model: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor, lam: float, temperature: float) -> None:
    """A client's steps: its labels, and the teacher it started from."""
    with torch.no_grad():
        logits = teacher(x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        distillation_loss(model(x), logits, y, lam, temperature).backward()
        optimizer.step()


def main(seed: int = 0) -> dict[str, float]:
    """Run everything; returns the accuracies."""
    torch.manual_seed(seed)
    centres = 1.5 * torch.randn(CLASSES, FEATURES)
    start = network()
    teachers, data = [], []
    for c in range(CLIENTS):
        y = (2 * c + torch.randint(3, (300,))) % CLASSES
        x = samples(y, centres)
        teachers.append(copy.deepcopy(start))
        train(teachers[-1], x, y)
        data.append((x, y))

    test_y = torch.arange(1000) % CLASSES
    test_x = samples(test_y, centres)
    student = copy.deepcopy(start)
    weighted_average(teachers, out=student)
    result = {"average": accuracy(student, test_x, test_y)}
    distil(student, teachers, samples(torch.randint(CLASSES, (1000,)), centres))
    result["distilled"] = accuracy(student, test_x, test_y)

    own = ((test_y - 0) % CLASSES) < 3  # what client 0 meets
    personal = copy.deepcopy(student)
    personalise(personal, student, *data[0], lam=0.5, temperature=5.0)
    result["distilled, client 0"] = accuracy(student, test_x[own], test_y[own])
    result["personal, client 0"] = accuracy(personal, test_x[own], test_y[own])
    return result


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name:20s} {value:.3f}")
