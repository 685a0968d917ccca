"""PerAda, FedDF, FedAlt and FedSim: by hand in float64 against their equations."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import LR, Turn, entries, gradient, joined, personalize
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext import _native
from pfl_ext import nn as networks
from pfl_ext.algorithms import FedAlt, FedAvg, FedDF, FedSim, PerAda
from pfl_ext.algorithms.fedalt import personal_part
from pfl_ext.algorithms.server_distillation import distil
from pfl_ext.data import Dataset, Partition
from pfl_ext.engines import Workers
from pfl_ext.federation import (
    Client,
    Federation,
    ForeignCheckpoint,
    InProcess,
    Record,
    Request,
    Server,
    Settings,
    Uploads,
    WorkingModel,
)
from pfl_ext.tasks import Classification


@pytest.fixture
def network() -> nn.Module:
    """A frozen layer, and trained ones after it."""
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    made[0].requires_grad_(False)
    return made


@pytest.fixture
def auxiliary(dataset: Dataset) -> Dataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    return Dataset("unlabelled", x, torch.zeros(20, dtype=torch.int64), ("x",), torch.zeros(20, dtype=torch.bool)).to(
        "cpu", torch.float64
    )


def _server(module: nn.Module, auxiliary: Dataset | None, held_out: Dataset | None = None, **vectors: Tensor) -> Server:
    server = Server(Classification(), module, Settings(seed=7), 3, auxiliary, held_out)
    server.update(vectors)
    server.round = 1
    return server


# ---- the clients' part -----------------------------------------------------------------------------------------------


@pytest.mark.by_hand("perada")
@pytest.mark.parametrize("official", [False, True])
def test_the_personal_adapter_is_held_near_w_and_the_local_one_starts_there(turn: Turn, official: bool) -> None:
    lam = 0.7
    method = PerAda(lr=LR, batch_size=4, lam=lam, personal_lr=0.05, official_lambda=official, kd_steps=0)
    runtime, client = turn(method)
    w = runtime.server["model"] + 0.1
    v = w + 0.25
    client["personal"] = v
    theta = w
    strength = 2 * lam if official else lam
    for batch in client.batches(4, name="personal"):
        v = v - 0.05 * (gradient(client, v, batch) + strength * (v - w))
    for batch in client.batches(4):
        theta = theta - LR * gradient(client, theta, batch)
    sent = method.train(client, {"model": w})
    personalize(runtime, client, {"model": w}, sent)
    torch.testing.assert_close(client["personal"], v, rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["model"], theta, rtol=0, atol=1e-13)
    assert not torch.equal(theta, w)


def test_what_the_theorems_speak_of_is_measured_and_nothing_is_trained_otherwise(turn: Turn) -> None:
    lam = 0.7
    plain, measured = (PerAda(lr=LR, batch_size=4, lam=lam, kd_steps=0, theory=theory) for theory in (False, True))
    found = {}
    for method in (plain, measured):
        runtime, client = turn(method)
        w = runtime.server["model"] + 0.1
        v = w + 0.25
        client["personal"] = v
        sent = method.train(client, {"model": w})
        personalize(runtime, client, {"model": w}, sent)
        found[method] = sent, client["personal"], client.report
    assert torch.equal(found[plain][0]["model"], found[measured][0]["model"])
    assert torch.equal(found[plain][1], found[measured][1])
    (sent, _, report), all_samples = found[measured], next(client.batches(client.samples))
    torch.testing.assert_close(sent["gradient"], gradient(client, w, all_samples), rtol=0, atol=1e-13)
    of_personal = gradient(client, v, all_samples) + lam * (v - w)
    assert report["personal_gradient_norm_squared"] == pytest.approx(float(of_personal.square().sum()), rel=1e-12)
    client.model.load(sent["model"])
    logits, targets = client.outputs(client.train)
    right = torch.softmax(logits, -1)[torch.arange(len(targets)), targets]
    assert report["local_error"] == pytest.approx(float((1 - right).mean()), rel=1e-12)
    other = -0.5 * sent["gradient"] + 1
    uploads = Uploads([0, 1], [30, 10], [sent, {**sent, "gradient": other}])
    measured.aggregate(runtime.server, uploads)  # alike, whatever the clients' sizes are
    expected = float(((sent["gradient"] + other) / 2).square().sum())
    assert runtime.server.report["gradient_norm_squared"] == pytest.approx(expected, rel=1e-12)


def test_only_what_is_trained_is_kept_and_sent(turn: Turn, network: nn.Module) -> None:
    runtime, client = turn(PerAda(lr=LR, kd_steps=0))
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert trained == 53 and runtime.server["model"].numel() == client["personal"].numel() == trained
    assert client.model.size == trained
    sent = runtime.method.train(client, runtime.server)
    assert sent["model"].numel() == trained
    assert torch.equal(client.model.module[0].weight, network[0].weight)  # type: ignore[index, union-attr]


def test_running_statistics_travel_unless_their_layer_is_frozen() -> None:
    network = networks.build(
        "resnet18", (3, 32, 32), 10, torch.Generator().manual_seed(0), adapters=True, freeze="backbone"
    )
    method, server = PerAda(kd_steps=0), _server(network, None)
    statistics = 2 * (2 * 3840 + 64) + 33  # mean and variance of two norms a convolution and of the stem; counters
    assert (server.model.parameters, server.model.size) == (1_413_258, 1_413_258 + statistics)
    method.set_up(server)
    assert [vector.numel() for vector in method.sends(server, 0, "train").values()] == [1_413_258 + statistics]
    assert [vector.numel() for vector in method.keeps(server.model).values()] == [1_413_258 + statistics]


def test_frozen_parts_are_bit_identical_after_training() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=generator)
    images = Dataset.from_tensors(x, torch.arange(40) % 2)
    parts = (torch.arange(0, 12), torch.arange(12, 24))
    tests = (torch.arange(24, 28), torch.arange(28, 32))
    nothing = torch.empty(0, dtype=torch.int64)
    partition = Partition(parts, (nothing, nothing), tests, nothing, torch.cat(tests))
    network = networks.build("resnet18", (3, 32, 32), 2, generator, adapters=True, freeze="backbone")
    before = WorkingModel(copy.deepcopy(network))
    frozen = {name: tensor for name, tensor in before.module.state_dict().items() if name not in before.names}
    assert "conv1.weight" in frozen and any("running_mean" in name for name in frozen)
    auxiliary = images.subset(torch.arange(32, 40)).unlabelled(images)
    method = PerAda(lr=LR, batch_size=6, kd_steps=2, kd_batch_size=4)
    engine = InProcess()
    run = Federation(method, network, images, partition, Settings(rounds=1), engine=engine, auxiliary=auxiliary)
    (last,) = run.run()
    assert set(last["models"]) == {"global", "personal"} and "global_test" in last["models"]["global"]
    for model in (run.server.model, engine.runtime.model):
        now = model.module.state_dict()
        assert all(torch.equal(now[name], tensor) for name, tensor in frozen.items())
    assert not torch.equal(run.server["model"], before.state())
    assert last["communication"]["up_parameters"] == last["communication"]["down_parameters"] == 2 * before.size
    assert last["training"]["trained_parameters"] == 2 * sum(p.numel() for p in before.trained)
    assert all(p.grad is None for p in run.server.model.module.parameters())


# ---- the server's part -----------------------------------------------------------------------------------------------


def _uploads(w: Tensor, name: str, clients: int = 3) -> Uploads:
    generator = torch.Generator().manual_seed(3)
    vectors = [{name: w + torch.randn(w.shape, generator=generator, dtype=w.dtype)} for _ in range(clients)]
    return Uploads(list(range(clients)), [5, 1, 1][:clients], vectors)  # type: ignore[arg-type]


def _by_hand(
    module: nn.Module, start: Tensor, teachers: list[Tensor], x: list[Tensor], temperature: float, cosine: bool
) -> Tensor:
    """R steps of torch's Adam on KL(mean of logits || student), on plain modules."""
    model = WorkingModel(copy.deepcopy(module))

    def logits(vector: Tensor, inputs: Tensor) -> Tensor:
        model.load(vector)
        return model.module(inputs).detach()

    means = [sum(logits(t, inputs) for t in teachers) / len(teachers) for inputs in x]
    model.load(start)
    optimizer = torch.optim.Adam([p for p in model.module.parameters() if p.requires_grad], lr=0.02)
    for step, (inputs, mean) in enumerate(zip(x, means, strict=True)):
        if cosine:
            optimizer.param_groups[0]["lr"] = 0.02 * 0.5 * (1 + math.cos(math.pi * step / len(x)))
        optimizer.zero_grad()
        log_p = F.log_softmax(model.module(inputs) / temperature, -1)
        F.kl_div(log_p, F.softmax(mean / temperature, -1), reduction="batchmean").backward()
        optimizer.step()
    return model.state()


