"""Results as records, for pandas and the like."""

from __future__ import annotations

from pathlib import Path

import pytest

import pfl_ext
from pfl_ext.cli import main
from pfl_ext.reports import ResultsFolder, folder_name, tidy

QUICK = ["--clients", "3", "--rounds", "1", "--lr", "0.1", "--train-samples", "60", "--quiet", "--no-plots"]
RECORD = {
    "round": 2,
    "seconds": 0.5,
    "clients": [0, 2],
    "communication": {"up_bytes": 8},
    "training": {"loss": 0.25},
    "models": {"a/b": {"test": {"accuracy": {"mean": 0.5, "std": 0.1}}}, "global": {"global_test": {"auc": 0.75}}},
    "work": [[0, 1, 2, 3, 4]],
}


def test_folder_names_hold_only_what_every_file_system_takes() -> None:
    assert folder_name("PerAda w/o KD") == "perada-w-o-kd"
    assert folder_name("alpha=0.1") == "alpha=0.1"


def test_a_record_in_long_form_is_a_row_a_number() -> None:
    rows = [tuple(row.values()) for row in tidy(RECORD)]
    assert rows == [
        (2, "round", "round", None, None, "seconds", None, 0.5),
        (2, "round", "round", None, None, "clients", None, 2),
        (2, "round", "communication", None, None, "up_bytes", None, 8),
        (2, "round", "training", None, None, "loss", None, 0.25),
        (2, "round", "models", "a/b", "test", "accuracy", "mean", 0.5),
        (2, "round", "models", "a/b", "test", "accuracy", "std", 0.1),
        (2, "round", "models", "global", "global_test", "auc", None, 0.75),
    ]


def test_what_clients_do_at_the_end_is_a_stage_and_no_further_round() -> None:
    found = {(row["round"], row["stage"]) for row in tidy({**RECORD, "round": 3, "stage": "personalized"})}
    assert found == {(2, "personalized")}


def test_the_long_file_is_beside_the_wide_one(tmp_path: Path) -> None:
    folder = ResultsFolder.create(tmp_path)
    folder.append(RECORD)
    folder.write_csv()
    header, first, *rest = (tmp_path / "metrics-long.csv").read_text().splitlines()
    assert header == "round,stage,group,model,data,metric,statistic,value"
    assert first == "2,round,round,,,seconds,,0.5" and len(rest) == 6
    (record,) = pfl_ext.load_results(tmp_path, "rounds")
    assert record["a/b/test/accuracy/mean"] == 0.5 and record["method"] is None  # no config.toml: nobody says which


def test_a_sweep_is_records_with_method_seed_and_what_was_varied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("some.toml").write_text('methods = ["zero", "fedavg"]\n[method.zero]\nname = "ditto"\nlam = 0.0\n')
    varied = ["--vary", "method.zero.lam=0,1", "--vary", "partition.alpha=1,9", "--partition", "dirichlet"]
    arguments = ["sweep", "--config", "some.toml", *QUICK, *varied, "--seeds", "0,1", "--output", "out"]
    assert main(arguments) == 0
    records = pfl_ext.load_results("out")
    runs = {(record["method"], record["seed"], record["lam"], record["alpha"]) for record in records}
    assert {run for run in runs if run[0] == "zero"} == {
        ("zero", seed, lam, alpha) for seed in (0, 1) for lam in (0.0, 1.0) for alpha in (1.0, 9.0)
    }
    assert {run[2] for run in runs if run[0] == "fedavg"} == {None}
    assert list(records[0])[:5] == ["run", "method", "seed", "lam", "alpha"]
    assert len({tuple(record) for record in records}) == 1  # the same keys everywhere

    # A comparison of it, and a run alone: the same names.
    one = pfl_ext.load_results("out/lam=0_alpha=1", "clients")
    assert [r["client"] for r in one if (r["method"], r["seed"]) == ("zero", 1)] == [0, 1, 2]
    alone = pfl_ext.load_results(Path("out/lam=0_alpha=1/zero-seed1"))
    assert {(r["run"], r["method"], r["seed"], r["lam"]) for r in alone} == {("zero-seed1", "zero", 1, 0.0)}

    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(records).query("model == 'personal' and statistic == 'mean' and metric == 'accuracy'")
    table = frame.query("data == 'test'").pivot_table("value", ["lam", "alpha"], "method")
    assert table.shape == (4, 1) and table.notna().all(axis=None)


def test_a_folder_without_results_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="it has no metrics"):
        pfl_ext.load_results(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        pfl_ext.load_results(tmp_path / "absent")
    with pytest.raises(ValueError, match="accepted is metrics, rounds or clients"):
        pfl_ext.load_results(tmp_path, "users")  # type: ignore[arg-type]
