from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import LR, Turn, gradient, personalize, server_of
from torch import nn

from pfl_ext.algorithms import Ditto, FedAsync, FedBuff
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings, Uploads


def _normalised() -> nn.Module:
    """43 parameters and 10 of its normalisation, then 11 buffers."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"staleness": "constant"}, [1, 1, 1]),
        ({"staleness": "polynomial", "a": 0.5}, [1, 3**-0.5, 10**-0.5]),
        ({"staleness": "polynomial"}, [1, 3**-0.5, 10**-0.5]),
        ({"staleness": "polynomial", "a": 0.0}, [1, 1, 1]),
        ({"staleness": "hinge", "a": 2.0, "b": 4.0}, [1, 1, 1 / 11]),
        ({"staleness": "hinge"}, [1, 1, 1 / 51]),
    ],
)
def test_fedasync_weighs_staleness_as_its_paper_does(options: dict[str, Any], expected: list[float]) -> None:
    method = FedAsync(**options)
    assert [method.weight(x) for x in (0, 2, 9)] == pytest.approx(expected, rel=1e-15)


def test_fedasync_mixes_an_upload_into_the_model() -> None:
    server = {"model": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    sent = [{"model": torch.tensor([3.0, 6.0], dtype=torch.float64)}]
    FedAsync(alpha=0.5, staleness="polynomial", a=1.0).aggregate(server, Uploads([0], [5], sent, [3]))
    assert server["model"].tolist() == [1 + 0.125 * 2, 2 + 0.125 * 4]


@pytest.mark.by_hand("fedasync")
def test_fedasyncs_client_is_held_near_what_it_received(turn: Turn) -> None:
    rho = 0.7
    runtime, client = turn(FedAsync(lr=LR, batch_size=4, rho=rho))
    start = runtime.server["model"]
    w = start.clone()
    for batch in client.batches(4):
        w = w - LR * (gradient(client, w, batch) + rho * (w - start))
    sent = runtime.method.train(client, {"model": start})
    torch.testing.assert_close(sent["model"], w, rtol=0, atol=1e-14)


def test_fedbuff_steps_along_the_mean_of_differences_the_older_the_shorter() -> None:
    server = server_of(_normalised())
    FedBuff().set_up(server)
    w = server["model"]
    changes = [torch.linspace(-1, x, len(w), dtype=w.dtype) for x in (2.0, 4.0)]
    uploads = Uploads([0, 1], [10, 90], [{"change": change} for change in changes], [0, 3])
    FedBuff(buffer=2, server_lr=0.5).aggregate(server, uploads)
    expected = w + 0.5 * (changes[0] + changes[1] / 2) / 2
    expected[53:] = (changes[0][53:] + changes[1][53:]) / 2  # buffers, which are sent as they are
    torch.testing.assert_close(server["model"], expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", ["local_buffers", "server_buffers"])
def test_buffers_that_are_not_sent_stay_as_fedbuffs_server_has_them(
    dataset: Dataset, partition: Partition, kind: str
) -> None:
    settings = Settings(rounds=4, **{kind: ("BatchNorm1d",)})
    run = Federation(FedBuff(lr=LR, batch_size=4, buffer=2), _normalised(), dataset, partition, settings)
    before = run.server["model"].clone()
    run.run()
    assert torch.equal(run.server["model"][53:], before[53:])
    assert not torch.equal(run.server["model"][:53], before[:53])


def test_running_variances_of_fedbuff_stay_positive_however_old_the_differences(
    dataset: Dataset, partition: Partition
) -> None:
    inputs = dataset.inputs * 0.01  # so that the variances, which begin at 1, fall
    small = Dataset("small", inputs, dataset.targets, dataset.classes, dataset.is_test, dtype=torch.float64)
    method = FedBuff(lr=LR, batch_size=4, buffer=1, local_epochs=10)
    run = Federation(method, _normalised(), small, partition, Settings(rounds=12))
    run.run()
    run.server.model.load(run.server["model"])
    norm = run.server.model.module[1]  # type: ignore[index]
    assert norm.running_var.min() > 0 and norm.running_var.max() < 0.1


@pytest.mark.parametrize("network", [_normalised()])
def test_fedbuff_sends_what_local_training_changed_and_buffers_as_they_are(turn: Turn) -> None:
    runtime, client = turn(FedBuff(lr=LR, batch_size=4))
    ditto, other = turn(Ditto(lr=LR, batch_size=4))
    received = {"model": runtime.server["model"]}
    theirs = ditto.method.train(other, received)["model"]
    ours = runtime.method.train(client, received)["change"]
    assert torch.equal(ours[:53], (theirs - received["model"])[:53]) and ours[:53].abs().max() > 1e-3
    assert torch.equal(ours[53:], theirs[53:]) and not torch.equal(ours[53:], received["model"][53:])


@pytest.mark.parametrize("cls", [FedAsync, FedBuff])
def test_the_personal_model_is_dittos(turn: Turn, cls: Any) -> None:
    options = {"lr": LR, "batch_size": 4, "lam": 0.5}
    runtime, client = turn(cls(**options))
    ditto, other = turn(Ditto(**options))
    received = {"model": runtime.server["model"] + 0.1}
    personalize(runtime, client, received, {})
    personalize(ditto, other, received, {})
    assert torch.equal(client["personal"], other["personal"])


@pytest.mark.parametrize(
    ("method", "wrong"), [(FedAsync, {"alpha": 0.0}), (FedBuff, {"buffer": 0}), (FedAsync, {"a": -1.0})]
)
def test_options_out_of_range_are_refused(method: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is"):
        method(**wrong)
