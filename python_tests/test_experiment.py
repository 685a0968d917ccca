"""Options of data and network: from tables to a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pfl_ext.cli import main
from pfl_ext.experiment import Experiment
from pfl_ext.federation import InProcess
from pfl_ext.nn import Networks
from pfl_ext.reports import read_config
from pfl_ext.sections import network_options


@pytest.fixture
def images(tmp_path: Path) -> str:
    random = np.random.default_rng(0)
    for name, side in (("main", 16), ("other", 20)):
        arrays = {}
        for part, count in (("train", 60), ("test", 20)):
            arrays[f"x_{part}"] = random.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
            arrays[f"y_{part}"] = np.arange(count) % 4
        np.savez(tmp_path / f"{name}.npz", **arrays)
    return f"npz:{tmp_path}/main.npz"


def _experiment(data: dict[str, Any], **more: Any) -> Experiment:
    tables = {
        "data": data,
        "partition": {"name": "iid", "clients": 2},
        "federation": {"rounds": 1},
        "method": {"name": "fedavg"},
    }
    return Experiment.from_sections({**tables, **more})


def test_network_options_reach_the_network(images: str) -> None:
    network = {"name": "resnet18", "stem": "small", "norm": "group", "adapters": True, "freeze": "backbone"}
    experiment = _experiment({"name": images}, network=network)
    made = experiment.make_network(experiment.make_data()[0])
    assert tuple(made.conv1.kernel_size) == (3, 3) and isinstance(made.bn1, torch.nn.GroupNorm)
    assert not made.conv1.weight.requires_grad and made.fc.out_features == 4
    again = Experiment.from_sections(experiment.sections())
    assert again.sections() == experiment.sections()
    assert again.sections()["network"]["freeze"] == "backbone"


def test_several_networks_have_commas_between_their_names_and_each_takes_its_own_options(images: str) -> None:
    network = {"name": "lenet,mlp,auto", "clients": [2, 0, 1], "hidden": 7}
    experiment = _experiment({"name": images}, network=network, partition={"name": "iid", "clients": 3})
    data = experiment.make_data()
    made = experiment.make_network(data[0])
    assert isinstance(made, Networks) and made.clients == (2, 0, 1)
    assert [each[-1].in_features for each in made.each] == [84, 7, 84]
    assert not torch.equal(made.each[0][-1].weight, made.each[2][-1].weight)  # drawn one after the other
    alone = _experiment({"name": images}, network={"name": "lenet"}).make_network(data[0])
    assert torch.equal(alone[-1].weight, made.each[0][-1].weight)
    told = experiment.resolved(data[0]).sections()["network"]
    assert told["name"] == "lenet,mlp,lenet" and told["clients"] == [2, 0, 1] and told["hidden"] == 7
    assert Experiment.from_sections({**experiment.sections(), "network": told}).sections()["network"] == told
    with pytest.raises(ValueError, match="of several networks; the run has lenet alone"):
        _experiment({"name": images}, network={"name": "lenet", "clients": [0]}).make_network(data[0])
    with pytest.raises(ValueError, match="unknown network 'mpl'"):
        _experiment({"name": images}, network={"name": "lenet,mpl"})


def test_options_a_network_does_not_have_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="unknown option 'stem' of the network lenet"):
        _experiment({}, network={"name": "lenet", "stem": "small"})
    with pytest.raises(ValueError, match="unknown network 'resnet'"):
        _experiment({}, network={"name": "resnet"})
    with pytest.raises(ValueError, match="stem is 'big'"):
        _experiment({}, network={"name": "resnet18", "stem": "big"})
    assert {"patch", "adapters"} <= network_options("vit").keys() and "patch" not in network_options("auto")


def test_mean_std_and_samples_are_options_of_the_data(images: str) -> None:
    experiment = _experiment(
        {"name": images, "mean": [1.0, 2.0, 3.0], "std": [4.0, 5.0, 6.0], "train_samples": 30, "test_samples": 10}
    )
    dataset, partition = experiment.make_data()
    assert dataset.mean is not None and dataset.mean.tolist() == [1, 2, 3] and len(dataset) == 40
    partition.check(dataset)
    with pytest.raises(ValueError, match="mean is 'grey'; accepted is a list of numbers"):
        _experiment({"name": images, "mean": "grey"})


def test_auxiliary_data_are_training_images_of_another_set_in_this_ones_shape(images: str) -> None:
    other = images.replace("main", "other")
    experiment = _experiment(
        {"name": images, "auxiliary": other, "auxiliary_samples": 25, "mean": "1,2,3", "std": [9] * 3}
    )
    dataset, partition = experiment.make_data()
    auxiliary = experiment.make_auxiliary(dataset, partition)
    assert auxiliary is not None and len(auxiliary) == 25 and auxiliary.input_shape == (3, 16, 16)
    assert torch.equal(auxiliary.mean, dataset.mean) and not auxiliary.targets.any()  # type: ignore[arg-type]
    federation = experiment.make(dataset, partition)
    assert federation.server.auxiliary is not None
    plain = _experiment({"name": images, "mean": "1,2,3", "std": [9] * 3}).make(dataset, partition)
    assert plain.server.auxiliary is None and plain.identity != federation.identity


def test_the_servers_own_held_out_samples_can_be_the_auxiliary_data(images: str) -> None:
    tables = {"name": images, "auxiliary": "server"}
    held = _experiment(tables, partition={"name": "dirichlet", "clients": 2, "server": 0.2})
    dataset, partition = held.make_data()
    auxiliary = held.make_auxiliary(dataset, partition)
    assert auxiliary is not None and torch.equal(auxiliary.inputs, dataset.inputs[partition.server])
    assert held.make(dataset, partition).server.held_out is not None
    none = _experiment(tables)
    with pytest.raises(ValueError, match="the partition leaves it none"):
        none.make_auxiliary(*none.make_data())


def test_extra_tests_are_test_images_of_other_sets_in_this_ones_shape(images: str) -> None:
    other = images.replace("main", "other")
    tables = {"name": images, "mean": "1,2,3", "std": [9] * 3, "extra_tests": {"Other one": other, "own": images}}
    experiment = _experiment({**tables, "extra_test_samples": 15})
    again = Experiment.from_sections(experiment.sections())
    assert again.sections()["data"]["extra_tests"] == tables["extra_tests"]
    named = _experiment({**tables, "extra_tests": f"Other one={other}, own={images}"})
    assert named.data_options["extra_tests"] == tables["extra_tests"]
    dataset, partition = experiment.make_data()
    tests = again.make_extra_tests(dataset)
    assert list(tests) == ["Other one", "own"]
    (part,) = tests["Other one"]
    assert len(part) == 15 and part.input_shape == (3, 16, 16) and set(part.targets.tolist()) == {0, 1, 2, 3}
    run = experiment.make(dataset, partition)
    assert isinstance(run.engine, InProcess)
    assert torch.equal(part.mean, dataset.mean) and list(run.engine.runtime.plan.tests) == ["global_test", *tests]
    (own,) = named.make_extra_tests(dataset)["own"]
    assert torch.equal(own.inputs, dataset.inputs[dataset.is_test]) and torch.equal(own.targets, dataset.targets[60:])
    assert "extra_tests" not in _experiment({"name": images}).sections()["data"]


@pytest.mark.parametrize("given", ["digits", "a=", "=digits", "a=x,a=y", ["digits"], 3])
def test_extra_tests_that_are_no_names_of_sources_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"extra_tests is .*; accepted is NAME=SOURCE"):
        _experiment({"extra_tests": given})


def test_the_command_line_evaluates_on_extra_tests(
    images: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["ditto", "--data", images, "--partition", "iid", "--clients", "2", "--rounds", "1", "--quiet"]
    more = ["--no-plots", "--personal-global-test", "--extra-tests", f"Other={images.replace('main', 'other')}"]
    assert main(["compare", *arguments, *more, "--output", str(tmp_path / "runs")]) == 0
    assert "personal: Other" in (out := capsys.readouterr().out) and "global: Other" in out
    wrong = ["--extra-tests", "C=cifar10-c", "--data-root", str(tmp_path), "--output", str(tmp_path / "wrong")]
    assert main(["run", *arguments, "--no-plots", *wrong]) == 1
    assert "cifar10-c is not in" in capsys.readouterr().err


def test_another_normalisation_is_another_run(images: str) -> None:
    first, second = (_experiment({"name": images, "mean": [m] * 3, "std": [1.0] * 3}).make_data() for m in (0.0, 1.0))
    make = _experiment({"name": images}).make
    assert make(*first).identity != make(*second).identity


def test_the_command_line_has_the_options_of_networks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "fedavg", "--help-all"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--network-adapters, --no-network-adapters" in text and "--network-pretrained NAME" in text
    assert "--network-stem {imagenet,small}" in text and "--auxiliary NAME" in text and "--data-mean" in text


def test_network_options_of_the_command_line_reach_the_run(images: str, tmp_path: Path) -> None:
    arguments = [
        "fedavg",
        "--data",
        images,
        "--partition",
        "iid",
        "--clients",
        "2",
        "--rounds",
        "1",
        "--network",
        "vit",
    ]
    more = ["--network-depth", "1", "--network-width", "12", "--network-patch", "8", "--network-adapters", "--quiet"]
    assert main(["run", *arguments, *more, "--no-plots", "--output", str(tmp_path / "run")]) == 0
    network = read_config(tmp_path / "run")["network"]
    assert network["depth"] == 1 and network["adapters"] is True and network["heads"] == 6
