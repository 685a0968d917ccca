"""``pfl-ext flower new`` writes an app, or says what is wrong and writes nothing. Flower is not needed for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pfl_ext.cli import main
from pfl_ext.experiment import Experiment

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_the_app_has_the_experiment_in_its_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--lr", "0.1", "--clients", "3", "--rounds", "2", "--alpha", "0.3", "--partition", "dirichlet"]
    options += ["--local-buffers", "BatchNorm1d,BatchNorm2d"]
    assert main(["flower", "new", "My App", "ditto", *options]) == 0
    content = tomllib.loads((tmp_path / "My App/pyproject.toml").read_text())
    app = content["tool"]["flwr"]["app"]
    assert app["components"] == {"serverapp": "my_app.server_app:app", "clientapp": "my_app.client_app:app"}
    for module in ("server_app", "client_app"):
        compile((tmp_path / f"My App/my_app/{module}.py").read_text(), module, "exec")
    config = dict(app["config"])
    assert config.pop("flower")["output"] == str(tmp_path / "My App/results")
    experiment = Experiment.from_sections(config)
    assert (experiment.method, experiment.clients, experiment.partition_options) == ("ditto", 3, {"alpha": 0.3})
    assert experiment.settings.local_buffers == ("BatchNorm1d", "BatchNorm2d")
    assert (experiment.settings.rounds, experiment.settings.diverged) == (2, "drop")
    # What Flower's configuration can hold.
    assert all(isinstance(value, bool | int | float | str) for table in config.values() for value in table.values())


def test_relative_paths_of_data_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.npz").write_bytes(b"")
    assert main(["flower", "new", "app", "fedavg", "--data", "npz:here.npz"]) == 0
    content = tomllib.loads((tmp_path / "app/pyproject.toml").read_text())
    assert content["tool"]["flwr"]["app"]["config"]["data"]["name"] == f"npz:{tmp_path}/here.npz"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "flower new FOLDER METHOD is accepted"),
        (["old"], "old is not known here"),
        (["new", "app"], "FOLDER and METHOD are needed"),
        (["new", "app", "fedavgg"], "did you mean fedavg"),
        (["new", "app", "mine.py:Mine"], "goes into server_app(method)"),
        (["new", "app", "fedavg", "--lam", "1"], "--lam is an option of the method"),
        (["new", "app", "fedavg", "--lr", "-1"], "--lr is -1.0; accepted is a value above 0"),
        (["new", "app", "fedavg", "--workers", "4"], "unknown option --workers"),
        (["new", "full", "fedavg"], "full is there already"),
        (["new", "1", "fedavg"], "begin it with a letter"),
    ],
)
def test_what_cannot_be_written_is_refused_and_nothing_is(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    assert main(["flower", *arguments]) in (1, 2)
    assert told in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
    assert (tmp_path / "full/file").read_text() == "mine"


def test_help_lists_the_options_of_the_method(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["flower", "new", "app", "ditto", "--help"])
    assert end.value.code == 0
    assert "--lam" in capsys.readouterr().out
