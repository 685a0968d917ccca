"""What must hold for every method, found by its file."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.algorithms import METHODS
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, InProcess, Settings, WorkingModel

_SHORT: dict[str, dict[str, Any]] = {
    "persfl": {"temperatures": (1.0, 5.0), "lambdas": (0.0, 0.5)},
    "fedgen": {"generator_steps": 3},
    "fedbuff": {"buffer": 2},
    "cfl": {"first_cut": 2, "eps1": 100.0, "eps2": 0.0, "smallest": 1},
}


def _network(frozen: bool) -> nn.Module:
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    network[0].requires_grad_(not frozen)
    return network.double()


def _states(run: Federation) -> list[Tensor]:
    """All states of the whole model that the server and the clients have."""
    assert isinstance(run.engine, InProcess)
    store, size = run.engine.store, run.server.model.size
    kept = [store.read(k, name) for k in range(store.clients) for name in store.names]
    states = [vector for vector in (*run.server.values(), *kept) if vector.shape[-1:] == (size,)]
    return [row for vector in states if vector.is_floating_point() for row in vector.view(-1, size)]


def _variances(model: WorkingModel, state: Tensor) -> Tensor:
    named = zip(model.names, model.pieces(state), strict=True)
    return torch.cat([piece for name, piece in named if name.endswith("running_var")])


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", METHODS)
def test_batch_normalisation_late_clients_and_partial_participation_give_finite_results(
    name: str, frozen: bool, dataset: Dataset, partition: Partition
) -> None:
    method = METHODS[name](lr=0.1, batch_size=4, momentum=0.5, **_SHORT.get(name, {}))
    settings = Settings(rounds=5, participation=0.5, new_clients=1, join_round=4, personal_global_test=True)
    auxiliary = dataset.subset(torch.arange(20)).unlabelled(dataset)
    run = Federation(method, _network(frozen), dataset, partition, settings, auxiliary=auxiliary)
    before = _variances(run.server.model, run.server.model.state())
    records = run.run()
    for record in records:
        assert record["models"].keys() <= {"global", "personal", "teacher"} and record["models"]
        for of in (record["models"], record["new_clients"]):
            for model, splits in of.items():
                for split, metrics in splits.items():
                    loss = metrics["loss"]["mean"] if isinstance(metrics["loss"], dict) else metrics["loss"]
                    assert math.isfinite(loss), (record["round"], model, split)
    changed = False
    for state in _states(run):
        variances = _variances(run.server.model, state)
        assert bool((variances > 0).all()), variances
        changed = changed or not torch.equal(variances, before)
    assert changed or not _states(run)
