"""pFedHN: the server's step by hand in float64, and what is sent, kept and counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import LR, Turn, gradient
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import PFedHN, PFedHNPC
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings, Uploads

SMALL: dict[str, Any] = {"lr": LR, "batch_size": 4, "width": 6, "hidden_layers": 1, "embedding": 2}


def _weights(vectors: dict[str, Tensor], client: int) -> Tensor:
    """The hypernetwork written out."""
    features = F.linear(vectors["embeddings"][client], vectors["features.0.weight"], vectors["features.0.bias"])
    features = F.linear(F.relu(features), vectors["features.2.weight"], vectors["features.2.bias"])
    return F.linear(features, vectors["heads.weight"], vectors["heads.bias"])


def _hypernetwork(server: Any) -> dict[str, Tensor]:
    """Copies of its tensors by name, and of the embeddings."""
    shapes = {
        "features.0.weight": (6, 2), "features.0.bias": (6,), "features.2.weight": (6, 6), "features.2.bias": (6,),
        "heads.weight": (43, 6), "heads.bias": (43,),
    }  # fmt: skip
    parts = server["hypernetwork"].clone().split([torch.Size(shape).numel() for shape in shapes.values()])
    named = {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}
    return {**named, "embeddings": server["embeddings"].clone()}


def test_each_client_is_sent_what_the_hypernetwork_makes_of_its_embedding(turn: Turn) -> None:
    runtime, _ = turn(PFedHN(**SMALL))
    for k in range(3):
        sent = runtime.method.sends(runtime.server, k, "train")["model"]
        torch.testing.assert_close(sent, _weights(_hypernetwork(runtime.server), k), rtol=0, atol=1e-15)
    vectors = _hypernetwork(runtime.server)
    assert not torch.equal(_weights(vectors, 0), _weights(vectors, 1))


@pytest.mark.by_hand("pfedhn")
def test_a_client_sends_how_sgd_changed_its_weights(turn: Turn) -> None:
    runtime, client = turn(PFedHN(**SMALL))
    start = runtime.method.sends(runtime.server, 0, "train")["model"]
    v = start
    for batch in client.batches(4):
        v = v - LR * gradient(client, v, batch)
    sent = runtime.method.train(client, {"model": start})
    assert set(sent) == {"difference"}
    torch.testing.assert_close(sent["difference"], start - v, rtol=0, atol=1e-14)


def test_the_gradients_of_a_clients_steps_are_cut_too(turn: Turn) -> None:
    clip = 0.05
    runtime, client = turn(PFedHN(**SMALL, clip=clip))
    start = runtime.method.sends(runtime.server, 0, "train")["model"]
    client.model.load(start)
    params = list(client.model.module.parameters())
    optimizer = torch.optim.SGD(params, lr=LR)
    for batch in client.batches(4):
        optimizer.zero_grad()
        F.cross_entropy(client.model.module(batch.inputs), batch.targets).backward()
        assert torch.nn.utils.clip_grad_norm_(params, clip) > clip
        optimizer.step()
    expected = start - client.model.state()
    sent = runtime.method.train(client, {"model": start})
    torch.testing.assert_close(sent["difference"], expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("clip", [50.0, 0.01])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_the_servers_steps_are_torchs_sgd_on_the_jacobians_products(turn: Turn, clip: float, momentum: float) -> None:
    method = PFedHN(
        **SMALL, server_lr=0.2, embedding_lr=0.3, server_momentum=momentum, server_weight_decay=0.01, clip=clip
    )  # fmt: skip
    runtime, _ = turn(method)
    leaves = {name: vector.detach().clone().requires_grad_() for name, vector in _hypernetwork(runtime.server).items()}
    embeddings = leaves["embeddings"]
    groups = [
        {"params": [vector for name, vector in leaves.items() if name != "embeddings"]},
        {"params": [embeddings], "lr": 0.3},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.2, momentum=momentum, weight_decay=0.01)
    generator = torch.Generator().manual_seed(0)
    for clients in ([0, 2], [1, 2]):
        differences = [torch.randn(43, generator=generator, dtype=torch.float64) for _ in clients]
        # J^T delta, the Jacobian written out row by row.
        for vector in leaves.values():
            vector.grad = torch.zeros_like(vector)
        for k, delta in zip(clients, differences, strict=True):
            for number, weight in zip(delta, _weights(leaves, k), strict=True):
                rows = torch.autograd.grad(weight, list(leaves.values()), retain_graph=True)
                for vector, row in zip(leaves.values(), rows, strict=True):
                    assert vector.grad is not None
                    vector.grad += number * row / len(clients)
        norm = torch.nn.utils.clip_grad_norm_(list(leaves.values()), clip)
        assert (norm > clip) == (clip < 1)
        optimizer.step()
        method.aggregate(runtime.server, Uploads(clients, [5, 1], [{"difference": d} for d in differences]))
        assert runtime.server.report["gradient_norm"] == pytest.approx(float(norm), rel=1e-12)
        found = _hypernetwork(runtime.server)
        for name, vector in leaves.items():
            torch.testing.assert_close(found[name], vector.detach(), rtol=0, atol=1e-13)


def test_every_part_of_the_hypernetwork_gets_a_gradient_and_other_clients_embeddings_get_none(turn: Turn) -> None:
    method = PFedHN(**SMALL, server_weight_decay=0.0)
    runtime, client = turn(method)
    before = _hypernetwork(runtime.server)
    sent = method.train(client, method.sends(runtime.server, 0, "train"))
    method.aggregate(runtime.server, Uploads([0], [8], [sent]))
    after = _hypernetwork(runtime.server)
    for name, vector in before.items():
        assert not torch.equal(after[name], vector), name
    assert torch.equal(runtime.server["embeddings"][1:], before["embeddings"][1:])


def test_what_is_counted_as_sent_is_the_generated_weights(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(PFedHN(lr=LR), network, dataset, partition, Settings(rounds=1, participation=0.7))
    counted = run.run()[0]["communication"]
    assert counted["up_parameters"] == counted["down_parameters"] == 2 * 43
    assert run.server["embeddings"].shape == (3, 1)
    assert len(run.server["hypernetwork"]) == 200 + 3 * (100 * 100 + 100) + 43 * 101


def test_a_client_that_never_took_part_is_evaluated_by_its_own_embedding(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    settings = Settings(rounds=1, new_clients=1)
    run = Federation(PFedHN(**SMALL, server_weight_decay=0.0), network, dataset, partition, settings)
    drawn = run.server["embeddings"].clone()
    last = run.run()[-1]
    assert torch.equal(run.server["embeddings"][2], drawn[2])
    assert not torch.equal(run.server["embeddings"][:2], drawn[:2])
    assert last["new_clients"]["personal"]["test"]["accuracy"]["count"] == 1


def test_the_heads_can_begin_around_the_networks_own_weights(turn: Turn) -> None:
    runtime, client = turn(PFedHN(**SMALL, start="network"))
    found = _hypernetwork(runtime.server)
    assert torch.equal(found["heads.bias"], client.model.state())
    other, _ = turn(PFedHN(**SMALL))
    assert torch.equal(found["heads.weight"], _hypernetwork(other.server)["heads.weight"])


def test_buffers_and_frozen_parameters_are_not_generated(dataset: Dataset, partition: Partition) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    network[3].bias.requires_grad_(False)
    run = Federation(PFedHN(**SMALL), network, dataset, partition, Settings(rounds=1))
    assert len(run.server["hypernetwork"]) == 18 + 42 + (25 + 10 + 15) * 7
    (record,) = run.run()
    sent = run.method.sends(run.server, 0, "train")["model"]
    run.server.model.load(sent)
    trained = run.server.model.module
    assert torch.equal(trained[3].bias, network[3].bias)
    assert not torch.equal(trained[1].running_mean, network[1].running_mean)
    assert record["communication"]["down_parameters"] == 3 * sent.numel()


@pytest.mark.parametrize(
    ("option", "value"),
    [("width", 0), ("server_lr", 0.0), ("server_momentum", 1.0), ("clip", -1.0), ("embedding", -1), ("start", "zero")],
)
def test_options_out_of_range_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is {value!r}; accepted is a value"):
        PFedHN(**{option: value})


@pytest.mark.by_hand("pfedhn-pc")
def test_the_personal_classifier_stays_with_the_client(turn: Turn) -> None:
    """pFedHN-PC: the hypernetwork makes the body, the head is the client's and goes on from its last turn."""
    runtime, client = turn(PFedHNPC(**SMALL))
    body = 4 * 5 + 5
    received = runtime.method.sends(runtime.server, 0, "train")
    assert received["model"].shape == (body,)
    head = client.model.state()[body:] + 0.1
    client["head"] = head
    v = torch.cat([received["model"], head])
    for batch in client.batches(4):
        v = v - LR * gradient(client, v, batch)
    sent = runtime.method.train(client, received)
    torch.testing.assert_close(sent["difference"], received["model"] - v[:body], rtol=0, atol=1e-14)
    torch.testing.assert_close(client["head"], v[body:], rtol=0, atol=1e-14)
    evaluated = runtime.method.models(client, received)["personal"]
    assert torch.equal(evaluated, torch.cat([received["model"], client["head"]]))
