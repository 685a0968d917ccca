from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, one_hot

from pfl_ext.metrics import classification_metrics, summarize


def auc_by_pairs(score: torch.Tensor, positive: torch.Tensor) -> float:
    """The definition: the share of (positive, negative) pairs in the right order, a tie counting half."""
    difference = score[positive][:, None] - score[~positive][None, :]
    return float(((difference > 0).double() + 0.5 * (difference == 0).double()).mean())


def macro_auc_by_pairs(scores: torch.Tensor, positives: torch.Tensor) -> float:
    areas = [
        auc_by_pairs(scores[:, c], positives[:, c])
        for c in range(scores.shape[1])
        if 0 < positives[:, c].sum() < len(scores)
    ]
    return sum(areas) / len(areas) if areas else math.nan


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 25), classes=st.integers(1, 5), levels=st.integers(1, 4), seed=st.integers(0, 2**20))
def test_auc_is_the_share_of_ordered_pairs_with_ties_and_missing_classes(n, classes, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    # Logits of few levels in each column give ties; the softmax keeps a tie of two equal rows.
    rows = torch.randn(levels, classes, generator=generator)
    logits = rows[torch.randint(levels, (n,), generator=generator)]
    targets = torch.randint(classes, (n,), generator=generator)
    expected = macro_auc_by_pairs(logits.double().log_softmax(1), one_hot(targets, classes).bool())
    # Exact counts, then a division for each class and a mean: a few roundings.
    assert classification_metrics(logits, targets)["auc"] == pytest.approx(expected, rel=1e-14, nan_ok=True)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 25), labels=st.integers(1, 5), levels=st.integers(1, 4), seed=st.integers(0, 2**20))
def test_multi_label_metrics_follow_their_definitions(n, labels, levels, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-levels, levels, (n, labels), generator=generator) / 2
    targets = torch.randint(2, (n, labels), generator=generator)
    metrics = classification_metrics(logits, targets)
    assert metrics["auc"] == pytest.approx(macro_auc_by_pairs(logits, targets.bool()), rel=1e-14, nan_ok=True)
    assert metrics["accuracy"] == pytest.approx(float(((logits.sigmoid() > 0.5) == targets.bool()).double().mean()))
    assert metrics["loss"] == pytest.approx(float(binary_cross_entropy_with_logits(logits.double(), targets.double())))
    assert metrics == pytest.approx(classification_metrics(logits, targets.float()), nan_ok=True)


def test_accuracy_and_loss_are_torchs():
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(200, 7, generator=generator), torch.randint(7, (200,), generator=generator)
    metrics = classification_metrics(logits, targets)
    assert metrics["accuracy"] == float((logits.argmax(1) == targets).double().mean())
    assert metrics["loss"] == pytest.approx(float(cross_entropy(logits.double(), targets)), rel=1e-14)


def test_confident_samples_are_no_ties():
    # In float32 both samples have probability 1 for class 0, and an AUC of 0.5.
    logits = torch.tensor([[30.0, 0.0], [25.0, 0.0]])
    assert classification_metrics(logits, torch.tensor([0, 1]))["auc"] == 1.0


def test_scores_are_probabilities_not_logits():
    # By the logit of class 0 the second sample comes first, by its probability the first one does.
    logits = torch.tensor([[1.0, 0.0], [2.0, 5.0]])
    assert classification_metrics(logits, torch.tensor([0, 1]))["auc"] == 1.0


def test_a_client_with_one_class_has_no_auc():
    metrics = classification_metrics(torch.eye(3), torch.zeros(3, dtype=torch.int64))
    assert math.isnan(metrics["auc"])
    assert metrics["accuracy"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("targets", [torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4)])
def test_without_samples_everything_is_nan(targets):
    metrics = classification_metrics(torch.zeros(0, 4), targets)
    assert list(metrics) == ["accuracy", "loss", "auc"]
    assert all(math.isnan(value) for value in metrics.values())


