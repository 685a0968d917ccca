from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import LR, Turn, entries, gradient, server_of
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import FedAvg, FedGen
from pfl_ext.algorithms.fedgen import diversity
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Server, Settings, Uploads, WorkingModel

SIZE, CLASSES, FEATURES, NOISE, HIDDEN = 4 * 5 + 5 + 5 * 3 + 3, 3, 5, 4, 6
GENERATOR = (NOISE + CLASSES) * HIDDEN + HIDDEN + HIDDEN * FEATURES + FEATURES


def _method(**options: Any) -> FedGen:
    return FedGen(**{"lr": LR, "batch_size": 4, "noise": NOISE, "hidden": HIDDEN, "generated": 7, **options})


def _generator(state: Tensor, given: Tensor) -> Tensor:
    """G by hand, from its vector."""
    shapes = [(HIDDEN, NOISE + CLASSES), (HIDDEN,), (FEATURES, HIDDEN), (FEATURES,)]
    parts = state.split([torch.Size(shape).numel() for shape in shapes])
    a, b, c, d = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
    return F.linear(F.relu(F.linear(given, a, b)), c, d)


def _drawn(method: FedGen, counts: Tensor, stream: torch.Generator) -> tuple[Tensor, Tensor]:
    labels = torch.multinomial(counts / counts.sum(), method.generated, replacement=True, generator=stream)
    noise = torch.randn(method.generated, NOISE, generator=stream, dtype=torch.float64)
    return labels, torch.cat([noise, F.one_hot(labels, CLASSES)], 1)


def _received(runtime: Any, counts: tuple[float, ...]) -> dict[str, Tensor]:
    generator = torch.randn(GENERATOR, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return {
        "model": runtime.server["model"],
        "generator": generator,
        "counts": torch.tensor(counts, dtype=torch.float64),
    }


@pytest.mark.by_hand("fedgen")
def test_a_client_trains_on_its_data_and_on_generated_features(turn: Turn) -> None:
    lam = 0.7
    method = _method(lam=lam)
    runtime, client = turn(method)
    received = _received(runtime, (3.0, 1.0, 0.0))
    head = entries(client.model, "2")
    w = received["model"]
    stream, seen = client.stream("generator"), torch.zeros(CLASSES, dtype=torch.float64)
    for batch in client.batches(4):
        labels, given = _drawn(method, received["counts"], stream)
        assert set(labels.tolist()) <= {0, 1}
        z = _generator(received["generator"], given)
        h = w[head].clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(F.linear(z, h[:15].view(3, 5), h[15:]), labels), h)
        assert slope.abs().max() > 0
        step = gradient(client, w, batch)
        step[head] += lam * slope
        w = w - LR * step
        seen += F.one_hot(batch.targets, CLASSES).sum(0)
    sent = method.train(client, received)
    torch.testing.assert_close(sent["model"], w, rtol=0, atol=1e-13)
    assert torch.equal(sent["counts"], seen) and int(seen.sum()) == 8


@pytest.mark.parametrize("why", ["lam is 0", "nothing was counted yet"])
@pytest.mark.usefixtures("by_autograd")
def test_without_generated_samples_a_client_is_fedavgs(turn: Turn, why: str) -> None:
    runtime, client = turn(_method(lam=0.0) if why == "lam is 0" else _method())
    received = _received(runtime, (1.0, 1.0, 1.0) if why == "lam is 0" else (0.0, 0.0, 0.0))
    plain, other = turn(FedAvg(lr=LR, batch_size=4))
    assert torch.equal(
        runtime.method.train(client, received)["model"],
        plain.method.train(other, {"model": received["model"]})["model"],
    )


def _uploads(model: Tensor, shifts: tuple[float, ...] = (0.5, -0.5)) -> Uploads:
    counts = (torch.tensor([4.0, 0.0, 0.0]), torch.tensor([0.0, 4.0, 0.0]))
    sent = [{"model": model + s, "counts": c.double()} for s, c in zip(shifts, counts, strict=True)]
    return Uploads([0, 1], [3, 1], sent)


def _server(method: FedGen, network: nn.Module) -> Server:
    server = server_of(network)
    method.set_up(server)
    return server


