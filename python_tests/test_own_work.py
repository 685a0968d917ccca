"""A user's own network, loss, data and method: by name on the command line, as objects in Python."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_files import EXAMPLES, load_example

import pfl_ext
from pfl_ext import named
from pfl_ext.algorithms import Ditto, FedAvg
from pfl_ext.cli import main
from pfl_ext.data import Dataset
from pfl_ext.nn import build
from pfl_ext.reports import ResultsFolder, read_config
from pfl_ext.tasks import Regression

OWN = f"{EXAMPLES}/own/net.py"
THREE = ["fedavg", "ditto", "scd"]
QUICK = ["--partition", "iid", "--clients", "3", "--rounds", "2", "--lr", "0.1", "--quiet"]
NAMED = ["--network", f"{OWN}:Net", "--task", f"{OWN}:Huber", "--data", f"{OWN}:load"]


def slow_adam(params: list[torch.Tensor], lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=lr, weight_decay=weight_decay, betas=(0.99, 0.9999))


@pytest.fixture(autouse=True)
def _forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work in an empty folder; what a test makes known is forgotten after it."""
    before = {section: dict(table) for section, table in named.TABLES.items()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for section, table in before.items():
        named.TABLES[section].clear()
        named.TABLES[section].update(table)


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "comparison.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _records(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not k.startswith("seconds")} for r in ResultsFolder.open(folder).records()]


# ---- by name ---------------------------------------------------------------------------------------------------------


def test_one_command_compares_own_network_loss_and_data_over_three_methods(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--network-width", "8", "--task-delta", "0.5", "--output", "out"]
    assert main(["compare", *THREE, *NAMED, *QUICK, *more]) == 0
    assert capsys.readouterr().out.count("| scd ") == 1
    assert [row["method"] for row in _rows(Path("out"))] == THREE
    assert 0 < float(_rows(Path("out"))[0]["global: local test"]) < 1  # a loss, not in per cent
    assert {"curves.png", "density.png", "partition.png", "users.md"} <= {path.name for path in Path("out").iterdir()}
    assert "Loss of each user's" in Path("out/users.md").read_text(encoding="utf-8")
    config = read_config(Path("out/ditto-seed0"))
    assert config["network"]["width"] == 8 and config["task"]["delta"] == 0.5 and config["metric"] == "loss"
    # What a run says of itself makes it again.
    again = ["run", "--config", "out/ditto-seed0/config.toml", "--quiet", "--no-plots", "--output", "again"]
    assert main(again) == 2 and "--trust-code" in capsys.readouterr().err
    assert main([*again, "--trust-code"]) == 0
    assert _records(Path("again")) == _records(Path("out/ditto-seed0"))


def test_the_example_does_the_same_in_six_lines_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    example = load_example("own_everything")
    assert capsys.readouterr().out.count("| scd ") == 1
    assert main(["compare", *THREE, *NAMED, *QUICK, "--clients", "5", "--rounds", "5", "--task-delta", "0.5"]) == 1
    assert "compare-load-iid holds" not in capsys.readouterr().err  # the runs in it do
    by_name = ["--task-delta", "0.5", "--clients", "5", "--rounds", "5", "--output", "out"]
    assert main(["compare", *THREE, *NAMED, *QUICK, *by_name]) == 0
    for label in THREE:
        assert _records(example.found[label].folder) == _records(Path(f"out/{label}-seed0"))
    assert {path.name for path in example.found.folder.iterdir()} == {path.name for path in Path("out").iterdir()}


@pytest.mark.parametrize(
    "text",
    [
        f'[network]\nname = "{OWN}:Net"\n[data]\nname = "{OWN}:load"',
        f'[task]\nname = "{OWN}:Huber"',
        f'[data]\nname = "{OWN}:load"',
        f'[network.fedavg]\nname = "{OWN}:Net"',
        f'[method]\nname = "{OWN}:Patient"',
        f'[method]\noptimizer = "{OWN}:slow_adam"',
        f'[method.fedavg]\noptimizer = "{OWN}:slow_adam"',
    ],
)
def test_a_file_names_no_code_unless_it_is_trusted(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.toml").write_text(text, encoding="utf-8")
    method = [] if "Patient" in text else ["fedavg"]
    assert main(["run", *method, "--config", "some.toml", *QUICK]) == 2
    error = capsys.readouterr().err
    assert "name it on the command line yourself, or give --trust-code" in error and error.count("\n") == 1
    if method:
        with pytest.raises(ValueError, match="give it here yourself, or trust_code=True if you trust both"):
            pfl_ext.run("fedavg", config="some.toml")
    assert not Path("results").exists() and not any(OWN in name for table in named.TABLES.values() for name in table)


def test_a_program_may_trust_the_code_of_a_file() -> None:
    text = f'methods = ["late", "fedavg"]\n[data]\nname = "{OWN}:load"\n[method.late]\nname = "{OWN}:Patient"\n'
    Path("some.toml").write_text(text + f'[network]\nname = "{OWN}:Net"', encoding="utf-8")
    common: dict[str, Any] = {"config": "some.toml", "partition": "iid", "clients": 2, "rounds": 1, "quiet": True}
    with pytest.raises(ValueError, match="trust_code=True"):
        pfl_ext.compare(**common)
    found = pfl_ext.compare(**common, trust_code=True, plots=False)
    assert list(found) == ["late", "fedavg"] and read_config(found["late"].folder)["method"]["lr"] == 0.003


def test_a_name_on_the_command_line_takes_the_place_of_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.toml").write_text('[network]\nname = "absent.py:Net"', encoding="utf-8")
    assert main(["run", "fedavg", "--config", "some.toml", "--network", "mlp", *QUICK, "--no-plots"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--network", "absent.py:Net"], "absent.py of the network absent.py:Net is not a file"),
        (["--network", f"{OWN}:Nett"], "has no network Nett (did you mean Net?)"),
        (["--network", f"{OWN}:torch"], "accepted is a class or function that makes a torch.nn.Module"),
        (["--task", f"{OWN}:Net"], "accepted is a class derived from pfl_ext.tasks.Task"),
        (["--network", "needs.py:Net"], "the parameter depth of the network needs.py:Net has no default"),
        (["--network", "needs.py:none"], "what the network needs.py:none makes is of the type NoneType"),
        (
            ["--data", "needs.py:none"],
            "the data needs.py:none are of the type NoneType; accepted is a Dataset",
        ),
        (["--network", f"{OWN}:Net", "--network-width", "wide"], "--network-width is 'wide'; accepted is an integer"),
        (["--network", f"{OWN}:Net", "--network-depth", "3"], "--network-depth is an option of the network"),
        (["--network", "torchvision:resnet19"], "torchvision has no network 'resnet19' (did you mean resnet"),
        (["--task", f"{OWN}:Huber", "--task-dela", "1"], "unknown option --task-dela (did you mean --task-delta"),
    ],
)
def test_what_a_name_does_not_stand_for_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("needs.py").write_text("def Net(depth): ...\ndef none(): ...\n", encoding="utf-8")
    sys.modules.pop("needs", None)
    assert main(["run", "fedavg", *arguments, *QUICK, "--no-plots"]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not Path("results").exists()


def test_worker_processes_have_the_same_code() -> None:
    arguments = ["run", f"{OWN}:Patient", *NAMED, *QUICK, "--optimizer", f"{OWN}:slow_adam", "--no-plots"]
    for workers in ("1", "2"):
        assert main([*arguments, "--workers", workers, "--output", workers]) == 0
    assert _records(Path("1")) == _records(Path("2"))
    assert read_config(Path("2"))["method"]["optimizer"] == f"{OWN}:slow_adam"
    given = {"network": f"{OWN}:Net", "task": f"{OWN}:Huber", "data": f"{OWN}:load", "partition": "iid", "clients": 3}
    for method, options in (("fedavg", {"optimizer": slow_adam}), (FedAvg(optimizer=slow_adam), {})):
        run = pfl_ext.run(method, **given, **options, rounds=2, lr=0.1, quiet=True, plots=False, overwrite=True)
        assert read_config(run.folder)["method"]["optimizer"].endswith(":slow_adam")
        assert _records(run.folder) == _records(Path("1"))


def test_data_of_ones_own_may_be_tensors_arrays_or_torch_datasets() -> None:
    x, y = torch.rand(6, 2), torch.arange(6) % 2
    torch_dataset = torch.utils.data.TensorDataset(x, y)
    for found in ((x, y), (x.numpy(), y.numpy()), torch_dataset, (torch_dataset, torch_dataset), (x, y, x, y)):
        dataset = named.as_dataset(found, "file.py:load")
        assert (
            dataset.name == "load" and torch.equal(dataset.inputs[:6], x) and dataset.targets[:6].tolist() == y.tolist()
        )
    own = Dataset.from_tensors(x, y, name="mine")
    assert named.as_dataset(own, "file.py:load") is own
    for wrong in (None, "digits", {"x": x}, (x,), (x, y, x)):
        with pytest.raises(ValueError, match=r"the data file\.py:load are .*; accepted is a Dataset, tensors"):
            named.as_dataset(wrong, "file.py:load")


# ---- networks of libraries -------------------------------------------------------------------------------------------


def test_networks_of_torchvision_and_timm_have_the_datas_classes() -> None:
    pytest.importorskip("torchvision")
    network = build("torchvision:squeezenet1_1", (3, 64, 64), 7, torch.Generator().manual_seed(0))
    assert network(torch.rand(2, 3, 64, 64)).shape == (2, 7)
    again = build("torchvision:squeezenet1_1", (3, 64, 64), 7, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), again.parameters(), strict=True))
    pytest.importorskip("timm")
    grey = build("timm:resnet10t", (1, 32, 32), 5, torch.Generator().manual_seed(0))
    assert grey(torch.rand(2, 1, 32, 32)).shape == (2, 5)
    with pytest.raises(ValueError, match="timm has no network 'resnet10tt'"):
        build("timm:resnet10tt", (1, 32, 32), 5, torch.Generator())


# ---- in Python -------------------------------------------------------------------------------------------------------


def test_a_program_gives_objects_in_place_of_names(capsys: pytest.CaptureFixture[str]) -> None:
    x, y = torch.rand(120, 4), torch.rand(120)
    module = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Flatten(0))
    weights = module[0].weight.detach().clone()
    common: dict[str, Any] = {"network": module, "data": (x, y), "partition": "iid", "clients": 2, "rounds": 1}
    run = pfl_ext.run(Ditto(lam=0.5, lr=0.2), **common, quiet=True, metric="rmse")
    assert torch.equal(module[0].weight, weights)  # a copy was trained
    assert run.folder == Path("results/ditto-python-data-iid-seed0") and "rmse" in str(run)
    config = read_config(run.folder)
    assert config["method"]["lam"] == 0.5 and config["method"]["lr"] == 0.2 and config["metric"] == "rmse"
    assert config["network"] == {"name": "python:Sequential"} and config["task"]["name"] == "regression"
    assert main(["resume", str(run.folder)]) == 1
    assert "is an object of the Python program that made the run: go on with it there" in capsys.readouterr().err
    more = pfl_ext.run(Ditto(lam=0.5, lr=0.2), **{**common, "rounds": 2}, quiet=True, resume=True)
    assert [record["round"] for record in more.results.records()] == [1, 2]
    found = pfl_ext.compare({"weak": Ditto(lam=0.1), "strong": Ditto}, **common, lr=0.3, quiet=True, plots=False)
    assert [row["method"] for row in found.rows()] == ["weak", "strong"] and list(found) == ["weak", "strong"]
    options = [read_config(found[label].folder)["method"] for label in found]
    assert [(o["lam"], o["lr"]) for o in options] == [(0.1, 0.3), (1.0, 0.3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 1}, r"unknown option 'learning_rate' \(did you mean lr\?\)"),
        ({"alpha": 1}, "alpha is an option of the partition dirichlet, .*; this run has ds1"),
        ({"lam": 1}, "lam is an option of the method ditto, .*; this run has fedavg"),
        ({"network_stem": "small", "network": "mlp"}, "network_stem is an option of the network resnet18, .* has mlp"),
        ({"rounds": "many"}, "rounds is 'many'; accepted is an integer"),
        ({"metric": "speed", "rounds": 1}, "metric is 'speed'; the task classification has accuracy, loss, auc"),
        ({"network": Regression}, "what the network .* makes is of the type Regression"),
        ({"resume": True}, "there is no folder results/fedavg-digits-ds1-seed0"),
    ],
)
def test_a_wrong_option_is_refused_in_the_words_of_python(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pfl_ext.run("fedavg", **options, quiet=True)
    assert not Path("results").exists()


def test_a_script_without_a_guard_is_told_so_in_one_sentence(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        'import pfl_ext\npfl_ext.run("fedavg", clients=2, rounds=1, workers=2, quiet=True, plots=False)\n',
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1
    assert "workers is 2, and each of them begins with an import of the script" in last
    assert "if __name__ == '__main__':" in last


# ---- another library's partition -------------------------------------------------------------------------------------


def test_a_partition_of_pfllib_is_read_and_trained(capsys: pytest.CaptureFixture[str]) -> None:
    random = np.random.default_rng(0)
    for part, count in (("train", 40), ("test", 12)):
        Path("MNIST", part).mkdir(parents=True)
        for client in range(3):
            y = random.integers(client, client + 2, count)
            x = random.normal(0, 0.3, (count, 1, 6, 6)).astype(np.float32)
            x[np.arange(count), 0, y] += 2  # a bright row for each class
            np.savez_compressed(Path("MNIST", part, f"{client}.npz"), data={"x": x, "y": y})
    Path("MNIST/config.json").write_text(json.dumps({"num_clients": 3, "num_classes": 4}), encoding="utf-8")
    arguments = ["--data", "pfllib:MNIST", "--partition", "by_domain", "--rounds", "5", "--lr", "0.1", "--quiet"]
    assert main(["compare", "fedavg", "ditto", *arguments, "--output", "out", "--no-plots"]) == 0
    ditto = _rows(Path("out"))[1]
    assert float(ditto["personal: local test"]) > 90  # two classes that are far apart
    rows = ResultsFolder.open("out/ditto-seed0").clients()
    assert [(row["train_samples"], row["test_samples"]) for row in rows] == [(40, 12)] * 3
    assert FedAvg.name in capsys.readouterr().out


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_runs_as_it_stands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES.parent / "docs" / "own-work.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(sh|python)\n(.*?)```", text, re.S)
    Path("net.py").write_text(Path(OWN).read_text(encoding="utf-8"), encoding="utf-8")
    for module in ("net", "own.net"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(".")
    names: dict[str, Any] = {"__name__": "page"}
    for language, block in blocks:
        if language == "python":
            block = block.replace("lr=0.1)", 'lr=0.1, quiet=True, overwrite=True, output="FOLDER")')
            exec(compile(block, "docs/own-work.md", "exec", dont_inherit=True), names)
            continue
        for line in block.splitlines():
            command = shlex.split(line, comments=True)[1:]
            more = ["--quiet", "--output", "by-name"] if command[0] == "compare" else ["--trust-code"]
            assert main([*command, *more]) == 0, line
    assert names["own"].layers[0].weight.shape == (16, 3) and not names["shared"].training
    assert torch.equal(names["network"].layers[0].weight, names["shared"].layers[0].weight)


def test_numbers_to_predict_need_no_network_to_be_named() -> None:
    run = pfl_ext.run(
        "ditto", data=(torch.rand(60, 3), torch.rand(60, 2)), partition="iid", clients=2, rounds=1, quiet=True
    )
    assert read_config(run.folder)["network"]["name"] == "mlp"
    assert run.personal_model(1)(torch.rand(5, 3)).shape == (5, 2)


def test_a_dictionary_of_tensors_enters_a_network_of_ones_own() -> None:
    class Sum(torch.nn.Module):
        def __init__(self, input_shape: dict[str, tuple[int, ...]]) -> None:
            super().__init__()
            self.last = torch.nn.Linear(input_shape["a"][0], 1)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": self.last(a + b)}

    x, y = torch.rand(60, 3), torch.rand(60)
    data = Dataset.from_tensors({"a": x, "b": x}, y)
    common: dict[str, Any] = {"data": data, "partition": "iid", "clients": 2, "rounds": 1, "quiet": True}
    run = pfl_ext.run("fedavg", network=Sum, **common)
    assert run.global_model().last.weight.shape == (1, 3)
    with pytest.raises(ValueError, match="network is 'auto', and a sample of 'tensors' is several tensors; name a"):
        pfl_ext.run("fedavg", **common, output="other")
