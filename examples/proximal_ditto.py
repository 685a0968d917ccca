"""ProximalSGD in a plain training loop: Ditto, whose clients keep a personal model near the global one.

Each client trains the global model, which is averaged, and its own, which is held near the received one by lambda / 2
times the squared distance.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pfl_ext.ops import squared_distance, weighted_average
from pfl_ext.optim import ProximalSGD


def client_data(client: int) -> tuple[Tensor, Tensor]:
    """A line through the origin whose slope differs from client to client."""
    generator = torch.Generator().manual_seed(client)
    x = torch.randn(100, 1, generator=generator)
    return x, (1.0 + client) * x


def main(lam: float = 0.5, rounds: int = 10, steps: int = 5) -> list[float]:
    """Train, and return the squared distance of each client's personal model from the global one."""
    torch.manual_seed(0)
    server = nn.Linear(1, 1)
    personal = [copy.deepcopy(server) for _ in range(3)]
    data = [client_data(client) for client in range(3)]
    optimizers = [ProximalSGD(v.parameters(), lr=0.1, lam=lam, momentum=0.5) for v in personal]
    for _ in range(rounds):
        received = [w.detach().clone() for w in server.parameters()]
        uploads = []
        for v, optimizer, (x, y) in zip(personal, optimizers, data, strict=True):
            optimizer.set_anchors(received)
            local = copy.deepcopy(server)
            plain = torch.optim.SGD(local.parameters(), lr=0.1)
            for model, update in ((local, plain), (v, optimizer)):
                for _ in range(steps):
                    update.zero_grad()
                    nn.functional.mse_loss(model(x), y).backward()
                    update.step()
            uploads.append(local)
        weighted_average(uploads, out=server)
    return [squared_distance(list(v.parameters()), list(server.parameters())).item() for v in personal]


if __name__ == "__main__":
    print("squared distances from the global model:", [round(d, 4) for d in main()])
