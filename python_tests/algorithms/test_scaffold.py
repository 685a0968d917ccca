from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from by_hand import LR, Turn, gradient, server_of
from torch import Tensor, nn

from pfl_ext.algorithms import SCAFFOLD, FedAvg
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings, Uploads


def _controls(size: int) -> tuple[Tensor, Tensor]:
    """c and c_k."""
    return (
        torch.linspace(-0.2, 0.3, size, dtype=torch.float64),
        torch.linspace(0.4, -0.1, size, dtype=torch.float64),
    )


@pytest.mark.by_hand("scaffold")
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_steps_are_corrected_and_the_control_variate_becomes_the_mean_of_their_gradients(
    turn: Turn, momentum: float
) -> None:
    runtime, client = turn(SCAFFOLD(lr=LR, batch_size=4, momentum=momentum, weight_decay=0.01))
    x = runtime.server["model"]
    c, own = _controls(len(x))
    client["control"] = own
    y, moved, gradients = x, torch.zeros_like(x), []
    for batch in client.batches(4):
        gradients.append(gradient(client, y, batch) + 0.01 * y)
        moved = momentum * moved + gradients[-1] - own + c
        y = y - LR * moved
    sent = runtime.method.train(client, {"model": x, "control": c})
    torch.testing.assert_close(sent["model"], y, rtol=0, atol=1e-14)
    if momentum == 0:
        by_the_paper = own - c + (x - y) / (2 * LR)
        torch.testing.assert_close(client["control"], by_the_paper, rtol=0, atol=1e-14)
    # The first gradient is in both steps: 1 + momentum times, the second once.
    mean = ((1 + momentum) * gradients[0] + gradients[1]) / (2 + momentum)
    torch.testing.assert_close(client["control"], mean, rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["control"], client["control"] - own, rtol=0, atol=0)


def test_option_one_is_the_gradient_at_the_received_model(turn: Turn) -> None:
    # Batches of 5 and 3: the gradient is that of all samples alike.
    runtime, client = turn(SCAFFOLD(lr=LR, batch_size=5, control="gradient", weight_decay=0.01))
    x = runtime.server["model"]
    c, own = _controls(len(x))
    client["control"] = own
    (everything,) = client.batches(8)
    y = x
    for batch in client.batches(5):
        y = y - LR * (gradient(client, y, batch) + 0.01 * y - own + c)
    sent = runtime.method.train(client, {"model": x, "control": c})
    torch.testing.assert_close(sent["model"], y, rtol=0, atol=1e-14)
    expected = gradient(client, x, everything) + 0.01 * x
    torch.testing.assert_close(client["control"], expected, rtol=0, atol=1e-14)


@pytest.mark.usefixtures("by_autograd")
def test_without_control_variates_a_turn_is_fedavgs(turn: Turn) -> None:
    runtime, client = turn(SCAFFOLD(lr=LR, batch_size=4))
    plain, other = turn(FedAvg(lr=LR, batch_size=4))
    x = runtime.server["model"]
    sent = runtime.method.train(client, dict(runtime.server))
    assert torch.equal(sent["model"], plain.method.train(other, {"model": x})["model"])
    assert sent["control"].abs().max() > 1e-3


def test_a_turn_without_steps_leaves_the_control_variate_as_it_is(turn: Turn) -> None:
    runtime, client = turn(SCAFFOLD(local_epochs=0))
    c, own = _controls(len(runtime.server["model"]))
    client["control"] = own
    sent = runtime.method.train(client, {"model": runtime.server["model"], "control": c})
    assert torch.equal(client["control"], own) and not bool(sent["control"].any())


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_the_server_steps_towards_the_mean_and_divides_by_all_clients(network: nn.Module, server_lr: float) -> None:
    size = server_of(network).model.size
    x, c = torch.arange(float(size)), torch.full((size,), 0.5)
    server = server_of(network.float(), clients=4, model=x, control=c)
    sent = [{"model": x + 1, "control": c * 2}, {"model": x - 3, "control": -c * 6}]
    SCAFFOLD(server_lr=server_lr).aggregate(server, Uploads([0, 2], [30, 1], sent))
    torch.testing.assert_close(server["model"], x + server_lr * (1 - 3) / 2)  # clients count alike
    torch.testing.assert_close(server["control"], c + (2 * c - 6 * c) / 4)


