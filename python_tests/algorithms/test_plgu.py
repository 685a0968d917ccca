"""PLGU-LF, PLGU-GRep and PLGU-GHN: by hand in float64, and what they become at the ends of their options."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from by_hand import LR, Turn, entries, gradient, joined, models
from torch import Tensor, nn

from pfl_ext import _native
from pfl_ext.algorithms import METHODS, PLGUGHN, PLGULF, FedRep, FedSAM, PFedHN, PLGUGRep, Standalone
from pfl_ext.data import Dataset, Partition
from pfl_ext.engines import Workers
from pfl_ext.federation import Federation, InProcess, Settings, WorkingModel
from pfl_ext.ops._declare import Op

RHO = 0.3
SIZES = (25, 18)  # of the two layers: 4 x 5 + 5 and 5 x 3 + 3


def _scores(a: Tensor, b: Tensor, sizes: tuple[int, ...] = SIZES) -> Tensor:
    """Equation (6) with a mean of 1, a score for each number."""
    raw = torch.stack([d.norm() / len(d) for d in (a - b).split(sizes)])
    xi = raw / raw.mean() if raw.sum() > 0 else torch.ones_like(raw)
    return torch.cat([x.expand(n) for x, n in zip(xi, sizes, strict=True)])


def _start(runtime: Any) -> tuple[Tensor, Tensor]:
    """A global and a personal model; the personal one's second layer is the farther from it."""
    w = runtime.server["model"]
    noise = torch.randn(len(w), generator=torch.Generator().manual_seed(0), dtype=w.dtype)
    return w, w + torch.cat([0.1 * noise[: SIZES[0]], 0.5 * noise[SIZES[0] :]])


# ---- PLGU-LF ---------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("plgu-lf")
@pytest.mark.parametrize("ascent", ["personal", "global"])
def test_lf_takes_the_steps_of_algorithm_1(turn: Turn, ascent: str) -> None:
    runtime, client = turn(PLGULF(lr=LR, batch_size=4, rho=RHO, personal_layers=1, ascent=ascent))
    w, kept = _start(runtime)
    client["personal"] = kept
    xi = _scores(kept, w)
    assert xi[-1] > xi[0]
    theta, w_k = torch.cat([w[: SIZES[0]], kept[SIZES[0] :]]), w.clone()
    for batch in client.batches(4):
        g = gradient(client, theta, batch)
        theta = theta - LR * g
        if ascent == "global":
            g = gradient(client, w_k, batch)
        w_k = w_k - LR * gradient(client, w_k + RHO * xi * g / g.norm(), batch)
    sent = runtime.method.train(client, {"model": w})
    torch.testing.assert_close(sent["model"], w_k, rtol=0, atol=1e-14)
    torch.testing.assert_close(client["personal"], theta, rtol=0, atol=1e-14)


def test_momentum_is_kept_apart_for_both_models(turn: Turn) -> None:
    runtime, client = turn(PLGULF(lr=LR, batch_size=4, rho=RHO, personal_layers=1, momentum=0.5))
    w, kept = _start(runtime)
    client["personal"] = kept
    xi = _scores(kept, w)
    theta, w_k = torch.cat([w[: SIZES[0]], kept[SIZES[0] :]]), w.clone()
    moved, moved_w = torch.zeros_like(w), torch.zeros_like(w)
    for batch in client.batches(4):
        g = gradient(client, theta, batch)
        moved = 0.5 * moved + g
        theta = theta - LR * moved
        moved_w = 0.5 * moved_w + gradient(client, w_k + RHO * xi * g / g.norm(), batch)
        w_k = w_k - LR * moved_w
    sent = runtime.method.train(client, {"model": w})
    torch.testing.assert_close(sent["model"], w_k, rtol=0, atol=1e-14)
    torch.testing.assert_close(client["personal"], theta, rtol=0, atol=1e-14)


