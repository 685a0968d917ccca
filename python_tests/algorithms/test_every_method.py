"""What must hold for every method, found by its file: one client, batch normalisation, frozen layers, new clients,
partial participation, worker processes, a run that is stopped and goes on."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pfl_ext import data
from pfl_ext.algorithms import METHODS
from pfl_ext.data import Dataset, Partition
from pfl_ext.engines import Workers, kept_processes
from pfl_ext.federation import Engine, Federation, InProcess, Record, Settings, WorkingModel
from pfl_ext.nn import Networks

_SHORT: dict[str, dict[str, Any]] = {
    "persfl": {"temperatures": (1.0, 5.0), "lambdas": (0.0, 0.5)},
    "fedgen": {"generator_steps": 3},
    "fedbuff": {"buffer": 2},
    "feddf": {"kd_steps": 3},
    "perada": {"kd_steps": 3},
    "fedala": {"most_passes": 12},
    "cfl": {"first_cut": 2, "eps1": 100.0, "eps2": 0.0, "smallest": 1},
    "pfedla": {"width": 12, "embedding": 4},
    "pfedhn": {"width": 12},
    "pfedhn-pc": {"width": 12},
    "plgu-ghn": {"width": 12},
}


def _method(name: str) -> Any:
    return METHODS[name](lr=0.1, batch_size=4, momentum=0.5, **_SHORT.get(name, {}))


def _network(frozen: bool) -> nn.Module:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    network[0].requires_grad_(not frozen)
    return network.double()


def _states(run: Federation) -> list[Tensor]:
    """All states of the whole model that the server and the clients have."""
    assert isinstance(run.engine, InProcess)
    store, size = run.engine.store, run.server.model.size
    kept = [store.read(k, name) for k in range(store.clients) for name in store.labels]
    states = [vector for vector in (*run.server.values(), *kept) if vector.shape[-1:] == (size,)]
    return [row for vector in states if vector.is_floating_point() for row in vector.view(-1, size)]


def _variances(model: WorkingModel, state: Tensor) -> Tensor:
    named = zip(model.names, model.pieces(state), strict=True)
    return torch.cat([piece for name, piece in named if name.endswith("running_var")])


def _check_losses(record: Record, clients: int, new: int = 0) -> None:
    """They are finite, and of all clients, whether they took part or not: else means do not compare."""
    assert record["models"].keys() <= {"global", "personal", "teacher"} and record["models"]
    for of, count in ((record["models"], clients), (record.get("new_clients", {}), new)):
        for model, splits in of.items():
            for split, metrics in splits.items():
                loss = metrics["loss"]["mean"] if isinstance(metrics["loss"], dict) else metrics["loss"]
                assert math.isfinite(loss), (record["round"], model, split)
                if isinstance(metrics["loss"], dict):
                    assert metrics["loss"]["count"] == count, (record["round"], model, split)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", METHODS)
def test_batch_normalisation_late_clients_and_partial_participation_give_finite_results(
    name: str, frozen: bool, dataset: Dataset, partition: Partition
) -> None:
    settings = Settings(rounds=5, participation=0.5, new_clients=1, join_round=4, personal_global_test=True)
    auxiliary = dataset.subset(torch.arange(20)).unlabelled(dataset)
    run = Federation(_method(name), _network(frozen), dataset, partition, settings, auxiliary=auxiliary)
    before = _variances(run.server.model, run.server.model.state())
    for record in run.run():
        _check_losses(record, 2, 1)
    changed = False
    for state in _states(run):
        variances = _variances(run.server.model, state)
        assert bool((variances > 0).all()), variances
        changed = changed or not torch.equal(variances, before)
    assert changed or not _states(run)


@pytest.mark.parametrize("name", METHODS)
def test_a_federation_may_have_one_client(name: str, dataset: Dataset, partition: Partition) -> None:
    parts = (partition.train[:1], partition.validation[:1], partition.test[:1])
    one = Partition(*parts, partition.server, partition.test[0])
    auxiliary = dataset.subset(torch.arange(20)).unlabelled(dataset)
    method = METHODS[name](
        lr=0.1, batch_size=4, **{**_SHORT.get(name, {}), **({"buffer": 1} if name == "fedbuff" else {})}
    )
    for record in Federation(method, _network(False), dataset, one, Settings(rounds=2), auxiliary=auxiliary).run():
        _check_losses(record, 1)


# ---- the same bits: in workers, and after a stop ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return data.load("digits").subset(torch.arange(240))


@pytest.fixture(scope="module")
def workers() -> Iterator[None]:
    """Processes that all runs share: to start two takes seconds, a run of a test less."""
    with kept_processes():
        yield


def _run(name: str, digits: Dataset, *others: nn.Module, store: str = "memory", **options: Any) -> Federation:
    order = torch.Generator().manual_seed(1)
    cut = data.PARTITIONERS["dirichlet"](digits, 4, generator=order, alpha=1.0, validation=0.2)
    torch.manual_seed(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    network = Networks([network, *others], (0, 1, 1, 0)) if others else network
    settings = Settings(rounds=3, participation=0.5, new_clients=1, join_round=3, checkpoint_every=1, store=store)
    auxiliary = digits.subset(torch.arange(20)).unlabelled(digits)
    return Federation(_method(name), network, digits, cut, settings, auxiliary=auxiliary, **options)


def _told(records: list[Record]) -> list[str]:
    return [json.dumps({k: v for k, v in r.items() if not k.startswith("seconds")}) for r in records]


def _vectors(run: Federation) -> dict[str, Tensor]:
    engine: Engine = run.engine
    return {**{f"server/{name}": vector for name, vector in run.server.items()}, **engine.state()}


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("name", METHODS)
def test_workers_and_a_stop_change_no_bit_on_digits(name: str, digits: Dataset, tmp_path: Path) -> None:
    _check_same_bits(name, digits, tmp_path)


@pytest.mark.usefixtures("workers")
@pytest.mark.parametrize("name", METHODS)
def test_networks_of_different_shapes_change_no_bit_or_are_refused_with_the_reason(
    name: str, digits: Dataset, tmp_path: Path
) -> None:
    torch.manual_seed(2)  # deeper, and with as many features
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 7), nn.ReLU(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 10))
    if not METHODS[name].several_networks:
        with pytest.raises(ValueError, match=f"^{name} brings clients' models together .* so that all need one net"):
            _run(name, digits, other)
        return
    run = _check_same_bits(name, digits, tmp_path, other)
    assert run.server.networks == (0, 1, 1, 0)


def _check_same_bits(name: str, digits: Dataset, tmp_path: Path, *others: nn.Module) -> Federation:
    """In one process, in workers, and after a stop; with several networks clients' rows are in files there."""
    whole = _run(name, digits, *others)
    told = _told(whole.run())
    expected = _vectors(whole)

    store = "mapped" if others else "memory"
    side_by_side = _run(name, digits, *others, store=store, engine=Workers(2))
    vectors: dict[str, Tensor] = {}
    found = []
    for record in side_by_side.rounds():
        found.append(record)
        vectors = {key: vector.clone() for key, vector in _vectors(side_by_side).items()}
    assert _told(found) == told
    _check_equal(vectors, expected)

    stopped = _run(name, digits, *others, store=store, folder=tmp_path)
    rounds = stopped.rounds()
    assert _told([next(rounds), next(rounds)]) == told[:2]  # the first is saved when the second is asked for
    rounds.close()
    resumed = _run(name, digits, *others, folder=tmp_path, resume=True)
    assert resumed.round == 1
    assert _told(resumed.run()) == told[1:]
    _check_equal(_vectors(resumed), expected)
    return whole


def _check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, vector in expected.items():
        assert torch.equal(found[name], vector), name


# ---- the equations ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_hand() -> dict[str, list[str]]:
    """For each method the tests beside this one that are marked as a turn of it by hand, in float64."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        specification = importlib.util.spec_from_file_location(f"looked_at_{path.stem}", path)
        if path == Path(__file__) or specification is None or specification.loader is None:
            continue
        module = sys.modules[specification.name] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        for name, test in vars(module).items():
            marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "by_hand"]
            for method in (method for mark in marks for method in mark.args):
                assert name.startswith("test_") and method in METHODS, (path.name, name, method)
                found.setdefault(method, []).append(name)
    return found


@pytest.mark.parametrize("name", METHODS)
def test_a_turn_of_one_client_is_computed_by_hand(name: str, by_hand: dict[str, list[str]]) -> None:
    assert by_hand.get(name), f"mark the test of its equations: @pytest.mark.by_hand({name!r})"
