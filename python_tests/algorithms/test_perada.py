"""PerAda, FedDF, FedAlt and FedSim: by hand in float64 against their equations."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext import _native
from pfl_ext import nn as networks
from pfl_ext.algorithms import FedAlt, FedAvg, FedDF, FedSim, PerAda
from pfl_ext.algorithms.fedalt import personal_entries
from pfl_ext.algorithms.server_distillation import distil
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Buffers, Client, Federation, Server, Settings, Uploads, WorkingModel

Turn = Callable[..., tuple[Any, Client]]
LR = 0.1


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


def _gradient(client: Client, v: Tensor, batch: Any) -> Tensor:
    """The gradient of the loss at the trained numbers v, by autograd on the plain module."""
    client.model.load(client.model.whole((client.model.changing, v)))
    loss = F.cross_entropy(client.model.module(batch.inputs), batch.targets)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, client.model.trained)])


def _server(module: nn.Module, vectors: dict[str, Tensor], auxiliary: Dataset | None, held_out: Any = None) -> Server:
    server = Server(vectors, module, 7, 3)
    server.round, server.auxiliary, server.held_out = 1, auxiliary, held_out
    return server


# ---- the clients' part -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("official", [False, True])
def test_the_personal_adapter_is_held_near_w_and_the_local_one_starts_there(turn: Turn, official: bool) -> None:
    lam = 0.7
    method = PerAda(lr=LR, batch_size=4, lam=lam, personal_lr=0.05, official_lambda=official, kd_steps=0)
    turns, client = turn(method)
    w = turns.server["adapter"] + 0.1
    v = w + 0.25
    client["personal"] = v
    theta = w
    strength = 2 * lam if official else lam
    for batch in client.batches(4, name="personal"):
        v = v - 0.05 * (_gradient(client, v, batch) + strength * (v - w))
    for batch in client.batches(4):
        theta = theta - LR * _gradient(client, theta, batch)
    sent = method.client_round(client, {"adapter": w})
    method.personal_round(client, {"adapter": w}, sent)
    torch.testing.assert_close(client["personal"], v, rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["adapter"], theta, rtol=0, atol=1e-13)
    assert not torch.equal(theta, w)


def test_only_what_is_trained_is_kept_and_sent(turn: Turn, network: nn.Module) -> None:
    turns, client = turn(PerAda(lr=LR, kd_steps=0))
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert trained == 53 and turns.server["adapter"].numel() == client["personal"].numel() == trained
    assert turns.method.trained_parameters(client.model) == 2 * trained
    sent = turns.method.client_round(client, turns.server)
    assert sent["adapter"].numel() == trained
    assert torch.equal(client.model.module[0].weight, network[0].weight)  # type: ignore[index, union-attr]


def test_running_statistics_travel_unless_their_layer_is_frozen() -> None:
    network = networks.build(
        "resnet18", (3, 32, 32), 10, torch.Generator().manual_seed(0), adapters=True, freeze="backbone"
    )
    model = WorkingModel(network)
    statistics = 2 * (2 * 3840 + 64) + 33  # mean and variance of two norms a convolution and of the stem; counters
    assert int(model.changing.sum()) == 1_413_258 + statistics
    assert PerAda().server_state(model)["adapter"].numel() == 1_413_258 + statistics
    assert PerAda().trained_parameters(model) == 2_826_516  # Table 1: 2.82 M
    local = WorkingModel(network, local_buffers=(nn.BatchNorm2d,))
    with pytest.raises(ValueError, match="buffers cannot be local"):
        PerAda().server_state(local)


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
    auxiliary = images.subset(torch.arange(32, 40)).unlabelled(images)
    method = PerAda(lr=LR, batch_size=6, kd_steps=2, kd_batch_size=4)
    run = Federation(method, network, images, partition, Settings(rounds=1), auxiliary=auxiliary)
    last = run.run()
    assert set(last["models"]) == {"global", "personal"} and "global_test" in last["models"]["global"]
    state, frozen = before.state(), ~before.changing
    assert torch.equal(run.server.model.state()[frozen], state[frozen])
    assert not torch.equal(run.server["adapter"], state[~frozen])
    sent = int(before.changing.sum())
    assert last["communication"]["up_parameters"] == last["communication"]["down_parameters"] == 2 * sent
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
    part = model.changing

    def logits(vector: Tensor, inputs: Tensor) -> Tensor:
        model.load(model.whole((part, vector)))
        return model.module(inputs).detach()

    means = [sum(logits(t, inputs) for t in teachers) / len(teachers) for inputs in x]
    model.load(model.whole((part, start)))
    optimizer = torch.optim.Adam([p for p in model.module.parameters() if p.requires_grad], lr=0.02)
    for step, (inputs, mean) in enumerate(zip(x, means, strict=True)):
        if cosine:
            optimizer.param_groups[0]["lr"] = 0.02 * 0.5 * (1 + math.cos(math.pi * step / len(x)))
        optimizer.zero_grad()
        log_p = F.log_softmax(model.module(inputs) / temperature, -1)
        F.kl_div(log_p, F.softmax(mean / temperature, -1), reduction="batchmean").backward()
        optimizer.step()
    return model.state()[part]


@pytest.mark.parametrize(("temperature", "schedule"), [(1.0, "constant"), (3.0, "cosine")])
def test_the_server_averages_without_weights_and_distils(
    network: nn.Module, auxiliary: Dataset, temperature: float, schedule: str
) -> None:
    options = {"kd_steps": 3, "kd_lr": 0.02, "kd_batch_size": 8}
    method = PerAda(kd_temperature=temperature, kd_schedule=schedule, **options)  # type: ignore[arg-type]
    w = WorkingModel(copy.deepcopy(network)).state()
    w = w[WorkingModel(copy.deepcopy(network)).changing]
    uploads = _uploads(w, "adapter")
    server = _server(network, {"adapter": w}, auxiliary)
    order = server.stream("distillation")
    rows = [torch.randperm(20, generator=order) for _ in range(2)]  # batches of 8 of 20: the rest of a pass is left
    x = [auxiliary.batch(r)[0] for r in (rows[0][:8], rows[0][8:16], rows[1][:8])]
    start = sum(uploads["adapter"]) / 3
    expected = _by_hand(network, start, uploads["adapter"], x, temperature, schedule == "cosine")
    method.server_round(server, uploads)
    torch.testing.assert_close(server["adapter"], expected, rtol=0, atol=1e-12)
    assert (server["adapter"] - start).abs().max() > 1e-3  # the term has a gradient
    assert server.report["kd_loss"] > 0


def test_without_distillation_the_server_averages(network: nn.Module) -> None:
    w = torch.zeros(53, dtype=torch.float64)
    uploads = _uploads(w, "adapter")
    server = _server(network, {"adapter": w}, None)
    PerAda(kd_steps=0).server_round(server, uploads)
    torch.testing.assert_close(server["adapter"], sum(uploads["adapter"]) / 3, rtol=0, atol=1e-15)
    assert not server.report


def test_feddf_weighs_by_samples_and_distils_the_whole_model(network: nn.Module, auxiliary: Dataset) -> None:
    network[0].requires_grad_(True)  # type: ignore[index, union-attr]
    method = FedDF(kd_steps=2, kd_lr=0.02, kd_batch_size=20)
    w = WorkingModel(copy.deepcopy(network)).state()
    uploads = _uploads(w, "model")
    server = _server(network, {"model": w}, auxiliary)
    order = server.stream("distillation")
    x = [auxiliary.batch(torch.randperm(20, generator=order))[0] for _ in range(2)]
    start = sum(n * t for n, t in zip((5, 1, 1), uploads["model"], strict=True)) / 7
    expected = _by_hand(network, start, uploads["model"], x, 1.0, False)
    method.server_round(server, uploads)
    torch.testing.assert_close(server["model"], expected, rtol=0, atol=1e-12)


def test_feddf_without_distillation_is_fedavg(turn: Turn) -> None:
    turns, client = turn(FedDF(lr=LR, kd_steps=0))
    plain, other = turn(FedAvg(lr=LR))
    w = {"model": turns.server["model"]}
    assert torch.equal(turns.method.client_round(client, w)["model"], plain.method.client_round(other, w)["model"])


def _distilled(network: nn.Module, auxiliary: Dataset, held_out: Any = None, round: int = 1, **options: Any) -> Server:
    method = PerAda(**{"kd_steps": 4, "kd_lr": 0.05, "kd_batch_size": 8, **options})
    w = torch.full((53,), 0.1, dtype=torch.float64)
    server = _server(network, {"adapter": w}, auxiliary, held_out)
    server.round = round
    torch.manual_seed(0)
    method.server_round(server, _uploads(w, "adapter"))
    return server


def test_kept_teachers_give_the_bits_of_teachers_asked_every_time(network: nn.Module, auxiliary: Dataset) -> None:
    kept = _distilled(network, auxiliary)
    asked = _distilled(network, auxiliary, kd_teachers="train")  # no layer of this network has two modes
    assert torch.equal(kept["adapter"], asked["adapter"])


def test_teachers_in_train_mode_use_the_statistics_of_the_batch(auxiliary: Dataset) -> None:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    results = []
    for mode in ("eval", "train"):
        method = PerAda(kd_steps=2, kd_batch_size=8, kd_teachers=mode)
        model = WorkingModel(copy.deepcopy(network))
        server = _server(network, method.server_state(model), auxiliary)
        uploads = Uploads([0, 1], [1, 1], [{"adapter": server["adapter"] * f} for f in (1.0, 2.0)])
        method.server_round(server, uploads)
        results.append(server["adapter"])
    assert not torch.allclose(*results)


def test_a_student_in_eval_mode_keeps_the_averaged_statistics(auxiliary: Dataset) -> None:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    model = WorkingModel(copy.deepcopy(network))
    buffers = model.entries("1")
    buffers[: 20 + 5 + 5 + 5 + 15 + 3] = False
    for mode, same in (("eval", True), ("train", False)):
        method = PerAda(kd_steps=2, kd_batch_size=8, kd_student=mode)
        server = _server(network, method.server_state(model), auxiliary)
        w = server["adapter"]
        method.server_round(server, Uploads([0, 1], [1, 1], [{"adapter": w}, {"adapter": w}]))
        assert torch.equal(server["adapter"][buffers], w[buffers]) is same


def test_the_distillation_distance_is_the_papers(network: nn.Module, auxiliary: Dataset) -> None:
    server = _distilled(network, auxiliary, kd_distance=True, kd_steps=40)
    model = WorkingModel(copy.deepcopy(network))
    x = auxiliary.batch(torch.arange(20))[0]

    def outputs(vector: Tensor) -> Tensor:
        model.load(model.whole((model.changing, vector)))
        return F.softmax(model.module(x), -1).detach()

    uploads = _uploads(torch.full((53,), 0.1, dtype=torch.float64), "adapter")
    ensemble = sum(outputs(t) for t in uploads["adapter"]) / 3
    before = (outputs(sum(uploads["adapter"]) / 3) - ensemble).abs().sum(-1).mean()  # type: ignore[arg-type]
    after = (outputs(server["adapter"]) - ensemble).abs().sum(-1).mean()
    assert server.report["distillation_distance_before"] == pytest.approx(float(before), rel=1e-12)
    assert server.report["distillation_distance"] == pytest.approx(float(after), rel=1e-12)


def test_distillation_from_one_teacher_makes_the_distance_small(network: nn.Module, auxiliary: Dataset) -> None:
    method = PerAda(kd_steps=150, kd_lr=0.03, kd_batch_size=20, kd_distance=True)
    server = _server(network, {}, auxiliary)
    teacher = server.model.state()
    generator = torch.Generator().manual_seed(0)
    start = teacher + torch.randn(teacher.shape, generator=generator, dtype=torch.float64) * server.model.changing
    student = distil(server, method, start, lambda: [teacher])
    assert server.report["distillation_distance"] < 0.1 * server.report["distillation_distance_before"]
    assert torch.equal(student[~server.model.changing], teacher[~server.model.changing])


def test_the_distance_can_be_had_without_distillation(network: nn.Module, auxiliary: Dataset) -> None:
    report = _distilled(network, auxiliary, kd_distance=True, kd_steps=0).report
    assert report["distillation_distance"] == report["distillation_distance_before"] > 0


def test_distillation_can_end_after_the_first_rounds(network: nn.Module, auxiliary: Dataset) -> None:
    first, later = (_distilled(network, auxiliary, round=r, kd_rounds=2) for r in (2, 3))
    plain = _distilled(network, auxiliary, kd_steps=0)
    assert torch.equal(later["adapter"], plain["adapter"]) and not torch.equal(first["adapter"], plain["adapter"])


def test_the_best_student_on_held_out_samples_is_kept(network: nn.Module, auxiliary: Dataset, dataset: Dataset) -> None:
    kept = _distilled(network, auxiliary, dataset, kd_keep_best=1, kd_lr=3.0, kd_steps=12)
    model = WorkingModel(copy.deepcopy(network))

    def accuracy(vector: Tensor) -> float:
        model.load(model.whole((model.changing, vector)))
        x, y = dataset.batch(torch.arange(len(dataset)))
        return float((model.module(x).argmax(-1) == y).double().mean())

    states = [_distilled(network, auxiliary, kd_lr=3.0, kd_steps=s)["adapter"] for s in range(13)]
    accuracies = [accuracy(state) for state in states]
    assert len(set(accuracies)) > 1 and kept.report["held_out_accuracy"] == max(accuracies)
    assert torch.equal(kept["adapter"], states[accuracies.index(max(accuracies))])


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
        server = _server(network, {"adapter": w}, images)
        method.server_round(server, Uploads([0], [1], [{"adapter": w}]))
        losses[cache] = server.report["kd_loss"]
    # The only teacher is the student: on the same images they agree.
    assert losses[False] < 1e-12 < 1e-3 < losses[True]


# ---- whole runs ------------------------------------------------------------------------------------------------------


def _run(network: nn.Module, dataset: Dataset, partition: Partition, auxiliary: Dataset, **options: Any) -> Federation:
    settings = Settings(**{"rounds": 4, "participation": 0.67, "checkpoint_every": 1, **options.pop("settings", {})})
    method = PerAda(lr=LR, batch_size=4, kd_steps=3, kd_batch_size=6, kd_distance=True)
    run = Federation(method, network, dataset, partition, settings, auxiliary=auxiliary, **options)
    run.run()
    return run


def _same(a: Federation, b: Federation) -> None:
    assert torch.equal(a.server["adapter"], b.server["adapter"])
    for k in range(3):
        assert torch.equal(a.store.read(k, "personal"), b.store.read(k, "personal"))

    def plain(records: list[Any]) -> list[Any]:
        return [{k: v for k, v in r.items() if not k.startswith("seconds")} for r in records]

    assert repr(plain(a.records)) == repr(plain(b.records))


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
    _run(dropout_network, dataset, partition, auxiliary, folder=tmp_path, settings={"rounds": 2})
    resumed = _run(dropout_network, dataset, partition, auxiliary, folder=tmp_path, resume=True)
    _same(whole, resumed)
    assert whole.records[-1]["server"]["distillation_distance"] > 0


def test_a_run_with_other_unlabelled_data_is_another_run(
    dropout_network: nn.Module, dataset: Dataset, partition: Partition, auxiliary: Dataset, tmp_path: Any
) -> None:
    from pfl_ext.federation import ForeignCheckpoint

    _run(dropout_network, dataset, partition, auxiliary, folder=tmp_path, settings={"rounds": 1})
    other = auxiliary.subset(torch.arange(10))
    with pytest.raises(ForeignCheckpoint, match="auxiliary"):
        _run(dropout_network, dataset, partition, other, folder=tmp_path, resume=True)


def test_workers_give_the_same_bits(
    dropout_network: nn.Module, dataset: Dataset, partition: Partition, auxiliary: Dataset
) -> None:
    one = _run(dropout_network, dataset, partition, auxiliary)
    _same(one, _run(dropout_network, dataset, partition, auxiliary, settings={"workers": 2}))


# ---- FedAlt and FedSim -----------------------------------------------------------------------------------------------


def _steps(client: Client, state: Tensor, entries: Tensor, **batches: Any) -> Tensor:
    part = client.model.changing
    for batch in client.batches(4, **batches):
        gradient = torch.zeros_like(state)
        gradient[part] = _gradient(client, state[part], batch)
        state = state - LR * torch.where(entries, gradient, 0.0)
    return state


def test_fedalt_trains_the_personal_part_then_the_shared_one(turn: Turn) -> None:
    turns, client = turn(FedAlt(lr=LR, batch_size=4, personal_epochs=2))
    v, u = turns.method._parts(client.model)
    assert int(v.sum()) == 18 and int(u.sum()) == 35  # the frozen layer is in neither
    received = {"shared": turns.server["shared"] + 0.1}
    client["personal"] = client["personal"] - 0.2
    state = client.model.state()
    state[v], state[u] = client["personal"], received["shared"]
    state = _steps(client, state, v, epochs=2, name="personal")
    state = _steps(client, state, u)
    sent = turns.method.client_round(client, received)
    torch.testing.assert_close(client["personal"], state[v], rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["shared"], state[u], rtol=0, atol=1e-13)


def test_fedsim_trains_both_parts_in_every_step(turn: Turn) -> None:
    turns, client = turn(FedSim(lr=LR, batch_size=4, personal="2"))
    v, u = turns.method._parts(client.model)
    assert int(v.sum()) == 35
    received = {"shared": turns.server["shared"] + 0.1}
    state = client.model.state()
    state[v], state[u] = client["personal"], received["shared"]
    state = _steps(client, state, v | u)
    sent = turns.method.client_round(client, received)
    torch.testing.assert_close(client["personal"], state[v], rtol=0, atol=1e-13)
    torch.testing.assert_close(sent["shared"], state[u], rtol=0, atol=1e-13)


def test_the_parts_have_the_sizes_of_the_papers_tables() -> None:
    network = networks.resnet18((3, 32, 32), 10)
    model = WorkingModel(network)

    def parameters(part: str, model: WorkingModel = model) -> int:
        return sum(p.numel() for p in model.parameters_in(personal_entries(model, part)))

    assert parameters("block-inputs") == 4_728_000  # Table 6: 4.73 M "input layer"
    assert parameters("input") == 9_408 and parameters("output") == 5_130
    adapted = WorkingModel(networks.add_adapters(networks.resnet18((3, 32, 32), 10)))
    assert parameters("adapter", adapted) == 1_413_258
    assert FedAlt(personal="adapter").trained_parameters(adapted) == 12_581_962  # Table 1: 12.59 M
    shared = FedAlt(personal="adapter")._parts(adapted)[1]
    assert sum(p.numel() for p in adapted.parameters_in(shared)) == 11_168_704


# ---- both backends ---------------------------------------------------------------------------------------------------

SCRIPT = """
import sys, torch
from safetensors.torch import save_file
from pfl_ext.algorithms import METHODS
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings

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
    found |= {f"{name}/{k}": run.store.read(k, "personal") for k in range(3) if name != "feddf"}
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
    assert found[0].keys() == found[1].keys() and len(found[0]) == 4 + 9
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
    buffers = Buffers(server=(nn.BatchNorm1d,))
    run = Federation(method, dropout_network, dataset, partition, Settings(rounds=2), buffers=buffers)
    before = run.server["adapter"].clone()
    run.run()
    model = run.server.model
    statistics = torch.zeros_like(model.changing)
    statistics[-13:] = True  # six means, six variances, a counter: the last numbers of a state
    kept = statistics[model.changing]
    assert torch.equal(run.server["adapter"][kept], before[kept])
    assert not torch.equal(run.server["adapter"][~kept], before[~kept])
