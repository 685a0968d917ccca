from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import LR, Turn, gradient, personalize

from pfl_ext.algorithms import Ditto, FedAsync, FedBuff
from pfl_ext.federation import Uploads


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"staleness": "constant"}, [1, 1, 1]),
        ({"staleness": "polynomial", "a": 0.5}, [1, 3**-0.5, 10**-0.5]),
        ({"staleness": "hinge", "a": 10.0, "b": 4.0}, [1, 1, 1 / 51]),
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
    server = {"model": torch.tensor([1.0], dtype=torch.float64)}
    sent = [{"difference": torch.tensor([x], dtype=torch.float64)} for x in (2.0, 4.0)]
    FedBuff(buffer=2, server_lr=0.5).aggregate(server, Uploads([0, 1], [10, 90], sent, [0, 3]))
    assert server["model"].item() == pytest.approx(1 + 0.5 * (2.0 + 4.0 / 2) / 2, rel=1e-15)


def test_fedbuff_sends_what_local_training_changed(turn: Turn) -> None:
    runtime, client = turn(FedBuff(lr=LR, batch_size=4))
    ditto, other = turn(Ditto(lr=LR, batch_size=4))
    received = {"model": runtime.server["model"]}
    theirs = ditto.method.train(other, received)["model"]
    ours = runtime.method.train(client, received)["difference"]
    assert torch.equal(ours, theirs - received["model"]) and ours.abs().max() > 1e-3


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