@pytest.mark.parametrize(("temperature", "schedule"), [(1.0, "constant"), (3.0, "cosine")])
def test_the_server_averages_without_weights_and_distils(
    network: nn.Module, auxiliary: Dataset, temperature: float, schedule: str
) -> None:
    options = {"kd_steps": 3, "kd_lr": 0.02, "kd_batch_size": 8}
    method = PerAda(kd_temperature=temperature, kd_schedule=schedule, **options)  # type: ignore[arg-type]
    w = WorkingModel(copy.deepcopy(network)).state()
    uploads = _uploads(w, "model")
    server = _server(network, auxiliary, model=w)
    order = server.stream("distillation")
    rows = [torch.randperm(20, generator=order) for _ in range(2)]  # batches of 8 of 20: the rest of a pass is left
    x = [auxiliary.batch(r)[0] for r in (rows[0][:8], rows[0][8:16], rows[1][:8])]
    start = sum(uploads.each("model")) / 3
    expected = _by_hand(network, start, uploads.each("model"), x, temperature, schedule == "cosine")
    method.aggregate(server, uploads)
    torch.testing.assert_close(server["model"], expected, rtol=0, atol=1e-12)
    assert (server["model"] - start).abs().max() > 1e-3  # the term has a gradient
    assert server.report["kd_loss"] > 0


