"""The strategies and steps for Flower apps of one's own, and the examples that use them, in Flower's simulation."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr", reason="Flower is not installed here: make flower makes an environment with it")

from flwr.app import Message, Metadata, MetricRecord, RecordDict
from flwr.app.message import make_message

from pfl_ext.flower import FusedFedAvg, read_arrays, write_arrays

FAULTS = ("raises", "late", "nan", "shape", "name", "dtype", "pickle", "claim", "json")


def _model(simulated: Any, label: str) -> dict[str, Tensor]:
    return {key.partition("/")[2]: x for key, x in simulated.tensors.items() if key.startswith(f"{label}/")}


def _sent(simulated: Any) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """What the server and its clients sent, made anew."""
    code = simulated.code
    server = code.network(code.whole()[0]).state_dict()
    clients = []
    for client in range(code.CLIENTS):
        model = code.network(code.whole()[0])
        with torch.no_grad():
            for x in model.parameters():
                x.add_(torch.randn(x.shape, generator=torch.Generator().manual_seed(client)))
        clients.append(model.state_dict())
    return server, clients


def _average(simulated: Any, without: int | None = None) -> dict[str, Tensor]:
    _, clients = _sent(simulated)
    weights = {k: 10 + k for k in range(len(clients)) if k != without}
    total = sum(weights.values())
    return {
        name: sum((w / total * clients[k][name].double() for k, w in weights.items()), torch.zeros(())).to(x.dtype)
        for name, x in clients[0].items()
    }


# Sums of six products in float32, of numbers below 8: each rounding is at most 2^-24 of that.
ROUNDING: dict[str, Any] = {"rtol": 0, "atol": 12 * 8 * 2.0**-24}


@pytest.mark.parametrize("label", ["fused", "streaming"])
def test_the_average_is_flowers(label: str, simulated: Any) -> None:
    ours, theirs = _model(simulated, f"strategy:{label}"), _model(simulated, "strategy:flower")
    assert list(ours) == list(theirs)
    for name, expected in _average(simulated).items():
        torch.testing.assert_close(ours[name], expected, **ROUNDING)
        torch.testing.assert_close(ours[name].double(), theirs[name].double(), **ROUNDING)
    assert simulated.found[f"strategy:{label}"] == pytest.approx(simulated.found["strategy:flower"])


def test_counts_stay_integers_where_flower_makes_them_fractions(simulated: Any) -> None:
    name = "1.num_batches_tracked"
    assert _model(simulated, "strategy:fused")[name].dtype == torch.int64
    assert _model(simulated, "strategy:flower")[name].dtype == torch.float64


@pytest.mark.parametrize("label", ["half", "streaming half"])
def test_half_a_learning_rate_goes_half_the_way(label: str, simulated: Any) -> None:
    server, _ = _sent(simulated)
    for name, average in _average(simulated).items():
        if average.is_floating_point():
            expected = server[name] + 0.5 * (average - server[name])
            torch.testing.assert_close(_model(simulated, f"strategy:{label}")[name], expected, **ROUNDING)


@pytest.mark.parametrize("label", [*(f"fault:{how}" for how in FAULTS), "streaming fault"])
def test_a_client_that_misbehaves_is_named_and_the_others_are_averaged(label: str, simulated: Any) -> None:
    got = _model(simulated, f"strategy:{label}")
    for name, expected in _average(simulated, without=simulated.code.BAD).items():
        torch.testing.assert_close(got[name], expected, **ROUNDING)


def test_the_log_names_who_is_left_out_of_an_average(simulated: Any) -> None:
    for told in (
        "it sent infinity or NaN",
        "it has not answered in time|it answered with an error",
        r"0.weight is \[19\] of torch.float32; the model has \[5, 4\]",
        "other is not in the model|0.weight is missing",
        "num-examples is \\[1, 2\\]; a finite number",
        "0.weight is no array of numbers",
    ):
        assert re.search(rf"round 1: node \d+ is left out: (?:{told})", simulated.log), told


def _reply(node: int, value: float, **metrics: Any) -> Message:
    content = {"arrays": write_arrays({"w": torch.full((3,), value)}), "metrics": MetricRecord({"num-examples": 1})}
    content["metrics"].update(metrics)
    return make_message(Metadata(1, str(node), node, 1, "0", "", 0.0, 9.0, "train"), RecordDict(content))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_client_whose_metric_has_another_length_is_left_out(streaming: bool) -> None:
    for odd in ([1.0, 2.0, 3.0], 1.0):
        replies = [_reply(1, 1.0, loss=[1.0, 2.0]), _reply(2, 8.0, loss=odd), _reply(3, 2.0, loss=[3.0, 4.0])]
        arrays, metrics = FusedFedAvg(streaming=streaming).aggregate_train(1, replies)
        assert arrays is not None and metrics is not None and metrics["loss"] == [2.0, 3.0]
        assert read_arrays(arrays)["w"].tolist() == [1.5] * 3


def test_an_odd_reply_to_an_evaluation_is_left_out_and_does_not_end_the_run() -> None:
    odd = [{"loss": [1.0]}, {"other": 1.0}, {"num-examples": [1, 2]}, {"num-examples": math.inf}, {"num-examples": -1}]
    replies = [_reply(1, 0.0, loss=1.0), *(_reply(2 + i, 0.0, **metrics) for i, metrics in enumerate(odd))]
    empty = make_message(Metadata(1, "8", 8, 1, "0", "", 0.0, 9.0, "evaluate"), RecordDict())
    found = FusedFedAvg().aggregate_evaluate(1, [*replies, empty, _reply(9, 0.0, loss=3.0)])
    assert found is not None and found["loss"] == 2.0
    assert FusedFedAvg().aggregate_evaluate(1, [_reply(1, 0.0, **{"num-examples": 0})]) is None
    assert FusedFedAvg().aggregate_evaluate(1, []) is None


@pytest.mark.parametrize("streaming", [False, True])
def test_what_becomes_of_a_client_with_nan_is_for_the_policy_to_say(streaming: bool) -> None:
    found = {}
    for nonfinite in ("skip", "propagate", "raise"):
        strategy = FusedFedAvg(nonfinite=nonfinite, streaming=streaming)
        replies = [_reply(1, 1.0), _reply(2, math.nan), _reply(3, 2.0)]
        if nonfinite == "raise":
            with pytest.raises(ValueError, match="node 2 sent infinity or NaN in round 1; nonfinite='skip' leaves"):
                strategy.aggregate_train(1, replies)
            continue
        arrays, _ = strategy.aggregate_train(1, replies)
        assert arrays is not None
        found[nonfinite] = read_arrays(arrays)["w"]
    assert found["skip"].tolist() == [1.5] * 3 and bool(found["propagate"].isnan().all())


def test_streaming_has_one_upload_at_a_time() -> None:
    sent: list[weakref.ref[Any]] = []
    there = []

    def replies() -> Iterator[Message]:
        for node in range(6):
            reply = _reply(node, float(node))
            sent.append(weakref.ref(reply.content["arrays"]["w"]))
            yield reply
            del reply
            there.append(sum(array() is not None for array in sent))

    gc.collect()
    gc.disable()  # a few large arrays do not call it either
    try:
        arrays, _ = FusedFedAvg(streaming=True).aggregate_train(1, replies())
    finally:
        gc.enable()
    assert arrays is not None and read_arrays(arrays)["w"].tolist() == [2.5] * 3
    assert there == [0] * 6


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="nonfinite is 'drop'; skip, raise or propagate"):
        FusedFedAvg(nonfinite="drop")
    with pytest.raises(ValueError, match="lr is nan; a finite number is accepted"):
        FusedFedAvg(lr=math.nan)
    with pytest.raises(TypeError, match="fraction"):
        FusedFedAvg(fraction=0.5)


# ---- the examples ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["averaging", "distillation", "proximal", "sharpness"])
def test_the_clients_of_an_example_learn(name: str, simulated: Any) -> None:
    losses = [metrics["loss"] for metrics in simulated.found[f"example:{name}"]["train"].values()]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_personal_models_last_from_round_to_round(simulated: Any) -> None:
    train, evaluated = (simulated.found["example:spectral"][part] for part in ("train", "evaluate"))
    losses = [train[str(t)]["personal_loss"] for t in (1, 2, 3)]
    # A model that began anew with the generic one would have the loss of the first round in every round.
    assert losses[2] < 0.6 * losses[0]
    assert evaluated["3"]["accuracy"] > 0.85
    assert 0 < train["1"]["mean_divergence"] <= train["1"]["largest_divergence"]


def test_the_statistics_of_batch_normalisation_are_sent(simulated: Any) -> None:
    model = _model(simulated, "example:proximal")
    assert (model["1.running_var"] > 0).all() and not torch.equal(model["1.running_var"], torch.ones(8))
    assert int(model["1.num_batches_tracked"]) == 30  # 10 batches in each of three rounds


def test_the_server_distils_and_stays_near_its_anchor(simulated: Any) -> None:
    distilled = [m["distillation_loss"] for m in simulated.found["example:distillation"]["train"].values()]
    near = [m["squared_distance"] for m in simulated.found["example:proximal"]["train"].values()]
    assert all(0 <= loss < 1 for loss in distilled) and all(distance > 0 for distance in near)
