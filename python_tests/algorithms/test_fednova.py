from __future__ import annotations

import pytest
import torch
from by_hand import LR, Turn, gradient, server_of
from torch import Tensor, nn

from pfl_ext.algorithms import FedAvg, FedNova
from pfl_ext.federation import Uploads


@pytest.mark.by_hand("fednova")
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_client_sends_its_change_for_one_step(turn: Turn, momentum: float) -> None:
    runtime, client = turn(FedNova(lr=LR, batch_size=4, momentum=momentum))
    w = runtime.server["model"]
    v, moved = w, torch.zeros_like(w)
    for batch in client.batches(4):
        moved = momentum * moved + gradient(client, v, batch)
        v = v - LR * moved
    sent = runtime.method.train(client, {"model": w})
    norm = 2 + momentum
    torch.testing.assert_close(sent["direction"], (w - v) / norm, rtol=0, atol=1e-14)
    assert sent["norm"].tolist() == [norm]
    plain, other = turn(FedAvg(lr=LR, batch_size=4, momentum=momentum))
    torch.testing.assert_close(plain.method.train(other, {"model": w})["model"], v, rtol=0, atol=1e-14)


def test_a_turn_without_steps_sends_no_direction(turn: Turn) -> None:
    runtime, client = turn(FedNova(local_epochs=0))
    sent = runtime.method.train(client, {"model": runtime.server["model"]})
    assert not bool(sent["direction"].any()) and sent["norm"].tolist() == [0.0]


def _uploads(directions: list[Tensor], norms: list[float], samples: list[int]) -> Uploads:
    sent = [{"direction": d, "norm": d.new_tensor([n])} for d, n in zip(directions, norms, strict=True)]
    return Uploads(list(range(len(sent))), samples, sent)


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_the_server_steps_along_the_mean_direction_as_far_as_clients_went(server_lr: float) -> None:
    network = nn.Linear(2, 1, bias=False).double()
    w = torch.tensor([1.0, 2.0], dtype=torch.float64)
    directions = [torch.tensor([0.5, -1.0], dtype=torch.float64), torch.tensor([-0.25, 0.125], dtype=torch.float64)]
    server = server_of(network, model=w)
    FedNova(server_lr=server_lr).aggregate(server, _uploads(directions, [2.0, 10.0], [3, 1]))
    effective = 0.75 * 2 + 0.25 * 10
    expected = w - server_lr * effective * (0.75 * directions[0] + 0.25 * directions[1])
    torch.testing.assert_close(server["model"], expected, rtol=0, atol=1e-15)


def test_with_equal_steps_it_is_fedavg() -> None:
    network = nn.Linear(25, 2, bias=False).double()
    w, *models = [torch.randn(50, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(4)]
    server, plain = server_of(network, model=w), server_of(network)
    FedNova().aggregate(server, _uploads([(w - v) / 6 for v in models], [6.0] * 3, [3, 1, 2]))
    FedAvg().aggregate(plain, Uploads([0, 1, 2], [3, 1, 2], [{"model": v} for v in models]))
    torch.testing.assert_close(server["model"], plain["model"], rtol=0, atol=1e-14)


def test_with_unequal_steps_the_longer_turn_does_not_pull_further() -> None:
    network = nn.Linear(1, 1, bias=False).double()
    ahead, back = torch.ones(1, dtype=torch.float64), -torch.ones(1, dtype=torch.float64)
    server = server_of(network, model=torch.zeros(1, dtype=torch.float64))
    # Gradients that cancel out, of 1 step and of 9: FedAvg's mean would be 4 steps along the second.
    FedNova().aggregate(server, _uploads([ahead, back], [1.0, 9.0], [1, 1]))
    assert server["model"].tolist() == [0.0]


def test_buffers_are_averaged_and_those_that_stay_do() -> None:
    network = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    w = torch.tensor([1.0, 0.0, 1.0, 3.0])
    directions = [torch.tensor([0.5, 0.2, 0.5, 5.0]), torch.tensor([0.5, 0.4, 0.1, 7.0])]
    server = server_of(network, model=w)
    FedNova().aggregate(server, _uploads(directions, [4.0, 4.0], [1, 1]))
    assert server["model"].tolist() == pytest.approx([-1.0, 0.3, 0.3, 6.0])
    server = server_of(network, model=w)
    server.model.stays[1:] = True  # as the type's name in server_buffers makes them
    FedNova().aggregate(server, _uploads(directions, [4.0, 4.0], [1, 1]))
    assert server["model"].tolist() == pytest.approx([-1.0, 0.0, 1.0, 3.0])


def test_a_step_size_of_0_is_refused() -> None:
    with pytest.raises(ValueError, match="server_lr is"):
        FedNova(server_lr=0.0)