def test_the_layers_with_the_largest_scores_stay_and_the_others_are_replaced_to_the_bit(turn: Turn) -> None:
    runtime, client = turn(PLGULF(personal_layers=1, local_epochs=0))
    w, kept = _start(runtime)
    client["personal"] = kept
    sent = runtime.method.train(client, {"model": w})
    assert torch.equal(client["personal"], torch.cat([w[: SIZES[0]], kept[SIZES[0] :]]))
    assert torch.equal(sent["model"], w)


def test_a_tensor_can_be_a_layer(turn: Turn) -> None:
    runtime, client = turn(PLGULF(personal_layers=1, local_epochs=0, layers="tensor"))
    w = runtime.server["model"]
    kept = w + 0.01
    kept[20:25] += 1  # the first bias
    client["personal"] = kept
    runtime.method.train(client, {"model": w})
    expected = w.clone()
    expected[20:25] = kept[20:25]
    assert torch.equal(client["personal"], expected)


@pytest.mark.parametrize(("options", "radius"), [({}, RHO), ({"radius": "sum"}, RHO / 2)])
def test_the_first_turn_begins_with_equal_scores_and_its_first_step_is_sams(
    turn: Turn, options: dict[str, Any], radius: float
) -> None:
    runtime, client = turn(PLGULF(lr=LR, batch_size=4, local_steps=1, rho=RHO, **options))
    plain, other = turn(FedSAM(lr=LR, batch_size=4, local_steps=1, rho=radius))
    w = {"model": runtime.server["model"]}
    assert "personal" not in client
    sent, expected = runtime.method.train(client, w)["model"], plain.method.train(other, w)["model"]
    # rho * xi / ||g|| and radius / ||g|| are rounded in another order: a few units in the last place of epsilon.
    torch.testing.assert_close(sent, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("options", "radius"), [({}, RHO), ({"radius": "sum"}, RHO / 2)])
def test_without_personal_layers_it_is_fedsam_to_the_bit(
    options: dict[str, Any], radius: float, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    common: dict[str, Any] = {"lr": LR, "batch_size": 3, "local_epochs": 2, "momentum": 0.5, "weight_decay": 0.01}
    settings = Settings(rounds=3, participation=0.7)
    ours = Federation(
        PLGULF(**common, rho=RHO, personal_layers=0, **options), network, dataset, partition, settings
    )  # fmt: skip
    theirs = Federation(FedSAM(**common, rho=radius), network, dataset, partition, settings)
    last, expected = ours.run()[-1], theirs.run()[-1]
    assert torch.equal(ours.server["model"], theirs.server["model"])
    assert ours.engine.state() == {} and set(last["models"]) == {"global"}
    assert last["training"]["trained_parameters"] == expected["training"]["trained_parameters"] == sum(SIZES)


@pytest.mark.usefixtures("by_autograd")
def test_with_all_layers_personal_clients_have_models_of_their_own_to_the_bit(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    common: dict[str, Any] = {"lr": LR, "batch_size": 3, "momentum": 0.5}
    kept = []
    for method in (PLGULF(**common, rho=RHO, personal_layers=2), Standalone(**common)):
        run = Federation(method, network, dataset, partition, Settings(rounds=3))
        run.run()
        kept.append(run.engine.state())
    assert kept[0]["personal/clients"].tolist() == kept[1]["personal/clients"].tolist() == [0, 1, 2]
    assert torch.equal(kept[0]["personal/rows"], kept[1]["personal/rows"])


@pytest.mark.parametrize("radius", ["sum", "mean", "full"])
def test_equal_scores_are_sam(radius: str) -> None:
    method = PLGULF(rho=RHO, radius=radius)
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (7, 3, 5)]
    gradients = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (7, 3, 5)]
    moved = {}
    for name, scores in (("given", torch.full((2,), 0.5, dtype=torch.float64)), ("none", None)):
        moved[name] = [x.clone() for x in start]
        method.perturb(moved[name], gradients, [0, 0, 1], scores, None)
    norm = torch.cat(gradients).norm()
    for given, none, x, g in zip(moved["given"], moved["none"], start, gradients, strict=True):
        sam = x + (RHO / 2 if radius == "sum" else RHO) * g / norm
        torch.testing.assert_close(given, sam, rtol=0, atol=1e-15)
        torch.testing.assert_close(none, sam, rtol=0, atol=1e-15)


