"""One client, one or two steps, by hand in float64 against the equations of each method."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from by_hand import LR, Turn, gradient, models, personalize
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import METHODS, Ditto, FedAvg, FedAvgFT, FedProx, PersFL, Standalone
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Client, Federation, Settings, Uploads


def _steps(client: Client, name: str, count: int, size: int = 4) -> list[Any]:
    return list(client.batches(size, steps=count, name=name))


@pytest.mark.by_hand("fedavg")
def test_fedavg_takes_sgd_steps_from_the_global_model(turn: Turn) -> None:
    runtime, client = turn(FedAvg(lr=LR, batch_size=4))
    start = runtime.server["model"]
    w = start.clone()
    for batch in _steps(client, "batches", 2):
        w = w - LR * gradient(client, w, batch)
    sent = runtime.method.train(client, {"model": start})
    torch.testing.assert_close(sent["model"], w, rtol=0, atol=1e-14)
    assert not torch.equal(w, start)


# What the server makes of the uploads is by hand in tests of their own.
_FEDAVGS_STEPS = (
    "cfl", "fedadagrad", "fedadam", "fedavgm", "fedbuff", "feddf", "fedyogi", "knn-per", "power-of-choice",
)  # fmt: skip


@pytest.mark.by_hand(*_FEDAVGS_STEPS)
@pytest.mark.parametrize("name", _FEDAVGS_STEPS)
def test_clients_of_methods_that_differ_elsewhere_take_sgd_steps_from_what_they_received(turn: Turn, name: str) -> None:
    runtime, client = turn(METHODS[name](lr=LR, batch_size=4, **({"kd_steps": 0} if name == "feddf" else {})))
    start = client.model.state() + 0.1
    w = start.clone()
    for batch in _steps(client, "batches", 2):
        w = w - LR * gradient(client, w, batch)
    sent = runtime.method.train(client, {"model": start})
    found = start + sent["change"] if name == "fedbuff" else sent["model"]
    torch.testing.assert_close(found, w, rtol=0, atol=1e-14)


def test_momentum_and_weight_decay_are_those_of_torchs_sgd(turn: Turn) -> None:
    method = FedAvg(lr=LR, batch_size=4, momentum=0.5, weight_decay=0.01)
    runtime, client = turn(method)
    start = runtime.server["model"].clone()
    client.model.load(start)
    optimizer = torch.optim.SGD(client.model.module.parameters(), lr=LR, momentum=0.5, weight_decay=0.01)
    for batch in _steps(client, "batches", 2):
        optimizer.zero_grad()
        F.cross_entropy(client.model.module(batch.inputs), batch.targets).backward()
        optimizer.step()
    expected = client.model.state()
    sent = method.train(client, {"model": start})
    torch.testing.assert_close(sent["model"], expected, rtol=0, atol=1e-14)


def test_the_server_weighs_clients_by_samples() -> None:
    uploads = Uploads([0, 2], [3, 1], [{"model": torch.tensor([1.0, 2.0])}, {"model": torch.tensor([5.0, 6.0])}])
    server: dict[str, Tensor] = {}
    FedAvg().aggregate(server, uploads)
    assert server["model"].tolist() == [2.0, 3.0]
    assert torch.equal(uploads.average(), server["model"])


@pytest.mark.by_hand("fedprox")
def test_fedprox_is_held_near_the_global_model(turn: Turn) -> None:
    mu = 0.7
    runtime, client = turn(FedProx(lr=LR, batch_size=4, mu=mu))
    start = runtime.server["model"]
    w = start.clone()
    for batch in _steps(client, "batches", 2):
        w = w - LR * (gradient(client, w, batch) + mu * (w - start))
    sent = runtime.method.train(client, {"model": start})
    torch.testing.assert_close(sent["model"], w, rtol=0, atol=1e-14)


def test_fedprox_without_its_term_is_fedavg(turn: Turn) -> None:
    runtime, client = turn(FedProx(lr=LR, mu=0.0))
    plain, other = turn(FedAvg(lr=LR))
    start = {"model": runtime.server["model"]}
    assert torch.equal(runtime.method.train(client, start)["model"], plain.method.train(other, start)["model"])


# The same method with a strong and with no proximal term; two steps, as the first begins at FedProx's anchor.
_PAIRS = [
    (FedProx(lr=LR, batch_size=4, mu=2.0), FedProx(lr=LR, batch_size=4, mu=0.0)),
    (Ditto(lr=LR, batch_size=4, lam=2.0), Ditto(lr=LR, batch_size=4, lam=0.0)),
]


def test_the_proximal_terms_are_not_dead(turn: Turn) -> None:
    for strong, weak in _PAIRS:
        results = []
        for method in (strong, weak):
            runtime, client = turn(method)
            if isinstance(method, Ditto):
                client["personal"] = runtime.server["model"] + 1
            received = {"model": runtime.server["model"]}
            sent = method.train(client, received)
            if isinstance(method, Ditto):
                personalize(runtime, client, received, sent)
            results.append(client["personal"] if isinstance(method, Ditto) else sent["model"])
        assert not torch.equal(*results)


@pytest.mark.by_hand("ditto")
def test_dittos_personal_model_is_held_near_the_received_one(turn: Turn) -> None:
    lam = 0.5
    runtime, client = turn(Ditto(lr=LR, batch_size=4, lam=lam, personal_epochs=2))
    w = runtime.server["model"]
    v = w + 0.25
    client["personal"] = v
    for batch in _steps(client, "personal", 4):
        v = v - LR * (gradient(client, v, batch) + lam * (v - w))
    sent = runtime.method.train(client, {"model": w})
    personalize(runtime, client, {"model": w}, sent)
    torch.testing.assert_close(client["personal"], v, rtol=0, atol=1e-14)
    plain, other = turn(FedAvg(lr=LR, batch_size=4))
    assert torch.equal(sent["model"], plain.method.train(other, {"model": w})["model"])  # w_k is FedAvg's


@pytest.mark.by_hand("standalone")
def test_standalone_goes_on_from_its_own_model_and_sends_nothing(turn: Turn) -> None:
    runtime, client = turn(Standalone(lr=LR, batch_size=4))
    v = client["personal"] + 0.5
    client["personal"] = v
    for batch in _steps(client, "batches", 2):
        v = v - LR * gradient(client, v, batch)
    assert runtime.method.train(client, {}) == {}
    torch.testing.assert_close(client["personal"], v, rtol=0, atol=1e-14)


@pytest.mark.by_hand("fedavg-ft")
def test_fine_tuning_starts_at_the_last_global_model(turn: Turn) -> None:
    runtime, client = turn(FedAvgFT(lr=LR, batch_size=4, fine_tune_epochs=2), stage="finish")
    w = runtime.server["model"] + 0.1
    v = w.clone()
    for batch in _steps(client, "fine-tune", 4):
        v = v - LR * gradient(client, v, batch)
    runtime.method.personalize(client, {"model": w}, {})
    torch.testing.assert_close(client["personal"], v, rtol=0, atol=1e-14)
    found = models(runtime, client, model=w)
    assert list(found) == ["global", "personal"]
    assert torch.equal(found["global"], w) and torch.equal(found["personal"], client["personal"])


# ---- PersFL ----------------------------------------------------------------------------------------------------------


def _persfl(**options: Any) -> PersFL:
    return PersFL(**{"lr": LR, "batch_size": 4, "distill_epochs": 1, **options})


def test_the_grid_is_table_5s_with_one_point_without_imitation() -> None:
    points = PersFL().points()
    assert len(points) == 1 + 7 * 4 and points[0] == (1.0, 0.0)
    assert {t for t, _ in points} == {1, 5, 9, 13, 17, 21, 25} and {x for _, x in points} == {0, 0.25, 0.5, 0.75, 1}


def test_a_client_keeps_the_received_model_with_the_lowest_validation_loss(turn: Turn) -> None:
    method = _persfl()
    runtime, client = turn(method)
    first = runtime.server["model"]
    client.model.load(first)
    loss = client.loss(client.validation)
    worse = first.clone()
    worse[-3:] += torch.tensor([50.0, -50.0, 0.0])
    for round, received in ((2, worse), (3, first), (4, worse)):
        client.round = round
        method.train(client, {"model": received})
    assert torch.equal(client["teacher"], first)
    assert client["teacher_round"].item() == 2  # G_2 arrives in round 3
    assert client["teacher_loss"].item() == pytest.approx(loss, rel=1e-12)


def test_the_initial_model_is_no_teacher(turn: Turn) -> None:
    method = _persfl()
    runtime, client = turn(method, round=1)
    method.train(client, {"model": runtime.server["model"]})
    assert "teacher" not in client


@pytest.mark.by_hand("persfl")
@pytest.mark.parametrize("soft", ["kl", "ce"])
@pytest.mark.parametrize("soft_mean", ["samples", "elements"])
@pytest.mark.parametrize("grid", ["one-by-one", "batched"])
def test_stage_2_minimises_equation_3(turn: Turn, grid: str, soft_mean: str, soft: str) -> None:
    temperature, lam = 5.0, 0.75
    options: dict[str, Any] = {"grid": grid, "soft": soft, "soft_mean": soft_mean, "distill_lr": 0.04}
    method = _persfl(temperatures=(temperature,), lambdas=(lam,), **options)
    runtime, client = turn(method, stage="finish")
    teacher = runtime.server["model"] + 0.3
    a = teacher.clone()
    for batch in _steps(client, "distillation", 2):
        client.model.load(teacher)
        o = client.model.module(batch.inputs).detach()

        def loss(logits: Tensor, targets: Tensor, o: Tensor = o) -> Tensor:
            target = F.softmax(o / temperature, -1)
            log_p = F.log_softmax(logits / temperature, -1)
            term = F.kl_div(log_p, target, reduction="batchmean") if soft == "kl" else -(target * log_p).sum(-1).mean()
            term = term / logits.shape[1] if soft_mean == "elements" else term
            return (1 - lam) * F.cross_entropy(logits, targets) + lam * temperature**2 * term

        a = a - 0.04 * gradient(client, a, batch, loss)
    method.personalize(client, {"model": teacher}, {})
    torch.testing.assert_close(client["personal"], a, rtol=0, atol=1e-12)
    assert client.report["temperature"] == temperature and client.report["lambda"] == lam


def test_the_soft_term_is_not_dead(turn: Turn) -> None:
    results = []
    for lam in (0.0, 0.5):
        method = _persfl(temperatures=(5.0,), lambdas=(lam,))
        runtime, client = turn(method, stage="finish")
        method.personalize(client, {"model": runtime.server["model"]}, {})
        results.append(client["personal"])
    assert (results[0] - results[1]).abs().max() > 1e-4


def test_both_ways_through_the_grid_choose_the_same_point_and_model(turn: Turn) -> None:
    found = []
    for grid in ("one-by-one", "batched"):
        method = _persfl(grid=grid, distill_epochs=3, momentum=0.5, weight_decay=0.01)
        runtime, client = turn(method, stage="finish")
        method.personalize(client, {"model": runtime.server["model"]}, {})
        found.append((client["personal"], client.report["temperature"], client.report["lambda"]))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-12)
    assert found[0][1:] == found[1][1:]


def test_the_chosen_student_has_the_highest_validation_accuracy_of_the_grid(turn: Turn) -> None:
    method = _persfl(distill_epochs=4)
    runtime, client = turn(method, stage="finish")
    method.personalize(client, {"model": runtime.server["model"]}, {})
    accuracies = []
    for student in method._one_by_one(client, client.outputs(client.train)[0]):
        client.model.load(student)
        logits, targets = client.outputs(client.validation)
        accuracies.append(float((logits.argmax(-1) == targets).double().mean()))
    assert client.report["distilled_validation_accuracy"] == max(accuracies)


def test_the_last_model_as_teacher_is_the_ablation_of_table_4(turn: Turn) -> None:
    method = _persfl(teacher="last")
    runtime, client = turn(method, round=9, stage="finish")
    client["teacher"], client["teacher_loss"] = runtime.server["model"], torch.tensor([0.0], dtype=torch.float64)
    last = runtime.server["model"] + 1
    method.personalize(client, {"model": last}, {})
    assert torch.equal(client["teacher"], last) and client.report["teacher_round"] == 9


def test_a_new_user_chooses_among_all_stored_global_models(turn: Turn) -> None:
    method = _persfl(stored_models=4)
    runtime, client = turn(method, round=9, stage="finish")
    good = runtime.server["model"]
    bad = good.clone()
    bad[-3:] += torch.tensor([50.0, -50.0, 0.0])
    for best in (6, 7, 8, 9):  # 6 to 9 are the last four rounds; round e is in row (e - 1) % 4
        runtime, client = turn(method, round=9, stage="finish")
        stored = torch.stack([good if (best - 1) % 4 == row else bad for row in range(4)])
        method.personalize(client, {"model": good if best == 9 else bad, "stored": stored}, {})
        assert torch.equal(client["teacher"], good) and client.report["teacher_round"] == best


def test_the_server_stores_the_last_global_models_for_users_that_never_took_part(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(_persfl(stored_models=3), network, dataset, partition, Settings(rounds=5, new_clients=1))
    models = [run.server["model"] for _ in run.rounds()]
    assert torch.equal(run.server["stored"], torch.stack([models[3], models[4], models[2]]))
    assert run.server["took_part"].tolist() == [1, 1, 0]
    assert "stored" in run.method.sends(run.server, 2, "finish")
    assert "stored" not in run.method.sends(run.server, 0, "finish")
    assert "stored" not in run.method.sends(run.server, 2, "evaluate")
    everyone = Federation(_persfl(), network, dataset, partition, Settings(rounds=1))
    assert everyone.server["stored"].numel() == 0


def test_a_user_that_took_part_in_the_first_round_alone_has_taken_part(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(_persfl(), network, dataset, partition, Settings(rounds=4, participation=0.34, seed=1))
    records = run.run()
    first = set(records[0]["clients"])
    later = {k for record in records[1:4] for k in record["clients"]}
    assert first - later, "the seed should leave one with round 1 alone"
    for k in first - later:  # it has received the initial model, which is none of the teachers, and the last one
        assert run.client_results[k].report["teacher_round"] == 4
        assert "stored" not in run.method.sends(run.server, k, "finish")


def test_the_teacher_of_a_run_of_one_round_is_its_global_model_and_not_the_initial_one(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run = Federation(_persfl(), network, dataset, partition, Settings(rounds=1, new_clients=1))
    run.run()
    assert [result.report["teacher_round"] for result in run.client_results] == [1.0, 1.0, 1.0]


def test_every_point_of_the_grid_is_tested_in_one_run_without_a_say_in_the_choice(turn: Turn) -> None:
    reports = []
    for tests in (False, True):
        method = _persfl(temperatures=(1.0, 5.0), lambdas=(0.0, 0.5), grid_tests=tests)
        runtime, client = turn(method, stage="finish")
        method.personalize(client, {"model": runtime.server["model"]}, {})
        reports.append(dict(client.report))
        chosen = client["personal"]
    tested = {name: value for name, value in reports[1].items() if name.startswith("test_accuracy")}
    assert list(tested) == [f"test_accuracy, T = {t}, lambda = {x}" for t, x in ((1, 0), (1, 0.5), (5, 0.5))]
    assert {name: value for name, value in reports[1].items() if name not in tested} == reports[0]
    client.model.load(chosen)
    place = f"test_accuracy, T = {reports[1]['temperature']:g}, lambda = {reports[1]['lambda']:g}"
    assert tested[place] == client.metrics(client.test)["accuracy"]


def test_persfl_without_validation_data_is_refused(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    empty = tuple(part[:0] for part in partition.validation)
    with pytest.raises(ValueError, match="3 of 3 clients have none"):
        Federation(PersFL(), network, dataset, dataclasses.replace(partition, validation=empty))


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("fedavg", "lr", 0.0),
        ("fedavg", "lr", float("nan")),
        ("fedavg", "momentum", 1.0),
        ("fedavg", "batch_size", 0),
        ("fedprox", "mu", -1.0),
        ("ditto", "lam", -0.1),
        ("persfl", "temperatures", (0.0,)),
        ("persfl", "lambdas", (1.5,)),
        ("persfl", "teacher", "best"),
    ],
)
def test_options_out_of_range_are_refused_by_name(name: str, option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} is"):
        METHODS[name](**{option: value})


def test_networks_of_linear_layers_are_trained_at_once() -> None:
    from pfl_ext.algorithms.persfl import _only_linear
    from pfl_ext.nn import lenet, mlp

    assert _only_linear(mlp((4,), 3)) and not _only_linear(lenet((3, 32, 32), 10))
    assert not _only_linear(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))


def test_among_equal_students_the_first_point_of_the_grid_wins(turn: Turn) -> None:
    method = _persfl(distill_epochs=0)  # all students are the teacher
    runtime, client = turn(method, stage="finish")
    method.personalize(client, {"model": runtime.server["model"]}, {})
    assert (client.report["temperature"], client.report["lambda"]) == (1.0, 0.0)
    assert torch.equal(client["personal"], client["teacher"])
