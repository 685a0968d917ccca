from __future__ import annotations

import pytest
import torch
from by_hand import LR, Turn, gradient, server_of
from torch import Tensor, nn

from pfl_ext.algorithms import FedAvg, FedAvgM, FedDyn
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings, Uploads

W = torch.tensor([1.0, 2.0], dtype=torch.float64)


def _uploads(*models: Tensor, samples: tuple[int, ...] = (3, 1)) -> Uploads:
    return Uploads(list(range(len(models))), list(samples), [{"model": m} for m in models])


# ---- FedAvgM ---------------------------------------------------------------------------------------------------------


def test_fedavgms_clients_are_fedavgs(turn: Turn) -> None:
    runtime, client = turn(FedAvgM(lr=LR, batch_size=4, momentum=0.5))
    plain, other = turn(FedAvg(lr=LR, batch_size=4, momentum=0.5))
    w = {"model": runtime.server["model"]}
    assert torch.equal(runtime.method.train(client, w)["model"], plain.method.train(other, w)["model"])


def test_fedavgms_server_steps_by_its_velocity(network: nn.Module) -> None:
    method = FedAvgM(server_momentum=0.8)
    server = server_of(network, model=W, velocity=torch.zeros_like(W))
    w, v = W, torch.zeros_like(W)
    for shift in (0.5, -0.25, 0.125):
        models = (w + shift, w - 2 * shift)
        v = 0.8 * v + (w - (3 * models[0] + models[1]) / 4)
        w = w - v
        method.aggregate(server, _uploads(*models))
        torch.testing.assert_close(server["velocity"], v, rtol=0, atol=1e-15)
        torch.testing.assert_close(server["model"], w, rtol=0, atol=1e-15)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("server_lr", [1.0, 0.3])
def test_fedavgms_server_is_torchs_sgd_on_the_mean_change(network: nn.Module, server_lr: float, nesterov: bool) -> None:
    method = FedAvgM(server_momentum=0.8, server_lr=server_lr, nesterov=nesterov)
    server = server_of(network, model=W, velocity=torch.zeros_like(W))
    w = W.clone().requires_grad_()
    optimizer = torch.optim.SGD([w], lr=server_lr, momentum=0.8, nesterov=nesterov)
    for shift in (0.5, -0.25, 0.125):
        models = (w.detach() + shift, w.detach() - 2 * shift)
        w.grad = w.detach() - (3 * models[0] + models[1]) / 4
        optimizer.step()
        method.aggregate(server, _uploads(*models))
        torch.testing.assert_close(server["model"], w.detach(), rtol=0, atol=1e-15)


