"""IFCA, FedEM, CFL, FedCAC and pFedLA: several models at the server, by hand in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from by_hand import LR, Turn, gradient, logits_of, models, samples, server_of, slope
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import CFL, IFCA, METHODS, FedAvg, FedCAC, FedEM, PFedLA
from pfl_ext.algorithms.cfl import bipartition
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Server, Settings, Uploads

QUICK: dict[str, Any] = {"lr": LR, "batch_size": 4}


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _linear(method: Any, clients: int = 4) -> Server:
    """A server of a network with two weights."""
    server = server_of(nn.Linear(2, 1, bias=False).double(), clients)
    method.set_up(server)
    return server


# ---- IFCA ------------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("ifca")
def test_ifca_trains_the_model_with_the_lowest_loss(turn: Turn) -> None:
    runtime, client = turn(IFCA(**QUICK, clusters=3))
    received = runtime.method.sends(runtime.server, 0, "train")
    assert len({tuple(v.tolist()) for v in received.values()}) == 3  # they begin differently
    x, y = samples(client, client.train)
    losses = [float(F.cross_entropy(logits_of(received[f"model/{j}"], x), y)) for j in range(3)]
    best = losses.index(min(losses))
    w = received[f"model/{best}"]
    for batch in client.batches(4):
        w = w - LR * gradient(client, w, batch)
    sent = runtime.method.train(client, received)
    torch.testing.assert_close(sent["model"], w, rtol=0, atol=1e-14)
    assert int(sent["cluster"]) == best
    evaluated = runtime.method.models(client, received)["personal"]
    assert torch.equal(evaluated, received[f"model/{best}"])


def test_ifca_averages_those_that_chose_a_model() -> None:
    method = IFCA(clusters=3)
    server = _linear(method)
    before = server["models"].clone()
    sent = [{"model": _vector(v, v), "cluster": torch.tensor([c])} for v, c in ((1.0, 0.0), (4.0, 2.0), (3.0, 0.0))]
    method.aggregate(server, Uploads([0, 1, 3], [5, 1, 1], sent))
    assert server["models"][0].tolist() == [2.0, 2.0] and server["models"][2].tolist() == [4.0, 4.0]
    assert torch.equal(server["models"][1], before[1])


def test_a_network_that_cannot_be_drawn_anew_is_refused() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    with pytest.raises(ValueError, match="reset_parameters, by which several models could begin differently"):
        IFCA().set_up(server_of(Plain()))
    IFCA(clusters=1).set_up(server_of(Plain()))


# ---- FedEM -----------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("fedem")
def test_fedem_takes_the_two_steps_of_expectation_maximisation(turn: Turn) -> None:
    runtime, client = turn(FedEM(**QUICK, components=2))
    received = runtime.method.sends(runtime.server, 0, "train")
    pi = _vector(0.3, 0.7)
    client["weights"] = pi
    x, y = samples(client, client.train)
    thetas = [received["model/0"], received["model/1"]]
    likelihood = torch.stack([F.softmax(logits_of(t, x), 1)[torch.arange(8), y] for t in thetas], 1)
    q = pi * likelihood / (pi * likelihood).sum(1, keepdim=True)
    expected = []
    for m, theta in enumerate(thetas):
        for batch in client.batches(4):

            def loss(w: Tensor, b: Any = batch, m: int = m) -> Tensor:
                each = -F.log_softmax(logits_of(w, b.inputs), 1)[torch.arange(len(b.rows)), b.targets]
                return (q[b.rows, m] * each).sum() / len(b.rows)

            theta = theta - LR * slope(loss, theta)[0]
        expected.append(theta)
    sent = runtime.method.train(client, received)
    torch.testing.assert_close(client["weights"], q.mean(0), rtol=0, atol=1e-13)
    for m in range(2):
        torch.testing.assert_close(sent[f"model/{m}"], expected[m], rtol=0, atol=1e-13)
    predict = runtime.method.models(client, received)["personal"]
    assert callable(predict)
    with torch.no_grad():
        found = predict(client.model, x)
    mixture = sum(w * F.softmax(logits_of(t, x), 1) for w, t in zip(q.mean(0), thetas, strict=True))
    torch.testing.assert_close(found.exp(), mixture, rtol=0, atol=1e-12)


def test_fedem_with_one_component_is_fedavg(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    runs = [
        Federation(method, network, dataset, partition, Settings(rounds=2))
        for method in (FedEM(**QUICK, components=1), FedAvg(**QUICK))
    ]
    for run in runs:
        run.run()
    torch.testing.assert_close(runs[0].server["models"][0], runs[1].server["model"], rtol=0, atol=1e-13)


def test_fedem_averages_each_component_by_samples() -> None:
    method = FedEM(components=2)
    server = _linear(method)
    sent = [{"model/0": _vector(v, v), "model/1": _vector(-v, v)} for v in (1.0, 5.0)]
    method.aggregate(server, Uploads([0, 1], [3, 1], sent))
    assert server["models"].tolist() == [[2.0, 2.0], [-2.0, 2.0]]


# ---- CFL -------------------------------------------------------------------------------------------------------------


def _cfl(method: CFL, server: Server, *steps: tuple[float, float]) -> None:
    """A round in which clients 0, 1, ... change their cluster's model so."""
    sent = [{"model": method.sends(server, k, "train")["model"] + _vector(*s)} for k, s in enumerate(steps)]
    method.aggregate(server, Uploads(list(range(len(steps))), [1] * len(steps), sent))


