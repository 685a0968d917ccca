"""``pfl-ext resume FOLDER``, and what a run is told that cannot go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pfl_ext.cli import main
from pfl_ext.reports import ResultsFolder, read_config

QUICK = ["--clients", "3", "--lr", "0.1", "--quiet", "--no-plots"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _records(folder: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not k.startswith("seconds")} for r in ResultsFolder.open(folder).records()]


def test_a_run_needs_its_folder_alone() -> None:
    assert main(["run", "ditto", *QUICK, "--rounds", "2", "--lam", "0.5", "--seed", "3", "--output", "one"]) == 0
    assert main(["resume", "one", "--rounds", "3", "--quiet", "--no-plots"]) == 0
    assert main(["run", "ditto", *QUICK, "--rounds", "3", "--lam", "0.5", "--seed", "3", "--output", "whole"]) == 0
    assert _records("one") == _records("whole")
    assert Path("one/config.toml").read_bytes() == Path("whole/config.toml").read_bytes()


def test_what_auto_chose_is_written_down() -> None:
    assert main(["run", "fedavg", *QUICK, "--partition", "iid", "--rounds", "1", "--output", "one"]) == 0
    config = read_config(Path("one"))
    chosen = (config["network"]["name"], config["task"]["name"], config["partition"]["test"], config["metric"])
    assert chosen == ("mlp", "classification", "proportional", "accuracy")


def test_a_comparison_and_a_sweep_need_their_folder_alone(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fedavg", "ditto", *QUICK, "--rounds", "1", "--set", "ditto.lam=0.5", "--columns", "method,rounds"]
    assert main(["compare", *arguments, "--output", "both"]) == 0
    capsys.readouterr()
    assert main(["resume", "both", "--rounds", "2", "--quiet", "--no-plots"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0] == "| method | rounds |" and table[3] == "| ditto  |      2 |"
    assert "personal: local test" in Path("both/comparison.csv").read_text(encoding="utf-8")
    assert "personal: local test" not in Path("both/comparison.tex").read_text(encoding="utf-8")
    assert read_config(Path("both/ditto-seed0"))["method"]["lam"] == 0.5
    assert main(["sweep", "ditto", *QUICK, "--rounds", "1", "--vary", "method.lam=1,2", "--output", "swept"]) == 0
    assert main(["resume", "swept", "--rounds", "2", "--quiet", "--no-plots"]) == 0
    assert [len(_records(f"swept/lam={lam}/ditto-seed0")) for lam in (1, 2)] == [2, 2]


def test_a_folder_that_is_none_of_a_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    for folder, reason in (("absent", "there is no such folder"), ("empty", "it has no config.toml")):
        assert main(["resume", folder]) == 2
        assert capsys.readouterr().err == f"pfl-ext resume: {folder} is not the folder of a run: {reason}\n"
    assert main(["resume"]) == 2
    assert "FOLDER" in capsys.readouterr().err
    assert not Path("absent").exists()


def test_a_refused_resume_lists_the_options_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "ditto", *QUICK, "--rounds", "1", "--output", "one"]
    assert main(arguments) == 0
    before = _records("one")
    other = ["--lam", "0.25", "--batch-size", "20", "--clients", "4", "--momentum", "0.5", "--rounds", "9"]
    assert main([*arguments, *other, "--resume"]) == 1
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert first == "pfl-ext run: the run in one has other options:"
    assert sorted(lines) == [
        "  --batch-size: 10 there, 20 here",
        "  --clients: 3 there, 4 here",
        "  --lam: 1.0 there, 0.25 here",
        "  --momentum: 0.0 there, 0.5 here",
    ]
    assert last.startswith("Give the values of that run (pfl-ext resume FOLDER does)")
    assert _records("one") == before
