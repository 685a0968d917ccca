"""Spectral co-distillation from a plain PyTorch loop: a personal and a generic model that teach each other.

Each client keeps a personal model. In a round it trains the generic model it received, drawn towards the low end of
its personal model's spectrum, and then its personal model, drawn towards the whole spectrum of the new generic one; the
server averages the generic models. The divergence is one call, differentiable in the list of parameters.

Run it:  python examples/spectral_codistillation.py --rounds 5
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

from pfl_ext.ops import SpectralTeacher, spectral_divergence, weighted_average

LAMBDA_GENERIC, LAMBDA_PERSONAL, TAU = 0.05, 0.01, 0.4


def client_data(client: int, samples: int = 200) -> tuple[Tensor, Tensor]:
    """Two features, three classes; each client sees them rotated by another angle."""
    generator = torch.Generator().manual_seed(client)
    labels = torch.randint(3, (samples,), generator=generator)
    angle = 2 * torch.pi * labels / 3 + 0.3 * client
    points = torch.stack([angle.cos(), angle.sin()], 1) + 0.3 * torch.randn(samples, 2, generator=generator)
    return points, labels


def train(model: nn.Module, teacher: SpectralTeacher, weight: float, data: tuple[Tensor, Tensor], epochs: int) -> None:
    """Cross-entropy plus the weighted divergence from the teacher's spectrum, which is computed once for all steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    points, labels = data
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(20):
            loss = nn.functional.cross_entropy(model(points[batch]), labels[batch])
            loss = loss + weight * spectral_divergence(model.parameters(), teacher)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Share of correct answers."""
    points, labels = data
    with torch.no_grad():
        return (model(points).argmax(1) == labels).double().mean().item()


def main() -> list[float]:
    """Run the rounds; returns the clients' mean personal accuracy after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    server = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 3))
    personal = [copy.deepcopy(server) for _ in range(arguments.clients)]
    data = [client_data(c) for c in range(arguments.clients)]
    history = []
    for round_number in range(1, arguments.rounds + 1):
        generic = []
        for model, samples in zip(personal, data, strict=True):
            local = copy.deepcopy(server)
            train(local, SpectralTeacher(model.parameters(), tau=TAU), LAMBDA_GENERIC, samples, epochs=1)
            train(model, SpectralTeacher(local.parameters()), LAMBDA_PERSONAL, samples, epochs=1)
            generic.append(local)
        weighted_average(generic, [len(labels) for _, labels in data], out=server)
        history.append(sum(accuracy(m, d) for m, d in zip(personal, data, strict=True)) / arguments.clients)
        shared = sum(accuracy(server, d) for d in data) / arguments.clients
        print(f"round {round_number}: personal accuracy {history[-1]:.3f}, generic {shared:.3f}")
    return history


if __name__ == "__main__":
    main()
