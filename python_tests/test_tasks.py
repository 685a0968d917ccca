"""Tasks: losses and metrics by hand, and what is refused before anything is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import METHODS, Ditto, FedAvg
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings, option
from pfl_ext.metrics import METRICS
from pfl_ext.tasks import TASKS, Classification, MultiLabel, NextToken, Pixels, Regression, Task, outputs, task_of

DRAW = torch.Generator().manual_seed(3)


def _rand(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW, dtype=torch.float64)


def _dataset(targets: Tensor, inputs: Tensor | None = None, **more: object) -> Dataset:
    inputs = _rand(len(targets), 4).float() if inputs is None else inputs
    return Dataset.from_tensors(inputs, targets, **more)  # type: ignore[arg-type]


def _partition(samples: int, clients: int = 2) -> Partition:
    parts = torch.arange(samples).chunk(clients)
    cut = [tuple(part[split::3] for part in parts) for split in range(3)]
    nothing = torch.empty(0, dtype=torch.int64)
    return Partition(train=cut[0], validation=cut[1], test=cut[2], global_test=nothing, server=nothing)


# ---- losses and metrics ----------------------------------------------------------------------------------------------


def test_regression_by_hand() -> None:
    found, y = torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([1.0, 4.0, 4.0])
    assert float(Regression().loss(found, y)) == pytest.approx((0 + 4 + 1) / 3)
    assert float(Regression(distance="absolute").loss(found, y)) == pytest.approx(1.0)
    assert float(Regression(distance="huber").loss(found, y)) == pytest.approx((0 + 1.5 + 0.5) / 3)
    metrics = Regression().metrics(found, y)
    assert metrics == pytest.approx({"loss": 5 / 3, "mae": 1.0, "rmse": math.sqrt(5 / 3), "r2": 1 - 5 / 6})
    constant = Regression().metrics(found[:2], torch.ones(2))
    assert math.isnan(constant["r2"]) and constant["mae"] == 0.5  # nothing varies that could be explained


def test_pixels_by_hand() -> None:
    targets = torch.tensor([[[0, 1], [1, -100]], [[2, 2], [0, 0]]])
    said = torch.tensor([[[0, 1], [0, 2]], [[2, 0], [0, 0]]])
    logits = 4 * F.one_hot(said, 3).movedim(-1, 1).double()
    metrics = Pixels().metrics(*Pixels().reduce(logits, targets))
    assert metrics["accuracy"] == pytest.approx(5 / 7)
    assert metrics["iou"] == pytest.approx((3 / 5 + 1 / 2 + 1 / 2) / 3)  # the ignored pixel is in no union
    right, wrong = math.log(math.exp(4) + 2) - 4, math.log(math.exp(4) + 2)
    assert metrics["loss"] == pytest.approx((5 * right + 2 * wrong) / 7)
    assert float(Pixels().loss(logits, targets)) == pytest.approx(metrics["loss"])
    assert Pixels().rows(logits).shape == (8, 3) and bool((Pixels().rows(logits).argmax(1) == said.flatten()).all())


def test_next_tokens_by_hand() -> None:
    targets = torch.tensor([[1, 2, -100], [0, 0, 3]])
    logits = _rand(2, 3, 4)
    kept = [NextToken().reduce(logits[i : i + 1], targets[i : i + 1]) for i in range(2)]  # batch by batch
    metrics = NextToken().metrics(*(torch.cat(part) for part in zip(*kept, strict=True)))
    log = logits.log_softmax(-1)
    losses = [-float(log[i, j, targets[i, j]]) for i in range(2) for j in range(3) if targets[i, j] != -100]
    right = sum(int(logits[i, j].argmax() == targets[i, j]) for i in range(2) for j in range(3))
    assert metrics["loss"] == pytest.approx(sum(losses) / 5)
    assert metrics["accuracy"] == pytest.approx(right / 5)
    assert metrics["perplexity"] == pytest.approx(math.exp(sum(losses) / 5))
    assert float(NextToken().loss(logits, targets)) == pytest.approx(sum(losses) / 5)


def test_labels_are_smoothed_in_training_and_not_in_the_metrics() -> None:
    logits, targets = _rand(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    log = logits.log_softmax(1)
    by_hand = -(0.8 * log.gather(1, targets[:, None])[:, 0] + 0.2 * log.mean(1)).mean()
    assert float(Classification(label_smoothing=0.2).loss(logits, targets)) == pytest.approx(float(by_hand))
    assert Classification(label_smoothing=0.2).metrics(logits, targets) == Classification().metrics(logits, targets)


def test_probabilities_and_predictions_are_of_the_tasks_form() -> None:
    logits = _rand(2, 3, 4, 5)
    assert bool(torch.allclose(Pixels().probabilities(logits).sum(1), torch.ones(2, 4, 5, dtype=torch.float64)))
    assert Pixels().predictions(logits).shape == (2, 4, 5)
    tokens = logits[0]
    assert bool(torch.allclose(NextToken().probabilities(tokens).sum(-1), torch.ones(3, 4, dtype=torch.float64)))
    assert bool(torch.equal(MultiLabel().predictions(torch.tensor([[-1.0, 2.0]])), torch.tensor([[0, 1]])))
    assert bool(torch.equal(Classification().predictions(torch.tensor([[-1.0, 2.0]])), torch.tensor([1])))


# ---- which task ------------------------------------------------------------------------------------------------------


def test_targets_say_the_task_where_they_leave_no_choice() -> None:
    assert task_of(_dataset(torch.tensor([0, 1, 2]))) == Classification()
    assert task_of(_dataset(torch.eye(3))) == MultiLabel()
    assert task_of(_dataset(torch.rand(3, 1))) == Regression()
    assert task_of(_dataset(torch.zeros(3, 5, dtype=torch.int64))) == NextToken()
    assert task_of(_dataset(torch.zeros(3, 5, 5, dtype=torch.int64))) == Pixels()
    with pytest.raises(ValueError, match=r"int64 \[3, 5, 5, 5\], for which there is no task here"):
        task_of(_dataset(torch.zeros(3, 5, 5, 5, dtype=torch.int64)))


def test_a_network_may_return_a_tensor_a_tuple_or_a_dictionary_with_logits() -> None:
    x = torch.ones(2)
    for returned in (x, (x, "hidden"), {"logits": x, "loss": None}):
        assert outputs(returned) is x
    for wrong, said in (({"scores": x}, "a dictionary of scores"), ((), "a tuple"), (None, "a NoneType")):
        with pytest.raises(TypeError, match=said):
            outputs(wrong)


# ---- in a federation -------------------------------------------------------------------------------------------------


class _Named(nn.Module):
    """A network of two named inputs that returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"logits": self.linear(inputs), "hidden": inputs}


