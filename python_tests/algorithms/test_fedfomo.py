from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from by_hand import LR, Turn, gradient, server_of
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import FedAvg, FedFomo
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Client, Federation, Request, Server, Settings, Uploads


def _method(**options: Any) -> FedFomo:
    return FedFomo(**{"lr": LR, "batch_size": 4, **options})


def _loss(client: Client, state: Tensor) -> float:
    client.model.load(state)
    dataset = client._dataset
    with torch.no_grad():
        return float(F.cross_entropy(client.model.module(dataset.inputs[8:12]), dataset.targets[8:12]))


def _trained(client: Client, state: Tensor, steps: int) -> Tensor:
    """A better model, by steps on the client's own data."""
    for batch in client.batches(8, steps=steps):
        state = state - 0.3 * gradient(client, state, batch)
    return state


@pytest.mark.by_hand("fedfomo")
def test_models_that_help_are_mixed_by_how_much_and_how_far_they_are(turn: Turn) -> None:
    runtime, client = turn(_method())
    start = runtime.model.state()
    own, good, better = (_trained(client, start, steps) for steps in (1, 3, 6))
    bad = start - 2 * (better - start)
    client["start"], client["personal"] = start, own
    models = [own, good, better, bad]
    gains = [(_loss(client, start) - _loss(client, x)) / float((x - start).norm()) for x in models]
    assert gains[3] < 0 < min(gains[:3])
    total = sum(gains[:3])
    mixed = start + sum(g / total * (x - start) for g, x in zip(gains[:3], models[:3], strict=True))
    v = mixed
    for batch in client.batches(4):
        v = v - LR * gradient(client, v, batch)
    sent = runtime.method.train(client, {"model/4": good, "model/1": better, "model/2": bad})
    torch.testing.assert_close(client["start"], mixed, rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["model"], v, rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["affinity"], torch.tensor(gains[1:]).double(), rtol=1e-6, atol=0)
    assert torch.equal(client["personal"], sent["model"])


def test_where_nothing_helps_a_client_goes_on_from_its_own_model(turn: Turn) -> None:
    runtime, client = turn(_method())
    start = runtime.model.state()
    better = _trained(client, start, 6)
    client["start"], client["personal"] = better, start
    sent = runtime.method.train(client, {"model/1": start - (better - start)})
    assert torch.equal(client["start"], start)
    plain, other = turn(FedAvg(lr=LR, batch_size=4))
    assert torch.equal(sent["model"], plain.method.train(other, {"model": start})["model"])
    assert sent["affinity"].item() < 0


def test_a_first_turn_without_any_model_is_fedavgs(turn: Turn) -> None:
    runtime, client = turn(_method())
    plain, other = turn(FedAvg(lr=LR, batch_size=4))
    w = runtime.model.state()
    sent = runtime.method.train(client, {})
    assert torch.equal(sent["model"], plain.method.train(other, {"model": w})["model"])
    assert sent["affinity"].numel() == 0


# ---- the server ------------------------------------------------------------------------------------------------------


def _server(method: FedFomo, clients: int = 5) -> Server:
    server = server_of(nn.Linear(2, 1, bias=False).double(), clients)
    method.set_up(server)
    return server


def _send(method: FedFomo, server: Server, sent: dict[int, tuple[list[float], list[float]]]) -> None:
    vectors = [
        {"model": torch.tensor(w, dtype=torch.float64), "affinity": torch.tensor(p, dtype=torch.float64)}
        for w, p in sent.values()
    ]
    method.aggregate(server, Uploads(list(sent), [1] * len(sent), vectors))


def test_affinities_add_up_for_the_models_that_were_sent_and_the_highest_are_sent_next() -> None:
    method = _method(downloads=2, explore=0.0)
    server = _server(method)
    _send(method, server, {k: ([float(k), 0.0], []) for k in range(4)})
    server["chosen"][0] = torch.tensor([3, 1])
    _send(method, server, {0: ([9.0, 9.0], [0.5, -0.25])})
    assert server["affinity"][0].tolist() == [0, -0.25, 0, 0.5, 0]
    assert server["chosen"][0].tolist() == [3, 2]  # 4 has sent nothing, 1 was no help
    received = method.sends(server, 0, "train")
    assert list(received) == ["model/3", "model/2"]
    assert [v.tolist() for v in received.values()] == [[3.0, 0.0], [2.0, 0.0]]
    assert server["models"][0].tolist() == [9.0, 9.0]
    server["chosen"][0] = torch.tensor([3, 2])
    _send(method, server, {0: ([9.0, 9.0], [0.25, 0.125])})
    assert server["affinity"][0].tolist() == [0, -0.25, 0.125, 0.75, 0]