def test_fedavgm_without_momentum_is_fedavg_to_the_bit(network: nn.Module) -> None:
    models = [torch.randn(50, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    server = server_of(network, model=models[2] * 3, velocity=torch.ones(50))
    FedAvgM(server_momentum=0.0).aggregate(server, _uploads(*models[:2]))
    plain = server_of(network)
    FedAvg().aggregate(plain, _uploads(*models[:2]))
    assert torch.equal(server["model"], plain["model"])


def test_the_servers_momentum_leaves_buffers_alone(network: nn.Module) -> None:
    server = server_of(network, model=torch.tensor([1.0, 1.0]), velocity=torch.tensor([9.0]))  # the second is a buffer
    FedAvgM(server_momentum=0.5).aggregate(server, _uploads(torch.tensor([0.5, 0.1]), samples=(1,)))
    assert server["model"].tolist() == pytest.approx([0.5 - 4.5, 0.1])


# ---- FedDyn ----------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("feddyn")
def test_feddyns_client_minimises_the_dynamically_regularised_loss(turn: Turn) -> None:
    alpha = 0.3
    runtime, client = turn(FedDyn(lr=LR, batch_size=4, alpha=alpha))
    theta = runtime.server["model"]
    g = torch.linspace(-0.2, 0.3, len(theta), dtype=theta.dtype)
    client["gradient"] = g
    v = theta.clone()
    for batch in client.batches(4):
        regulariser = v.clone().requires_grad_()
        term = -(g * regulariser).sum() + alpha / 2 * (regulariser - theta).square().sum()  # squared
        (slope,) = torch.autograd.grad(term, regulariser)
        assert slope.abs().max() > 0
        v = v - LR * (gradient(client, v, batch) + slope)
    sent = runtime.method.train(client, {"model": theta})
    torch.testing.assert_close(sent["model"], v, rtol=0, atol=1e-13)
    torch.testing.assert_close(client["gradient"], g - alpha * (v - theta), rtol=0, atol=1e-14)


def test_after_a_turn_that_converged_the_kept_gradient_is_that_of_the_loss(turn: Turn) -> None:
    runtime, client = turn(FedDyn(lr=0.2, batch_size=8, local_epochs=400, alpha=1.0))
    client["gradient"] = torch.full_like(client["gradient"], 0.01)
    found = runtime.method.train(client, {"model": runtime.server["model"]})["model"]
    (batch,) = client.batches(8)
    torch.testing.assert_close(client["gradient"], gradient(client, found, batch), rtol=0, atol=1e-6)


def test_feddyns_server_subtracts_its_state_and_counts_clients_alike(network: nn.Module) -> None:
    alpha, h = 0.5, torch.tensor([0.1, -0.2], dtype=torch.float64)
    server = server_of(network, clients=4, model=W, h=h)
    models = (W + 1, W - 0.5)
    FedDyn(alpha=alpha).aggregate(server, _uploads(*models))
    h = h - alpha / 4 * ((models[0] - W) + (models[1] - W))  # over all four clients, of whom two were selected
    torch.testing.assert_close(server["h"], h, rtol=0, atol=1e-15)
    torch.testing.assert_close(server["model"], (models[0] + models[1]) / 2 - h / alpha, rtol=0, atol=1e-14)


def test_feddyns_state_is_over_the_clients_that_can_be_selected(network: nn.Module) -> None:
    server = server_of(network, clients=9, model=W, h=torch.zeros_like(W))
    server.members = 4
    FedDyn(alpha=0.5).aggregate(server, _uploads(W + 1, W - 0.5))
    torch.testing.assert_close(server["h"], torch.full_like(W, -0.5 / 4 * 0.5), rtol=0, atol=1e-15)


def test_feddyns_state_is_the_mean_of_what_the_clients_keep(turn: Turn, network: nn.Module) -> None:
    method = FedDyn(lr=LR, batch_size=4, alpha=0.2)
    runtime, _ = turn(method)
    server = server_of(network, clients=3, **runtime.server)
    gradients = {k: torch.zeros_like(server["h"]) for k in range(3)}
    for selected in ([0, 2], [1], [0, 1]):
        sent = []
        for k in selected:
            _, client = turn(method, client=k)
            client["gradient"] = gradients[k]
            sent.append(method.train(client, {"model": server["model"]}))
            gradients[k] = client["gradient"]
        method.aggregate(server, Uploads(selected, [8] * len(selected), sent))
    torch.testing.assert_close(server["h"], sum(gradients.values()) / 3, rtol=0, atol=1e-14)


def test_feddyns_state_stays_the_mean_where_clients_join(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    settings = Settings(rounds=4, new_clients=1, join_round=3, participation=0.67)
    run = Federation(FedDyn(lr=LR, batch_size=4, alpha=0.2), network, dataset, partition, settings)
    for record in run.rounds():
        store = run.engine.store  # type: ignore[attr-defined]
        kept = [store.read(k, "gradient") for k in range(2 if record["round"] < 3 else 3)]
        torch.testing.assert_close(run.server["h"], torch.stack(kept).mean(0), rtol=0, atol=1e-14)


def test_feddyns_state_leaves_buffers_alone(network: nn.Module) -> None:
    server = server_of(network, clients=1, model=torch.tensor([1.0, 1.0]), h=torch.tensor([2.0]))
    FedDyn(alpha=1.0).aggregate(server, _uploads(torch.tensor([1.0, 0.1]), samples=(1,)))
    assert server["model"].tolist() == pytest.approx([-1.0, 0.1])


@pytest.mark.parametrize(
    ("cls", "option", "value"),
    [(FedAvgM, "server_momentum", 1.0), (FedAvgM, "server_lr", 0.0), (FedDyn, "alpha", 0.0), (FedDyn, "alpha", -1.0)],
)
def test_options_out_of_range_are_refused(cls: type, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} is"):
        cls(**{option: value})