@pytest.mark.parametrize("norm", ["global", "layer"])
@pytest.mark.parametrize("p", [1.5, 2.0, 3.0, math.inf])
def test_the_full_radius_is_the_norm_of_the_perturbation_whatever_the_scores(p: float, norm: str) -> None:
    method = PLGULF(rho=RHO, p=p, norm=norm, radius="full")
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(n, generator=generator, dtype=torch.float64) for n in (7, 3, 5)]
    for scores in (torch.tensor([0.9, 0.1], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64), None):
        moved = [torch.zeros_like(g) for g in gradients]
        method.perturb(moved, gradients, [0, 0, 1], scores, None)
        torch.testing.assert_close(torch.cat(moved).norm(p=p).item(), RHO, rtol=1e-12, atol=0)
    # No gradient, no perturbation, and no NaN.
    moved = [torch.zeros_like(g) for g in gradients]
    method.perturb(moved, moved, [0, 0, 1], torch.tensor([0.9, 0.1], dtype=torch.float64), None)
    assert not torch.cat(moved).any()


def test_normalisation_layers_can_be_left_out_of_the_scores() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    model = WorkingModel(module)
    groups = model.layers().groups
    method = PLGULF(score_norms=False)
    without = method.left_out(model, model.trained, groups)
    assert without is not None and without.tolist() == [False, True, False]
    assert PLGULF().left_out(model, model.trained, groups) is None
    w = model.state()
    theta = w + torch.randn(len(w), generator=torch.Generator().manual_seed(1), dtype=w.dtype)
    scored = PLGULF().scores(model.tensors(theta), model.tensors(w), groups)
    left = method.scores(model.tensors(theta), model.tensors(w), groups, without)
    expected = scored.masked_fill(torch.tensor([False, True, False]), 0.0)
    torch.testing.assert_close(left, expected / expected.sum())
    assert method.scores(model.tensors(w), model.tensors(w), groups, without).tolist() == [0.5, 0.0, 0.5]


def test_scores_by_the_root_of_the_size_are_root_mean_squares() -> None:
    personal = [torch.full((n,), 2.0, dtype=torch.float64) for n in (4, 2, 10)]
    server = [torch.zeros_like(x) for x in personal]
    server[2] += 1
    by_size, by_root = (PLGULF(score=score).scores(personal, server, [0, 0, 1]) for score in ("size", "root"))
    raw = torch.tensor([2 / 6**0.5, 1 / 10**0.5], dtype=torch.float64)
    torch.testing.assert_close(by_size, raw / raw.sum(), rtol=0, atol=1e-15)
    torch.testing.assert_close(by_root, torch.tensor([2, 1], dtype=torch.float64) / 3, rtol=0, atol=1e-15)
    assert PLGULF(score="root").scores(personal, personal, [0, 0, 1]).tolist() == [0.5, 0.5]


def test_the_perturbation_follows_norm_exponent_and_ball(turn: Turn) -> None:
    runtime, client = turn(PLGULF(personal_layers=1))
    w, kept = _start(runtime)
    (batch,) = client.batches(4, steps=1)
    g, xi = gradient(client, kept, batch), _scores(kept, w)
    norms = torch.cat([part.norm().expand(n) for part, n in zip(g.split(SIZES), SIZES, strict=True)])
    expected = {
        (): g / g.norm(),
        (("norm", "layer"),): g / norms,
        (("literal_exponent", True),): g / g.norm() ** 2,
        (("p", float("inf")),): g.sign(),
    }
    for options, direction in expected.items():
        method = PLGULF(lr=LR, batch_size=4, local_steps=1, rho=RHO, personal_layers=2, **dict(options))
        client["personal"] = kept
        sent = method.train(client, {"model": w})
        at = w + RHO * xi * direction
        torch.testing.assert_close(sent["model"], w - LR * gradient(client, at, batch), rtol=0, atol=1e-14)


