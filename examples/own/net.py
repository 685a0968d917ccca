"""A network, data, a loss and a method of one's own: what ``file.py:Name`` names, on the command line and in files."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pfl_ext.algorithms import FedAvg
from pfl_ext.federation import option
from pfl_ext.tasks import Regression


class Net(nn.Module):
    """Two layers. ``input_shape`` is given, ``width`` is an option: --network-width 32."""

    def __init__(self, input_shape: tuple[int, ...], width: int = 16) -> None:
        """Of samples of that shape."""
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(input_shape[0], width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        """A number for each sample."""
        return self.layers(x).squeeze(1)


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A curve with noise: samples and numbers to predict, for training and for testing."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(600, 3, generator=generator) * 2 - 1
    y = torch.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.05 * torch.randn(600, generator=generator)
    return x[:500], y[:500], x[500:], y[500:]


@dataclass(frozen=True)
class Huber(Regression):
    """Regression whose loss grows linearly where the error is large, so that outliers count less."""

    name = "huber"

    delta: float = option(1.0, "error from which on the loss is linear")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean Huber loss."""
        return nn.functional.huber_loss(outputs, targets, delta=self.delta)


def slow_adam(params: list[Tensor], lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Adam with a long memory: --optimizer own/net.py:slow_adam."""
    return torch.optim.Adam(params, lr=lr, weight_decay=weight_decay, betas=(0.99, 0.9999))


@dataclass(frozen=True)
class Patient(FedAvg):
    """FedAvg with smaller steps by default."""

    name = "patient"
    lr: float = option(0.003, "step size of the local SGD")