def test_a_network_that_returns_a_dictionary_trains_to_the_same_bits() -> None:
    data = _dataset(torch.arange(24) % 3)
    named, plain = _Named(), nn.Linear(4, 3)
    plain.load_state_dict(named.linear.state_dict())
    settings = Settings(rounds=2, fused_steps=False)  # a native step has sums of another order
    runs = [Federation(FedAvg(lr=0.1), net, data, _partition(24), settings) for net in (named, plain)]
    for run in runs:
        run.run()
    assert torch.equal(runs[0].server["model"], runs[1].server["model"])


def test_regression_learns_and_is_reported() -> None:
    x = _rand(240, 4).float()
    data = _dataset((x @ torch.tensor([1.0, -2.0, 0.5, 0.0]))[:, None], x)
    run = Federation(Ditto(lr=0.05, local_epochs=3), nn.Linear(4, 1), data, _partition(240), Settings(rounds=10))
    record = run.run()[-1]["models"]
    for model in ("global", "personal"):
        assert record[model]["test"]["r2"]["mean"] > 0.95
        assert set(record[model]["test"]) == {"loss", "mae", "rmse", "r2"}


@dataclass(frozen=True)
class Quantile(Task):
    """The pinball loss."""

    name = "quantile"

    q: float = option(0.9, "which quantile")

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        apart = targets - outputs
        return torch.maximum(self.q * apart, (self.q - 1) * apart).mean()


def test_a_task_of_the_users_own_is_trained_and_reported() -> None:
    numbers = torch.linspace(0, 1, 600)[torch.randperm(600, generator=torch.Generator().manual_seed(0))][:, None]
    data = _dataset(numbers, torch.ones(600, 1))
    found = []
    for q in (0.2, 0.9):
        run = Federation(
            FedAvg(lr=0.02, local_epochs=5),
            nn.Linear(1, 1),
            data,
            _partition(600),
            Settings(rounds=8),
            task=Quantile(q),
        )
        assert set(run.run()[-1]["models"]["global"]["test"]) == {"loss"}
        found.append(float(run.server["model"].sum()))  # weight and bias, of an input of 1
    assert found == pytest.approx([0.2, 0.9], abs=0.08)


def test_the_task_is_part_of_a_runs_identity() -> None:
    data, module = _dataset(torch.rand(24, 1)), nn.Linear(4, 1)
    runs = [
        Federation(FedAvg(), module, data, _partition(24), Settings(rounds=1), task=task).identity
        for task in (Regression(), Regression(distance="huber"), Quantile(0.9))
    ]
    assert len({(run["task"], run.get("task.distance")) for run in runs}) == 3