def _two_clusters(server: Server, *of: int) -> None:
    server["models"][:2] = torch.stack([_vector(0, 0), _vector(7, 7)])
    server["cluster"], server["clusters"] = torch.tensor(of), torch.tensor([2])


APART = ((1.0, 0.1), (1.0, -0.1), (-1.0, 0.1), (-1.0, -0.1))


def test_cfl_cuts_a_cluster_at_rest_whose_clients_are_not() -> None:
    method = CFL(first_cut=1, eps1=0.4, eps2=0.9)
    server = _linear(method)
    start = server["models"][0].clone()
    _cfl(method, server, *APART)
    assert server["cluster"].tolist() == [0, 0, 1, 1]
    torch.testing.assert_close(server["models"][:2], torch.stack([start + _vector(1, 0), start + _vector(-1, 0)]))
    assert server.report["clusters"] == 2


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"eps2": 2.0}, APART),  # no client is far from rest
        ({}, ((1.0, 0.0),) * 4),  # the cluster is not at rest
        ({"first_cut": 3}, APART),  # too early: the server is in round 2
        ({"smallest": 4}, APART),
        ({"most": 1}, APART),
        ({}, APART[:3]),  # one of its clients is missing
    ],
)
def test_cfl_does_not_cut_otherwise(options: dict[str, Any], steps: tuple[tuple[float, float], ...]) -> None:
    method = CFL(**{"first_cut": 1, "eps1": 0.4, "eps2": 0.9, **options})
    server = _linear(method)
    _cfl(method, server, *steps)
    assert server["cluster"].tolist() == [0] * 4 and int(server["clusters"]) == 1


def test_cfl_weighs_by_samples_within_a_cluster_and_leaves_clusters_without_uploads() -> None:
    method = CFL()
    server = _linear(method)
    _two_clusters(server, 0, 0, 1, 1)
    method.aggregate(server, Uploads([0, 1], [3, 1], [{"model": _vector(1, 0)}, {"model": _vector(5, 0)}]))
    assert server["models"][:2].tolist() == [[2.0, 0.0], [7.0, 7.0]]


def test_cfl_cuts_a_second_time_by_clients_numbers() -> None:
    method = CFL(first_cut=1, eps1=0.4, eps2=0.9, smallest=1)
    server = _linear(method)
    _two_clusters(server, 1, 0, 1, 0)
    _cfl(method, server, (0.1, 0.0), (1.0, 0.0), (0.1, 0.0), (-1.0, 0.0))
    assert server["cluster"].tolist() == [1, 0, 1, 2]


@pytest.mark.parametrize("seed", range(6))
def test_a_bipartition_has_the_smallest_largest_similarity_across(seed: int) -> None:
    rows = F.normalize(_random(5, 3, seed=seed))
    similarity = rows @ rows.T
    found = bipartition(similarity)

    def across(second: Tensor) -> float:
        return float(similarity[second][:, ~second].max())

    every = [torch.tensor(c) for c in itertools.product([False, True], repeat=5) if any(c) and not all(c)]
    assert across(found) == min(across(second) for second in every)


# ---- FedCAC ----------------------------------------------------------------------------------------------------------


