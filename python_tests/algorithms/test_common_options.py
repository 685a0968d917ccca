"""Options that all methods have: optimiser, clipping, step-size schedules, weights of clients."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from by_hand import LR, Turn
from torch import Tensor, nn

from pfl_ext.algorithms import METHODS, Ditto, FedAvg, FedNova
from pfl_ext.data import PARTITIONERS, Dataset, Partition
from pfl_ext.federation import Federation, Method, Settings, Steps, Uploads
from pfl_ext.federation.optimizers import scheduled
from pfl_ext.options import plain_value

FACTORIES = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    torch.optim.RMSprop: torch.optim.RMSprop,
}


@pytest.mark.parametrize("optimizer", FACTORIES, ids=plain_value)
@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_steps_are_those_of_torchs_optimizer_on_loss_and_proximal_term(turn: Turn, optimizer: Any, lam: float) -> None:
    """In float64: Adam's first steps are nearly the sign of the gradient, which rounding can turn around."""
    _, client = turn(FedAvg(lr=LR, batch_size=4, weight_decay=0.01, optimizer=optimizer, clip=0.5))
    model, anchor = client.model, torch.full_like(client.model.state(), 0.1)
    steps = Steps(
        client, FedAvg(lr=LR, batch_size=4, weight_decay=0.01, optimizer=optimizer, clip=0.5), anchor=anchor, lam=lam
    )
    start = model.state()
    batches = list(client.batches(4))[:3]
    for batch in batches:
        steps.take(batch)
    found = model.state()

    model.load(start)
    params = model.trained
    torchs = FACTORIES[optimizer](params, lr=LR, weight_decay=0.01)
    for batch in batches:
        loss = client.task.loss(model(batch.inputs), batch.targets)
        for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
            p.grad = g
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        for p, w in zip(params, model.tensors(anchor), strict=True):
            p.grad = p.grad + lam * (p.detach() - w)
        torchs.step()
    torch.testing.assert_close(found[: model.parameters], model.state()[: model.parameters], rtol=1e-12, atol=1e-12)
    assert not torch.equal(found, start)


def test_the_state_of_an_optimizer_lives_for_a_turn(turn: Turn) -> None:
    method = FedAvg(lr=LR, batch_size=4, optimizer="adam", local_steps=1)
    runtime, client = turn(method)
    first = method.train(client, runtime.server)["model"]
    second = method.train(client, runtime.server)["model"]  # from the same model on the same batch
    assert torch.equal(first, second)


def test_sgd_by_a_factory_is_the_fused_step(turn: Turn) -> None:
    plain = functools.partial(torch.optim.SGD, momentum=0.9)
    found = []
    for options in ({"optimizer": plain}, {"momentum": 0.9}):
        method = FedAvg(lr=LR, batch_size=4, weight_decay=0.01, **options)  # type: ignore[arg-type]
        runtime, client = turn(method)
        found.append(method.train(client, runtime.server)["model"])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 2, [0.5, 1, 1, 1]),
        ("step", 0, [1, 1, 0.1, 0.1]),
        ("cosine", 0, [1, 0.5 * (1 + math.cos(math.pi / 4)), 0.5, 0.5 * (1 + math.cos(3 * math.pi / 4))]),
        ("cosine", 2, [0.5, 1, 1, 0.5]),
    ],
)
def test_schedules_by_hand(kind: str, warmup: int, expected: list[float]) -> None:
    assert [scheduled(kind, at, 4, warmup, 2, 0.1) for at in range(4)] == pytest.approx(expected)


def test_the_step_size_follows_rounds_and_steps(turn: Turn) -> None:
    method = FedAvg(lr=LR, batch_size=4, lr_rounds="step", lr_drop_every=2, lr_drop=0.5, lr_steps="cosine")
    _, client = turn(method, round=5)  # two drops
    batches = client.steps_of(4)
    start = client.model.state()
    steps = Steps(client, method)
    rates = []
    for _ in range(batches):
        before = client.model.trained[0].detach().clone()
        steps.step([torch.ones_like(p) for p in steps.params])
        rates.append(float((before - client.model.trained[0].detach()).mean()))
    cosine = [0.5 * (1 + math.cos(math.pi * s / batches)) for s in range(batches)]
    assert rates == pytest.approx([LR * 0.25 * f for f in cosine], rel=1e-6)
    assert steps.accumulated == pytest.approx(0.25 * sum(cosine))
    assert not torch.equal(start, client.model.state())


