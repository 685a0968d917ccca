"""The command line of ``pfl-ext run``: METHOD, its options, and folders that are there or not."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from safetensors.torch import load_file

from pfl_ext.algorithms import METHODS
from pfl_ext.cli import main
from pfl_ext.commands import run
from pfl_ext.reports import ResultsFolder, read_config

QUICK = ["--clients", "3", "--rounds", "1", "--lr", "0.1", "--quiet", "--no-plots"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_command_line_becomes_a_request_without_running_anything(tmp_path: Path) -> None:
    request = run.parse(["ditto", "--lam", "0.5", "--rounds", "3", "--output", "out", "--no-plots"])
    assert request.experiment.method == "ditto" and request.experiment.method_options == {"lam": 0.5}
    assert request.experiment.settings.rounds == 3
    assert request.output.folder == Path("out") and not request.output.plots and not request.output.resume
    with pytest.raises(FrozenInstanceError):
        request.output = None  # type: ignore[misc, assignment]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--output", "scd", "fedavg"], 2, "METHOD comes first: pfl-ext run fedavg [options]"),
        (["--lam", "1", "ditto"], 2, "METHOD comes first: pfl-ext run ditto [options]"),
        (["--quiet", "own.py:Own"], 2, "METHOD comes first: pfl-ext run own.py:Own [options]"),
        (["--output", "scd"], 2, "no method is named: METHOD comes first"),
        (["fedavg", "scd"], 2, "unexpected argument 'scd'"),
        (["fedavg", "--rounds"], 2, "--rounds: expected one argument"),
        (["fedavg", "--config"], 2, "--config: expected one argument; see pfl-ext run --help"),
        (["fedavg", "--learning-rate", "1"], 2, "unknown option --learning-rate (did you mean --lr?)"),
        (["fedavg", "--alpha", "1"], 2, "--alpha is an option of the partition dirichlet, ds2"),
        (["fedavg", "--alpha", "1"], 2, "; this run has ds1"),
        (
            ["fedavg", "--partition", "dirichlet", "--k=1"],
            2,
            "--k is an option of the partition labels_per_client, ds1",
        ),
        (["fedavg", "--lam", "1"], 2, "--lam is an option of the method ditto, "),
        (["fedavg", "--lam", "1"], 2, "; this run has fedavg"),
        (
            ["fedavg", "--network", "lenet", "--network-stem", "small"],
            1,
            "--network-stem is an option of the network resnet18, resnet34, resnet50; this run has lenet",
        ),
        (["fedavg", "--data", "mnist"], 1, "allow the download (--download)"),
        (["fedavg", "--data", "mnist"], 1, "by --data-root PATH or"),
        (["fedavg", "--auxiliary", "server"], 1, ": --auxiliary is server"),
        (["fedavg", "--auxiliary", "server"], 1, "a partition with --server 0.1"),
        (["fedavg", "--device", "abacus"], 1, ": --device is 'abacus'"),
        (["fedavg", "--data-mean", "grey"], 1, ": --data-mean is 'grey'; accepted is a list of numbers"),
        (["fedavg", "--resume", "--output", "absent"], 1, "--resume: there is no folder absent"),
        (["fedavg", "--resume", "--overwrite"], 2, "give one of them"),
    ],
)
def test_a_wrong_command_line_is_one_line_in_its_own_words(
    arguments: Sequence[str],
    status: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PFL_EXT_DATA", raising=False)
    assert main(["run", *arguments]) == status
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_wrong_value_of_the_file_is_not_blamed_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("some.toml").write_text("[method]\nlr = 'fast'\n", encoding="utf-8")
    assert main(["run", "fedavg", "--momentum", "0.5", "--config", "some.toml"]) == 1
    assert capsys.readouterr().err == "pfl-ext run: method.lr is 'fast'; accepted is a number\n"


def test_a_file_of_a_comparison_says_which_methods_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.toml").write_text('methods = ["fedavg", "ditto"]\n', encoding="utf-8")
    assert main(["run", "--config", "some.toml"]) == 2
    assert "METHOD, which comes first, is one of fedavg, ditto" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["ditto", "--help-all"], ["--config", "some.toml", "--help-all"]])
def test_help_shows_the_options_of_the_method_in_groups(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("some.toml").write_text('[method]\nname = "ditto"\n', encoding="utf-8")
    with pytest.raises(SystemExit) as stopped:
        main(["run", *arguments])
    text = capsys.readouterr().out
    assert stopped.value.code == 0
    for group in ("method ditto:", "data, task and network:", "partition ds1:", "network:", "output:"):
        assert f"\n{group}\n" in text
    assert "--lam X" in text and "--mu" not in text and "--overwrite" in text


def test_help_without_a_method_lists_the_methods(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = capsys.readouterr().out
    assert "usage: pfl-ext run METHOD [options]" in text and "\n  plgu-lf " in text


# ---- folders ---------------------------------------------------------------------------------------------------------


def test_overwrite_begins_anew_and_resume_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "fedavg", *QUICK, "--output", "out"]
    assert main(arguments) == 0
    assert main([*arguments, "--rounds", "2"]) == 1
    assert "--resume goes on with it, --overwrite removes its results" in capsys.readouterr().err
    assert main([*arguments, "--rounds", "2", "--resume"]) == 0
    assert len(ResultsFolder.open("out").records()) == 2
    assert main([*arguments, "--seed", "1", "--overwrite"]) == 0
    assert len(ResultsFolder.open("out").records()) == 1
    assert read_config(Path("out"))["federation"]["seed"] == 1


def test_a_comparison_refuses_folders_of_earlier_runs_before_it_begins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "ditto", *QUICK, "--output", "out"]) == 0
    assert main(["compare", "fedavg", "ditto", *QUICK, "--output", "out"]) == 1
    assert "out/ditto-seed0 holds the results of an earlier run" in capsys.readouterr().err
    assert not Path("out/fedavg-seed0").exists()
    assert main(["compare", "fedavg", "ditto", *QUICK, "--overwrite", "--output", "out"]) == 0
    assert main(["compare", "fedavg", *QUICK, "--resume", "--output", "absent"]) == 1
    assert "--resume: there is no folder absent" in capsys.readouterr().err


# ---- code from files -------------------------------------------------------------------------------------------------

CODE = """
from pathlib import Path

