"""FedPer, LG-FedAvg and FedBABU: which part is trained, kept and sent."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from by_hand import LR, Turn, entries, gradient, joined, models
from torch import nn

from pfl_ext.algorithms import METHODS, FedBABU, FedPer, LGFedAvg, Standalone
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings, Uploads, WorkingModel

HEAD = 5 * 3 + 3
BASE = 4 * 5 + 5
# What a method calls what it shares and keeps, and how many numbers of the network of two layers are shared.
PARTS = [
    (FedPer, "base", "head", BASE),
    (LGFedAvg, "head", "representation", HEAD),
]


@pytest.mark.by_hand("fedper", "lg-fedavg")
@pytest.mark.parametrize(("cls", "shared", "own", "size"), PARTS)
def test_both_parts_take_steps_together_and_one_is_sent(turn: Turn, cls: Any, shared: str, own: str, size: int) -> None:
    runtime, client = turn(cls(lr=LR, batch_size=4))
    sent_part = entries(client.model, "2") == (shared == "head")
    received = {shared: runtime.server[shared] + 0.1}
    client[own] = client[own] - 0.2
    v = joined(sent_part, received[shared], client[own])
    for batch in client.batches(4):
        v = v - LR * gradient(client, v, batch)
    sent = runtime.method.train(client, received)
    assert set(sent) == {shared} and sent[shared].numel() == size
    torch.testing.assert_close(sent[shared], v[sent_part], rtol=0, atol=1e-14)
    torch.testing.assert_close(client[own], v[~sent_part], rtol=0, atol=1e-14)
    found = models(runtime, client, **received)
    assert set(found) == {"personal"}
    assert torch.equal(found["personal"], joined(sent_part, received[shared], client[own]))


def _three_layers() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("network", [_three_layers()])
@pytest.mark.parametrize(
    ("head", "modules", "size"),
    [("0,2", ("0", "2"), 25 + 36), ("4, 0", ("0", "4"), 25 + 21), ("2,4", ("2", "4"), 36 + 21)],
)
def test_a_head_can_be_several_modules(turn: Turn, head: str, modules: tuple[str, str], size: int) -> None:
    runtime, client = turn(FedPer(lr=LR, batch_size=4, head=head))
    own = entries(client.model, *modules)
    assert int(own.sum()) == client["head"].numel() == size
    received = {"base": runtime.server["base"] + 0.1}
    client["head"] = client["head"] - 0.2
    v = joined(own, client["head"], received["base"])
    for batch in client.batches(4):
        v = v - LR * gradient(client, v, batch)
    sent = runtime.method.train(client, received)
    torch.testing.assert_close(client["head"], v[own], rtol=0, atol=1e-14)
    torch.testing.assert_close(sent["base"], v[~own], rtol=0, atol=1e-14)
    found = models(runtime, client, **received)["personal"]
    assert torch.equal(found, joined(own, client["head"], received["base"]))


def test_a_head_that_is_the_whole_network_is_refused(turn: Turn) -> None:
    with pytest.raises(ValueError, match="module '0,2' does not part what is trained in two"):
        turn(FedPer(head="0,2"))


@pytest.mark.parametrize(("cls", "shared"), [(FedPer, "base"), (LGFedAvg, "head"), (FedBABU, "body")])
def test_the_shared_part_is_averaged_by_samples(cls: Any, shared: str) -> None:
    uploads = Uploads([0, 2], [3, 1], [{shared: torch.tensor([1.0])}, {shared: torch.tensor([5.0])}])
    server: Any = {}
    cls().aggregate(server, uploads)
    assert server[shared].tolist() == [2.0]


@pytest.mark.parametrize("cls", [FedPer, LGFedAvg])
def test_a_clients_first_turn_is_that_of_standalone(turn: Turn, cls: Any) -> None:
    runtime, client = turn(cls(lr=LR, batch_size=4))
    alone, other = turn(Standalone(lr=LR, batch_size=4))
    runtime.method.train(client, runtime.method.sends(runtime.server, 0, "train"))
    trained = client.model.state()
    alone.method.train(other, {})
    assert torch.equal(trained, other["personal"])


@pytest.mark.parametrize(("cls", "size"), [(FedPer, BASE), (LGFedAvg, HEAD), (FedBABU, BASE)])
def test_only_the_shared_part_is_communicated(
    dataset: Dataset, partition: Partition, network: nn.Module, cls: Any, size: int
) -> None:
    run = Federation(cls(batch_size=4), network, dataset, partition, Settings(rounds=1))
    record = run.run()[0]
    sent = record["communication"]
    assert sent["up_parameters"] == sent["down_parameters"] == 3 * size
    assert record["training"]["trained_parameters"] == (BASE if cls is FedBABU else BASE + HEAD)


# ---- FedBABU ---------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("fedbabu")
def test_fedbabu_trains_the_body_under_the_initial_head(turn: Turn) -> None:
    runtime, client = turn(FedBABU(lr=LR, batch_size=4, weight_decay=0.1))
    head = entries(client.model, "2")
    initial = runtime.model.state()[head]
    received = {"body": runtime.server["body"] + 0.1}
    v = joined(head, initial, received["body"])
    for batch in client.batches(4):
        v = v - LR * torch.where(head, 0.0, gradient(client, v, batch) + 0.1 * v)
    sent = runtime.method.train(client, received)
    torch.testing.assert_close(sent["body"], v[~head], rtol=0, atol=1e-14)
    assert torch.equal(client.model.state()[head], initial) and "head" not in client
    trained = client.model.state()
    found = models(runtime, client, **sent)
    assert set(found) == {"global"} and torch.equal(found["global"], trained)


@pytest.mark.parametrize("part", ["full", "head", "body"])
def test_fedbabu_fine_tunes_what_it_is_told_to(turn: Turn, part: str) -> None:
    runtime, client = turn(FedBABU(lr=LR, batch_size=4, fine_tune_epochs=1, fine_tune=part), stage="finish")
    head = entries(client.model, "2")
    received = {"body": runtime.server["body"] + 0.1}
    trained = {"full": head | ~head, "head": head, "body": ~head}[part]
    start = joined(head, client["head"], received["body"])
    v = start.clone()
    for batch in client.batches(4, name="fine-tune"):
        v = v - LR * torch.where(trained, gradient(client, v, batch), 0.0)
    runtime.method.personalize(client, received, {})
    torch.testing.assert_close(client["personal"], v, rtol=0, atol=1e-14)
    assert torch.equal(client["personal"][~trained], start[~trained])
    assert not (client["personal"] == start)[trained].all()
    found = models(runtime, client, **received)
    assert list(found) == ["global", "personal"]
    assert torch.equal(found["global"], start) and torch.equal(found["personal"], client["personal"])


def test_the_global_model_of_fedbabu_is_tested_under_the_initial_head(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(FedBABU(lr=LR, batch_size=4), network, dataset, partition, Settings(rounds=2))
    last = run.run()[-1]
    model = WorkingModel(copy.deepcopy(network))
    head = entries(model, "2")
    model.load(joined(head, model.state()[head], run.server["body"]))
    x, y = dataset.batch(partition.global_test)
    accuracy = float((model(x).argmax(-1) == y).double().mean())
    assert last["models"]["global"]["global_test"]["accuracy"] == pytest.approx(accuracy, abs=1e-12)


@pytest.mark.parametrize("head", ["fc", "2,fc"])
@pytest.mark.parametrize("name", ["fedper", "lg-fedavg", "fedbabu", "fedrep"])
def test_a_head_that_is_not_there_is_refused_with_the_names_that_are(turn: Turn, name: str, head: str) -> None:
    with pytest.raises(ValueError, match="module 'fc' does not part what is trained in two; that is in 0, 2"):
        turn(METHODS[name](head=head))