def test_nobody_is_sent_its_own_model_or_one_of_a_client_that_never_took_part() -> None:
    method = _method(downloads=4, explore=1.0, explore_decay=0.0)
    server = _server(method)
    for t in range(1, 6):
        server.round = t
        _send(method, server, {k: ([0.0, 0.0], [0.0] * len(method.sends(server, k, "train"))) for k in (1, 3)})
        chosen = [{n for n in row if n >= 0} for row in server["chosen"].tolist()]
        assert chosen == [{1, 3}, {3}, {1, 3}, {1}, {1, 3}]


def test_exploring_is_random_by_the_round_and_ends() -> None:
    method = _method(downloads=1, explore=0.3, explore_decay=0.1)
    server = _server(method, 40)
    _send(method, server, {k: ([0.0, 0.0], []) for k in range(40)})
    server["affinity"][:, 7] = 1.0
    found = []
    for t in (1, 1, 2, 3, 9):
        server.round = t
        found.append(method._chosen(server)[:, 0].tolist())
    strays = [sum(n != 7 for k, n in enumerate(row) if k != 7) for row in found]
    assert found[0] == found[1] != found[2]
    assert 2 <= strays[0] <= 16 and strays[3:] == [0, 0]


def test_what_is_sent_differs_by_client_and_is_counted(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(_method(downloads=2), network, dataset, partition, Settings(rounds=4, participation=0.34, seed=1))
    known: set[int] = set()
    sizes = []
    for record in run.rounds():
        (k,) = record["clients"]
        models = min(2, len(known - {k}))
        sizes.append(models)
        assert record["communication"] == {
            "up_parameters": 43 + models,
            "up_bytes": 8 * (43 + models),
            "down_parameters": models * 43,
            "down_bytes": 8 * models * 43,
        }
        known.add(k)
    assert len(set(sizes)) > 1
    assert "global" not in record["models"]


def test_a_client_that_never_took_part_is_evaluated_with_what_it_would_begin_from(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(_method(), network, dataset, partition, Settings(rounds=6, new_clients=1))
    run.run()
    method, runtime = run.method, run.engine.runtime  # type: ignore[attr-defined]
    assert method.sends(run.server, 0, "evaluate") == {}
    received = method.sends(run.server, 2, "evaluate")
    assert sorted(received) == ["model/0", "model/1"]
    client, found = runtime.begin(Request(2, 6, "evaluate"))
    state = runtime.models(client, found)["personal"]
    initial = run.server["models"][2]
    client.model.load(state)
    mixed = client.loss(client.validation)
    client.model.load(initial)
    assert mixed < client.loss(client.validation) and not torch.equal(state, initial)


def test_clients_without_validation_data_are_refused(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    empty = tuple(part[:0] for part in partition.validation)
    with pytest.raises(ValueError, match="3 of 3 clients have none"):
        Federation(FedFomo(), network, dataset, dataclasses.replace(partition, validation=empty))


def test_buffers_that_stay_with_a_client_are_kept_with_its_model(dataset: Dataset, partition: Partition) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    settings = Settings(rounds=3, local_buffers=("BatchNorm1d",))
    run = Federation(_method(), network, dataset, partition, settings)
    run.run()
    store, local = run.engine.store, run.engine.runtime.model.local  # type: ignore[attr-defined]
    initial = store.initial["personal"][local]
    for k in range(3):
        own = store.read(k, "personal")[local]
        assert torch.equal(own, store.read(k, "pfl_ext.local_buffers")) and not bool((own == initial).any())


@pytest.mark.parametrize(("option", "value"), [("downloads", 0), ("explore", 1.5), ("explore_decay", -0.1)])
def test_options_out_of_range_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is"):
        FedFomo(**{option: value})