def test_without_distillation_the_server_averages(network: nn.Module) -> None:
    w = torch.zeros(53, dtype=torch.float64)
    uploads = _uploads(w, "model")
    server = _server(network, None, model=w)
    PerAda(kd_steps=0).aggregate(server, uploads)
    torch.testing.assert_close(server["model"], sum(uploads.each("model")) / 3, rtol=0, atol=1e-15)
    assert not server.report


def test_feddf_weighs_by_samples_and_distils_the_whole_model(network: nn.Module, auxiliary: Dataset) -> None:
    network[0].requires_grad_(True)  # type: ignore[index, union-attr]
    method = FedDF(kd_steps=2, kd_lr=0.02, kd_batch_size=20)
    w = WorkingModel(copy.deepcopy(network)).state()
    uploads = _uploads(w, "model")
    server = _server(network, auxiliary, model=w)
    order = server.stream("distillation")
    x = [auxiliary.batch(torch.randperm(20, generator=order))[0] for _ in range(2)]
    start = sum(n * t for n, t in zip((5, 1, 1), uploads.each("model"), strict=True)) / 7
    expected = _by_hand(network, start, uploads.each("model"), x, 1.0, False)
    method.aggregate(server, uploads)
    torch.testing.assert_close(server["model"], expected, rtol=0, atol=1e-12)


def test_feddf_without_distillation_is_fedavg(turn: Turn) -> None:
    runtime, client = turn(FedDF(lr=LR, kd_steps=0))
    plain, other = turn(FedAvg(lr=LR))
    w = {"model": runtime.server["model"]}
    assert torch.equal(runtime.method.train(client, w)["model"], plain.method.train(other, w)["model"])


def _distilled(network: nn.Module, auxiliary: Dataset, held_out: Any = None, round: int = 1, **options: Any) -> Server:
    method = PerAda(**{"kd_steps": 4, "kd_lr": 0.05, "kd_batch_size": 8, **options})
    w = torch.full((53,), 0.1, dtype=torch.float64)
    server = _server(network, auxiliary, held_out, model=w)
    server.round = round
    torch.manual_seed(0)
    method.aggregate(server, _uploads(w, "model"))
    return server