def test_the_server_trains_the_generator_to_be_understood_by_the_ensemble(network: nn.Module) -> None:
    """One step of Adam, which is the learning rate by the gradient's sign (but for its epsilon)."""
    lr, gamma = 1e-3, 0.5
    method = _method(generator_steps=1, generator_lr=lr, diversity=gamma)
    server = _server(method, network)
    model, start = server["model"].clone(), server["generator"].clone()
    uploads = _uploads(model)
    head = entries(WorkingModel(network), "2")
    w = start.clone().requires_grad_()
    counts = torch.tensor([4.0, 4.0, 0.0], dtype=torch.float64)
    labels, given = _drawn(method, counts, server.stream("generator"))
    z = _generator(w, given)
    heads = [state[head] for state in uploads.each("model")]
    logits = sum(F.linear(z, h[:15].view(3, 5), h[15:]) for h in heads) / 2
    noise = given[:, :NOISE]
    products = torch.cdist(noise, noise) ** 2 / NOISE * torch.cdist(z, z, p=1) / FEATURES
    terms = (F.cross_entropy(logits, labels), gamma * torch.exp(-products.mean()))
    slopes = [torch.autograd.grad(term, w, retain_graph=True)[0] for term in terms]
    assert all(slope.abs().max() > 1e-6 for slope in slopes)
    slope = sum(slopes)
    expected = start - lr * slope / (slope.abs() + 1e-8)
    method.aggregate(server, uploads)
    torch.testing.assert_close(server["generator"], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(server["model"], model, rtol=0, atol=1e-14)  # the plain mean of +0.5 and -0.5
    assert server["counts"].tolist() == [4.0, 4.0, 0.0]
    assert server.report["generator_loss"] == pytest.approx(float(terms[0].detach()), rel=1e-12)


def test_the_generator_learns_what_the_predictors_know(network: nn.Module) -> None:
    method = _method(generator_steps=100, generator_lr=0.02, generated=32)
    server = _server(method, network)
    losses = []
    for server.round in (1, 2):
        method.aggregate(server, _uploads(server["model"]))
        losses.append(server.report["generator_loss"])
    assert losses[1] < 0.1  # far below log 3


def test_the_diversity_term_is_alive_at_real_sizes() -> None:
    random = torch.Generator().manual_seed(0)
    noise, features = torch.randn(32, 32, generator=random), torch.randn(32, 512, generator=random)
    assert diversity(noise, features[:1].expand(32, 512)) == 1
    features.requires_grad_()
    apart = diversity(noise, features)
    assert 0.01 < apart < 0.9
    # Once more as far apart: less of the term, and the way there is along its gradient.
    assert diversity(noise, 2 * features) < apart
    (slope,) = torch.autograd.grad(apart, features)
    assert diversity(noise, features - slope / slope.norm()) < apart


@pytest.mark.parametrize(("features", "classes"), [(84, 10), (512, 100)], ids=["lenet", "resnet18"])
def test_the_generator_moves_by_both_terms_at_real_sizes(features: int, classes: int) -> None:
    """With the default sizes, from a new generator: neither gradient is lost beside the other."""
    method = FedGen()
    network = nn.Sequential(nn.Linear(4, features), nn.Linear(features, classes))
    server = _server(method, network)
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (method.generated,), generator=random)
    noise = torch.randn(method.generated, method.noise, generator=random)
    start = server["generator"].clone().requires_grad_()
    z = method._generator(server.model)(start, torch.cat([noise, F.one_hot(labels, classes).float()], 1))
    terms = (F.cross_entropy(network[1](z), labels), method.diversity * diversity(noise, z))
    understood, apart = (float(torch.autograd.grad(term, start, retain_graph=True)[0].norm()) for term in terms)
    assert 0.1 < apart / understood < 10
    # By norms in place of means nothing of it would be left.
    norms = torch.exp(-(torch.cdist(noise, noise) ** 2 * torch.cdist(z, z, p=1)).mean())
    assert float(torch.autograd.grad(norms, start)[0].norm()) < 1e-6 * understood


def test_both_terms_of_the_generator_matter(network: nn.Module) -> None:
    found = []
    for gamma in (0.0, 5.0):
        method = _method(generator_steps=5, diversity=gamma, generator_lr=0.01)
        server = _server(method, network)
        method.aggregate(server, _uploads(server["model"]))
        found.append(server["generator"])
    assert (found[0] - found[1]).abs().max() > 1e-3


def test_the_generator_begins_with_the_seed_of_the_run(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    first = [
        Federation(_method(), network, dataset, partition, Settings(seed=seed)).server["generator"]
        for seed in (0, 0, 1)
    ]
    assert torch.equal(first[0], first[1]) and not torch.equal(first[0], first[2])


def test_model_generator_and_counts_are_sent(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    run = Federation(_method(generator_steps=1), network, dataset, partition, Settings(rounds=2))
    last = run.run()[-1]
    sent = last["communication"]
    assert sent["up_parameters"] == 3 * (SIZE + CLASSES)
    assert sent["down_parameters"] == 3 * (SIZE + CLASSES + GENERATOR)
    assert last["training"]["trained_parameters"] == SIZE


def test_a_head_without_linear_layers_is_refused(dataset: Dataset, partition: Partition) -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(ValueError, match="the head '1' has none: name another"):
        Federation(FedGen(), network, dataset, partition)


@pytest.mark.parametrize(
    ("option", "value"), [("lam", -1.0), ("generated", 0), ("generator_lr", 0.0), ("diversity", -1.0), ("noise", 0)]
)
def test_options_out_of_range_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is"):
        FedGen(**{option: value})
