"""What a configuration file may hold; the rest is refused by every command that takes one."""

from __future__ import annotations

from pathlib import Path

import pytest

from pfl_ext.cli import main
from pfl_ext.configuration import Configuration

COMMANDS = {
    "run": ["run", "fedavg"],
    "compare": ["compare", "fedavg"],
    "sweep": ["sweep", "fedavg", "--vary", "method.lr=1"],
    "data": ["data"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sed = [1, 2]", "unknown key 'sed' (did you mean seeds"),
        ("rounds = 5", "rounds is an option of a table; it stands below [federation]"),
        ("lr = 0.1", "lr is an option of a table; it stands below [method]"),
        ("alpha = 0.1", "alpha is an option of a table; it stands below [partition]"),
        ("[metod]\nlr = 1", "unknown table [metod] (did you mean method"),
        ("partition = 3", "partition is 3; accepted is a table, [partition]"),
        ("method = 'fedavg'", "method is 'fedavg'; accepted is a table, [method]"),
        ("[[method]]\nname = 'fedavg'", "accepted is a table, [method]"),
        ("sweep = 3", "sweep is 3; accepted is a table, [sweep]"),
        ("[method]\nname = 3", "name in [method] is 3; accepted is text"),
        ("[method.late]\nname = []", "name in [method.late] is []; accepted is text"),
        ("[partition]\nname = 3", "name in [partition] is 3; accepted is text"),
        ("[data]\nname = 3", "name in [data] is 3; accepted is text"),
        ("[method]\nlr = {}", "lr in [method] is a table; accepted is a value"),
        ("[federation]\nrounds = {}", "rounds in [federation] is a table; accepted is a value"),
        ("[partition]\nclients = {}", "clients is {}; accepted is an integer"),
        ("[partition]\nclient = 5", "unknown option 'client' of the partition ds1 (did you mean clients"),
        ("[method]\nlrr = 0.1", "unknown option 'lrr' of"),
        ("[method.ditto]\nlamm = 1", "unknown option 'lamm' of the method ditto (did you mean lam"),
        ("[federation.ditto]\nround = 1", "unknown option 'round' of federation (did you mean rounds"),
        ("[network.ditto]\nstemm = 'small'", "unknown option 'stemm' of network (did you mean stem"),
        ("methods = 'fedavg'", "methods is 'fedavg'; accepted is a list"),
        ("methods = [3]", "methods is [3]; accepted is a list of names"),
        ("seeds = 3", "seeds is 3; accepted is a list"),
        ("seeds = []", "seeds is []; accepted is a list"),
        ("seeds = ['a']", "seeds is ['a']; accepted is a list of integers"),
        ("metric = 3", "metric is 3; accepted is text"),
        ("columns = 'method'", "columns is 'method'; accepted is a list"),
        ("[task]\nnme = 'pixels'", "unknown option 'nme' of the task auto (did you mean name"),
        ("[task]\nname = 'pixel'", "unknown task 'pixel' (did you mean pixels"),
        ("[task]\nname = 'regression'\nlabel_smoothing = 0.1", "it is an option of the task classification"),
        ("[data]\ndownlod = true", "unknown option 'downlod' of data (did you mean download"),
        ("statistic = 3", "statistic is 3; accepted is text"),
        ("[method", "is not TOML"),
        pytest.param("a = " + "[" * 5000, "some.toml is not TOML", id="deep"),
        pytest.param("[method]\nlr = 1" + "0" * 5000, "some.toml is not TOML", id="long number"),
    ],
)
def test_what_a_file_may_not_hold_is_one_line(
    command: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some.toml"
    file.write_text(text, encoding="utf-8")
    output = [] if command == "data" else ["--output", str(tmp_path / "out")]
    assert main([*COMMANDS[command], "--config", str(file), *output]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["run", "compare", "sweep"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("metric = 'acuracy'", "--metric is 'acuracy' (did you mean accuracy or auc?); the task classification has"),
        ("metric = 'rmse'", "--metric is 'rmse'; the task classification has accuracy, loss, auc"),
        ("columns = ['methd']", "--columns has 'methd' (did you mean method"),
    ],
)
def test_a_table_that_cannot_be_made_is_refused_before_anything_runs(
    command: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "some.toml").write_text(text, encoding="utf-8")
    more = ["--config", str(tmp_path / "some.toml"), "--quiet", "--output", str(tmp_path / "out")]
    assert main([*COMMANDS[command], *more]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(ValueError, match="is not TOML"):
        Configuration.read(tmp_path / "some.toml")


def test_a_whole_file_is_read() -> None:
    found = Configuration.of(
        {
            "methods": ["fedavg", "late"],
            "seeds": [0, 1],
            "metric": "auc",
            "statistic": "weighted_mean",
            "method": {"lr": 0.1, "late": {"name": "ditto"}},
            "sweep": {"method.lr": [0.1]},
        }
    )
    assert found.methods == ("fedavg", "late") and found.seeds == (0, 1)
    assert found.metric == "auc" and found.statistic == "weighted_mean" and found.sweep == {"method.lr": [0.1]}
    assert found.sections == {"method": {"lr": 0.1, "late": {"name": "ditto"}}}
    assert Configuration.of({}) == Configuration()


def test_the_metric_of_the_tables_can_stand_in_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "some.toml"
    file.write_text(
        'methods = ["fedavg"]\nmetric = "loss"\n[partition]\nclients = 3\n[federation]\nrounds = 1\n', encoding="utf-8"
    )
    arguments = ["compare", "--config", str(file), "--quiet", "--no-plots", "--output", str(tmp_path / "out")]
    assert main(arguments) == 0
    by_file = capsys.readouterr().out
    assert main([*arguments, "--resume", "--metric", "loss"]) == 0
    assert capsys.readouterr().out == by_file
    assert main([*arguments, "--resume", "--metric", "accuracy"]) == 0
    assert capsys.readouterr().out != by_file
