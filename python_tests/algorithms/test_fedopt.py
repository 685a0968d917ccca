from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import LR, Turn, server_of
from torch import Tensor, nn

from pfl_ext.algorithms import METHODS, FedAdagrad, FedAdam, FedAvg, FedYogi
from pfl_ext.federation import Uploads

NAMES = ("fedadagrad", "fedadam", "fedyogi")


def _uploads(*models: Tensor) -> Uploads:
    return Uploads(list(range(len(models))), [3, 1][: len(models)], [{"model": m} for m in models])


@pytest.mark.parametrize("name", NAMES)
def test_clients_are_fedavgs(turn: Turn, name: str) -> None:
    runtime, client = turn(METHODS[name](lr=LR, batch_size=4, momentum=0.5))
    plain, other = turn(FedAvg(lr=LR, batch_size=4, momentum=0.5))
    w = {"model": runtime.server["model"]}
    assert torch.equal(runtime.method.train(client, w)["model"], plain.method.train(other, w)["model"])


def _square(name: str, v: float, square: float, beta2: float) -> float:
    if name == "fedadagrad":
        return v + square
    if name == "fedadam":
        return beta2 * v + (1 - beta2) * square
    return v - (1 - beta2) * square * (1 if v > square else -1)


@pytest.mark.parametrize("name", NAMES)
def test_the_server_steps_by_both_moments(name: str) -> None:
    beta1, beta2, tau, server_lr = 0.6, 0.8, 0.1, 0.3
    options: dict[str, Any] = {} if name == "fedadagrad" else {"beta2": beta2}
    method = METHODS[name](beta1=beta1, tau=tau, server_lr=server_lr, **options)
    server = server_of(nn.Linear(2, 1, bias=False).double())
    method.set_up(server)
    assert server["square"].tolist() == pytest.approx([tau**2] * 2) and not bool(server["mean"].any())
    w, m, v = server["model"].tolist(), [0.0, 0.0], [tau**2] * 2
    # Large changes, then small ones: FedYogi's v rises and falls.
    for shift in (0.5, -0.25, 0.01):
        first, second = ([x + shift for x in w], [x - 2 * shift * (i + 1) for i, x in enumerate(w)])
        for i in range(2):
            change = 0.75 * (first[i] - w[i]) + 0.25 * (second[i] - w[i])
            m[i] = beta1 * m[i] + (1 - beta1) * change
            v[i] = _square(name, v[i], change**2, beta2)
            w[i] = w[i] + server_lr * m[i] / (v[i] ** 0.5 + tau)
        method.aggregate(server, _uploads(*(torch.tensor(x, dtype=torch.float64) for x in (first, second))))
        for found, expected in ((server["mean"], m), (server["square"], v), (server["model"], w)):
            assert found.tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_servers_steps_leave_buffers_alone(name: str) -> None:
    network = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    server = server_of(network)
    method = METHODS[name]()
    method.set_up(server)
    before = server["model"][0].item()
    method.aggregate(server, _uploads(torch.tensor([before - 1.0, 0.4, 0.1, 5.0])))
    assert server["model"][1:].tolist() == pytest.approx([0.4, 0.1, 5.0])
    assert server["model"][0].item() < before


def test_with_a_large_tau_all_of_them_are_a_step_along_the_mean_change() -> None:
    tau = 1e6
    for cls in (FedAdagrad, FedAdam, FedYogi):
        server = server_of(nn.Linear(2, 1, bias=False).double())
        method = cls(beta1=0.0, tau=tau, server_lr=2 * tau)
        method.set_up(server)
        w = server["model"].clone()
        method.aggregate(server, _uploads(w + 1))
        torch.testing.assert_close(server["model"], w + 1, rtol=0, atol=1e-2)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        *((name, option, value) for name in NAMES for option, value in (("tau", 0.0), ("server_lr", 0.0))),
        *((name, "beta1", 1.0) for name in NAMES),
        ("fedadam", "beta2", 1.0),
        ("fedyogi", "beta2", -0.1),
    ],
)
def test_options_out_of_range_are_refused(name: str, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} is"):
        METHODS[name](**{option: value})