def test_fedcacs_critical_parameters_are_those_that_moved_most_by_their_size(turn: Turn) -> None:
    method = FedCAC(tau=0.4)
    _, client = turn(method)
    a, b = _random(43), _random(43, seed=1)
    mask = method.critical(client.model, a, b)
    worth = ((b - a) * b).abs()
    for begin, end in ((0, 20), (20, 25), (25, 40), (40, 43)):
        count = max(1, int(0.4 * (end - begin)))
        chosen = set(worth[begin:end].argsort(descending=True)[:count].tolist())
        assert set(mask[begin:end].nonzero().flatten().tolist()) == chosen


def test_fedcacs_critical_parameters_have_changed(turn: Turn) -> None:
    method = FedCAC(tau=0.5)
    _, client = turn(method)
    a, b = _random(43), _random(43)
    b[:3] += 1  # three of 20 weights: fewer than the half, and none of the other tensors
    assert method.critical(client.model, a, b).nonzero().flatten().tolist() == [0, 1, 2]
    nothing = torch.zeros(2, 43, dtype=torch.bool)
    assert method.partners(nothing, torch.ones(2, dtype=torch.bool), 1).all()  # alike, and no division by zero


def test_fedcac_mixes_critical_parameters_with_partners_and_the_rest_with_all() -> None:
    method = FedCAC(tau=0.5, beta=10)
    server = _linear(method, 3)
    server.round = 1
    server["model"] = _vector(0, 0)
    # Of two numbers one is critical: the first of clients 0 and 1, the second of client 2.
    sent = [{"model": w} for w in (_vector(2, 0.1), _vector(4, 0.2), _vector(0.1, 6))]
    method.aggregate(server, Uploads([0, 1, 2], [1, 1, 2], sent))
    assert server["critical"].tolist() == [[True, False], [True, False], [False, True]]
    # Overlaps: 1 between 0 and 1, 0 else; their mean is 1/3, the threshold 1/3 + 2/30.
    assert server["partners"].tolist() == [[True, True, False], [True, True, False], [False, False, True]]
    mean = _vector((2 + 4 + 2 * 0.1) / 4, (0.1 + 0.2 + 2 * 6) / 4)
    torch.testing.assert_close(server["model"], mean)
    torch.testing.assert_close(method.sends(server, 0, "train")["model"], torch.stack([_vector(3.0)[0], mean[1]]))
    torch.testing.assert_close(method.sends(server, 2, "train")["model"], torch.stack([mean[0], _vector(6.0)[0]]))
    assert method.sends(server, 1, "evaluate")["model"].tolist() == [4.0, 0.2]
    # Beyond round beta nobody is alike enough, unless as alike as the most alike.
    assert method.partners(server["critical"], server["known"], 20).tolist() == torch.eye(3).bool().tolist()


@pytest.mark.by_hand("fedcac")
def test_fedcac_trains_the_mixture(turn: Turn) -> None:
    runtime, client = turn(FedCAC(**QUICK))
    start = runtime.server["model"] + 0.1
    w = start
    for batch in client.batches(4):
        w = w - LR * gradient(client, w, batch)
    sent = runtime.method.train(client, {"model": start})
    torch.testing.assert_close(sent["model"], w, rtol=0, atol=1e-14)
    found = models(runtime, client, model=start)  # a client that never took part has the global model
    assert torch.equal(found["personal"], start) and torch.equal(found["global"], start)


# ---- pFedLA ----------------------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {**QUICK, "embedding": 2, "width": 4, "server_lr": 0.3}


def _layer_weights(v: Tensor) -> Tensor:
    """The hypernetwork written out: embedding 2, width 4 three times, 2 layers of 3 clients."""
    e, a, b, c, d, f, g, h, i = v.split([2, 8, 4, 16, 4, 16, 4, 24, 6])
    x = F.relu(F.linear(e, a.view(4, 2), b))
    x = F.relu(F.linear(x, c.view(4, 4), d))
    x = F.relu(F.linear(x, f.view(4, 4), g))
    weights = F.relu(F.linear(x, h.view(6, 4), i)).view(2, 3)
    return weights / weights.sum(1, keepdim=True)


def _mixed(server: Server, v: Tensor) -> Tensor:
    weights, rows = _layer_weights(v), server["models"]
    return torch.cat([weights[0] @ rows[:, :25], weights[1] @ rows[:, 25:]])