def test_kept_teachers_give_the_bits_of_teachers_asked_every_time(network: nn.Module, auxiliary: Dataset) -> None:
    kept = _distilled(network, auxiliary)
    asked = _distilled(network, auxiliary, kd_teachers="train")  # no layer of this network has two modes
    assert torch.equal(kept["model"], asked["model"])


def test_teachers_in_train_mode_use_the_statistics_of_the_batch(auxiliary: Dataset) -> None:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    results = []
    for mode in ("eval", "train"):
        method = PerAda(kd_steps=2, kd_batch_size=8, kd_teachers=mode)
        server = _server(network, auxiliary)
        method.set_up(server)
        uploads = Uploads([0, 1], [1, 1], [{"model": server["model"] * f} for f in (1.0, 2.0)])
        method.aggregate(server, uploads)
        results.append(server["model"])
    assert not torch.allclose(*results)


def test_a_student_in_eval_mode_keeps_the_averaged_statistics(auxiliary: Dataset) -> None:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    buffers = entries(WorkingModel(copy.deepcopy(network)), "1")
    buffers[: 20 + 5 + 5 + 5 + 15 + 3] = False
    for mode, same in (("eval", True), ("train", False)):
        method = PerAda(kd_steps=2, kd_batch_size=8, kd_student=mode)
        server = _server(network, auxiliary)
        method.set_up(server)
        w = server["model"]
        method.aggregate(server, Uploads([0, 1], [1, 1], [{"model": w}, {"model": w}]))
        assert torch.equal(server["model"][buffers], w[buffers]) is same


def test_the_distillation_distance_is_the_papers(network: nn.Module, auxiliary: Dataset) -> None:
    server = _distilled(network, auxiliary, kd_distance=True, kd_steps=40)
    model = WorkingModel(copy.deepcopy(network))
    x = auxiliary.batch(torch.arange(20))[0]

    def outputs(vector: Tensor) -> Tensor:
        model.load(vector)
        return F.softmax(model.module(x), -1).detach()

    uploads = _uploads(torch.full((53,), 0.1, dtype=torch.float64), "model")
    ensemble = sum(outputs(t) for t in uploads.each("model")) / 3
    before = (outputs(sum(uploads.each("model")) / 3) - ensemble).abs().sum(-1).mean()  # type: ignore[arg-type]
    after = (outputs(server["model"]) - ensemble).abs().sum(-1).mean()
    assert server.report["distillation_distance_before"] == pytest.approx(float(before), rel=1e-12)
    assert server.report["distillation_distance"] == pytest.approx(float(after), rel=1e-12)


def test_distillation_from_one_teacher_makes_the_distance_small(network: nn.Module, auxiliary: Dataset) -> None:
    method = PerAda(kd_steps=150, kd_lr=0.03, kd_batch_size=20, kd_distance=True)
    server = _server(network, auxiliary)
    teacher = server.model.state()
    generator = torch.Generator().manual_seed(0)
    start = teacher + torch.randn(teacher.shape, generator=generator, dtype=torch.float64)
    distil(server, method, [start], [Uploads([0], [1], [{"model": teacher}])])
    assert server.report["distillation_distance"] < 0.1 * server.report["distillation_distance_before"]
    assert torch.equal(server.model.module[0].weight, network[0].weight)  # type: ignore[index, union-attr]


def test_the_distance_can_be_had_without_distillation(network: nn.Module, auxiliary: Dataset) -> None:
    report = _distilled(network, auxiliary, kd_distance=True, kd_steps=0).report
    assert report["distillation_distance"] == report["distillation_distance_before"] > 0


def test_distillation_can_end_after_the_first_rounds(network: nn.Module, auxiliary: Dataset) -> None:
    first, later = (_distilled(network, auxiliary, round=r, kd_rounds=2) for r in (2, 3))
    plain = _distilled(network, auxiliary, kd_steps=0)
    assert torch.equal(later["model"], plain["model"]) and not torch.equal(first["model"], plain["model"])