def test_a_servers_step_leaves_buffers_alone() -> None:
    network = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, affine=False))
    server = server_of(network, clients=1, model=torch.tensor([1.0, 0.0, 1.0, 3.0]), control=torch.zeros(1))
    sent = {"model": torch.tensor([2.0, 0.4, 0.1, 5.0]), "control": torch.ones(1)}
    SCAFFOLD(server_lr=9.0).aggregate(server, Uploads([0], [1], [sent]))
    assert server["model"].tolist() == pytest.approx([10.0, 0.4, 0.1, 5.0])


def test_the_servers_control_variate_is_the_mean_of_the_clients(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    settings = Settings(rounds=4, new_clients=1, join_round=3, participation=0.67)
    run = Federation(SCAFFOLD(lr=LR, batch_size=4), network, dataset, partition, settings)
    for record in run.rounds():
        store = run.engine.store  # type: ignore[attr-defined]
        kept = [store.read(k, "control") for k in range(2 if record["round"] < 3 else 3)]
        torch.testing.assert_close(run.server["control"], torch.stack(kept).mean(0), rtol=0, atol=1e-14)
    assert run.server["control"].abs().max() > 1e-3


def test_control_variates_are_sent_to_those_that_train_alone(turn: Turn) -> None:
    runtime, _ = turn(SCAFFOLD())
    assert list(runtime.method.sends(runtime.server, 0, "train")) == ["model", "control"]
    assert list(runtime.method.sends(runtime.server, 0, "evaluate")) == ["model"]


def test_clients_that_differ_meet_at_the_common_optimum() -> None:
    """What the control variates are for: FedAvg with many local steps stops elsewhere, SCAFFOLD does not."""
    x = torch.tensor([[1.0], [1.0], [3.0], [3.0]], dtype=torch.float64)  # two clients with other curvatures
    y = torch.tensor([0, 1, 0, 0])
    points = Dataset("points", x, y, ("a", "b"), torch.zeros(4, dtype=torch.bool), dtype=torch.float64)
    nothing = (torch.empty(0, dtype=torch.int64),) * 2
    cut = Partition((torch.arange(2), torch.arange(2, 4)), nothing, nothing, nothing[0], nothing[0])
    slopes = {}
    for cls in (SCAFFOLD, FedAvg):
        torch.manual_seed(0)
        network = nn.Linear(1, 2, bias=False).double()
        options: dict[str, Any] = {"lr": 0.2, "batch_size": 2, "local_epochs": 20, "weight_decay": 0.05}
        run = Federation(cls(**options), network, points, cut, Settings(rounds=200))
        run.run()
        model = run.server.model
        model.load(run.server["model"])
        weight = model.trained[0]
        loss = nn.functional.cross_entropy(model(x), y) + 0.05 / 2 * weight.square().sum()
        (slope,) = torch.autograd.grad(loss, weight)
        slopes[cls.name] = float(slope.norm())
    assert slopes["scaffold"] < 1e-6 < 1e-3 < slopes["fedavg"]


def test_it_runs_with_differential_privacy_and_option_one_is_refused(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    private = Settings(rounds=2, dp_clip=1.0, dp_noise=1.0)
    records = Federation(SCAFFOLD(batch_size=4), network, dataset, partition, private).run()
    assert math.isfinite(records[-1]["training"]["epsilon"])
    with pytest.raises(ValueError, match="control is 'gradient', which has no differentially private form"):
        Federation(SCAFFOLD(batch_size=4, control="gradient"), network, dataset, partition, private).run()


@pytest.mark.parametrize(("option", "value"), [("server_lr", 0.0), ("control", "both")])
def test_options_out_of_range_are_refused(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is"):
        SCAFFOLD(**{option: value})