def test_a_turn_after_the_last_round_has_the_whole_step_size(turn: Turn) -> None:
    method = FedAvg(lr=LR, lr_rounds="step", lr_drop_every=1)
    _, client = turn(method, round=2, stage="finish")
    steps = Steps(client, method)
    steps.step([torch.ones_like(p) for p in steps.params])
    assert steps.accumulated == 1


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_gradients_are_in_a_change_as_often_as_torchs_momentum_has_them(
    turn: Turn, steps: int, momentum: float
) -> None:
    x = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=1.0, momentum=momentum)
    method = FedNova(lr=LR, momentum=momentum, lr_steps="step", lr_drop_every=2, lr_drop=0.5)
    ours = Steps(turn(method)[1], method)
    for s in range(steps):
        x.grad = torch.ones_like(x)
        optimizer.param_groups[0]["lr"] = 0.5 ** (s // 2)
        optimizer.step()
        ours.step([torch.ones_like(p) for p in ours.params])
    assert ours.accumulated == pytest.approx(-float(x.detach()), rel=1e-12, abs=1e-12)


def test_weights_of_clients_are_those_that_were_asked_for() -> None:
    sent = [{"model": torch.tensor([0.0])}, {"model": torch.tensor([4.0])}]

    def average(weighting: str, equally: bool) -> float:
        return float(Uploads([0, 1], [3, 1], sent, weighting=weighting).average(equally=equally))

    assert average("paper", False) == average("samples", True) == 1
    assert average("paper", True) == average("equal", False) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sdg"}, "optimizer is 'sdg'; accepted is a value of sgd, adam, adamw, .*or in Python a factory"),
        ({"optimizer": "adam", "momentum": 0.9}, "momentum is 0.9; accepted is a value of 0: it is SGD's"),
        ({"clip": -1.0}, "clip is -1.0"),
        ({"lr_drop": 0.0}, "lr_drop is 0.0"),
        ({"lr_rounds": "linear"}, "lr_rounds is 'linear'; accepted is a value one of constant, cosine, step"),
        ({"weighting": "size"}, "weighting is 'size'"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ditto(**options)


def test_a_factory_that_makes_something_else_is_refused(turn: Turn) -> None:
    for wrong, message in ((torch.optim.LBFGS, "does not take"), (lambda *_, **__: 3, "made a int")):
        method = FedAvg(optimizer=wrong)
        runtime, client = turn(method)
        with pytest.raises(ValueError, match=message):
            method.train(client, runtime.server)


# ---- every method ----------------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": "adam"},
    "clip": {"clip": 0.05},
    "lr_rounds": {"lr_rounds": "cosine", "lr_warmup_rounds": 2},
    "lr_steps": {"lr_steps": "cosine"},
    "weighting": {},
}
SPECIAL: dict[str, dict[str, Any]] = {
    "fedbuff": {"buffer": 2}, "fedasync": {}, "perada": {"kd_steps": 0}, "feddf": {"kd_steps": 0},
    "fedgen": {"batch_size": 4}, "persfl": {"distill_epochs": 1, "temperatures": (1.0,), "lambdas": (0.5,)},
}  # fmt: skip


def _run(method: Method, dataset: Dataset, partition: Partition, network: nn.Module) -> Tensor:
    """All that two rounds left of a run, the server's vectors and every client's."""
    public = dataset.unlabelled(dataset) if method.public else None
    run = Federation(method, network, dataset, partition, Settings(rounds=2, seed=7), auxiliary=public)
    run.run()
    kept = run.engine.state()
    return torch.cat([x.double().flatten() for x in (*run.server.values(), *(kept[name] for name in sorted(kept)))])


@pytest.fixture(scope="module")
def small() -> tuple[Dataset, Partition, nn.Module]:
    draw = torch.Generator().manual_seed(0)
    data = Dataset.from_tensors(torch.randn(60, 6, generator=draw), torch.arange(60) % 3)
    partition = PARTITIONERS["dirichlet"](data, 3, generator=draw, alpha=0.5, minimum=8, validation=0.2, server=0.1)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))
    return data, partition, network


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_the_options_or_says_why_not(name: str, small: tuple[Dataset, Partition, nn.Module]) -> None:
    given = {"lr": 0.05, "batch_size": 4, "local_steps": 3, **SPECIAL.get(name, {})}
    plain = _run(METHODS[name](**given), *small)
    reasons = dict(METHODS[name].refuses)
    for option, values in OPTIONS.items():
        changed = [values] if values else [{option: "samples"}, {option: "equal"}]
        if option in reasons:
            with pytest.raises(ValueError, match=f"{option} is .* in {name}: {reasons[option]}"):
                METHODS[name](**{**given, **changed[0]})
            continue
        # Of the two weightings one is the paper's.
        found = [_run(METHODS[name](**{**given, **some}), *small) for some in changed]
        assert any(not torch.equal(x, plain) for x in found), f"{option} changes nothing"
        assert all(bool(x.isfinite().all()) for x in found)


def test_steps_that_python_decides_on_are_not_recorded(turn: Turn) -> None:
    """A CUDA graph replays one step: another step size, Adam's count, a nest of inputs would not be in it."""
    for options, recorded in (({}, True), ({"optimizer": "adam"}, False), ({"lr_steps": "cosine"}, False)):
        method = FedAvg(lr=LR, **options)  # type: ignore[arg-type]
        assert Steps(turn(method)[1], method)._is_the_same_every_time() == recorded