def test_the_best_student_on_held_out_samples_is_kept(network: nn.Module, auxiliary: Dataset, dataset: Dataset) -> None:
    kept = _distilled(network, auxiliary, dataset, kd_keep_best=1, kd_lr=3.0, kd_steps=12)
    model = WorkingModel(copy.deepcopy(network))

    def accuracy(vector: Tensor) -> float:
        model.load(vector)
        x, y = dataset.batch(torch.arange(len(dataset)))
        return float((model.module(x).argmax(-1) == y).double().mean())

    states = [_distilled(network, auxiliary, kd_lr=3.0, kd_steps=s)["model"] for s in range(13)]
    accuracies = [accuracy(state) for state in states]
    assert len(set(accuracies)) > 1 and kept.report["held_out_accuracy"] == max(accuracies)
    assert torch.equal(kept["model"], states[accuracies.index(max(accuracies))])


def test_a_server_without_the_data_it_needs_is_refused(
    network: nn.Module, dataset: Dataset, partition: Partition, auxiliary: Dataset
) -> None:
    for method in (PerAda(), FedDF()):
        with pytest.raises(ValueError, match="has no unlabelled data"):
            Federation(method, network, dataset, partition)
    with pytest.raises(ValueError, match="kd_keep_best needs labelled samples"):
        Federation(PerAda(kd_keep_best=5), network, dataset, partition, auxiliary=auxiliary)


def test_augmented_images_are_seen_by_teachers_and_student_alike_unless_kept(auxiliary: Dataset) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 1, 6, 6, generator=generator, dtype=torch.float64)
    images = Dataset("x", x, torch.zeros(12, dtype=torch.int64), ("x",), torch.zeros(12, dtype=torch.bool)).to(
        "cpu", torch.float64
    )
    torch.manual_seed(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).double()
    w = WorkingModel(copy.deepcopy(network)).state()
    losses = {}
    for cache in (True, False):
        method = PerAda(kd_steps=3, kd_batch_size=6, kd_augmentation="flip", kd_cache=cache, kd_lr=1e-9)
        server = _server(network, images, model=w)
        method.aggregate(server, Uploads([0], [1], [{"model": w}]))
        losses[cache] = server.report["kd_loss"]
    # The only teacher is the student: on the same images they agree.
    assert losses[False] < 1e-12 < 1e-3 < losses[True]


# ---- whole runs ------------------------------------------------------------------------------------------------------


def _run(
    network: nn.Module, dataset: Dataset, partition: Partition, auxiliary: Dataset, rounds: int = 4, **options: Any
) -> tuple[dict[str, Tensor], list[Record]]:
    """What server and clients have at the end, and the records."""
    settings = Settings(rounds=rounds, participation=0.67, checkpoint_every=1)
    method = PerAda(lr=LR, batch_size=4, kd_steps=3, kd_batch_size=6, kd_distance=True)
    run = Federation(method, network, dataset, partition, settings, auxiliary=auxiliary, **options)
    records = run.run()
    return {**run.server, **run.engine.state()}, records


def _same(a: tuple[dict[str, Tensor], list[Record]], b: tuple[dict[str, Tensor], list[Record]]) -> None:
    assert set(a[0]) == set(b[0]) == {"model", "personal/clients", "personal/rows"}
    assert all(torch.equal(a[0][name], b[0][name]) for name in a[0])

    def plain(records: list[Record]) -> list[Record]:
        return [{k: v for k, v in r.items() if not k.startswith("seconds")} for r in records]

    assert len(a[1]) == 4 and repr(plain(a[1])) == repr(plain(b[1]))


@pytest.fixture
def dropout_network() -> nn.Module:
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 3)).double()
    made[0].requires_grad_(False)
    return made