@pytest.mark.parametrize("several", [False, True])
def test_nan_logits_count_as_wrong_and_show_in_the_loss(several):
    logits = torch.tensor([[2.0, -1.0], [math.nan, 0.0]])
    targets = torch.tensor([[1, 0], [0, 0]]) if several else torch.tensor([0, 0])
    metrics = classification_metrics(logits, targets)
    assert metrics["accuracy"] == (0.75 if several else 0.5)
    assert math.isnan(metrics["loss"])
    assert math.isnan(metrics["auc"])


def test_an_impossible_target_costs_an_infinite_loss():
    logits = torch.tensor([[0.0, -math.inf], [0.0, 1.0]])
    metrics = classification_metrics(logits, torch.tensor([1, 0]))
    assert metrics["loss"] == math.inf
    assert math.isnan(metrics["auc"])


@pytest.mark.parametrize(
    ("logits", "targets", "message"),
    [
        (torch.zeros(3), torch.zeros(3), "logits torch.float32 \\[3\\]"),
        (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3), "floating-point"),
        (torch.zeros(3, 2), torch.zeros(4), "targets torch.float32 \\[4\\]"),
        (torch.zeros(3, 2), torch.zeros(3, 5), "targets torch.float32 \\[3, 5\\]"),
        (torch.zeros(3, 2), torch.tensor([0, 1, 2]), "from 0 to 1.*got 0 to 2"),
        (torch.zeros(3, 2), torch.tensor([0, 1, -100]), "got -100 to 1"),
        (torch.zeros(1, 2), torch.tensor([[0.5, 1.0]]), "must be 0 or 1"),
    ],
)
def test_what_does_not_fit_is_named(logits, targets, message):
    with pytest.raises(ValueError, match=message):
        classification_metrics(logits, targets)


def test_the_prediction_distance_is_the_l1_distance_of_probabilities_cut_at_one() -> None:
    from pfl_ext.metrics import prediction_distance

    p = torch.tensor([[0.8, 0.2], [0.99, 0.01], [0.5, 0.5]], dtype=torch.float64)
    g = torch.tensor([[0.6, 0.4], [0.01, 0.99], [0.5, 0.5]], dtype=torch.float64)
    assert prediction_distance(p, g) == pytest.approx((0.4 + 1 + 0) / 3)


@pytest.mark.parametrize("seed", range(20))
def test_metrics_of_few_samples_are_those_of_many(seed, monkeypatch):
    torch.manual_seed(seed)
    n, classes = 1 + seed * 3, 2 + seed % 5
    logits = torch.randn(n, classes).mul(2).round() / 2 if seed % 2 else torch.randn(n, classes) * 3  # ties, or none
    if seed == 7:
        logits[0, 1] = float("inf")
    if seed == 9:
        logits[2] = float("nan")
    targets = torch.randint(0, max(1, classes - seed % 3), (n,))
    few = classification_metrics(logits, targets)
    monkeypatch.setattr("pfl_ext.metrics._FEW", 0)
    many = classification_metrics(logits, targets)
    for name in ("accuracy", "auc"):
        assert few[name] == many[name] or (math.isnan(few[name]) and math.isnan(many[name]))
    assert few["loss"] == pytest.approx(many["loss"], rel=1e-13, nan_ok=True)


def test_a_class_out_of_range_is_refused_among_few_samples():
    with pytest.raises(ValueError, match=r"class numbers from 0 to 2, .* got 0 to 3"):
        classification_metrics(torch.zeros(2, 3), torch.tensor([0, 3]))


@pytest.mark.parametrize("clients", [1, 2, 3, 5, 20, 41, 1000])
def test_quantiles_over_clients_are_numpys_to_the_bit(clients: int) -> None:
    values = np.random.default_rng(clients).normal(size=clients)
    for some in (values, np.round(values), np.append(values, np.inf)):
        found = summarize(some)
        names = {"min": 0.0, "q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95, "max": 1.0}
        with np.errstate(invalid="ignore"):
            expected = np.quantile(some, list(names.values()))
        np.testing.assert_array_equal([found[name] for name in names], expected)
