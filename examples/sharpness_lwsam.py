"""LWSAM in a plain training loop: two clients of PLGU, whose global model is perturbed where they are personal.

Each client has a personal model and a copy of the global one. Once a round the layers are scored by how far the two are
apart; then the global copy takes steps of LWSAM, the personal one steps of SGD, on the same batches (Algorithm 1
of PLGU).
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pfl_ext.ops import personalization_scores, weighted_average
from pfl_ext.optim import LWSAM


def client_data(client: int) -> tuple[Tensor, Tensor]:
    """Two classes that lie elsewhere for each client."""
    generator = torch.Generator().manual_seed(client)
    labels = torch.randint(0, 2, (200,), generator=generator)
    centres = torch.tensor([[2.0, 0.0], [-2.0, 0.0]]).roll(client, dims=1)
    return centres[labels] + torch.randn(200, 2, generator=generator), labels


def main(rounds: int = 10, steps: int = 5) -> list[float]:
    """Train, and return the accuracy of each client's personal model."""
    torch.manual_seed(0)
    server = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    personal = [copy.deepcopy(server) for _ in range(2)]
    data = [client_data(client) for client in range(2)]
    for _ in range(rounds):
        uploads = []
        for theta, (x, y) in zip(personal, data, strict=True):
            w = copy.deepcopy(server)
            optimizer = LWSAM(w.named_parameters(), torch.optim.SGD, rho=0.05, lr=0.1)
            optimizer.scores = personalization_scores(theta, server)
            own = torch.optim.SGD(theta.parameters(), lr=0.1)
            for _ in range(steps):
                own.zero_grad()
                nn.functional.cross_entropy(theta(x), y).backward()
                own.step()
                nn.functional.cross_entropy(w(x), y).backward()
                optimizer.first_step(zero_grad=True)
                nn.functional.cross_entropy(w(x), y).backward()
                optimizer.second_step(zero_grad=True)
            uploads.append(w)
        weighted_average(uploads, out=server)
    return [(theta(x).argmax(1) == y).float().mean().item() for theta, (x, y) in zip(personal, data, strict=True)]


if __name__ == "__main__":
    print("accuracy of the personal models:", [round(a, 3) for a in main()])
