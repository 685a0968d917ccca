"""Test sets beside the global one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pfl_ext.algorithms import METHODS, Ditto
from pfl_ext.data import Dataset, Partition
from pfl_ext.engines import Workers
from pfl_ext.federation import Engine, Federation, InProcess, Record, Request, Settings
from pfl_ext.federation.client import current_outputs
from pfl_ext.metrics import classification_metrics
from pfl_ext.reports import ResultsFolder, comparison, recorded

QUICK: dict[str, Any] = {"lr": 0.1, "batch_size": 4}
SETTINGS: dict[str, Any] = {"rounds": 2, "personal_global_test": True, "prediction_distance": True}


def _run(
    dataset: Dataset,
    partition: Partition,
    network: nn.Module,
    tests: dict[str, Sequence[Dataset]] | None = None,
    method: str = "ditto",
    folder: Path | None = None,
    engine: Engine | None = None,
    **settings: Any,
) -> tuple[Federation, list[Record]]:
    options = Settings(**{**SETTINGS, **settings})
    run = Federation(
        METHODS[method](**QUICK), network, dataset, partition, options, extra_tests=tests, folder=folder, engine=engine
    )
    return run, run.run()


def _of_client(run: Federation, client: int, split: str, metric: str) -> float:
    return run.client_results[client].metrics["personal", split][metric]


def _shifted(dataset: Dataset, by: float) -> Dataset:
    return Dataset("shifted", dataset.inputs[30:90] + by, dataset.targets[30:90], dataset.classes, dataset.is_test[:60])


def test_the_global_test_set_under_another_name_has_its_results(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    run, records = _run(dataset, partition, network, {"again": [dataset.subset(partition.global_test)]})
    models = records[-1]["models"]
    for model in ("personal", "global"):
        assert models[model]["again"] == models[model]["global_test"], model
    assert "distance" in models["personal"]["again"]
    assert _of_client(run, 1, "again", "accuracy") == _of_client(run, 1, "global_test", "accuracy")


def test_results_are_averaged_over_the_parts(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    parts = [_shifted(dataset, 0.0), _shifted(dataset, 3.0)]
    run, records = _run(dataset, partition, network, {"both": parts, "one": parts[:1], "other": parts[1:]})
    models = records[-1]["models"]
    assert isinstance(run.engine, InProcess)
    runtime = run.engine.runtime
    client, received = runtime.begin(Request(3, run.round, "evaluate"))
    runtime.model.load(runtime.models(client, received)["personal"])
    expected = [classification_metrics(*current_outputs(client.model, part, torch.arange(60))) for part in parts]
    assert expected[0]["loss"] != expected[1]["loss"]
    for metric in ("accuracy", "loss", "auc"):
        by_hand = [part[metric] for part in expected]
        assert _of_client(run, 3, "both", metric) == pytest.approx(sum(by_hand) / 2, rel=1e-12)
        own = [models["global"][name][metric] for name in ("one", "other")]
        assert models["global"]["both"][metric] == pytest.approx(sum(own) / 2, rel=1e-12)
    assert models["personal"]["one"]["accuracy"]["count"] == partition.clients


def test_personal_models_see_them_where_they_see_the_global_test_set(
    dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    _, records = _run(dataset, partition, network, {"far": [_shifted(dataset, 3.0)]}, personal_global_test=False)
    models = records[-1]["models"]
    assert "far" in models["global"] and "far" not in models["personal"]
    _, without_global = _run(dataset, partition, network, {"far": [_shifted(dataset, 3.0)]}, method="standalone")
    assert list(without_global[-1]["models"]) == ["personal"]


def test_they_are_seen_after_the_last_round_change_nothing_else_and_a_run_resumes_with_or_without_them(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    tests = {"far": [_shifted(dataset, 3.0)]}
    plain, without = _run(dataset, partition, network, rounds=4)
    tested, with_them = _run(dataset, partition, network, tests, rounds=4)
    assert plain.identity == tested.identity and "extra_tests" not in json.dumps(plain.identity)
    for record in with_them:
        for splits in record["models"].values():
            assert ("far" in splits) == (record["round"] == 4)
            splits.pop("far", None)
    times = ("seconds", "seconds_training")
    left = [[{k: v for k, v in r.items() if k not in times} for r in records] for records in (without, with_them)]
    assert json.dumps(left[0]) == json.dumps(left[1])
    for name, vector in plain.server.items():
        assert torch.equal(vector, tested.server[name])

    _run(dataset, partition, network, folder=tmp_path)
    settings = Settings(**{**SETTINGS, "rounds": 4})
    resumed = Federation(
        Ditto(**QUICK), network, dataset, partition, settings, folder=tmp_path, resume=True, extra_tests=tests
    )
    assert resumed.round == 2
    third, last = resumed.run()
    assert last["models"]["global"]["far"] and "far" not in third["models"]["global"]
    assert torch.equal(resumed.server["model"], plain.server["model"])


def test_worker_processes_give_the_same_bits(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    large = dataset.subset(torch.arange(120).repeat(60))  # large enough for a file of its own
    tests = {"large": [large, _shifted(dataset, 1.0)], "far": [_shifted(dataset, 3.0)]}
    (one, ours), (two, theirs) = (
        _run(dataset, partition, network, tests, engine=engine, rounds=1) for engine in (InProcess(), Workers(2))
    )
    assert json.dumps(ours[-1]["models"]) == json.dumps(theirs[-1]["models"])
    assert len(one.client_results) == partition.clients
    assert [repr(result) for result in one.client_results] == [repr(result) for result in two.client_results]


def test_comparisons_show_them_under_their_names(
    dataset: Dataset, partition: Partition, network: nn.Module, tmp_path: Path
) -> None:
    tests = {"far": [_shifted(dataset, 3.0)]}
    folders = {}
    for name in ("ditto", "fedavg", "standalone"):
        method, settings = METHODS[name](**QUICK), Settings(**SETTINGS)
        run = Federation(method, network, dataset, partition, settings, extra_tests=tests)
        folders[name] = ResultsFolder.create(tmp_path / name)
        list(recorded(run, folders[name]))
    ditto, fedavg, standalone = comparison(folders)
    models = folders["ditto"].records()[-1]["models"]
    assert ditto["personal: far"] == pytest.approx(100 * models["personal"]["far"]["accuracy"]["mean"])
    assert ditto["global: far"] == pytest.approx(100 * models["global"]["far"]["accuracy"])
    assert fedavg["personal: far"] is None and standalone["global: far"] is None
    columns = list(ditto)
    assert columns.index("personal: far") == columns.index("personal: global test") + 1


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("far", {"classes": ("a", "b", "c", "d")}, "far .shifted. has 4 classes, 'points' has 3 classes"),
        ("far", {"classes": ("a", "b", "d")}, "has a class 'd' where 'points' has 'c'"),
        ("far", {"inputs": torch.zeros(60, 5)}, r"far .shifted. are \[5\], those of 'points' \[4\]"),
        ("global_test", {}, "called 'global_test'; letters, digits"),
        ("a/b", {}, "called 'a/b'; letters, digits"),
        ("", {}, "called ''; letters"),
    ],
)
def test_what_does_not_fit_the_data_is_refused(
    name: str, changes: dict[str, Any], message: str, dataset: Dataset, partition: Partition, network: nn.Module
) -> None:
    given = {"inputs": dataset.inputs[:60], "classes": dataset.classes, **changes}
    test = Dataset("shifted", targets=dataset.targets[:60], is_test=dataset.is_test[:60], **given)
    with pytest.raises(ValueError, match=message):
        Federation(Ditto(**QUICK), network, dataset, partition, extra_tests={name: [test]})
    numbers = Dataset("n", dataset.inputs, dataset.targets, ("0", "1", "2"), dataset.is_test)
    Federation(Ditto(**QUICK), network, dataset, partition, extra_tests={"n": [numbers]})  # names may be missing


def test_an_empty_one_is_refused(dataset: Dataset, partition: Partition, network: nn.Module) -> None:
    for parts in ([], [dataset.subset(torch.arange(0))]):
        with pytest.raises(ValueError, match="the extra test set none is empty"):
            Federation(Ditto(**QUICK), network, dataset, partition, extra_tests={"none": parts})
