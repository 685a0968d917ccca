"""Distillation of every task: pixels and tokens row by row, numbers by their squared difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import FedDF, PerAda, PersFL
from pfl_ext.algorithms.server_distillation import distil
from pfl_ext.data import PARTITIONERS, Dataset
from pfl_ext.federation import Batch, Distillation, Federation, Server, Settings, Uploads, WorkingModel
from pfl_ext.tasks import Classification, NextToken, Pixels, Regression, Task

DRAW = torch.Generator().manual_seed(5)


class Tokens(nn.Module):
    """Logits of the next of five tokens at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        """[n, length, 5]."""
        return self.head(self.embedding(x))


def _tokens(n: int = 40) -> Dataset:
    text = torch.randint(0, 5, (n, 7), generator=DRAW)
    targets = text[:, 1:].clone()
    targets[:, -1] = -100
    return Dataset.from_tensors(text[:, :-1], targets)


def _masks(n: int = 40) -> Dataset:
    x = torch.rand(n, 2, 4, 4, generator=DRAW)
    return Dataset.from_tensors(x, (x[:, 0] > x[:, 1]).long())


def _numbers(n: int = 40) -> Dataset:
    x = torch.rand(n, 3, generator=DRAW)
    return Dataset.from_tensors(x, x.sum(1, keepdim=True))


KINDS: dict[str, tuple[Any, Any, Task, str]] = {
    "tokens": (_tokens, Tokens, NextToken(), "accuracy"),
    "pixels": (_masks, lambda: nn.Conv2d(2, 2, 1), Pixels(), "iou"),
    "numbers": (_numbers, lambda: nn.Linear(3, 1), Regression(), "loss"),
}


def _network(make: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made: nn.Module = make()
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_of_distillation_by_hand(kind: str) -> None:
    data, make, task, _ = KINDS[kind]
    network, unlabelled = _network(make).double(), data().to("cpu", torch.float64)
    states = [torch.randn(WorkingModel(network).size, dtype=torch.float64, generator=DRAW) for _ in range(2)]
    server = Server(task, network, Settings(seed=7), 2, unlabelled)
    server.round = 1
    method = FedDF(kd_steps=1, kd_lr=0.01, kd_batch_size=40)
    uploads = Uploads([0, 1], [1, 1], [{"model": state} for state in states])
    start = sum(states) / 2
    (found,) = distil(server, method, [start], [uploads])

    model = WorkingModel(_network(make).double())
    x = unlabelled.batch(torch.arange(40))[0]
    teachers = []
    for state in states:
        model.load(state)
        teachers.append(model(x).detach())
    target = (teachers[0] + teachers[1]) / 2
    model.load(start)
    outputs = model(x)
    if kind == "numbers":
        loss = (outputs - target).square().mean()
    else:
        classes = 1 if kind == "pixels" else -1
        p, q = (F.log_softmax(z.movedim(classes, -1), -1) for z in (target, outputs))
        loss = (p.exp() * (p - q)).sum(-1).mean()
    adam = torch.optim.Adam(model.trained, lr=0.01)
    loss.backward()
    adam.step()
    assert server.report["kd_loss"] == pytest.approx(float(loss.detach()), rel=1e-6)  # added up in float32
    torch.testing.assert_close(found, model.state(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", [FedDF, PerAda])
def test_methods_that_distil_at_the_server_run_on_every_task(kind: str, method: Any) -> None:
    data, make, task, metric = KINDS[kind]
    dataset = data(80)
    partition = PARTITIONERS["iid"](dataset, 2, generator=torch.Generator().manual_seed(0), server=0.2)
    own = method(lr=0.1, kd_steps=4, kd_batch_size=8, kd_keep_best=2, kd_distance=True)
    run = Federation(own, _network(make), dataset, partition, Settings(rounds=1), task=task, auxiliary=data())
    server = run.run()[-1]["server"]
    assert f"held_out_{metric}" in server and server["distillation_distance"] >= 0


def test_the_best_student_of_numbers_is_that_of_the_lowest_loss() -> None:
    assert Regression().is_better(0.1, 0.2) and Regression().is_better(0.2, float("nan"))
    assert Classification().is_better(0.2, 0.1) and not Classification().is_better(float("nan"), 0.1)


def test_numbers_have_no_temperature() -> None:
    data, make, task, _ = KINDS["numbers"]
    dataset = data(40)
    partition = PARTITIONERS["iid"](dataset, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="the task regression has no logits that it could soften"):
        Federation(FedDF(kd_temperature=2.0), _network(make), dataset, partition, task=task, auxiliary=data())


@dataclass(frozen=True)
class Focal(Classification):
    """A loss of the user's on logits."""

    name = "focal"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """(1 - p)^2 of the cross-entropy."""
        log = F.log_softmax(outputs, -1).gather(1, targets[:, None])
        return -((1 - log.exp()).square() * log).mean()


def _divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    p, q = (F.log_softmax(z / temperature, -1) for z in (teacher, student))
    return temperature**2 * (p.exp() * (p - q)).sum(-1).mean()


@pytest.mark.parametrize(
    ("task", "shape", "targets"),
    [
        (Classification(label_smoothing=0.2), (6, 3), torch.arange(6) % 3),
        (Focal(), (6, 3), torch.arange(6) % 3),
        (NextToken(), (2, 4, 3), torch.tensor([[0, 1, 2, -100], [2, 2, -100, -100]])),
        (Pixels(), (2, 3, 2, 2), torch.tensor([[[0, -100], [2, 1]], [[1, 1], [0, 2]]])),
    ],
)
def test_distillation_is_the_tasks_loss_and_the_teachers_rows_that_count(
    task: Task, shape: tuple[int, ...], targets: Tensor
) -> None:
    student, teacher = (torch.randn(shape, dtype=torch.float64, generator=DRAW) for _ in range(2))
    counts = targets.flatten() != -100
    imitation = _divergence(task.rows(student)[counts], task.rows(teacher)[counts], 2.0)
    expected = 0.7 * task.loss(student, targets) + 0.3 * imitation
    loss = Distillation(task, teacher, hard=0.7, soft=0.3, temperature=2.0)
    found = loss(student, Batch(student, targets, torch.arange(len(student))))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"hard": -1.0, "soft": 1.0}, "hard is -1.0"),
        ({"hard": 0.0, "soft": 0.0}, "not both 0"),
        ({"hard": 1.0, "soft": float("nan")}, "soft is nan"),
        ({"hard": 1.0, "soft": 1.0, "temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_weights_with_which_there_is_nothing_to_learn_are_refused(numbers: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Distillation(Classification(), torch.zeros(4, 3), **numbers)


def test_persfl_distils_tokens() -> None:
    dataset = _tokens(60)
    partition = PARTITIONERS["iid"](dataset, 2, generator=torch.Generator().manual_seed(0), validation=0.2)
    method = PersFL(lr=0.1, distill_epochs=1, temperatures=(2.0,), lambdas=(0.0, 0.5))
    run = Federation(method, _network(Tokens), dataset, partition, Settings(rounds=2), task=NextToken())
    assert run.run()[-1]["models"]["personal"]["test"]["perplexity"]["mean"] > 1
