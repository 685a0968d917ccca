from __future__ import annotations

import csv
import math
import multiprocessing
import os
import random
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import command_process
import pytest
from torch import Tensor

import pfl_ext
from pfl_ext.algorithms import FedAvg
from pfl_ext.cli import main
from pfl_ext.data import Partition
from pfl_ext.federation import Client
from pfl_ext.reports import ResultsFolder, read_config

QUICK = ["--data", "digits", "--clients", "5", "--rounds", "3", "--lr", "0.1", "--quiet", "--no-plots"]


def _metrics(folder: Path) -> list[dict[str, Any]]:
    records = ResultsFolder.open(folder).records()
    return [{key: value for key, value in record.items() if not key.startswith("seconds")} for record in records]


# ---- run -------------------------------------------------------------------------------------------------------------


def test_run_leaves_a_whole_results_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["run", "ditto", *QUICK[:-1], "--output", str(folder)]) == 0
    assert "| personal | test" in capsys.readouterr().out
    expected = {"config.toml", "versions.json", "metrics.jsonl", "metrics.csv", "clients.csv", "partition.safetensors"}
    expected |= {"classes.csv"}
    assert expected | {"curves.png", "clients.png", "density.png", "partition.png", "checkpoints", "clients"} <= set(
        os.listdir(folder)
    )
    assert [record["round"] for record in _metrics(folder)] == [1, 2, 3]
    with (folder / "clients.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 and float(rows[0]["personal/test/accuracy"]) > 0.2
    config = read_config(folder)
    assert config["method"]["lam"] == 1.0 and config["federation"]["rounds"] == 3


def test_a_saved_configuration_makes_the_same_run_again(tmp_path: Path) -> None:
    assert main(["run", "fedprox", *QUICK, "--mu", "0.5", "--seed", "4", "--output", str(tmp_path / "a")]) == 0
    arguments = ["run", "--config", str(tmp_path / "a" / "config.toml"), "--quiet", "--no-plots"]
    assert main([*arguments, "--output", str(tmp_path / "b")]) == 0
    assert _metrics(tmp_path / "a") == _metrics(tmp_path / "b")


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text('[method]\nname = "fedprox"\nmu = 0.5\n[federation]\nrounds = 2\n')
    folder = tmp_path / "out"
    arguments = ["run", "--config", str(tmp_path / "some.toml"), "--mu", "0.25", "--quiet", "--no-plots"]
    assert main([*arguments, "--output", str(folder)]) == 0
    config = read_config(folder)
    assert config["method"]["mu"] == 0.25 and config["federation"]["rounds"] == 2


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["run"], 2, "no method is named: METHOD comes first, pfl-ext run METHOD [options]; known are apfl, cfl"),
        (["run", "fedavgg"], 2, "unknown method 'fedavgg' (did you mean fedavg"),
        (["run", "ditto", "--lamm", "1"], 2, "unknown option --lamm (did you mean --lam"),
        (["run", "fedavg", "--lr", "fast"], 1, ": --lr is 'fast'; accepted is a number"),
        (["run", "fedavg", "--lr", "-1"], 1, ": --lr is -1.0; accepted is a value above 0"),
        (["run", "fedavg", "--rounds", "2.5"], 1, ": --rounds is '2.5'; accepted is an integer"),
        (["run", "fedavg", "--store", "cloud"], 1, ": --store is 'cloud'; accepted is memory, mapped"),
        (["run", "fedavg", "--clients", "0"], 1, ": --clients is 0; accepted is 1 or more"),
        (["run", "fedavg", "--clients", "5000"], 1, "clients"),
        (["run", "fedavg", "--data", "mnisst"], 1, "mnist"),
        (["run", "fedavg", "--partition", "dirichelt"], 2, "did you mean dirichlet"),
        (["run", "fedavg", "--network", "resnet"], 1, "unknown network 'resnet'"),
        (["run", "persfl", "--partition", "dirichlet"], 1, "partition with --validation 0.2"),
        (["run", "fedavg", "--config", "absent.toml"], 2, "absent.toml cannot be read"),
        (["compare"], 2, "name the methods to compare"),
        (["compare", "fedavg", "ditto", "--set", "dito.lam=1"], 2, "dito is not compared (did you mean ditto?)"),
        (["compare", "fedavg", "--set", "fedavg"], 2, "METHOD.OPTION=VALUE is accepted"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: Sequence[str],
    status: int,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == status
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_an_unknown_name_in_a_file_suggests_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in (
        ('[metod]\nname = "fedavg"', "unknown table [metod] (did you mean method"),
        ('[method]\nname = "ditto"\nlamda = 1', "unknown option 'lamda' of the method ditto (did you mean lam"),
        ('[method]\nname = "fedavg"\n[data]\ndownload = "maybe"', "download is 'maybe'; accepted is true or false"),
        ("[method", "is not TOML"),
    ):
        (tmp_path / "bad.toml").write_text(text)
        assert main(["run", "--config", str(tmp_path / "bad.toml")]) != 0
        assert message in capsys.readouterr().err


def test_help_lists_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", "persfl", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0
    for part in ("--temperatures", "(default: 1,5,9,13,17,21,25)", "--participation", "(default: 1.0)", "PersFL"):
        assert part in text
    assert "classes of each client" in text  # an option of the partition that is in use


def test_help_shows_what_is_asked_for_most_and_help_all_the_rest_in_groups(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    shown = {}
    for word in ("--help", "--help-all"):
        for command in (["run", "ditto"], ["run"], ["compare"], ["sweep"]):
            with pytest.raises(SystemExit) as stopped:
                main([*command, word])
            assert stopped.value.code == 0
            shown[command[0], len(command), word] = capsys.readouterr().out
    short, full = shown["run", 2, "--help"], shown["run", 2, "--help-all"]
    assert short.count("\n") < 95 < 2 * 95 < full.count("\n")
    flags = {text: set(re.findall(r"^  (--[a-z-]+)", text, re.M)) for text in (short, full)}
    assert {"--lam", "--lr", "--rounds", "--data", "--k", "--workers", "--output"} <= flags[short] < flags[full]
    assert "virtual time" not in short.lower() and "\nVirtual time" in full
    assert f"--help-all shows {len(flags[full] - flags[short])} more options." in short
    assert max(map(len, re.findall(r"^  .*", full, re.M))) <= 110
    assert "--vary" in shown["sweep", 1, "--help"] and "--set" in shown["compare", 1, "--help"]


def test_no_command_prints_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert text.count("\n") < 25 and "\n  run " in text and "pfl-ext run persfl" in text


def test_results_that_are_there_are_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["run", "fedavg", *QUICK, "--output", str(tmp_path)]
    assert main(arguments) == 0
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert main(arguments) == 1
    assert (
        "holds the results of an earlier run: --resume goes on with it, --overwrite removes its results"
        in capsys.readouterr().err
    )
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


# ---- compare and data ------------------------------------------------------------------------------------------------


def test_compare_prints_one_table_and_writes_all_styles(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["compare", "fedavg", "ditto", *QUICK[:-1], "--seeds", "0,1", "--output", str(tmp_path)]
    assert main([*arguments, "--set", "ditto.lam=0.5"]) == 0
    out = capsys.readouterr().out
    assert out.count("| fedavg ") == 1 and out.count("| ditto ") == 1 and "personal: local test" in out
    files = {"comparison.md", "comparison.csv", "comparison.tex", "users.md", "curves.png", "clients.png"}
    assert files <= set(os.listdir(tmp_path))
    config = read_config(tmp_path / "ditto-seed1")
    assert config["method"]["lam"] == 0.5 and config["federation"]["seed"] == 1
    partitions = [Partition.load(tmp_path / f"{m}-seed0" / "partition.safetensors") for m in ("fedavg", "ditto")]
    assert partitions[0].fingerprint == partitions[1].fingerprint
    other = Partition.load(tmp_path / "fedavg-seed1" / "partition.safetensors")
    assert other.fingerprint != partitions[0].fingerprint
    models = [_metrics(tmp_path / f"{m}-seed0")[-1]["models"]["global"] for m in ("fedavg", "ditto")]
    assert models[0] == models[1]  # Ditto's global model is FedAvg's, on the same batches


@pytest.mark.parametrize("command", [["compare"], ["sweep", "--vary", "method.lr=0.1"]], ids=["compare", "sweep"])
def test_the_tables_can_be_of_another_metric(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command[0], "fedavg", *command[1:], *QUICK, "--metric", "auc", "--output", str(tmp_path)]) == 0
    (run,) = tmp_path.rglob("metrics.jsonl")
    auc = _metrics(run.parent)[-1]["models"]["global"]["test"]["auc"]["mean"]
    assert f" {100 * auc:.2f} " in capsys.readouterr().out
    assert f" {100 * auc:.2f} " in (tmp_path / "tails.md").read_text()


@pytest.mark.parametrize(
    ("command", "table"), [(["compare"], "comparison"), (["sweep", "--vary", "method.mu=0.1,1"], "sweep")]
)
def test_a_run_that_diverges_ends_no_other_and_is_in_no_table(
    command: list[str], table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hot = ["--set", "fedavg.lr=1e30", "--seeds", "0,1", "--output", str(tmp_path)]
    assert main([command[0], "fedavg", "fedprox", *command[1:], *QUICK, *hot]) == 1
    said = capsys.readouterr()
    assert said.err.count("left out of the tables: fedavg, seed") == 2 and "client 0 diverged in round 1" in said.err
    with (tmp_path / f"{table}.csv").open() as file:
        rows = list(csv.DictReader(file))
    of_fedavg, *of_fedprox = rows
    assert (of_fedavg["method"], of_fedavg["diverged"], of_fedavg["global: local test"]) == ("fedavg", "2", "")
    for row in of_fedprox:
        assert row["method"] == "fedprox" and row["diverged"] in ("0", "")  # of another point it says nothing
        assert float(row["global: local test"]) > 50
    (printed,) = (line.replace(" ", "") for line in said.out.splitlines() if "| fedavg " in line)
    assert "|fedavg|2|-|" in printed
    assert (tmp_path / "tails.md").read_text().count("fedavg") == 1


def test_a_mean_is_over_the_seeds_that_did_not_diverge(tmp_path: Path) -> None:
    class Hot(FedAvg):
        """Diverges with seed 1 alone."""

        name = "hot"

        def train(self, client: Client, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
            bad = math.nan if client._settings.seed == 1 else 1
            return {name: bad * vector for name, vector in super().train(client, received).items()}

    options = {"data": "digits", "clients": 3, "rounds": 1, "quiet": True, "plots": False}
    found = pfl_ext.compare([Hot, "ditto"], seeds=[0, 1, 2], output=tmp_path, **options)
    assert [(row["diverged"], row["seeds"]) for row in found.rows()] == [(1, 2), (0, 3)]
    assert len(found.diverged["hot"]) == 1 and "hot, seed 1: client 0 diverged" in found.diverged["hot"][0]
    alone = pfl_ext.compare([Hot], seeds=[0, 2], output=tmp_path / "alone", **options)
    assert found.rows()[0]["global: local test"] == alone.rows()[0]["global: local test"]
    with pytest.raises(KeyError, match="all runs of hot diverged"):
        pfl_ext.compare([Hot], seeds=[1], output=tmp_path / "none", **options | {"plots": True})["hot"]


def test_what_the_command_line_does_not_override_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "own.toml"
    file.write_text('methods = ["fedavg", "ditto"]\n[federation.ditto]\nrounds = 2\n', encoding="utf-8")
    options = ["--data", "digits", "--clients", "3", "--rounds", "1", "--quiet", "--no-plots"]
    assert main(["compare", "--config", str(file), *options, "--output", str(tmp_path / "out")]) == 0
    assert "note: rounds is 1 but for those with a value in a table of their own" in (said := capsys.readouterr().err)
    assert said.count("note") == 1 and said.rstrip().endswith("ditto 2")
    rounds = [read_config(tmp_path / "out" / f"{name}-seed0")["federation"]["rounds"] for name in ("fedavg", "ditto")]
    assert rounds == [1, 2]


def test_landscape_draws_the_models_of_runs_without_changing_their_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folders = [tmp_path / name for name in ("plgu-lf", "fedsam")]
    for folder in folders:
        assert main(["run", folder.name, *QUICK, "--output", str(folder)]) == 0
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    picture = tmp_path / "l.png"
    assert main(["landscape", *map(str, folders), "--client", "2", "--points", "3", "--output", str(picture)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "plgu-lf" in line or "fedsam" in line]
    assert [(line[1], line[3]) for line in lines] == [
        ("plgu-lf", "global"), ("plgu-lf", "personal"), ("fedsam", "global")
    ]  # fmt: skip
    assert float(lines[1][5]) < float(lines[0][5])  # a client's own model has the lower loss on its training data
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {path: path.read_bytes() for path in files} == files


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--client", "5"], "--client is 5; the run has clients 0 to 4"),
        (["--models", "personel"], r"--models personel: .* has global, personal \(did you mean personal\?\)"),
        (["--points", "4"], "--points is 4; accepted is an odd number"),
    ],
)
def test_a_landscape_that_cannot_be_drawn_is_one_clear_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "run"
    assert main(["run", "ditto", *QUICK, "--rounds", "1", "--output", str(folder)]) == 0
    capsys.readouterr()
    assert main(["landscape", str(folder), *arguments, "--output", str(tmp_path / "l.png")]) != 0
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1 and re.search(message, captured.err)
    assert not (tmp_path / "l.png").exists()


def test_data_shows_saves_and_draws_a_partition_that_a_run_can_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cut.safetensors"
    options = ["--partition", "dirichlet", "--alpha", "0.5", "--clients", "4", "--seed", "3"]
    assert main(["data", *options, "--save", str(file), "--picture", str(tmp_path / "cut.png")]) == 0
    assert "4 clients, fingerprint" in capsys.readouterr().out and (tmp_path / "cut.png").stat().st_size > 1000
    arguments = ["run", "fedavg", "--partition-file", str(file), "--rounds", "1", "--quiet", "--no-plots"]
    assert main([*arguments, "--output", str(tmp_path / "run")]) == 0
    used = Partition.load(tmp_path / "run" / "partition.safetensors")
    assert used.fingerprint == Partition.load(file).fingerprint


def test_the_command_line_overrides_a_methods_own_table_in_the_file_of_a_run(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text(
        '[method]\nlr = 0.1\n[method.late]\nname = "ditto"\nlr = 0.2\nlam = 0.3\n[federation.late]\nrounds = 3\n',
        encoding="utf-8",
    )
    folder = tmp_path / "run"
    options = ["--lr", "0.05", "--rounds", "1", "--quiet", "--no-plots"]
    assert main(["run", "late", "--config", str(file), *options, "--output", str(folder)]) == 0
    used = read_config(folder)
    assert used["method"]["name"] == "ditto" and used["federation"]["rounds"] == 1
    assert used["method"]["lr"] == 0.05 and used["method"]["lam"] == 0.3


def test_data_takes_the_file_of_a_comparison_or_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(
        'methods = ["fedavg", "late"]\nseeds = [0, 1]\n[partition]\nclients = 4\n[network]\nname = "mlp"\n'
        "[network.late]\nadapters = true\n[federation]\nrounds = 2\n[federation.late]\nrounds = 3\n"
        '[method.late]\nname = "fedavg"\nlr = 0.2\n[sweep]\n"method.lr" = [0.1, 0.2]\n',
        encoding="utf-8",
    )
    assert main(["data", "--config", str(file)]) == 0
    assert "4 clients, fingerprint" in capsys.readouterr().out


# ---- stopping and going on -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    """Starts commands in processes that have everything imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pfl_ext.commands.run", "pfl_ext.commands.data"])

    def start(arguments: Sequence[str]) -> Any:
        return context.Process(target=command_process.run, args=(arguments,))

    first = start(["data"])  # so that what a test times is not the start of the server
    first.start()
    first.join()
    yield start


def test_a_run_killed_at_random_moments_ends_as_an_unbroken_one(tmp_path: Path, processes: Any) -> None:
    common = ["run", "persfl", "--rounds", "12", "--lr", "0.1", "--checkpoint-every", "1", "--quiet", "--no-plots"]
    common += ["--temperatures", "1,5", "--lambdas", "0,0.5", "--participation", "0.6"]
    whole = processes([*common, "--output", str(tmp_path / "whole")])
    begin = time.monotonic()
    whole.start()
    whole.join()
    assert whole.exitcode == 0
    duration = time.monotonic() - begin
    seed = random.randrange(1 << 30)
    moments, killed = random.Random(seed), 0
    while True:
        resume = ["--resume"] if (tmp_path / "broken").exists() else []
        process = processes([*common, *resume, "--output", str(tmp_path / "broken")])
        process.start()
        process.join(moments.uniform(0.1, 0.8) * duration if killed < 5 else None)
        if process.exitcode is not None:
            break
        process.kill()
        process.join()
        killed += 1
    assert process.exitcode == 0, f"moments of seed {seed}"
    assert killed > 0
    assert _metrics(tmp_path / "broken") == _metrics(tmp_path / "whole"), f"moments of seed {seed}"
    assert (tmp_path / "broken" / "clients.csv").read_bytes() == (tmp_path / "whole" / "clients.csv").read_bytes()


def test_an_interrupt_stops_after_the_round_and_saves(tmp_path: Path, processes: Any) -> None:
    common = ["run", "fedavg", "--rounds", "500", "--lr", "0.1", "--quiet", "--no-plots", "--output", str(tmp_path)]
    process = processes(common)
    process.start()
    while not (tmp_path / "metrics.jsonl").exists() or not (tmp_path / "metrics.jsonl").read_text().count("\n") > 2:
        assert process.is_alive()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    process.join(30)
    assert process.exitcode == 130
    done = len(_metrics(tmp_path))
    assert 0 < done < 500
    saved = max(int(path.stem.rpartition("-")[2]) for path in (tmp_path / "checkpoints").iterdir())
    assert saved == done


def test_a_landscape_is_the_same_on_every_device(
    device_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    folder, printed = tmp_path / "fedavg", []
    assert main(["run", "fedavg", *QUICK, "--output", str(folder)]) == 0
    for device in ([], ["--device", device_type]):
        capsys.readouterr()
        assert main(["landscape", str(folder), "--points", "3", *device, "--output", str(tmp_path / "l.png")]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert (
        main(["landscape", str(folder), "--points", "3", "--device", "tpu", "--output", str(tmp_path / "l.png")]) != 0
    )
    assert "--device is 'tpu', which cannot be used here" in capsys.readouterr().err