from pfl_ext.algorithms import FedAvg

Path("ran").touch()


class Gift(FedAvg):
    "A gift."

    name = "gift"
"""


@pytest.fixture
def gift(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A method in a file whose import leaves a trace; it is forgotten after the test."""
    before = dict(METHODS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    module = f"gift_{tmp_path.name.replace('-', '_')}"  # each test has its own: a module is imported once
    (tmp_path / f"{module}.py").write_text(CODE, encoding="utf-8")
    yield f"{module}.py:Gift"
    METHODS.clear()
    METHODS.update(before)


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["run"], '[method]\nname = "{}"'),
        (["run", "late"], '[method.late]\nname = "{}"'),
        (["run"], '[method]\nname = "late"\n[method.late]\nname = "{}"'),
        (["compare"], 'methods = ["{}"]'),
        (["compare", "late"], '[method.late]\nname = "{}"'),
        (["sweep", "late", "--vary", "method.lr=1"], '[method.late]\nname = "{}"'),
    ],
)
def test_a_file_runs_no_code_unless_it_is_trusted(
    command: list[str], text: str, gift: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("some.toml").write_text(text.format(gift), encoding="utf-8")
    arguments = [*command, "--config", "some.toml", *QUICK, "--output", "out"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "name it on the command line yourself, or give --trust-code" in error and error.count("\n") == 1
    assert not Path("ran").exists() and not Path("out").exists()
    assert main([*arguments, "--trust-code"]) == 0
    assert Path("ran").exists()


def test_a_method_that_the_command_line_names_is_trusted(gift: str) -> None:
    Path("some.toml").write_text(f'[method."{gift}"]\nlr = 0.2\n', encoding="utf-8")
    assert main(["run", gift, "--config", "some.toml", *QUICK, "--output", "out"]) == 0
    assert Path("ran").exists()


def test_the_results_of_a_method_of_a_file_are_not_trusted_either(
    gift: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert main(["run", gift, *QUICK, "--output", "out"]) == 0
    del METHODS[gift]
    assert main(["landscape", "out", "--points", "3"]) == 2
    assert "give --trust-code" in capsys.readouterr().err
    assert main(["landscape", "out", "--points", "3", "--trust-code"]) == 0


def test_a_file_with_the_name_of_another_module_is_refused(capsys: pytest.CaptureFixture[str], gift: str) -> None:
    Path("json.py").write_text(CODE, encoding="utf-8")
    assert main(["run", "json.py:Gift", *QUICK]) == 2
    assert "has the name of another module" in capsys.readouterr().err and not Path("ran").exists()


def test_a_run_with_several_networks_goes_on_and_gives_a_model_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    nets = ["--network", "mlp,small_net.py:Small", "--network-clients", "0,1,1", "--network-hidden", "6"]
    Path("small_net.py").write_text(
        "from torch import nn\n\n\nclass Small(nn.Sequential):\n"
        "    def __init__(self, classes):\n        super().__init__(nn.Flatten(), nn.Linear(64, classes))\n"
    )
    assert main(["run", "fedavg", *QUICK, *nets]) == 1
    assert "fedavg brings clients' models together number by number" in capsys.readouterr().err
    distil = ["feddf", "--kd-steps", "2", "--auxiliary", "server", "--server", "0.2", "--output", "out"]
    assert main(["run", *distil, "--partition", "iid", *QUICK, *nets]) == 0
    assert read_config(Path("out"))["network"]["clients"] == [0, 1, 1]
    assert main(["resume", "out", "--rounds", "2", "--quiet", "--no-plots", "--trust-code"]) == 0
    assert main(["export", "out", "--to", "x.safetensors", "--trust-code"]) == 1
    assert "the run has 2 networks, each with a global model of its own" in capsys.readouterr().err
    assert main(["export", "out", "--network", "1", "--to", "x.safetensors", "--trust-code"]) == 0
    assert load_file("x.safetensors")["1.weight"].shape == (10, 64)
