from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_ext.metrics import summarize
from pfl_ext.reports import best_rounds, rounds_to_converge

accuracies = st.lists(st.one_of(st.floats(0, 1), st.just(math.nan)), max_size=45)


@settings(max_examples=80, deadline=None)
@given(accuracies, st.randoms(use_true_random=False))
def test_summaries_are_numpys_over_the_clients_with_a_value(values, random):
    weights = [random.randint(1, 9) for _ in values]
    summary = summarize(values, weights)
    x = np.array([v for v in values if not math.isnan(v)])
    w = np.array([w for v, w in zip(values, weights, strict=True) if not math.isnan(v)])
    assert (summary["count"], summary["missing"]) == (len(x), len(values) - len(x))
    if len(x) == 0:
        assert all(math.isnan(v) for name, v in summary.items() if name not in ("count", "missing"))
        return
    tail = max(1, sum(1 for k in range(len(x)) if 20 * k < len(x)))  # the clients before 5 % of them are reached
    expected = {
        "mean": np.mean(x),
        "weighted_mean": np.average(x, weights=w),
        "std": np.std(x),
        "variance": np.var(x),
        "min": x.min(),
        "q05": np.percentile(x, 5),
        "q25": np.percentile(x, 25),
        "median": np.median(x),
        "q75": np.percentile(x, 75),
        "q95": np.percentile(x, 95),
        "max": x.max(),
        "lowest5": np.mean(sorted(x)[:tail]),
        "top5": np.mean(sorted(x, reverse=True)[:tail]),
    }
    # Values up to 1, sums of up to 45: 45 roundings of 1e-16, the variance with a few more.
    assert {name: summary[name] for name in expected} == pytest.approx(expected, abs=1e-14)
    assert set(summary) == {*expected, "count", "missing"}


@pytest.mark.parametrize(("clients", "tail"), [(1, 1), (20, 1), (21, 2), (140, 7)])
def test_five_per_cent_are_whole_clients_rounded_up(clients, tail):
    summary = summarize(list(range(clients)))  # 0.05 * 140 is more than 7 in floating point
    assert summary["lowest5"] == np.mean(range(tail))
    assert summary["top5"] == np.mean(range(clients - tail, clients))


def test_a_tensor_of_any_dtype_gives_the_same_as_a_list():
    values = torch.tensor([0.5, 0.25, 1.0], dtype=torch.bfloat16, requires_grad=True)
    assert summarize(values, torch.tensor([1, 2, 3])) == summarize([0.5, 0.25, 1.0], [1, 2, 3])


def test_infinite_losses_and_weights_of_zero_raise_no_warning(recwarn):
    assert summarize([1.0, math.inf])["mean"] == math.inf
    assert math.isnan(summarize([1.0, 2.0], [0, 0])["weighted_mean"])
    assert not recwarn.list


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0, 2.0], [1.0]), "each of the 2 values, got 1"),
        (([1.0], [-1.0]), "0 or more, got -1"),
        (([1.0], [math.nan]), "0 or more, got nan"),
        (([[1.0]],), "one-dimensional"),
    ],
)
def test_what_cannot_be_summarized_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        summarize(*arguments)


def a_round(number: int, test: float, validation: float | None = None, loss: float = 1.0) -> dict:
    model = {"test": {"accuracy": {"mean": test}}}
    if validation is not None:
        model["validation"] = {"accuracy": {"mean": validation}, "loss": {"mean": loss}}
    return {"round": number, "models": {"personal": model}}


def test_last_best_by_validation_and_best_on_test_are_kept_apart():
    history = [
        {"round": 0},
        a_round(1, test=0.9, validation=0.5),
        a_round(2, test=0.7, validation=0.8),
        {"round": 3},
        a_round(4, test=0.6, validation=0.6),
        {"round": 5},
    ]
    best = best_rounds(history)["personal"]
    assert {name: entry["round"] for name, entry in best.items()} == {
        "last": 4,
        "best_by_validation": 2,
        "best_on_test": 1,
    }
    assert best["best_by_validation"]["test"] == {"accuracy": {"mean": 0.7}}
    assert best["best_by_validation"]["validation"]["accuracy"] == {"mean": 0.8}


def test_the_earliest_of_equal_rounds_is_the_best():
    assert best_rounds([a_round(r, 0.5, 0.5) for r in (3, 4)])["personal"]["best_by_validation"]["round"] == 3


def test_by_loss_the_lowest_is_the_best():
    history = [a_round(1, 0.5, 0.5, loss=2.0), a_round(2, 0.5, 0.5, loss=0.5), a_round(3, 0.5, 0.5, loss=math.nan)]
    assert best_rounds(history, "loss")["personal"]["best_by_validation"]["round"] == 2


def test_without_validation_data_nothing_is_best_by_validation():
    best = best_rounds([a_round(1, 0.5), a_round(2, 0.6, math.nan)])["personal"]
    assert best["best_by_validation"] is None
    assert best["best_on_test"]["round"] == 2
    assert best_rounds([{"round": 1}]) == {}


def test_convergence_is_the_first_round_near_the_best_by_validation() -> None:
    def record(round: int, validation: float, test: float) -> dict:
        return {
            "round": round,
            "models": {
                "global": {"validation": {"accuracy": {"mean": validation}}, "test": {"accuracy": {"mean": test}}}
            },
        }

    history = [record(1, 0.5, 0.99), record(2, 0.795, 0.1), {"round": 3}, record(4, 0.8, 0.2)]
    assert rounds_to_converge(history, "global") == 2
    assert rounds_to_converge(history, "global", share=1.0) == 4
    assert rounds_to_converge(history, "personal") is None