def test_a_resumed_run_is_bit_identical(
    dropout_network: nn.Module, dataset: Dataset, partition: Partition, auxiliary: Dataset, tmp_path: Any
) -> None:
    whole = _run(dropout_network, dataset, partition, auxiliary)
    _, first = _run(dropout_network, dataset, partition, auxiliary, 2, folder=tmp_path)
    found, rest = _run(dropout_network, dataset, partition, auxiliary, folder=tmp_path, resume=True)
    _same(whole, (found, first + rest))
    assert whole[1][-1]["server"]["distillation_distance"] > 0


def test_a_run_with_other_unlabelled_data_is_another_run(
    dropout_network: nn.Module, dataset: Dataset, partition: Partition, auxiliary: Dataset, tmp_path: Any
) -> None:
    _run(dropout_network, dataset, partition, auxiliary, 1, folder=tmp_path)
    other = auxiliary.subset(torch.arange(10))
    with pytest.raises(ForeignCheckpoint, match="auxiliary"):
        _run(dropout_network, dataset, partition, other, folder=tmp_path, resume=True)


def test_workers_give_the_same_bits(
    dropout_network: nn.Module, dataset: Dataset, partition: Partition, auxiliary: Dataset
) -> None:
    one = _run(dropout_network, dataset, partition, auxiliary)
    _same(one, _run(dropout_network, dataset, partition, auxiliary, engine=Workers(2)))


# ---- FedAlt and FedSim -----------------------------------------------------------------------------------------------


def _steps(client: Client, state: Tensor, chosen: Tensor, **batches: Any) -> Tensor:
    for batch in client.batches(4, **batches):
        state = state - LR * torch.where(chosen, gradient(client, state, batch), 0.0)
    return state


@pytest.mark.by_hand("fedalt")
def test_fedalt_trains_the_personal_part_then_the_shared_one(turn: Turn) -> None:
    runtime, client = turn(FedAlt(lr=LR, batch_size=4, personal_epochs=2))
    v = entries(client.model, "4")
    u = ~v
    assert int(v.sum()) == 18 and int(u.sum()) == 35  # the frozen layer is in neither
    received = {"shared": runtime.server["shared"] + 0.1}
    client["personal"] = client["personal"] - 0.2
    state = joined(v, client["personal"], received["shared"])
    state = _steps(client, state, v, epochs=2, name="personal")
    state = _steps(client, state, u)
    sent = runtime.method.train(client, received)
    torch.testing.assert_close(client["personal"], state[v], rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["shared"], state[u], rtol=0, atol=1e-13)


@pytest.mark.by_hand("fedsim")
def test_fedsim_trains_both_parts_in_every_step(turn: Turn) -> None:
    runtime, client = turn(FedSim(lr=LR, batch_size=4, personal="2"))
    v = entries(client.model, "2")
    u = ~v
    assert int(v.sum()) == 35
    received = {"shared": runtime.server["shared"] + 0.1}
    state = joined(v, client["personal"], received["shared"])
    state = _steps(client, state, v | u)
    sent = runtime.method.train(client, received)
    torch.testing.assert_close(client["personal"], state[v], rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["shared"], state[u], rtol=0, atol=1e-13)


def test_the_parts_have_the_sizes_of_the_papers_tables() -> None:
    network = networks.resnet18((3, 32, 32), 10)
    model = WorkingModel(network)

    def parameters(part: str, model: WorkingModel = model) -> int:
        return sum(p.numel() for p in personal_part(model, part).parameters)

    assert parameters("block-inputs") == 4_728_000  # Table 6: 4.73 M "input layer"
    assert parameters("input") == 9_408 and parameters("output") == 5_130
    adapted = WorkingModel(networks.add_adapters(networks.resnet18((3, 32, 32), 10)))
    assert parameters("adapter", adapted) == 1_413_258
    assert sum(p.numel() for p in (~personal_part(adapted, "adapter")).parameters) == 11_168_704


# ---- both backends ---------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
from safetensors.torch import save_file
from pfl_ext.algorithms import METHODS
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings
from pfl_ext.tasks import Classification

