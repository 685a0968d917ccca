"""Variants of methods, and sweeps over options."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from pfl_ext.cli import main
from pfl_ext.comparison import Comparison, points, variant
from pfl_ext.data import Partition
from pfl_ext.reports import ResultsFolder, read_config

QUICK = ["--quiet", "--no-plots"]
FILE = """
methods = ["fedavg", "Ditto, weak", "ditto"]
seeds = [3]
[data]
name = "digits"
[partition]
name = "dirichlet"
clients = 4
alpha = 1.0
[federation]
rounds = 2
[federation.fedavg]
evaluate_train = true
[method]
lr = 0.1
[method.ditto]
lam = 0.5
[method."Ditto, weak"]
name = "ditto"
lam = 0.01
"""


def _config(folder: Path, text: str = FILE) -> list[str]:
    (folder / "some.toml").write_text(text, encoding="utf-8")
    return ["--config", str(folder / "some.toml"), "--output", str(folder / "out"), *QUICK]


def _saved(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_config(folder)
    return found


def test_a_file_names_methods_seeds_and_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *_config(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "| fedavg " in printed and "| Ditto, weak " in printed and "| ditto " in printed
    saved = {name: _saved(tmp_path / "out" / f"{name}-seed3") for name in ("fedavg", "ditto-weak", "ditto")}
    assert [saved[name]["method"].get("lam") for name in saved] == [None, 0.01, 0.5]
    assert [saved[name]["federation"]["evaluate_train"] for name in saved] == [True, False, False]
    assert all(config["method"]["lr"] == 0.1 for config in saved.values())


def test_one_variant_of_the_file_can_be_run_alone(tmp_path: Path) -> None:
    assert main(["run", "Ditto, weak", *_config(tmp_path), "--lr", "0.2"]) == 0
    saved = _saved(tmp_path / "out")
    assert saved["method"]["name"] == "ditto" and saved["method"]["lam"] == 0.01 and saved["method"]["lr"] == 0.2


def test_the_command_line_chooses_among_the_variants_and_sets_their_options(tmp_path: Path) -> None:
    arguments = ["Ditto, weak", "--set", "Ditto, weak.personal_epochs=2"]
    assert main(["compare", *arguments, *_config(tmp_path)]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == ["ditto-weak-seed3"]
    assert _saved(tmp_path / "out" / "ditto-weak-seed3")["method"]["personal_epochs"] == 2


def test_a_sweep_runs_every_combination_and_what_it_does_not_concern_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vary = ["--vary", "method.lam=0,1", "--vary", "partition.alpha=0.5,5"]
    arguments = ["fedavg", "ditto", *vary, *_config(tmp_path)]
    arguments.remove("--no-plots")
    assert main(["sweep", *arguments]) == 0
    with (tmp_path / "out" / "sweep.csv").open() as file:
        rows = [(row["method"], row["lam"], row["alpha"]) for row in csv.DictReader(file)]
    assert rows == [
        ("fedavg", "", "0.5"),
        ("ditto", "0", "0.5"),
        ("fedavg", "", "5"),
        ("ditto", "0", "5"),
        ("ditto", "1", "0.5"),
        ("ditto", "1", "5"),
    ]
    saved = _saved(tmp_path / "out" / "lam=1_alpha=5" / "ditto-seed3")
    assert saved["method"]["lam"] == 1.0 and saved["partition"]["alpha"] == 5.0
    assert not (tmp_path / "out" / "sweep.png").exists()  # two axes have no one picture


def test_a_sweep_over_one_option_is_drawn(tmp_path: Path) -> None:
    text = FILE + '[sweep]\n"method.ditto.lam" = [0.1, 1.0]\n'
    arguments = _config(tmp_path, text)
    arguments.remove("--no-plots")
    assert main(["sweep", "ditto", "fedavg", *arguments]) == 0
    assert (tmp_path / "out" / "sweep.png").read_bytes()[1:4] == b"PNG"
    assert len(list((tmp_path / "out").rglob("density.png"))) == 2  # a picture of the clients at each point
    assert not (tmp_path / "out" / "new-clients.png").exists()
    assert main(["sweep", "ditto", "fedavg", "--resume", *_config(tmp_path, text)]) == 0  # nothing is left to do


def test_new_clients_have_a_column_and_a_picture_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = FILE + '[sweep]\n"method.ditto.fine_tune_epochs" = [1, 2]\n'
    arguments = _config(tmp_path, text)
    arguments.remove("--no-plots")
    assert main(["sweep", "ditto", "--new-clients", "1", *arguments]) == 0
    assert "personal: new clients" in capsys.readouterr().out
    assert (tmp_path / "out" / "new-clients.png").read_bytes() != (tmp_path / "out" / "sweep.png").read_bytes()


@pytest.mark.parametrize("command", ["compare", "sweep"])
def test_the_table_is_by_the_statistic_of_the_file_unless_the_command_line_names_one(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vary = ["--vary", "method.ditto.lam=1"] if command == "sweep" else []
    arguments = [command, "ditto", *vary, *_config(tmp_path, 'statistic = "weighted_mean"' + FILE)]
    assert main(arguments) == 0
    assert "personal: weighted local test" in capsys.readouterr().out
    assert main([*arguments, "--resume", "--statistic", "mean"]) == 0
    assert "weighted" not in capsys.readouterr().out
    assert main([command, *vary, *_config(tmp_path, 'statistic = "median"' + FILE)]) != 0
    assert "statistic is 'median' (did you mean mean?); accepted is mean, weighted_mean" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("", ["sweep"], "name what to vary"),
        ("", ["sweep", "--vary", "method.lam"], "SECTION.OPTION=A,B,... is accepted"),
        ("", ["sweep", "--vary", "method.mu=1,2"], "none of fedavg, Ditto, weak, ditto has the option mu"),
        ("", ["sweep", "--vary", "method.dito.lam=1"], "'dito' is not compared (did you mean ditto"),
        ("", ["sweep", "--vary", "alpha=1"], "section.option is accepted"),
        ("", ["sweep", "--vary", "partition.alfa=1"], "unknown option 'alfa' of the partition dirichlet"),
        ('[sweep]\n"method.lr" = 1', ["sweep"], "a list of values is accepted"),
        ('[sweep]\n"method.lr" = [1]', ["compare"], "run it with pfl-ext sweep"),
        ("[method.dito]\nlam = 1", ["compare"], "[method.dito] is for no method or variant of this name (did you mean"),
        ('[method.strong]\nname = "dito"', ["compare", "strong"], "unknown method 'dito' (did you mean ditto"),
        ("", ["compare", "Ditto, weaker"], "unknown method 'Ditto, weaker' (did you mean Ditto, weak"),
        ('[method."ditto  weak"]\nname = "ditto"', ["compare", "ditto  weak", "Ditto, weak"], "the same folder"),
    ],
)
def test_a_mistake_is_one_clear_line_before_anything_runs(
    text: str, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *_config(tmp_path, FILE + text)]) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_table_of_a_method_that_is_not_compared_changes_nothing() -> None:
    sections = {"method": {"lr": 0.1, "ditto": {"lam": 2.0}}, "network": {"name": "mlp", "ditto": {"name": "lenet"}}}
    assert variant(sections, "fedavg") == {"method": {"lr": 0.1, "name": "fedavg"}, "network": {"name": "mlp"}}
    assert variant(sections, "ditto")["network"] == {"name": "lenet"}


def test_points_do_not_change_the_comparison_they_are_made_of() -> None:
    sections = {"method": {"ditto": {"lam": 2.0}}, "partition": {"name": "iid"}}
    comparison = Comparison(sections, ("ditto",), None)
    assert [p.comparison.sections["method"]["ditto"]["lam"] for p in points(comparison, {"method.lam": [1, 3]})] == [
        1,
        3,
    ]
    assert sections == {"method": {"ditto": {"lam": 2.0}}, "partition": {"name": "iid"}}


def test_a_partition_seed_gives_every_seed_the_same_users_and_other_weights(tmp_path: Path) -> None:
    common = ["compare", "fedavg", "--rounds", "1", "--clients", "3", "--seeds", "0,1", "--quiet", "--no-plots"]
    assert main([*common, "--partition-seed", "5", "--output", str(tmp_path / "fixed")]) == 0
    assert main([*common, "--output", str(tmp_path / "redrawn")]) == 0
    prints = {
        name: [
            Partition.load(tmp_path / name / f"fedavg-seed{k}" / "partition.safetensors").fingerprint for k in (0, 1)
        ]
        for name in ("fixed", "redrawn")
    }
    assert len(set(prints["fixed"])) == 1 and len(set(prints["redrawn"])) == 2
    accuracies = [ResultsFolder.open(tmp_path / "fixed" / f"fedavg-seed{k}").records()[-1]["training"] for k in (0, 1)]
    assert accuracies[0] != accuracies[1]
    assert "different people" not in (tmp_path / "fixed" / "users.md").read_text(encoding="utf-8")
    assert "different people" in (tmp_path / "redrawn" / "users.md").read_text(encoding="utf-8")


def test_a_picture_of_one_of_several_partitions_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    notes = []
    draw = Partition.draw
    monkeypatch.setattr(Partition, "draw", lambda self, *given: notes.append(given[-1]) or draw(self, *given))
    common = ["compare", "fedavg", "--rounds", "1", "--clients", "3", "--seeds", "0,1", "--quiet"]
    assert main([*common, "--output", str(tmp_path / "redrawn")]) == 0
    assert main([*common, "--partition-seed", "5", "--output", str(tmp_path / "fixed")]) == 0
    assert notes == ["the last seed's, one of 2 partitions", ""]


def test_a_sweep_writes_the_users_of_each_point(tmp_path: Path) -> None:
    arguments = [
        "sweep",
        "fedavg",
        "--vary",
        "partition.k=2,3",
        "--rounds",
        "1",
        "--clients",
        "3",
        "--quiet",
        "--no-plots",
    ]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 0
    for point in ("k=2", "k=3"):
        assert "| user 2 " in (tmp_path / "out" / point / "users.md").read_text(encoding="utf-8")


def test_options_that_are_named_together_change_together() -> None:
    given = Comparison({"federation": {"rounds": 1}}, ("fedavg",), (0,))
    both = {"federation.dp_noise, federation.dp_clip": [[0.0, 0.0], [0.8, 1.0]]}
    found = [point.comparison.experiments()[0][1].settings for point in points(given, both)]
    assert [(s.dp_noise, s.dp_clip) for s in found] == [(0.0, 0.0), (0.8, 1.0)]
    assert [point.folder for point in points(given, both)] == ["dp-noise=0.0_dp-clip=0.0", "dp-noise=0.8_dp-clip=1.0"]
    with pytest.raises(ValueError, match="a list of 2 values is accepted, one for each"):
        points(given, {"federation.dp_noise, federation.dp_clip": [0.0]})
