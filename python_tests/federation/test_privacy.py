"""Differential privacy: gradients of single samples by hand, the accountant against Opacus, what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext import nn as networks
from pfl_ext.algorithms import METHODS, Ditto, FedAvg, FedSAM, PerAda
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import (
    Client,
    Federation,
    ForeignCheckpoint,
    Settings,
    Steps,
    WorkingModel,
    sam,
)
from pfl_ext.federation.privacy import epsilon, private_gradients, refuse_batch_norm, sampling
from pfl_ext.federation.settings import Privacy
from pfl_ext.tasks import Classification


# What opacus.accountants.analysis.rdp of Opacus 1.6.0 gives (compute_rdp, get_privacy_spent) with its default orders.
@pytest.mark.parametrize(
    ("rate", "noise", "steps", "delta", "expected"),
    [
        (0.01, 1.0, 1000, 1e-5, 2.1013652716430564),
        (1 / 36, 0.8, 720, 1e-5, 8.658415357248947),
        (1 / 36, 1.0, 720, 1e-5, 5.253826939575037),
        (1 / 36, 1.5, 720, 1e-5, 2.6126537915404797),
        (0.2, 0.8, 50, 1e-5, 16.921099168696664),
        (1.0, 2.0, 10, 1e-6, 8.84687435850794),
        (0.5, 4.0, 100, 1e-5, 6.350179544185608),
        (0.001, 0.6, 10000, 1e-5, 3.3218995971280134),
    ],
)
def test_epsilon_is_that_of_opacus(rate: float, noise: float, steps: int, delta: float, expected: float) -> None:
    assert epsilon(rate, noise, steps, delta) == pytest.approx(expected, rel=1e-10)


def test_epsilon_has_its_limits_and_orders() -> None:
    assert epsilon(0.1, 1.0, 0, 1e-5) == 0 and epsilon(0.1, 0.0, 1, 1e-5) == math.inf
    assert 1e3 < epsilon(0.1, 0.05, 10, 1e-5) < math.inf  # no overflow with little noise
    assert epsilon(0.1, 1.0, 10, 1e-5) < epsilon(0.1, 1.0, 20, 1e-5) < epsilon(0.2, 1.0, 20, 1e-5)


def test_a_pass_has_as_many_batches_as_without_privacy() -> None:
    assert sampling(100, 32) == (1 / 4, 4) and sampling(96, 32) == (1 / 3, 3) and sampling(5, 32) == (1.0, 1)


def _network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)).double()


def test_private_gradients_are_clipped_sample_by_sample() -> None:
    model = WorkingModel(_network())
    model.module.train()
    x = 3 * torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(6) % 3
    privacy = Privacy(dp_noise=0.7, dp_clip=2.75, dp_delta=1e-5)
    loss, found = private_gradients(
        model, model.trained, x, y, Classification().loss, privacy, 4.0, torch.Generator().manual_seed(3)
    )
    expected = [torch.zeros_like(p) for p in model.trained]
    norms = []
    for i in range(6):
        each = torch.autograd.grad(F.cross_entropy(model.module(x[i : i + 1]), y[i : i + 1]), model.trained)
        norm = torch.sqrt(sum((g**2).sum() for g in each))  # type: ignore[arg-type]
        norms.append(float(norm))
        for total, g in zip(expected, each, strict=True):
            total += g * min(1.0, 2.75 / float(norm))
    assert min(norms) < 2.75 < max(norms)  # some are clipped and some are not
    noise = torch.Generator().manual_seed(3)
    for total, g in zip(expected, found, strict=True):
        random = torch.randn(total.shape, generator=noise, dtype=torch.float64)
        torch.testing.assert_close(g, (total + 0.7 * 2.75 * random) / 4, rtol=1e-12, atol=1e-14)
    assert float(loss) == pytest.approx(float(F.cross_entropy(model.module(x).detach(), y)), rel=1e-12)


def test_an_empty_batch_is_noise_alone() -> None:
    model = WorkingModel(_network())
    nothing = torch.empty(0, 4, dtype=torch.float64), torch.empty(0, dtype=torch.int64)
    noise = torch.Generator().manual_seed(3)
    loss, found = private_gradients(
        model, model.trained, *nothing, Classification().loss, Privacy(dp_noise=1.0, dp_clip=2.0), 4.0, noise
    )
    again = torch.Generator().manual_seed(3)
    assert float(loss) == 0
    for g in found:
        torch.testing.assert_close(g, 0.5 * torch.randn(g.shape, generator=again, dtype=torch.float64))


def test_many_samples_are_taken_in_parts_with_the_same_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    model = WorkingModel(_network())
    x = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.arange(9) % 3

    def gradients() -> list[Tensor]:
        quiet = Privacy(dp_clip=0.5)
        return private_gradients(model, model.trained, x, y, Classification().loss, quiet, 4.0, torch.Generator())[1]

    whole = gradients()
    monkeypatch.setattr("pfl_ext.federation.privacy._NUMBERS", 100)  # two samples at a time
    for a, b in zip(whole, gradients(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["vit", "resnet18"])
def test_the_networks_for_privacy_have_per_sample_gradients(name: str) -> None:
    options: dict[str, Any] = {"vit": {"depth": 1, "width": 12, "patch": 16}, "resnet18": {"norm": "group"}}[name]
    network = networks.build(
        name, (3, 32, 32), 3, torch.Generator(), adapters=True, freeze="backbone", adapter_dropout=0.0, **options
    ).double()
    refuse_batch_norm(network)
    model = WorkingModel(network)
    model.module.train()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 2])
    quiet = Privacy(dp_clip=1e9)  # nothing is clipped: the sum of the samples' gradients
    _, found = private_gradients(model, model.trained, x, y, Classification().loss, quiet, 2.0, torch.Generator())
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), model.trained)
    for g, e in zip(found, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-8, atol=1e-10)


def test_batch_normalisation_is_refused_with_the_reason_unless_it_is_frozen(
    dataset: Dataset, partition: Partition
) -> None:
    network = networks.build("resnet18", (3, 32, 32), 3, torch.Generator(), adapters=True, freeze="backbone")
    with pytest.raises(ValueError, match=r"batch normalisation \(bn1\): it mixes the samples.*norm=group"):
        refuse_batch_norm(network)
    refuse_batch_norm(nn.Sequential(networks.FrozenBatchNorm2d(3)))
    mixing = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="it mixes the samples"):
        Federation(FedAvg(), mixing, dataset, partition, Settings(dp_clip=1.0, dp_noise=1.0))


def test_methods_that_touch_samples_elsewhere_are_refused(dataset: Dataset, partition: Partition) -> None:
    private = {name for name, method in METHODS.items() if method.private}
    assert {"fedavg", "ditto", "perada", "feddf", "fedalt", "fedsim", "standalone"} <= private
    assert not private & {"persfl", "scd", "fedsam", "fedgen", "pfedme"}
    with pytest.raises(ValueError, match="fedsam has no differentially private form"):
        Federation(FedSAM(), nn.Linear(4, 3), dataset, partition, Settings(dp_clip=1.0))


def test_whether_a_method_is_private_is_a_value_that_it_inherits_or_sets(
    dataset: Dataset, partition: Partition
) -> None:
    class Inherits(FedAvg):
        name = "inherits"

    class Unsaid(Inherits):
        name = "unsaid"
        private = False

    private = Settings(rounds=1, dp_clip=1.0, dp_noise=1.0)
    (record,) = Federation(Inherits(batch_size=4), nn.Linear(4, 3).double(), dataset, partition, private).run()
    assert record["training"]["epsilon"] > 0
    with pytest.raises(ValueError, match="unsaid has no differentially private form"):
        Federation(Unsaid(), nn.Linear(4, 3).double(), dataset, partition, private)
    Federation(Unsaid(batch_size=4), nn.Linear(4, 3).double(), dataset, partition, Settings(rounds=1)).run()


@pytest.mark.parametrize("how", ["loss", "perturb"])
def test_a_method_that_says_it_is_private_and_trains_otherwise_is_refused_in_its_turn(
    how: str, dataset: Dataset, partition: Partition
) -> None:
    @dataclass(frozen=True)
    class Wrong(FedAvg):
        def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
            client.model.load(received["model"])
            if how == "loss":
                Steps(client, self).train(lambda logits, batch: logits.square().mean())
            else:
                Steps(client, self, perturb=sam(0.1)).train()
            return {"model": client.model.state()}

    run = Federation(Wrong(), nn.Linear(4, 3).double(), dataset, partition, Settings(rounds=1, dp_clip=1.0))
    with pytest.raises(ValueError, match="another loss, or takes a gradient elsewhere"):
        run.run()


def test_options_of_privacy_are_checked() -> None:
    for wrong in ({"dp_noise": 1.0}, {"dp_clip": -1.0}, {"dp_clip": 1.0, "dp_delta": 0.0}):
        with pytest.raises(ValueError, match="dp_"):
            Settings(**wrong)  # type: ignore[arg-type]


@pytest.fixture
def dataset() -> Dataset:
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(48) % 3
    x = torch.randn(48, 4, generator=generator, dtype=torch.float64) + 2 * torch.eye(4, dtype=torch.float64)[y]
    return Dataset("points", x, y, ("a", "b", "c"), torch.zeros(48, dtype=torch.bool), dtype=torch.float64)


@pytest.fixture
def partition() -> Partition:
    train = (torch.arange(0, 10), torch.arange(10, 34))
    test = (torch.arange(34, 40), torch.arange(40, 48))
    nothing = torch.empty(0, dtype=torch.int64)
    return Partition(train, (nothing, nothing), test, nothing, torch.cat(test))


def _run(method: Any, dataset: Dataset, partition: Partition, **more: Any) -> Federation:
    """A run to its end; its last record has the mean of what the clients have spent."""
    options = {"rounds": 3, "dp_clip": 1.0, "dp_noise": 1.2, "checkpoint_every": 1, **more.pop("settings", {})}
    run = Federation(method, _network(), dataset, partition, Settings(**options), **more)
    last = run.run()[-1]
    means = [result.report["epsilon"] for result in run.client_results if "epsilon" in result.report]
    assert last["training"].get("epsilon") == (pytest.approx(sum(means) / len(means)) if means else None)
    return run


def test_both_adapters_of_every_client_are_accounted_for_together(dataset: Dataset, partition: Partition) -> None:
    auxiliary = dataset.subset(torch.arange(12)).unlabelled(dataset)
    method = PerAda(lr=0.1, batch_size=4, personal_epochs=2, kd_steps=2, kd_batch_size=6)
    run = _run(method, dataset, partition, auxiliary=auxiliary)
    for k, (samples, batches) in enumerate(((10, 3), (24, 6))):
        # 1 pass of the local and 2 of the personal adapter in each of 3 rounds; distillation sees no client's data.
        steps = 3 * 3 * batches
        assert run.client_results[k].report["epsilon"] == pytest.approx(epsilon(1 / batches, 1.2, steps, 1e-5)), samples
        # The personal adapter is never sent: against the server the local one's 3 passes are what counts.
        sent = run.client_results[k].report["epsilon_sent"]
        assert sent == pytest.approx(epsilon(1 / batches, 1.2, 3 * batches, 1e-5)), samples


def test_a_private_run_is_resumed_to_the_bit_with_its_account(
    dataset: Dataset, partition: Partition, tmp_path: Any
) -> None:
    method = Ditto(lr=0.1, batch_size=4)
    whole = _run(method, dataset, partition)
    _run(method, dataset, partition, folder=tmp_path, settings={"rounds": 1})
    resumed = _run(method, dataset, partition, folder=tmp_path, resume=True)
    assert torch.equal(whole.server["model"], resumed.server["model"])
    ours, theirs = (run.client_results[1].report["epsilon"] for run in (whole, resumed))
    assert ours == theirs > 0
    with pytest.raises(ForeignCheckpoint, match=r"dp_noise: 1\.2 there, 2\.0 here"):
        _run(method, dataset, partition, folder=tmp_path, resume=True, settings={"dp_noise": 2.0})


def test_noise_and_clipping_matter(dataset: Dataset, partition: Partition) -> None:
    method = FedAvg(lr=0.1, batch_size=4)
    models = [
        _run(method, dataset, partition, settings=settings).server["model"]
        for settings in ({}, {"dp_noise": 0.0}, {"dp_noise": 0.0, "dp_clip": 1e9}, {"dp_clip": 0.0, "dp_noise": 0.0})
    ]
    for i in range(4):
        for j in range(i):
            assert not torch.allclose(models[i], models[j])


def test_how_far_personal_predictions_are_from_global_ones_is_recorded(dataset: Dataset, partition: Partition) -> None:
    settings = Settings(rounds=1, prediction_distance=True, personal_global_test=True)
    last = Federation(Ditto(lr=0.5, batch_size=4), _network(), dataset, partition, settings).run()[-1]
    for split in ("test", "global_test"):
        assert 0 < last["models"]["personal"][split]["distance"]["mean"] <= 1
    assert "distance" not in last["models"]["global"]["test"]
