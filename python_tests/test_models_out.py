"""Trained models come out: as modules, as files that torch alone reads, as the beginning of other runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pfl_ext.cli import main
from pfl_ext.data import load
from pfl_ext.experiment import Experiment, of_folder, restored
from pfl_ext.exported import save_model
from pfl_ext.federation import Federation
from pfl_ext.reports import ResultsFolder

QUICK = ["--clients", "3", "--rounds", "2", "--lr", "0.1", "--quiet", "--no-plots"]

# A network with buffers and a frozen layer, in a file that knows nothing of this package.
NET = """
from torch import nn


class Plain(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.last = nn.Linear(6 * 36, classes)
        self.first.requires_grad_(False)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu().flatten(1))
"""

# Reads the file, the images and the plain network, and prints the accuracy.
SCRIPT = """
import json, sys
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from plain import Plain

network = Plain()
network.load_state_dict(load_file("model.safetensors"))
network.eval()
with safe_open("model.safetensors", framework="pt") as file:
    about = {key: json.loads(value) for key, value in file.metadata().items() if key != "format"}
samples = load_file("test.safetensors")
images = (samples["x"].float() - torch.tensor(about["mean"]).view(-1, 1, 1)) / torch.tensor(about["std"]).view(-1, 1, 1)
right = network(images).argmax(1) == samples["y"]
print(json.dumps({"accuracy": right.double().mean().item(), "classes": about["classes"]}))
assert not any(name.startswith("pfl_ext") for name in sys.modules)
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _experiment(method: str = "ditto", **more: Any) -> Experiment:
    tables = {
        "partition": {"name": "ds1", "clients": 3},
        "network": {"name": "mlp"},
        "federation": {"rounds": 2},
        "method": {"name": method, "lr": 0.1},
    }
    return Experiment.from_sections({**tables, **more})


def _accuracy(module: torch.nn.Module, run: Federation, rows: torch.Tensor) -> float:
    inputs, targets = run.dataset.batch(rows)
    with torch.no_grad():
        return (module(inputs).argmax(1) == targets).double().mean().item()


# ---- modules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_gives_the_models_that_it_evaluated(workers: int) -> None:
    experiment = _experiment(federation={"rounds": 2, "workers": workers})
    run = experiment.make(*experiment.make_data())
    last = run.run()[-1]
    before = torch.get_rng_state()
    for result in run.client_results:
        module = run.personal_model(result.client)
        assert not module.training
        expected = result.metrics["personal", "test"]["accuracy"]
        assert _accuracy(module, run, run.partition.test[result.client]) == pytest.approx(expected, abs=1e-12)
    found = _accuracy(run.global_model(), run, run.partition.global_test)
    assert found == pytest.approx(last["models"]["global"]["global_test"]["accuracy"], abs=1e-12)
    assert torch.equal(torch.get_rng_state(), before)
    first, second = run.global_model(), run.global_model()
    next(first.parameters()).data.zero_()
    assert next(second.parameters()).data.any()  # copies


def test_what_a_run_has_no_model_of_is_refused() -> None:
    run = _experiment("standalone").make(*_experiment().make_data())
    with pytest.raises(ValueError, match=r"standalone has no global model; personal_model\(client\) gives"):
        run.global_model()
    with pytest.raises(ValueError, match="client is 3; the run has clients 0 to 2"):
        run.personal_model(3)


def test_without_personal_models_a_clients_is_the_global_one() -> None:
    run = _experiment("fedavg").make(*_experiment().make_data())
    states = [module.state_dict() for module in (run.global_model(), run.personal_model(1))]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_plain_torch_script_gives_an_exported_model_the_same_accuracy(tmp_path: Path) -> None:
    Path("plain.py").write_text(NET, encoding="utf-8")
    Path("script.py").write_text(SCRIPT, encoding="utf-8")
    sys.modules.pop("plain", None)
    assert main(["run", "ditto", "--network", "plain.py:Plain", *QUICK, "--output", "run"]) == 0
    export = ["export", "run", "--trust-code", "--to", "model.safetensors"]
    run = restored(Path("run"), of_folder(Path("run")))
    digits = load("digits")
    personal = {row["client"]: row["personal/test/accuracy"] for row in ResultsFolder.open("run").clients()}
    shared = ResultsFolder.open("run").records()[-1]["models"]["global"]["global_test"]["accuracy"]
    for more, rows, expected in (
        ([], run.partition.global_test, shared),
        (["--client", "2", "--overwrite"], run.partition.test[2], personal[2]),
    ):
        assert main([*export, *more]) == 0
        save_file({"x": digits.inputs[rows], "y": digits.targets[rows]}, "test.safetensors")
        done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {"accuracy": expected, "classes": list("0123456789")}


def test_an_exported_file_says_what_it_is_and_is_not_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "ditto", *QUICK, "--output", "run"]) == 0
    assert main(["export", "run", "--client", "1", "--to", "model.safetensors"]) == 0
    assert "the personal model of client 1 after round 2: model.safetensors" in capsys.readouterr().out
    with safe_open("model.safetensors", framework="pt") as file:
        about = file.metadata()
    assert json.loads(about["model"]) == "client 1" and json.loads(about["round"]) == 2
    assert json.loads(about["network"])["name"] == "mlp" and json.loads(about["method"])["name"] == "ditto"
    content = Path("model.safetensors").read_bytes()
    assert main(["export", "run", "--to", "model.safetensors"]) == 2
    assert "model.safetensors is there already; --overwrite replaces it" in capsys.readouterr().err
    assert main(["export", "run", "--client", "7", "--to", "other"]) == 1
    assert "--client is 7; the run has clients 0 to 2" in capsys.readouterr().err
    assert main(["export", "absent", "--to", "other"]) == 1
    assert "absent holds no results: it has no config.toml" in capsys.readouterr().err
    assert Path("model.safetensors").read_bytes() == content and not Path("other").exists()


# ---- as a beginning --------------------------------------------------------------------------------------------------


def test_a_run_begins_with_the_model_of_a_file_a_run_or_a_checkpoint() -> None:
    assert main(["run", "fedavg", *QUICK, "--checkpoint-every", "1", "--output", "run"]) == 0
    assert main(["export", "run", "--to", "model.safetensors"]) == 0
    expected = load_file("model.safetensors")
    first, last = sorted(Path("run/checkpoints").iterdir())
    found = {}
    for source in ("model.safetensors", "run", str(last), str(first)):
        experiment = _experiment(network={"name": "mlp", "pretrained": source})
        found[source] = experiment.make_network(experiment.make_data()[0]).state_dict()
    for source in ("model.safetensors", "run", str(last)):
        assert all(torch.equal(found[source][name], expected[name]) for name in expected), source
    assert not all(torch.equal(found[str(first)][name], expected[name]) for name in expected)


def test_adapters_of_an_exported_model_are_loaded_too() -> None:
    network = {"name": "resnet18", "stem": "small", "adapters": True, "input_channels": 3, "input_size": 16}
    few = {"name": "digits", "train_samples": 60, "test_samples": 20}
    experiment = _experiment("fedavg", data=few, network=network, federation={"rounds": 1})
    dataset, partition = experiment.make_data()
    run = experiment.make(dataset, partition)
    state = run.global_model().state_dict()
    save_model(run.global_model(), Path("adapted.safetensors"), run, experiment)
    again = _experiment("fedavg", data=few, network={**network, "pretrained": "adapted.safetensors"})
    loaded = again.make_network(dataset).state_dict()
    assert any("adapter" in name for name in state)
    assert all(torch.equal(loaded[name], state[name]) for name in state)
