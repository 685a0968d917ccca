"""MOON, FedProto, FedPAC, FedAS, GPFL and kNN-Per: by hand in float64, from the features on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from by_hand import LR, Turn, features_of, logits_of, samples, server_of, slope
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import GPFL, METHODS, MOON, FedAS, FedAvg, FedPAC, FedProto, KNNPer
from pfl_ext.algorithms.fedpac import combination
from pfl_ext.algorithms.gpfl import ConditionalValve
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, InProcess, Settings, Uploads

HEAD = slice(25, 43)
BODY = slice(0, 25)
QUICK: dict[str, Any] = {"lr": LR, "batch_size": 4}


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _means(z: Tensor, y: Tensor) -> Tensor:
    return torch.stack([z[y == c].mean(0) for c in range(3)])


# ---- MOON ------------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("moon")
def test_moon_is_drawn_to_the_received_features_and_away_from_the_last_ones(turn: Turn) -> None:
    mu, tau = 2.0, 0.5
    runtime, client = turn(MOON(**QUICK, mu=mu, tau=tau))
    start = runtime.server["model"]
    previous = start + 0.3 * _random(43)
    client["previous"] = previous

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        z = features_of(w, x)
        near = torch.exp(F.cosine_similarity(z, features_of(start, x)) / tau)
        far = torch.exp(F.cosine_similarity(z, features_of(previous, x)) / tau)
        return F.cross_entropy(logits_of(w, x), y) + mu * -torch.log(near / (near + far)).mean()

    w = start
    for batch in client.batches(4):
        w = w - LR * slope(lambda w, b=batch: loss(w, b.inputs, b.targets), w)[0]
    sent = runtime.method.train(client, {"model": start})
    torch.testing.assert_close(sent["model"], w, rtol=0, atol=1e-13)
    assert torch.equal(client["previous"], sent["model"])
    plain, other = turn(FedAvg(**QUICK))
    assert (plain.method.train(other, {"model": start})["model"] - w).abs().max() > 1e-4  # the term is alive


def test_moons_first_turn_is_fedavgs(turn: Turn) -> None:
    runtime, client = turn(MOON(**QUICK))
    plain, other = turn(FedAvg(**QUICK))
    start = {"model": runtime.server["model"]}
    assert torch.equal(runtime.method.train(client, start)["model"], plain.method.train(other, start)["model"])


# ---- FedProto --------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("fedproto")
def test_fedproto_trains_towards_prototypes_and_sends_its_own(turn: Turn) -> None:
    lam, known = 0.7, torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    runtime, client = turn(FedProto(**QUICK, lam=lam))
    table = _random(3, 5)
    table[1] = 0.0
    w = client["personal"]

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        z = features_of(w, x)
        away = torch.stack([(z[i] - table[y[i]]).square().mean() * known[y[i]] for i in range(len(y))]).mean()
        return F.cross_entropy(logits_of(w, x), y) + lam * away

    for batch in client.batches(4):
        w = w - LR * slope(lambda w, b=batch: loss(w, b.inputs, b.targets), w)[0]
    sent = runtime.method.train(client, {"prototypes": table[known > 0], "known": known})
    torch.testing.assert_close(client["personal"], w, rtol=0, atol=1e-13)
    x, y = samples(client, client.train)
    torch.testing.assert_close(sent["prototypes"], _means(features_of(w, x), y), rtol=0, atol=1e-13)
    assert sent["counts"].tolist() == [3, 3, 2]


@pytest.mark.parametrize("weights", ["clients", "samples"])
def test_fedproto_averages_each_class_over_those_that_have_it(network: nn.Module, weights: str) -> None:
    method = FedProto(weights=weights)
    server = server_of(network)
    method.set_up(server)
    a, b = _random(2, 5), _random(1, 5, seed=1)
    sent = [
        {"prototypes": a, "counts": torch.tensor([3.0, 1.0, 0.0], dtype=torch.float64)},
        {"prototypes": b, "counts": torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)},
    ]
    uploads = Uploads([0, 2], [4, 1], sent)
    assert uploads.parameters() == 2 * 5 + 3 + 5 + 3  # clients send different amounts
    method.aggregate(server, uploads)
    first = (a[0] + b[0]) / 2 if weights == "clients" else (3 * a[0] + b[0]) / 4
    torch.testing.assert_close(server["prototypes"], torch.stack([first, a[1], torch.zeros(5)]), rtol=0, atol=1e-15)
    assert server["known"].tolist() == [1, 1, 0]
    method.aggregate(server, Uploads([2], [1], sent[1:]))
    assert torch.equal(server["prototypes"][0], b[0]) and torch.equal(server["prototypes"][1], a[1])  # stays


def test_fedproto_predicts_the_nearest_prototype(turn: Turn) -> None:
    runtime, client = turn(FedProto(**QUICK), stage="evaluate")
    table, known = _random(2, 5), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    predict = runtime.method.models(client, {"prototypes": table, "known": known})["personal"]
    assert callable(predict)
    x, _ = samples(client, client.test)
    with torch.no_grad():
        found = predict(client.model, x)
    apart = (features_of(client["personal"], x)[:, None] - table).square().sum(-1)
    torch.testing.assert_close(found[:, [0, 2]], -apart, rtol=0, atol=1e-12)
    assert bool((found[:, 1] < found[:, [0, 2]].amin(1)).all())
    states = runtime.method.models(client, {"prototypes": table[:0], "known": torch.zeros(3)})
    assert torch.equal(states["personal"], client["personal"])  # before there are any
    runtime, client = turn(FedProto(**QUICK, predict="head"), stage="evaluate")
    assert isinstance(runtime.method.models(client, {"prototypes": table, "known": known})["personal"], Tensor)


# ---- FedPAC ----------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("fedpac")
def test_fedpac_trains_the_head_then_the_representation_towards_the_centroids(turn: Turn) -> None:
    lam = 0.7
    runtime, client = turn(FedPAC(**QUICK, lam=lam))
    received = runtime.method.sends(runtime.server, 0, "train")
    received |= {"centroids": _random(3, 5), "known": torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)}
    w = torch.cat([received["representation"], received["head"]])
    x, y = samples(client, client.train)
    z = features_of(w, x)
    p = torch.tensor([3 / 8, 3 / 8, 2 / 8], dtype=torch.float64)
    mu = _means(z, y)
    trace = sum(p[c] * z[y == c].square().sum(1).mean() for c in range(3))
    variance = (trace - sum(p[c] ** 2 * mu[c] @ mu[c] for c in range(3))) / 8
    for batch in client.batches(4, name="head"):
        g = slope(lambda w, b=batch: F.cross_entropy(logits_of(w, b.inputs), b.targets), w)[0]
        w = torch.cat([w[BODY], w[HEAD] - LR * g[HEAD]])

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        z = features_of(w, x)
        away = torch.stack([(z[i] - received["centroids"][y[i]]).square().mean() * (y[i] < 2) for i in range(len(y))])
        return F.cross_entropy(logits_of(w, x), y) + lam * away.mean()

    for batch in client.batches(4):
        g = slope(lambda w, b=batch: loss(w, b.inputs, b.targets), w)[0]
        w = torch.cat([w[BODY] - LR * g[BODY], w[HEAD]])
    sent = runtime.method.train(client, received)
    torch.testing.assert_close(sent["representation"], w[BODY], rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["head"], w[HEAD], rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["centroids"], _means(features_of(w, x), y), rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["variance"], variance[None], rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["shares"], p[:, None] * mu, rtol=0, atol=1e-13)


def _best_on_a_grid(p: Tensor, steps: int = 60) -> float:
    """The smallest value of the programme of three clients, over points of the simplex."""
    grid = [(a, b, steps - a - b) for a, b in itertools.product(range(steps + 1), repeat=2) if a + b <= steps]
    points = torch.tensor(grid, dtype=torch.float64) / steps
    return float(((points @ p) * points).sum(1).min())


@pytest.mark.parametrize("seed", range(8))
def test_fedpacs_combination_is_the_minimum(seed: int) -> None:
    a = _random(3, 4, seed=seed)
    p = torch.diag(_random(3, seed=seed + 100).abs() * 0.1) + a @ a.T
    weights = torch.tensor(combination(p), dtype=torch.float64)
    assert float(weights.sum()) == pytest.approx(1) and bool((weights >= 0).all())
    # Weights below 1e-3 are left out, which changes the value by at most 3e-3 times the largest slope.
    assert float(weights @ p @ weights) <= _best_on_a_grid(p) + 3e-3 * float(p.abs().max())
    slopes = p @ weights
    assert float((slopes - slopes[weights > 0].mean()).clamp(max=0).abs().max()) < 6e-3 * float(p.abs().max())


def test_fedpacs_combination_of_equals_is_their_mean_and_of_strangers_ones_own() -> None:
    same = torch.eye(3, dtype=torch.float64)
    assert combination(same) == pytest.approx([1 / 3] * 3)
    far = torch.diag(torch.tensor([0.01, 0.01, 0.01], dtype=torch.float64))
    far[1:, 1:] += 100.0
    assert combination(far)[0] > 0.99
    assert combination(torch.zeros(2, 2)) == pytest.approx([0.5, 0.5])


def test_fedpacs_server_mixes_heads_of_those_alike(network: nn.Module) -> None:
    method = FedPAC()
    server = server_of(network)
    method.set_up(server)
    heads, shares = [_random(18, seed=s) for s in range(3)], [torch.zeros(3, 5), torch.zeros(3, 5), torch.ones(3, 5)]
    sent = [
        {
            "representation": torch.full((25,), float(i), dtype=torch.float64), "head": heads[i],
            "centroids": torch.full((3, 5), float(i), dtype=torch.float64),
            "counts": torch.tensor([1.0 + i, 0.0, 0.0], dtype=torch.float64),
            "variance": torch.tensor([1.0], dtype=torch.float64), "shares": shares[i].double(),
        }
        for i in range(3)
    ]  # fmt: skip
    method.aggregate(server, Uploads([0, 1, 3], [1, 1, 2], sent))
    # min a1^2 + a2^2 + a3^2 + 15 a3^2: a3 = 1/33, the others 16/33 each.
    expected = (16 * heads[0] + 16 * heads[1] + heads[2]) / 33
    torch.testing.assert_close(server["heads"][0], expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(server["heads"][1], expected, rtol=0, atol=1e-9)
    # For the stranger: min sum + 15 (a1 + a2)^2, so a1 = a2 = 1/33 and a3 = 31/33.
    torch.testing.assert_close(server["heads"][3], (heads[0] + heads[1] + 31 * heads[2]) / 33, rtol=0, atol=1e-9)
    assert server["has_head"].tolist() == [True, True, False, True]
    assert server["centroids"][0].tolist() == pytest.approx([(2 * 1 + 3 * 2) / 6] * 5)
    assert server["representation"].tolist() == pytest.approx([(1 + 2 * 2) / 4] * 25)
    torch.testing.assert_close(method.sends(server, 2, "train")["head"], sum(heads) / 3, rtol=0, atol=1e-14)


# ---- FedAS -----------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("fedas")
def test_fedas_aligns_the_received_representation_to_its_own_features(turn: Turn) -> None:
    align_lr = 0.3
    runtime, client = turn(FedAS(**QUICK, align_lr=align_lr))
    received = runtime.server["representation"]
    own = client["personal"] + 0.2 * _random(43)
    client["personal"] = own
    x, y = samples(client, client.train)
    prototypes = _means(features_of(own, x), y)
    w = torch.cat([received, own[HEAD]])
    for batch in client.batches(4, name="alignment"):

        def away(w: Tensor, b: Any = batch) -> Tensor:
            return (features_of(w, b.inputs) - prototypes[b.targets]).square().mean()

        g = slope(away, w)[0]
        w = torch.cat([w[BODY] - align_lr * g[BODY], w[HEAD]])
    for batch in client.batches(4):
        w = w - LR * slope(lambda w, b=batch: F.cross_entropy(logits_of(w, b.inputs), b.targets), w)[0]
    fisher = sum(
        slope(lambda w, b=batch: F.cross_entropy(logits_of(w, b.inputs), b.targets), w)[0].square().sum()
        for batch in client.batches(4, name="fisher")
    )
    sent = runtime.method.train(client, {"representation": received})
    torch.testing.assert_close(client["personal"], w, rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["representation"], w[BODY], rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["fisher"], fisher[None], rtol=1e-12, atol=0)


def test_fedas_has_nothing_to_align_to_in_a_clients_first_turn(turn: Turn) -> None:
    runtime, client = turn(FedAS(**QUICK, align_lr=0.3))
    received = runtime.server["representation"] + 0.1
    w = torch.cat([received, client["personal"][HEAD]])
    for batch in client.batches(4):
        w = w - LR * slope(lambda w, b=batch: F.cross_entropy(logits_of(w, b.inputs), b.targets), w)[0]
    runtime.method.train(client, {"representation": received})
    torch.testing.assert_close(client["personal"], w, rtol=0, atol=1e-13)


def test_fedas_weighs_clients_by_what_they_learnt(network: nn.Module) -> None:
    server = server_of(network, representation=torch.zeros(2, dtype=torch.float64))
    sent = [
        {"representation": torch.full((2,), v, dtype=torch.float64), "fisher": torch.tensor([f], dtype=torch.float64)}
        for v, f in ((1.0, 3.0), (5.0, 1.0))
    ]
    FedAS().aggregate(server, Uploads([0, 1], [1, 9], sent))
    assert server["representation"].tolist() == [2.0, 2.0]
    for upload in sent:
        upload["fisher"] = torch.zeros(1, dtype=torch.float64)
    FedAS().aggregate(server, Uploads([0, 1], [1, 9], sent))
    assert server["representation"].tolist() == [3.0, 3.0]


# ---- GPFL ------------------------------------------------------------------------------------------------------------


def _valve(v: Tensor, z: Tensor, condition: Tensor) -> Tensor:
    """Two times 5 x 5 weights, 5 shifts, 5 scales and 5 shifts of the normalisation, in the order of the module."""
    halves = []
    for half in v.split(40):
        a, b, scale, shift = half.split([25, 5, 5, 5])
        halves.append(F.layer_norm(F.relu(F.linear(condition, a.view(5, 5), b)), [5], scale, shift))
    return F.relu((halves[0] + 1) * z + halves[1])


@pytest.mark.by_hand("gpfl")
def test_gpfl_trains_features_valve_embeddings_and_head_at_once(turn: Turn) -> None:
    lam = 0.3
    runtime, client = turn(GPFL(**QUICK, lam=lam))
    received = runtime.method.sends(runtime.server, 0, "train")
    fixed = received["embeddings"]
    shares = torch.tensor([3 / 8, 3 / 8, 2 / 8], dtype=torch.float64)
    personal, common = shares @ fixed, fixed.mean(0)

    def loss(w: Tensor, v: Tensor, c: Tensor, x: Tensor, y: Tensor) -> Tensor:
        z = features_of(w, x)
        shared = _valve(v, z, common)
        logits = F.linear(_valve(v, z, personal), w[25:40].view(3, 5), w[40:43])
        angles = torch.stack([F.cosine_similarity(shared, c[j][None]) for j in range(3)], 1)
        apart = torch.stack([(shared[i] - fixed[y[i]]).norm() for i in range(len(y))]).mean()
        return F.cross_entropy(logits, y) + F.cross_entropy(angles, y) + lam * apart

    w, v, c = torch.cat([received["representation"], client["head"]]), received["valve"], fixed
    for batch in client.batches(4):
        g = slope(lambda w, v, c, b=batch: loss(w, v, c, b.inputs, b.targets), w, v, c)
        assert all(float(part.abs().max()) > 1e-6 for part in g)
        w, v, c = w - LR * g[0], v - LR * g[1], c - LR * g[2]
    sent = runtime.method.train(client, received)
    torch.testing.assert_close(sent["representation"], w[BODY], rtol=0, atol=1e-12)
    torch.testing.assert_close(client["head"], w[HEAD], rtol=0, atol=1e-12)
    torch.testing.assert_close(sent["valve"], v, rtol=0, atol=1e-12)
    torch.testing.assert_close(sent["embeddings"], c, rtol=0, atol=1e-12)
    x, _ = samples(client, client.test)
    evaluated = {"representation": w[BODY], "valve": v, "embeddings": c}
    predict = runtime.method.models(client, evaluated)["personal"]
    assert callable(predict)
    with torch.no_grad():
        found = predict(client.model, x)
    logits = F.linear(_valve(v, features_of(w, x), shares @ c), w[25:40].view(3, 5), w[40:43])
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-12)


def test_a_conditional_valve_of_zeros_is_relu() -> None:
    valve, z = ConditionalValve(4), torch.randn(3, 4)
    with torch.no_grad():
        for p in valve.parameters():
            p.zero_()
    assert torch.equal(valve(z, torch.randn(4)), F.relu(z))


# ---- kNN-Per ---------------------------------------------------------------------------------------------------------


def test_knn_per_mixes_the_network_with_the_nearest_samples(turn: Turn) -> None:
    weight, scale, k = 0.3, 0.7, 3
    runtime, client = turn(KNNPer(neighbours=k, weight=weight, scale=scale), stage="evaluate")
    w = runtime.server["model"]
    predict = runtime.method.models(client, {"model": w})["personal"]
    assert callable(predict)
    x, _ = samples(client, client.test)
    memory, labels = samples(client, client.train)
    with torch.no_grad():
        found = predict(client.model, x)
    for row, one in zip(found.exp(), x, strict=True):
        squared = (features_of(w, memory) - features_of(w, one[None])).square().sum(1)
        near = squared.argsort()[:k]
        p = torch.zeros(3, dtype=torch.float64)
        for i in near:
            p[labels[i]] += torch.exp(-squared[i] / (scale * 5))
        mixed = weight * p / p.sum() + (1 - weight) * F.softmax(logits_of(w, one[None])[0], 0)
        torch.testing.assert_close(row, mixed, rtol=0, atol=1e-12)


def test_knn_per_without_weight_is_fedavg(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    run = Federation(KNNPer(**QUICK, weight=0.0), network, dataset, partition, Settings(rounds=2))
    models = run.run()[-1]["models"]
    for metric in ("accuracy", "loss"):
        personal, shared = (models[name]["test"][metric]["mean"] for name in ("personal", "global"))
        assert personal == pytest.approx(shared, abs=1e-12)


def test_knn_per_tunes_its_weight_on_validation_data(turn: Turn) -> None:
    """The network says class 0 always; the neighbours, which are told by their inputs, are right more often."""
    method = KNNPer(tune=True, weight=0.0, neighbours=1)
    runtime, client = turn(method, stage="evaluate")
    w = runtime.server["model"].clone()
    w[25:40], w[40:43] = 0.0, torch.tensor([9.0, 0.0, 0.0])
    x, y = samples(client, client.validation)
    predict = method.models(client, {"model": w})["personal"]
    assert callable(predict)
    with torch.no_grad():
        right = (predict(client.model, x).argmax(1) == y).double().mean()
    assert right > (y == 0).double().mean()


# ---- all -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedproto", "fedpac", "gpfl", "fedrod-h"])
def test_a_head_without_linear_layers_is_refused(name: str, dataset: Dataset, partition: Partition) -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(ValueError, match="the head '1' has none: name another"):
        Federation(METHODS[name](), network, dataset, partition)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("moon", "tau", 0.0),
        ("moon", "mu", -1.0),
        ("fedproto", "lam", -1.0),
        ("fedproto", "weights", "all"),
        ("fedpac", "head_epochs", -1),
        ("fedas", "align_lr", 0.0),
        ("gpfl", "lam", -1.0),
        ("knn-per", "neighbours", 0),
        ("knn-per", "weight", 1.5),
    ],
)
def test_options_out_of_range_are_refused(name: str, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is"):
        METHODS[name](**{option: value})


def test_clients_of_fedproto_send_no_more_than_they_have(dataset: Dataset, network: nn.Module) -> None:
    """Two clients of one and of two classes: what is counted is what each sends."""
    y = dataset.targets
    rows = ((y == 0).nonzero().flatten()[:8], (y > 0).nonzero().flatten()[:8])
    none = torch.empty(0, dtype=torch.int64)
    cut = Partition(rows, (none, none), tuple(r + 24 for r in (rows[0] % 24, rows[1] % 24)), none, torch.arange(40, 48))
    run = Federation(FedProto(**QUICK), network, dataset, cut, Settings(rounds=2))
    first, second = run.run()
    assert first["communication"]["up_parameters"] == (5 + 3) + (2 * 5 + 3)
    assert first["communication"]["down_parameters"] == 2 * 3
    assert second["communication"]["down_parameters"] == 2 * (3 * 5 + 3)
    assert isinstance(run.engine, InProcess) and run.engine.store.labels == ["personal"]