def test_a_client_that_never_took_part_has_the_global_model(turn: Turn) -> None:
    runtime, client = turn(PLGULF())
    found = models(runtime, client, model=runtime.server["model"] + 0.1)
    assert torch.equal(found["personal"], found["global"])


def test_running_statistics_of_both_models_are_their_own(dataset: Dataset, partition: Partition) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)).double()
    kept = []
    for method in (PLGULF(lr=LR, personal_layers=3), Standalone(lr=LR)):
        run = Federation(method, network, dataset, partition, Settings(rounds=2))
        run.run()
        kept.append(run.engine.state())
    assert kept[0]["personal/clients"].tolist() == kept[1]["personal/clients"].tolist() == [0, 1, 2]
    assert torch.equal(kept[0]["personal/rows"], kept[1]["personal/rows"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"personal_layers": 3}, "personal_layers is 3; accepted is a value up to 2, the layers of this network"),
        ({"personal_layers": -1}, "personal_layers is -1; accepted is a value not negative"),
        ({"rho": -0.1}, "rho is -0.1; accepted is a value not negative"),
        ({"p": 0.5}, r"p is 0.5; accepted is a value of at least 1, infinity \(inf\) included"),
        ({"p": 1.0, "literal_exponent": True}, "literal_exponent is True; accepted is a value false where p is 1"),
        ({"layers": "block"}, "layers is 'block'; accepted is a value one of module, tensor"),
    ],
)
def test_what_lf_cannot_do_is_refused(turn: Turn, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        turn(PLGULF(**options))


@pytest.mark.parametrize(("layers", "count"), [(2, 1), (5, 1), (9, 2), (23, 5), (41, 9)])
def test_the_papers_five_of_23_layers_are_taken_in_proportion(layers: int, count: int) -> None:
    model = WorkingModel(nn.Sequential(*(nn.Linear(1, 1) for _ in range(layers))))
    assert PLGULF()._count(model) == count


# ---- PLGU-GRep -------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("plgu-grep")
@pytest.mark.parametrize("steps", [1, 0])
def test_grep_takes_the_steps_of_equations_9_to_13(turn: Turn, steps: int) -> None:
    # The head is the first layer, so that the representation has the two tensors of the other and scores matter.
    method = PLGUGRep(lr=LR, batch_size=4, head_epochs=2, rho=RHO, head="0", local_steps=steps, layers="tensor")
    runtime, client = turn(method)
    head = entries(client.model, "0")
    sizes = (15, 3)
    phi = runtime.server["representation"] + 0.1
    client["head"] = client["head"] - 0.2
    v = joined(head, client["head"], phi)
    for batch in client.batches(4, epochs=2, name="head"):
        v = v - LR * torch.where(head, gradient(client, v, batch), 0.0)  # (9)
    for batch in client.batches(4, steps=1) if steps else client.batches(4):
        v = v - LR * torch.where(head, 0.0, gradient(client, v, batch))  # (11)
        g = torch.where(head, 0.0, gradient(client, v, batch))
        epsilon = torch.zeros_like(v)
        epsilon[~head] = RHO * _scores(v[~head], phi, sizes) * g[~head] / g.norm()  # (10), (12)
        v = v - LR * torch.where(head, 0.0, gradient(client, v + epsilon, batch))  # (13)
    sent = method.train(client, {"representation": phi})
    torch.testing.assert_close(client["head"], v[head], rtol=0, atol=1e-14)
    torch.testing.assert_close(sent["representation"], v[~head], rtol=0, atol=1e-14)


def test_greps_head_is_that_of_fedrep_to_the_bit(turn: Turn) -> None:
    heads = []
    for method in (PLGUGRep(lr=LR, batch_size=4, rho=RHO), FedRep(lr=LR, batch_size=4)):
        runtime, client = turn(method)
        before = runtime.server["representation"].clone()
        sent = method.train(client, {"representation": runtime.server["representation"]})
        heads.append(client["head"])
        assert not torch.equal(sent["representation"], before)
    assert torch.equal(*heads)


# ---- PLGU-GHN --------------------------------------------------------------------------------------------------------


@pytest.mark.by_hand("plgu-ghn")
def test_ghn_scores_layers_by_their_distance_from_what_was_sent(turn: Turn) -> None:
    runtime, client = turn(PLGUGHN(lr=LR, batch_size=4, rho=RHO))
    sent_down = runtime.method.sends(runtime.server, 0, "train")["model"]
    v = sent_down.clone()
    for batch in client.batches(4):
        g = gradient(client, v, batch)
        v = v - LR * gradient(client, v + RHO * _scores(v, sent_down) * g / g.norm(), batch)
    sent = runtime.method.train(client, {"model": sent_down})
    torch.testing.assert_close(sent["difference"], sent_down - v, rtol=0, atol=1e-14)


def test_ghn_of_radius_zero_is_pfedhn_to_the_bit(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    runs = []
    for method in (PLGUGHN(lr=LR, batch_size=4, rho=0.0), PFedHN(lr=LR, batch_size=4)):
        run = Federation(method, network, dataset, partition, Settings(rounds=2))
        run.run()
        runs.append(run.server)
    assert runs[0].keys() == runs[1].keys()
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


# ---- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plgu-lf", "plgu-grep", "plgu-ghn"])
def test_the_perturbation_is_not_dead(turn: Turn, name: str) -> None:
    sent = []
    for rho in (0.0, RHO):
        method = METHODS[name](lr=LR, batch_size=4, rho=rho)
        runtime, client = turn(method)
        sent.append(method.train(client, method.sends(runtime.server, 0, "train")))
    for key in sent[0]:
        assert (sent[0][key] - sent[1][key]).abs().max() > 1e-5


@pytest.mark.skipif(not _native.status()["cpu"].loaded, reason="the native library is not loaded")
@pytest.mark.parametrize("name", ["plgu-lf", "plgu-grep", "plgu-ghn"])
def test_plain_torch_gives_what_the_native_ops_give(turn: Turn, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(Op, "__call__", lambda op, *arguments: op.reference(*arguments))
        method = METHODS[name](lr=LR, batch_size=4, rho=RHO, momentum=0.5)
        runtime, client = turn(method)
        if name == "plgu-lf":
            client["personal"] = _start(runtime)[1]
        sent.append(method.train(client, method.sends(runtime.server, 0, "train")))
    for key in sent[0]:
        # A handful of steps on 43 numbers of size 1: each rounds a few times at 2^-53, and a step grows no error
        # by more than 1 + lr * ||Hessian||, which is below 2 here.
        torch.testing.assert_close(sent[0][key], sent[1][key], rtol=0, atol=64 * 43 * 2.0**-53)


@pytest.mark.parametrize("name", ["plgu-lf", "plgu-ghn"])
def test_workers_give_the_bits_of_one_process(
    name: str, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    method = METHODS[name](lr=LR, batch_size=4, rho=RHO)
    found = []
    for engine in (InProcess(), Workers(2)):
        run = Federation(method, network, dataset, partition, Settings(rounds=2), engine=engine)
        run.run()
        found.append({**run.server, **{f"clients/{kept}": vector for kept, vector in engine.state().items()}})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][vector], found[1][vector]) for vector in found[0])
