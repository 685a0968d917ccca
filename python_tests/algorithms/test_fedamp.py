from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from by_hand import LR, Turn, gradient, models, server_of
from torch import Tensor, nn

from pfl_ext.algorithms import FedAMP
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Server, Settings, Uploads

ALPHA, SIGMA, LAM = 0.4, 2.0, 0.6


def _method(**options: Any) -> FedAMP:
    return FedAMP(**{"lr": LR, "batch_size": 4, "alpha": ALPHA, "sigma": SIGMA, "lam": LAM, **options})


def _server(clients: int = 4) -> Server:
    server = server_of(nn.Linear(2, 1, bias=False).double(), clients)
    _method().set_up(server)
    return server


def _send(method: FedAMP, server: Server, **models: Tensor) -> None:
    clients = [int(k[1:]) for k in models]
    method.aggregate(server, Uploads(clients, [1] * len(clients), [{"model": w} for w in models.values()]))


def _vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.by_hand("fedamp")
def test_a_client_trains_near_its_cloud_model_and_from_it(turn: Turn) -> None:
    runtime, client = turn(_method())
    u = runtime.model.state() + 0.1
    v = u.clone()
    for batch in client.batches(4):
        v = v - LR * (gradient(client, v, batch) + LAM / ALPHA * (v - u))
    sent = runtime.method.train(client, {"model": u})
    torch.testing.assert_close(sent["model"], v, rtol=0, atol=1e-14)


def test_the_cloud_model_is_a_gradient_step_on_the_sum_of_a() -> None:
    """By autograd: U = W - alpha grad sum of A(|w_k - w_j|^2) over pairs, with A(x) = 1 - exp(-x / sigma)."""
    method, server = _method(), _server(3)
    rows = [_vector(0.0, 0.5), _vector(1.0, 1.0), _vector(-0.5, 2.0)]
    _send(method, server, _0=rows[0], _1=rows[1], _2=rows[2])
    w = torch.stack(rows).requires_grad_()
    pairs = [(0, 1), (0, 2), (1, 2)]
    total = sum(1 - torch.exp(-(w[k] - w[j]).square().sum() / SIGMA) for k, j in pairs)
    assert isinstance(total, Tensor)
    (slope,) = torch.autograd.grad(total, w)
    # The gradient is 2 A' (w_k - w_j); the paper's xi has A' alone, so that its alpha is twice the step.
    expected = (w - ALPHA / 2 * slope).detach()
    for k in range(3):
        torch.testing.assert_close(method.sends(server, k, "train")["model"], expected[k], rtol=0, atol=1e-14)


def test_attention_is_the_papers() -> None:
    method, server = _method(), _server(3)
    _send(method, server, _0=_vector(0, 0), _1=_vector(1, 0), _2=_vector(0, 2))
    near, far, across = (ALPHA / SIGMA * math.exp(-x / SIGMA) for x in (1, 4, 5))
    expected = _vector(1 - near - far, near, far, near, 1 - near - across, across, far, across, 1 - far - across)
    torch.testing.assert_close(server["attention"].flatten(), expected, rtol=0, atol=1e-15)


def test_where_others_would_count_more_than_all_of_it_they_share_it() -> None:
    method, server = _method(alpha=20.0), _server(3)
    _send(method, server, _0=_vector(0, 0), _1=_vector(1, 0), _2=_vector(0, 2))
    near, far = (math.exp(-x / SIGMA) for x in (1, 4))
    torch.testing.assert_close(server["attention"][0], _vector(0, near, far) / (near + far), rtol=0, atol=1e-15)
    assert bool((server["attention"] >= 0).all())
    torch.testing.assert_close(server["attention"].sum(1), torch.ones(3, dtype=torch.float64))


def test_clients_that_rest_keep_their_models_and_those_that_never_took_part_count_for_nothing() -> None:
    method, server = _method(), _server(4)
    initial = server["models"][3].clone()
    _send(method, server, _0=_vector(0, 0), _1=_vector(1, 0))
    _send(method, server, _1=_vector(3, 0), _2=_vector(0, 2))
    assert server["known"].tolist() == [True, True, True, False]
    distances = server["distances"]
    assert distances[:3, :3].tolist() == [[0, 9, 4], [9, 0, 13], [4, 13, 0]]
    assert server["attention"][:3, 3].tolist() == [0, 0, 0]
    torch.testing.assert_close(server["models"][3], initial)
    # One that never took part begins at the mean of the others, and is evaluated with it.
    for stage in ("train", "evaluate"):
        torch.testing.assert_close(method.sends(server, 3, stage)["model"], _vector(1, 2 / 3))  # type: ignore[arg-type]


def test_before_anybody_has_sent_something_all_receive_the_initial_weights(turn: Turn) -> None:
    runtime, client = turn(_method())
    for stage in ("train", "evaluate"):
        found = runtime.method.sends(runtime.server, 1, stage)  # type: ignore[arg-type]
        assert torch.equal(found["model"], runtime.model.state())
    assert list(models(runtime, client)) == ["personal"]


def test_a_client_is_evaluated_with_the_model_it_sent_and_trains_from_another() -> None:
    method, server = _method(), _server(2)
    _send(method, server, _0=_vector(0, 0), _1=_vector(1, 0))
    assert torch.equal(method.sends(server, 1, "evaluate")["model"], _vector(1, 0))
    assert not torch.equal(method.sends(server, 1, "train")["model"], _vector(1, 0))


def test_there_is_one_copy_of_each_clients_model(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    run = Federation(_method(), network, dataset, partition, Settings(rounds=2))
    records = run.run()
    assert run.engine.store.labels == []  # type: ignore[attr-defined]
    assert [name for name, x in run.server.items() if x.numel() >= 3 * 43] == ["models"]
    assert records[-1]["communication"] == {
        "up_parameters": 3 * 43,
        "up_bytes": 3 * 43 * 8,
        "down_parameters": 3 * 43,
        "down_bytes": 3 * 43 * 8,
    }
    assert "global" not in records[-1]["models"]


def test_buffers_are_mixed_and_do_not_count_as_distance() -> None:
    network = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False)).double()
    method, server = _method(alpha=1.0, sigma=2.0), server_of(network, 2)
    method.set_up(server)
    _send(method, server, _0=_vector(1, 0, 1, 2), _1=_vector(1, 8, 3, 4))
    torch.testing.assert_close(method.sends(server, 0, "train")["model"], _vector(1, 4, 2, 3))
    server.model.stays[1:] = True
    _send(method, server, _0=_vector(5, 9, 9, 9))
    assert server["models"][0].tolist() == [5, 0, 1, 2]


@pytest.mark.parametrize(("option", "value"), [("alpha", 0.0), ("sigma", 0.0), ("lam", -1.0), ("lam", 21.0)])
def test_options_out_of_range_are_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option} is"):
        FedAMP(**{option: value})
