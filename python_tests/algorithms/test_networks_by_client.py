"""Networks of different shapes: FedMD and FedDF's prototypes by hand, what is sent, what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from by_hand import LR, logits_of, slope
from torch import Tensor, nn
from torch.nn import functional as F

from pfl_ext.algorithms import FedDF, FedMD, FedProto, Standalone
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import ClientRuntime, Federation, Plan, Request, Server, Settings, Uploads
from pfl_ext.federation.client import Rows
from pfl_ext.nn import Networks
from pfl_ext.tasks import Classification


@pytest.fixture
def networks(network: nn.Module) -> Networks:
    """4 - 5 - 3 with 43 parameters, and 4 - 3 with 15; client 1 has the second."""
    torch.manual_seed(3)
    return Networks([network, nn.Linear(4, 3).double()])


@pytest.fixture
def public(dataset: Dataset) -> Dataset:
    return dataset.subset(torch.arange(6)).unlabelled(dataset)


# ---- FedMD -----------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("fedmd")
@pytest.mark.parametrize("distance", ["absolute", "squared"])
def test_a_turn_of_fedmd_digests_revisits_and_says_what_the_next_samples_are(
    distance: str, dataset: Dataset, partition: Partition, network: nn.Module, public: Dataset
) -> None:
    method = FedMD(lr=LR, batch_size=8, public_lr=0.3, public_epochs=2, distance=distance)
    rows = {0: Rows(partition.train[0], partition.validation[0], partition.test[0])}
    plan = Plan(method, Classification(), copy.deepcopy(network), dataset, rows, Settings(seed=7), public=public)
    w = plan.kept()["personal"]
    runtime = ClientRuntime(plan, plan.store())
    agreed = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    of, following = torch.tensor([5, 0, 2, 3]), torch.tensor([1, 4])
    sent = {"rows": following, "consensus": agreed, "consensus_rows": of}
    reply = runtime(Request(0, 2, "train", received=sent))

    x = public.batch(of)[0]
    for _ in range(2):  # all four samples in one batch, twice
        apart = (lambda w: (logits_of(w, x) - agreed).abs().mean()) if distance == "absolute" else (
            lambda w: (logits_of(w, x) - agreed).square().mean()
        )  # fmt: skip
        w = w - 0.3 * slope(apart, w)[0]
    own, targets = dataset.batch(partition.train[0])
    w = w - LR * slope(lambda w: F.cross_entropy(logits_of(w, own), targets), w)[0]
    torch.testing.assert_close(runtime.store.read(0, "personal"), w, rtol=1e-12, atol=1e-14)
    expected = logits_of(w, public.batch(following)[0])
    torch.testing.assert_close(reply.sent["outputs"], expected, rtol=1e-12, atol=1e-14)
    assert reply.work.trained == 2 * 4 + 8  # public samples are trained on too
    assert reply.received == {"rows": 2, "consensus": 12, "consensus_rows": 4}


def test_the_server_of_fedmd_takes_the_mean_of_outputs_and_draws_new_samples(
    networks: Networks, public: Dataset
) -> None:
    method = FedMD(public_samples=4)
    server = Server(Classification(), networks, Settings(seed=7), 3, public)
    method.set_up(server)
    assert method.sends(server, 0, "train").keys() == {"rows"} and server["consensus"].shape == (4, 3)
    first = server["rows"]
    outputs = [torch.full((4, 3), value, dtype=torch.float64) for value in (1.0, 5.0)]
    server.begin(1, 3)
    method.aggregate(server, Uploads([0, 1], [30, 10], [{"outputs": one} for one in outputs]))
    torch.testing.assert_close(server["consensus"], torch.full((4, 3), 3.0, dtype=torch.float64))
    assert torch.equal(server["consensus_rows"], first) and not torch.equal(server["rows"], first)
    assert method.sends(server, 0, "train").keys() == {"rows", "consensus", "consensus_rows"}


def test_the_first_turn_of_fedmd_may_be_longer(
    dataset: Dataset, partition: Partition, networks: Networks, public: Dataset
) -> None:
    method = FedMD(lr=LR, first_epochs=3)
    run = Federation(method, networks, dataset, partition, Settings(rounds=2), auxiliary=public)
    works = [[work[1] for work in record["work"]] for record in run.run()]
    assert works == [[8 * 4] * 3, [6 + 8] * 3]


# ---- FedDF -----------------------------------------------------------------------------------------------------------


def test_each_prototype_of_feddf_is_averaged_and_distilled_from_all(networks: Networks, public: Dataset) -> None:
    method = FedDF(kd_steps=1, kd_lr=0.01, kd_batch_size=6)
    server = Server(Classification(), networks, Settings(seed=7), 3, public)
    method.set_up(server)
    assert [method.sends(server, k, "train")["model"].numel() for k in range(3)] == [43, 15, 43]
    random = torch.Generator().manual_seed(1)
    states = [torch.randn(n, dtype=torch.float64, generator=random) for n in (43, 15, 43)]
    server.begin(1, 3)
    method.aggregate(server, Uploads([0, 1, 2], [1, 5, 3], [{"model": w} for w in states]))

    x = public.batch(torch.arange(6))[0]

    def linear_of(w: Tensor, x: Tensor) -> Tensor:
        return F.linear(x, w[:12].view(3, 4), w[12:])

    teachers = [logits_of(states[0], x), linear_of(states[1], x), logits_of(states[2], x)]
    target = torch.softmax(torch.stack(teachers).mean(0), 1)
    for name, start, outputs in (
        ("model", (states[0] + 3 * states[2]) / 4, logits_of),
        ("model@1", states[1], linear_of),
    ):

        def divergence(w: Tensor, outputs: Any = outputs) -> Tensor:
            return F.kl_div(torch.log_softmax(outputs(w, x), 1), target, reduction="batchmean")

        gradient = slope(divergence, start)[0]
        expected = start - 0.01 * gradient / (gradient.abs() + 1e-8)  # Adam's first step
        torch.testing.assert_close(server[name], expected, rtol=1e-9, atol=1e-12)


def test_a_prototype_nobody_sent_is_distilled_from_where_it_was(networks: Networks, public: Dataset) -> None:
    method = FedDF(kd_steps=0)
    server = Server(Classification(), networks, Settings(seed=7), 3, public)
    method.set_up(server)
    before = server["model@1"]
    method.aggregate(server, Uploads([0, 2], [1, 1], [{"model": torch.ones(43)}, {"model": torch.zeros(43)}]))
    assert torch.equal(server["model@1"], before) and torch.equal(server["model"], torch.full((43,), 0.5))


@pytest.mark.parametrize("options", [{"kd_teachers": "train"}, {"kd_distance": True}])
def test_all_ways_of_distillation_take_several_networks(
    options: dict[str, Any], dataset: Dataset, partition: Partition, networks: Networks, public: Dataset
) -> None:
    method = FedDF(lr=LR, kd_steps=2, **options)
    run = Federation(method, networks, dataset, partition, Settings(rounds=1), auxiliary=public)
    told = run.run()[0]["server"]
    assert {"kd_loss", "kd_loss@1"} <= told.keys()
    distances = {"distillation_distance", "distillation_distance_before"}
    assert ({*distances, *(f"{name}@1" for name in distances)} <= told.keys()) == ("kd_distance" in options)


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_what_is_sent_is_counted_by_each_clients_network_and_the_global_test_is_a_mean_over_networks(
    dataset: Dataset, partition: Partition, networks: Networks, public: Dataset
) -> None:
    run = Federation(FedDF(lr=LR, kd_steps=0), networks, dataset, partition, Settings(rounds=1), auxiliary=public)
    record = run.run()[0]
    assert record["communication"] == dict.fromkeys(("up_parameters", "down_parameters"), 101) | dict.fromkeys(
        ("up_bytes", "down_bytes"), 808
    )
    assert [(work[3], work[4]) for work in record["work"]] == [(8 * n, 8 * n) for n in (43, 15, 43)]
    x, y = dataset.batch(partition.global_test)
    with torch.no_grad():
        right = [float((run.global_model(n)(x).argmax(1) == y).double().mean()) for n in range(2)]
    assert record["models"]["global"]["global_test"]["accuracy"] == pytest.approx(sum(right) / 2)
    assert isinstance(run.personal_model(1), nn.Linear)
    with pytest.raises(ValueError, match="network is 2; the run has networks 0 to 1"):
        run.global_model(2)


def test_networks_that_cannot_run_are_refused(dataset: Dataset, partition: Partition, networks: Networks) -> None:
    settings = Settings(rounds=1)
    for clients, problem in (((0, 1), "2 clients are given a network; the partition has 3"), ((0, 0, 0), "no client")):
        with pytest.raises(ValueError, match=problem):
            Federation(Standalone(), Networks(list(networks.each), clients), dataset, partition, settings)
    with pytest.raises(ValueError, match="client has network 2; the run has networks 0 to 1"):
        Networks(list(networks.each), (0, 2, 1))
    with pytest.raises(ValueError, match="some of them the same object"):
        Networks([networks.each[0], networks.each[0]])
    with pytest.raises(ValueError, match="network 0 has 5 features; network 1 has 4 features: FedProto compares"):
        Federation(FedProto(), networks, dataset, partition, settings)
    with pytest.raises(ValueError, match="fedmd needs public samples"):
        Federation(FedMD(), networks, dataset, partition, settings)
    buffers = Settings(rounds=1, local_buffers=("BatchNorm1d",))
    with pytest.raises(ValueError, match=r"are of one network; the run has several"):
        Federation(Standalone(), networks, dataset, partition, buffers)
    wide = Networks([networks.each[0], nn.Linear(9, 3).double()])
    with pytest.raises(ValueError, match="the network does not take a batch"):
        Federation(Standalone(), wide, dataset, partition, settings)
    with pytest.raises(TypeError, match="no function of their own"):
        networks(dataset.inputs)


def test_a_run_with_other_networks_does_not_go_on(
    dataset: Dataset, partition: Partition, networks: Networks, tmp_path: Any
) -> None:
    Federation(Standalone(), networks, dataset, partition, Settings(rounds=1), folder=tmp_path).run()
    others = Networks(list(networks.each), (1, 0, 0))
    with pytest.raises(RuntimeError, match="they differ in networks"):
        Federation(Standalone(), others, dataset, partition, Settings(rounds=2), folder=tmp_path, resume=True)
