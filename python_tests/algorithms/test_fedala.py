from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from by_hand import LR, Turn, entries, gradient, models
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import FedALA, FedAvg
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Client, Federation, Settings, WorkingModel

ETA = 3.0


def _method(**options: Any) -> FedALA:
    return FedALA(**{"lr": LR, "batch_size": 4, "weight_lr": ETA, "sample": 1.0, **options})


def _own(w: Tensor) -> Tensor:
    return w + torch.linspace(-0.9, 0.8, len(w), dtype=w.dtype)


def _between(client: Client, own: Tensor, w: Tensor, weights: Tensor) -> Tensor:
    """A model whose last layer is between two, and whose others are the received ones."""
    chosen = entries(client.model, "2")
    state = w.clone()
    state[chosen] = own[chosen] + (w - own)[chosen] * weights
    return state


def _pass(client: Client, own: Tensor, w: Tensor, weights: Tensor, batches: list[Any]) -> tuple[Tensor, float]:
    """The weights after a pass by hand, and the mean loss: autograd's derivative in the weights themselves."""
    losses = []
    for batch in batches:
        leaf = weights.clone().requires_grad_()
        chosen = entries(client.model, "2")
        state = w.clone().masked_scatter(chosen, own[chosen] + (w - own)[chosen] * leaf)
        pieces = client.model.tensors(state)
        hidden = F.relu(F.linear(batch.inputs, pieces[0], pieces[1]))
        loss = F.cross_entropy(F.linear(hidden, pieces[2], pieces[3]), batch.targets)
        (slope,) = torch.autograd.grad(loss, leaf)
        weights = (weights - ETA * slope).clamp(0, 1)
        losses.append(float(loss.detach()))
    return weights, statistics.mean(losses)


@pytest.mark.by_hand("fedala")
def test_later_turns_learn_the_weights_by_one_pass_and_train_from_there(turn: Turn) -> None:
    runtime, client = turn(_method())
    w = runtime.server["model"]
    own, before = _own(w), torch.linspace(0, 1, 18, dtype=w.dtype)
    client["personal"], client["weights"] = own, before
    expected, loss = _pass(client, own, w, before, list(client.batches(4, name="aggregation")))
    assert 0 < int(((expected == 0) | (expected == 1)).sum()) < 18  # some are clipped, some are not
    v = _between(client, own, w, expected)
    for batch in client.batches(4):
        v = v - LR * gradient(client, v, batch)
    sent = runtime.method.train(client, {"model": w})
    torch.testing.assert_close(client["weights"], expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["model"], v, rtol=0, atol=1e-13)
    assert torch.equal(client["personal"], sent["model"])
    assert client.report["aggregation_loss"] == pytest.approx(loss, rel=1e-6)
    assert (expected - before).abs().max() > 1e-2


def test_the_first_time_the_weights_are_learnt_until_the_loss_stays(turn: Turn) -> None:
    threshold = 0.003
    runtime, client = turn(_method(threshold=threshold, most_passes=60))
    w = runtime.server["model"]
    own, weights = _own(w), torch.ones(18, dtype=w.dtype)
    client["personal"] = own
    batches, losses = list(client.batches(4, name="aggregation")), list[float]()
    while len(losses) <= 10 or statistics.pstdev(losses[-10:]) >= threshold:
        weights, loss = _pass(client, own, w, weights, batches)
        losses.append(loss)
    assert 12 < len(losses) < 60
    client.trained = 0
    runtime.method.train(client, {"model": w})
    assert client.trained == 8 * (len(losses) + 1)  # passes over the sample, and the training itself
    torch.testing.assert_close(client["weights"], weights, rtol=0, atol=1e-12)


def test_a_loss_that_stays_from_the_beginning_takes_eleven_passes(turn: Turn) -> None:
    runtime, client = turn(_method(threshold=1e-9))
    client["personal"] = runtime.server["model"]  # the weights have no influence
    runtime.method.train(client, {"model": runtime.server["model"]})
    assert client.trained == 8 * (11 + 1)


def test_weights_that_never_settle_are_given_up_after_the_most_passes(turn: Turn) -> None:
    runtime, client = turn(_method(threshold=0.0, most_passes=3))
    client["personal"] = _own(runtime.server["model"])
    runtime.method.train(client, {"model": runtime.server["model"]})
    assert client.trained == 8 * (3 + 1)


def test_a_first_turn_begins_at_the_received_model(turn: Turn) -> None:
    runtime, client = turn(_method())
    plain, other = turn(FedAvg(lr=LR, batch_size=4))
    w = {"model": runtime.server["model"]}
    assert torch.equal(runtime.method.train(client, w)["model"], plain.method.train(other, w)["model"])
    assert "weights" not in client and "personal" in client


def test_the_weights_are_learnt_on_a_sample(turn: Turn) -> None:
    runtime, client = turn(_method(sample=0.5))
    w = runtime.server["model"]
    own, ones = _own(w), torch.ones(18, dtype=w.dtype)
    client["personal"], client["weights"] = own, ones
    expected, _ = _pass(client, own, w, ones, list(client.batches(4, name="aggregation"))[:1])
    client.trained = 0
    runtime.method.train(client, {"model": w})
    torch.testing.assert_close(client["weights"], expected, rtol=0, atol=1e-13)
    assert client.trained == 4 + 8


@pytest.mark.parametrize(("layers", "size"), [(1, 18), (2, 18 + 10), (3, 53), (9, 53), (0, 53)])
def test_the_last_layers_have_weights_and_buffers_have_none(layers: int, size: int) -> None:
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    assert len(_method(aggregated_layers=layers).keeps(WorkingModel(network))["weights"]) == size


def test_the_parameters_that_have_weights_count_as_trained_a_second_time(turn: Turn) -> None:
    runtime, client = turn(_method())
    client["personal"], client["weights"] = runtime.server["model"], torch.ones(18, dtype=torch.float64)
    runtime.method.train(client, {"model": runtime.server["model"]})
    assert client.trained_parameters == 43 + 18


def test_what_is_evaluated_is_the_trained_model_and_the_global_one_before(turn: Turn) -> None:
    runtime, client = turn(_method())
    w = runtime.server["model"] + 1
    assert torch.equal(models(runtime, client, model=w)["personal"], w)
    client["personal"] = w + 2
    found = models(runtime, client, model=w)
    assert torch.equal(found["personal"], w + 2) and torch.equal(found["global"], w)


def test_it_learns_on_points(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    first, *_, last = Federation(_method(weight_lr=1.0), network, dataset, partition, Settings(rounds=8)).run()
    losses = [r["models"]["personal"]["test"]["loss"]["mean"] for r in (first, last)]
    assert losses[1] < losses[0]
    assert 0 < last["training"]["aggregation_weight"] < 1


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


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("aggregated_layers", -1),
        ("weight_lr", 0.0),
        ("sample", 0.0),
        ("sample", 1.1),
        ("threshold", -1.0),
        ("most_passes", 0),
    ],
)
def test_options_out_of_range_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is"):
        FedALA(**{option: value})