# ---- refused before anything is trained ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "module", "task", "message"),
    [
        (torch.arange(24) % 4, nn.Linear(4, 3), None, "outputs for 3 classes, and 'tensors' has 4; build it with 4"),
        (
            torch.rand(24, 1),
            nn.Linear(4, 2),
            None,
            r"regression takes .* float32 \[2, 2\] for targets float32 \[2, 1\]",
        ),
        (torch.eye(3).repeat(8, 1), nn.Linear(4, 2), None, r"multi-label takes .* float32 \[2, 2\]"),
        (
            torch.arange(24) % 3,
            nn.Linear(5, 3),
            None,
            r"does not take a batch of 'tensors', float32 \[2, 4\]: RuntimeEr",
        ),
        (torch.rand(24, 1), nn.Linear(4, 1), Classification(), r"classification takes .* targets int64 \[n\]"),
        (torch.zeros(24, 5).long(), nn.Linear(4, 3), NextToken(), r"next-token takes floating logits \[n, length, voc"),
        (torch.zeros(24, 5, 5).long(), nn.Linear(4, 3), Pixels(), r"pixels takes floating logits \[n, classes, height"),
    ],
)
def test_outputs_that_do_not_fit_the_targets_are_refused(
    targets: Tensor, module: nn.Module, task: Task | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Federation(FedAvg(), module, _dataset(targets), _partition(24), Settings(rounds=1), task=task)


@dataclass(frozen=True)
class _Unmeant(Regression):
    name = "unmeant"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square()


def test_a_loss_that_is_no_mean_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"loss of the task unmeant is torch.float32 \[2, 1\]; accepted is one floating"
    ):
        Federation(
            FedAvg(), nn.Linear(4, 1), _dataset(torch.rand(24, 1)), _partition(24), Settings(rounds=1), task=_Unmeant()
        )


@pytest.mark.parametrize(
    ("name", "targets", "task"),
    [
        ("persfl", torch.rand(24, 1), "regression"),
        ("fedrod", torch.rand(24, 1), "regression"),
        ("fedgen", torch.rand(24, 1), "regression"),
        ("fedgen", torch.eye(3).repeat(8, 1), "multi-label"),
    ],
)
def test_methods_that_need_logits_or_classes_refuse_a_task_without_them(name: str, targets: Tensor, task: str) -> None:
    with pytest.raises(ValueError, match=f"{name} needs .*, and the task {task} has none"):
        Federation(METHODS[name](), nn.Linear(4, 3), _dataset(targets), _partition(24), Settings(rounds=1))


def test_every_task_says_what_it_is() -> None:
    for name, task in TASKS.items():
        assert task.name == name and task.__doc__


# ---- metrics that are asked for --------------------------------------------------------------------------------------


def test_extra_metrics_by_hand() -> None:
    targets, said = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 1, 1])
    logits = 100.0 * F.one_hot(said, 7).double()
    found = Classification(extra_metrics=tuple(METRICS)).measured(logits, targets)
    assert found["balanced_accuracy"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["macro_f1"] == pytest.approx((4 / 5 + 2 / 3) / 2)
    assert found["top5"] == 1.0 and found["accuracy"] == 0.75
    assert found["brier"] == pytest.approx(2 / 4) and found["ece"] == pytest.approx(0.25)
    soft = torch.tensor([[math.log(0.7), math.log(0.3)], [math.log(0.9), math.log(0.1)]])
    calibration = Classification(extra_metrics=("ece", "brier")).measured(soft, torch.tensor([0, 1]))
    assert calibration == pytest.approx(
        {**calibration, "ece": (0.3 + 0.9) / 2, "brier": (0.18 + 1.62) / 2}, nan_ok=True
    )


def worst(outputs: Tensor, targets: Tensor) -> float:
    """A metric of a user's."""
    return float((outputs.flatten() - targets.flatten()).abs().max())


def test_extra_metrics_are_reported_of_every_client() -> None:
    data = _dataset(torch.arange(24) % 3)
    task = Classification(extra_metrics=("macro_f1",))
    last = Federation(FedAvg(), nn.Linear(4, 3), data, _partition(24), Settings(rounds=1), task=task).run()[-1]
    assert 0 <= last["models"]["global"]["test"]["macro_f1"]["mean"] <= 1
    numbers = Regression(extra_metrics=(worst,))  # type: ignore[arg-type]
    run = Federation(FedAvg(), nn.Linear(4, 1), _dataset(torch.rand(24, 1)), _partition(24), task=numbers)
    assert run.run()[-1]["models"]["global"]["test"]["worst"]["mean"] > 0


def test_extra_metrics_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"extra_metrics is .*; accepted is a value of balanced_accuracy, macro_f1"):
        Classification(extra_metrics=("f2",))
    with pytest.raises(ValueError, match=r"of .. for next-token, which keeps no outputs"):
        NextToken(extra_metrics=("ece",))
    task = Regression(extra_metrics=("ece",))
    with pytest.raises(ValueError, match="extra_metrics has ece, which is of samples with one class; regression has"):
        Federation(FedAvg(), nn.Linear(4, 1), _dataset(torch.rand(24, 1)), _partition(24), task=task)
