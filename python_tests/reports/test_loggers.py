"""TensorBoard, Weights & Biases, MLflow and loggers of one's own, with the real packages where they are installed."""

from __future__ import annotations

import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

import pfl_ext
from pfl_ext.cli import main
from pfl_ext.reports import ResultsFolder, loggers_of, scalars

QUICK: dict[str, Any] = {"clients": 3, "lr": 0.1, "train_samples": 60, "quiet": True, "plots": False}


def test_scalars_are_grouped_by_what_one_compares() -> None:
    models = {"personal": {"test": {"auc": {"mean": 0.5, "lowest5": 0.25}}}, "global": {"global_test": {"auc": 0.75}}}
    record = {"round": 3, "clients": [1, 2], "training": {"loss": 2.0}, "models": models, "new_clients": models}
    found = scalars(record)
    assert found == {
        "round/clients": 2,
        "training/loss": 2.0,
        "test auc/personal": 0.5,
        "test auc over clients/personal lowest5": 0.25,
        "global_test auc/global": 0.75,
        "test auc of new clients/personal": 0.5,
        "test auc of new clients over clients/personal lowest5": 0.25,
        "global_test auc of new clients/global": 0.75,
    }
    after = scalars({**record, "stage": "personalized"})
    assert after.keys() == {f"after the last round: {name}" for name in found}


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_without_its_package_the_message_says_what_to_install(
    name: str, make_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"pip install 'pfl_ext\[{name}\]'"):
        loggers_of([name], make_run("a", [1.0]))


def test_an_unknown_name_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", "fedavg", "--log", "tensorbored", "--quiet"]) == 1
    assert "--log is 'tensorbored'; accepted are tensorboard, wandb, mlflow" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


class Own:
    """A logger of one's own; it fails in round 2."""

    def __init__(self, folder: ResultsFolder) -> None:
        self.folder, self.rounds, self.closed = folder, list[int](), False
        MADE.append(self)

    def append(self, record: Any) -> None:
        if record["round"] == 2:
            raise ConnectionError("no network")
        self.rounds.append(record["round"])

    def close(self) -> None:
        self.closed = True


MADE: list[Own] = []


def test_one_of_ones_own_gets_the_records_and_its_errors_do_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {**QUICK, "quiet": False, "rounds": 3, "output": tmp_path / "out"}
    pfl_ext.compare(["fedavg", "ditto"], log=[Own], **options)
    assert [(own.folder.path.name, own.rounds, own.closed) for own in MADE] == [
        ("fedavg-seed0", [1], True),
        ("ditto-seed0", [1], True),
    ]
    assert len(ResultsFolder.open(tmp_path / "out" / "ditto-seed0").records()) == 3
    assert capsys.readouterr().err.count("Own gets no more records (ConnectionError: no network); the run goes on") == 2


def test_mlflow_has_options_and_every_round_also_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'pfl_ext[mlflow]'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    folder = tmp_path / "run"
    for rounds in (2, 3):
        pfl_ext.run("ditto", log=["mlflow"], rounds=rounds, output=folder, resume=rounds > 2, **QUICK)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("pfl_ext")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert run.data.params["method.name"] == "ditto" and run.data.params["federation.seed"] == "0"
    history = client.get_metric_history(run.info.run_id, "test accuracy/personal")
    records = ResultsFolder.open(folder).records()
    found = [(record["round"], record["models"]["personal"]["test"]["accuracy"]["mean"]) for record in records]
    assert [(metric.step, metric.value) for metric in history] == found and len(found) == 3


def test_wandb_has_options_and_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="W&B is not installed: pip install 'pfl_ext[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "run"
    pfl_ext.run("persfl", log=["wandb"], rounds=2, output=folder, validation=0.2, **QUICK)
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = _read(file)
    steps = [{item.nested_key[0] or item.key: item.value_json for item in record.history.item} for record in found]
    rounds = [step for step in steps if "test accuracy/global" in step]
    assert [step["round"] for step in rounds] == ["1", "2"]
    (after,) = [step for step in steps if "after the last round: test accuracy/personal" in step]
    assert after["round"] == "2"
    record = ResultsFolder.open(folder).records()[1]
    assert float(rounds[1]["test accuracy/global"]) == record["models"]["global"]["test"]["accuracy"]["mean"]
    assert (folder / "wandb-run.txt").read_text().strip() in os.fspath(file)


def _read(file: Path) -> list[Any]:
    """The history records of a run's file: LevelDB's log of messages, after 7 bytes of W&B's."""
    from wandb.proto import wandb_internal_pb2

    content, place, message, found = file.read_bytes(), 7, b"", []
    while place < len(content):
        if 32768 - place % 32768 < 7:  # the end of a block, where no header fits
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        message += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(message)
            message = b""
            found += [record] if record.WhichOneof("record_type") == "history" else []
    return found