@pytest.mark.by_hand("pfedla")
def test_pfedla_mixes_layers_and_steps_the_hypernetwork_along_the_change(turn: Turn) -> None:
    runtime, client = turn(PFedLA(**SMALL))
    method, server = runtime.method, runtime.server
    assert isinstance(server, Server)
    server["models"] = _random(3, 43)
    server["hypernetworks"] = server["hypernetworks"].abs()  # of four units some are alive then
    numbers = server["hypernetworks"].clone()
    start = method.sends(server, 0, "train")["model"]
    torch.testing.assert_close(start, _mixed(server, numbers[0]), rtol=0, atol=1e-13)
    w = start
    for batch in client.batches(4):
        w = w - LR * gradient(client, w, batch)
    sent = method.train(client, {"model": start})
    torch.testing.assert_close(sent["model"], w, rtol=0, atol=1e-13)
    # J^T (start - w), as the gradient of the product of the mixture with it.
    g = slope(lambda v: _mixed(server, v) @ (start - w), numbers[0])[0]
    assert float(g.abs().max()) > 1e-6
    others = server["models"].clone()
    method.aggregate(server, Uploads([0], [8], [sent]))
    torch.testing.assert_close(server["hypernetworks"][0], numbers[0] - 0.3 * g, rtol=0, atol=1e-12)
    assert torch.equal(server["hypernetworks"][1:], numbers[1:]) and torch.equal(server["models"][1:], others[1:])
    assert torch.equal(server["models"][0], sent["model"])


def test_a_layer_of_pfedla_that_nobody_has_a_weight_for_is_the_clients_own(turn: Turn) -> None:
    runtime, _ = turn(PFedLA(**SMALL))
    server = runtime.server
    server["models"], server["hypernetworks"] = _random(3, 43), server["hypernetworks"].abs()
    server["hypernetworks"][1, -6:-3] = -1e6  # shifts of the first layer's three weights
    sent = runtime.method.sends(server, 1, "train")["model"]
    assert torch.equal(sent[:25], server["models"][1, :25]) and not torch.equal(sent[25:], server["models"][1, 25:])


# ---- all -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("ifca", "clusters", 0),
        ("fedem", "components", 0),
        ("cfl", "eps1", -1.0),
        ("cfl", "first_cut", 0),
        ("fedcac", "tau", 0.0),
        ("fedcac", "beta", 0),
        ("pfedla", "width", 0),
        ("pfedla", "server_lr", 0.0),
    ],
)
def test_options_out_of_range_are_refused(name: str, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is"):
        METHODS[name](**{option: value})


@pytest.fixture(scope="module")
def populations() -> tuple[Dataset, Partition]:
    """Six clients; to the last three the classes are the other way round."""
    y = torch.arange(360) % 3
    x = torch.randn(360, 4, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(4)[y]
    told = torch.where(torch.arange(360) < 180, y, 2 - y)
    dataset = Dataset("points", x, told, ("a", "b", "c"), torch.zeros(360, dtype=torch.bool))
    train, test = (tuple(torch.arange(60 * k + a, 60 * k + b) for k in range(6)) for a, b in ((0, 40), (40, 60)))
    none = torch.empty(0, dtype=torch.int64)
    return dataset, Partition(train, (none,) * 6, test, none, torch.cat(test))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ifca", {"clusters": 2}),
        ("fedem", {"components": 2}),
        ("cfl", {"first_cut": 5, "eps1": 0.1, "eps2": 0.3}),
        ("fedamp", {"sigma": 10.0}),
        ("fedpac", {}),
        ("pfedla", {}),
    ],
)
def test_two_populations_are_told_apart(
    name: str, options: dict[str, Any], populations: tuple[Dataset, Partition]
) -> None:
    """One model for both is right for hardly more than one of them; two are for most samples of both."""
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    found = {}
    for label, own in (("fedavg", {}), (name, options)):
        run = Federation(METHODS[label](lr=0.1, batch_size=4, **own), network, *populations, Settings(rounds=15))
        (test,) = (splits["test"] for splits in run.run()[-1]["models"].values())
        found[label] = test["accuracy"]["mean"]
    assert found["fedavg"] < 0.7 and found[name] > 0.75
    if name == "cfl":
        assert run.server["cluster"].tolist() in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])
