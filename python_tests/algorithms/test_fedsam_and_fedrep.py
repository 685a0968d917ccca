from __future__ import annotations

import pytest
import torch
from by_hand import LR, Turn, entries, gradient, joined, models

from pfl_ext.algorithms import FedAvg, FedRep, FedSAM


@pytest.mark.by_hand("fedsam")
def test_fedsam_steps_by_the_gradient_at_the_perturbed_model(turn: Turn) -> None:
    rho = 0.3
    runtime, client = turn(FedSAM(lr=LR, batch_size=4, rho=rho))
    w = runtime.server["model"]
    v = w.clone()
    for batch in client.batches(4):
        g = gradient(client, v, batch)
        v = v - LR * gradient(client, v + rho * g / g.norm(), batch)
    sent = runtime.method.train(client, {"model": w})
    torch.testing.assert_close(sent["model"], v, rtol=0, atol=1e-12)


def test_fedsam_of_radius_zero_is_fedavg(turn: Turn) -> None:
    runtime, client = turn(FedSAM(lr=LR, batch_size=4, rho=0.0, momentum=0.5))
    plain, other = turn(FedAvg(lr=LR, batch_size=4, momentum=0.5))
    w = {"model": runtime.server["model"]}
    assert torch.equal(runtime.method.train(client, w)["model"], plain.method.train(other, w)["model"])


@pytest.mark.by_hand("fedrep")
def test_fedrep_trains_the_head_then_the_representation(turn: Turn) -> None:
    runtime, client = turn(FedRep(lr=LR, batch_size=4, head_epochs=2))
    head = entries(client.model, "2")
    assert int(head.sum()) == 5 * 3 + 3
    received = {"representation": runtime.server["representation"] + 0.1}
    client["head"] = client["head"] - 0.2
    v = joined(head, client["head"], received["representation"])
    for batch in client.batches(4, epochs=2, name="head"):
        v = v - LR * torch.where(head, gradient(client, v, batch), 0.0)
    for batch in client.batches(4):
        v = v - LR * torch.where(head, 0.0, gradient(client, v, batch))
    sent = runtime.method.train(client, received)
    torch.testing.assert_close(client["head"], v[head], rtol=0, atol=1e-14)
    torch.testing.assert_close(sent["representation"], v[~head], rtol=0, atol=1e-14)
    found = models(runtime, client, **received)
    assert set(found) == {"personal"}
    assert torch.equal(found["personal"], joined(head, client["head"], received["representation"]))