x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
no = torch.zeros(48, dtype=torch.bool)
dataset = Dataset("points", x, torch.arange(48) % 3, ("a", "b", "c"), no, dtype=torch.float64)
parts = [tuple(torch.arange(12 * k + a, 12 * k + b) for k in range(3)) for a, b in ((0, 8), (8, 8), (8, 12))]
partition = Partition(*parts, torch.empty(0, dtype=torch.int64), torch.cat(parts[2]))
auxiliary = dataset.subset(torch.arange(36, 48)).unlabelled(dataset)
torch.manual_seed(1)
network = torch.nn.Sequential(torch.nn.Linear(4, 50), torch.nn.Tanh(), torch.nn.Linear(50, 3)).double()
found = {}
for name, options in (
    ("perada", {"kd_steps": 3, "kd_temperature": 2.0}), ("feddf", {"kd_steps": 3}), ("fedalt", {}), ("fedsim", {})
):
    method = METHODS[name](lr=0.05, batch_size=4, momentum=0.5, **options)
    run = Federation(method, network, dataset, partition, Settings(rounds=2), auxiliary=auxiliary)
    run.run()
    found |= {f"{name}/{vector}": value for vector, value in run.server.items()}
    found |= {f"{name}/{k}": run.engine.store.read(k, "personal") for k in range(3) if name != "feddf"}
save_file(found, sys.argv[1])
"""


def test_both_backends_give_the_same_models_to_within_rounding(tmp_path: Path) -> None:
    if not all(library.loaded for name, library in _native.status().items() if name == "cpu"):
        pytest.skip("the native library is not there")
    found = []
    for native in ("0", "1"):
        environment = {**os.environ, "PFL_EXT_NATIVE": native, "PYTHONPATH": os.pathsep.join(sys.path)}
        path = tmp_path / f"{native}.safetensors"
        # Elsewhere than in the repository: there "-c" would import the tree, which has no library in it.
        subprocess.run([sys.executable, "-c", SCRIPT, str(path)], check=True, env=environment, cwd=tmp_path)
        found.append(load_file(path))
    assert found[0].keys() == found[1].keys() and len(found[0]) == 4 + 10
    # Sums of up to 200 products of numbers around 1 are rounded in another order: 200 eps in each of 8 local steps and
    # 6 of distillation, forward and backward. Adam divides by the root of squares, which are 1e-3 and more here: 1e3.
    bound = 1e3 * 2 * 14 * 200 * torch.finfo(torch.float64).eps
    for name, plain in found[0].items():
        torch.testing.assert_close(plain, found[1][name], rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}")
    assert any(not torch.equal(plain, found[1][name]) for name, plain in found[0].items())  # two backends, not one


def test_statistics_that_stay_the_servers_are_not_changed_by_clients(
    dropout_network: nn.Module, dataset: Dataset, partition: Partition
) -> None:
    method = PerAda(lr=LR, batch_size=4, kd_steps=0)
    settings = Settings(rounds=2, server_buffers=("BatchNorm1d",))
    run = Federation(method, dropout_network, dataset, partition, settings)
    before = run.server["model"].clone()
    run.run()
    # Six means, six variances, a counter: the last numbers of a state.
    assert torch.equal(run.server["model"][-13:], before[-13:])
    assert not torch.equal(run.server["model"][:-13], before[:-13])


def test_statistics_that_stay_with_clients_are_their_own(
    dropout_network: nn.Module, dataset: Dataset, partition: Partition
) -> None:
    method, engine = PerAda(lr=LR, batch_size=4, kd_steps=0), InProcess()
    settings = Settings(rounds=2, local_buffers=("BatchNorm1d",))
    run = Federation(method, dropout_network, dataset, partition, settings, engine=engine)
    before = run.server["model"].clone()
    run.run()
    assert torch.equal(run.server["model"][-13:], before[-13:])  # nobody has sent any
    assert not torch.equal(run.server["model"][:-13], before[:-13])
    own = [engine.runtime.models(*engine.runtime.begin(Request(k, 2, "evaluate")))["global"] for k in range(2)]
    assert all(torch.equal(state[:-13], run.server["model"][:-13]) for state in own)
    # All but the counter, of two batches in each of two turns.
    assert not (own[0][-13:-1] == own[1][-13:-1]).any() and own[0][-1] == own[1][-1] == 4
