"""The papers' own numbers beside every paper-scale file: one that is changed there is found here.

Sources: PerAda's Tables 5 and 8 and appendix A.3; SCD's section 4.1 and appendix B; PLGU's section 6.1; PersFL's
section 5, with the rounds of its Table 7. What a paper leaves open is not here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pfl_ext.comparison import Comparison, points
from pfl_ext.configuration import Configuration
from pfl_ext.experiment import Experiment

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER = sorted(path for path in CONFIGS.glob("*/*.toml") if not path.stem.endswith("-small"))

Numbers = Mapping[str, Any]
"""What all methods of a file have, by ``section.option``; ``method.NAME.option`` is of the method NAME alone."""

_ADAPTER = {"network.PerAda.adapters": True, "network.PerAda.freeze": "backbone"}


def _perada(
    batch: int, each: int, epochs: int, rounds: int, lam: float, lr: float, kd: tuple[float, int, int]
) -> Numbers:
    """A column of Table 8."""
    return {
        "method.batch_size": batch,
        "clients a round": each,
        "method.local_epochs": epochs,
        "method.perada.personal_epochs": epochs,
        "federation.rounds": rounds,
        **{f"method.{name}.lam": lam for name in ("perada", "ditto", "pfedme")},
        "method.lr": lr,
        "method.PerAda.kd_lr": kd[0],
        "method.PerAda.kd_steps": kd[1],
        "method.PerAda.kd_batch_size": kd[2],
        "method.PerAda w/o KD.kd_steps": 0,
        "method.pfedme.inner_steps": 3,
        "network.name": "resnet18",
        **_ADAPTER,
    }


_CIFAR = {
    **_perada(64, 8, 10, 200, 1.0, 0.01, (1e-3, 500, 2048)),
    "data.name": "cifar10",
    "data.auxiliary": "cifar100",
    "partition.clients": 20,
    "partition.alpha": 0.1,
    "partition.per_class": 2,  # the official split's
    "partition.server": 0.1,
}
_OFFICE = {
    **_perada(128, 4, 1, 100, 0.1, 0.05, (1e-4, 100, 256)),
    "data.auxiliary": "cifar10",
    "partition.clients": 4,
}
_CHEXPERT = {
    **_perada(256, 8, 1, 30, 1.0, 0.01, (1e-5, 50, 128)),
    "data.name": "chexpert",
    "data.auxiliary": "cifar10",
    "metric": "auc",
    "partition.clients": 20,
    "partition.group_below": 2000,
    "partition.server": 0.1,
    "partition.test_fraction": 0.1,
}
_PRIVATE = {
    "data.name": "cifar10",
    "data.auxiliary": "cifar100",
    "network.name": "vit",
    "network.input_size": 224,
    "clients a round": 20,
    "federation.rounds": 10,
    "federation.dp_delta": 1e-5,
    "method.local_epochs": 1,
    "method.Ditto.lr": 0.05,
    "method.PerAda w/o KD.lr": 0.1,
    "method.PerAda.lr": 0.2,
    "method.PerAda.kd_lr": 0.005,
    "method.PerAda.kd_batch_size": 32,
    "method.PerAda w/o KD.kd_steps": 0,
    "partition.alpha": 0.1,
    "method.batch_size": 32,  # the official default; the paper says nothing
    **_ADAPTER,
}


def _scd(data: str, clients: int, network: str, rounds: int = 500, lr: float = 0.01, batch: int = 10) -> Numbers:
    return {
        "data.name": data,
        "partition.name": "dirichlet",
        "partition.clients": clients,
        "network.name": network,
        "federation.rounds": rounds,
        "method.momentum": 0.5,
        "method.weight_decay": 0.0,
        "method.batch_size": batch,
        "method.lr": lr,
        "method.scd.lam_g": 0.05,
        "method.scd.lam_p": 0.01,
        "method.scd.tau": 0.4,
        "seeds": 3,
        "statistic": "weighted_mean",
    }


def _plgu(data: str, clients: int, labels: int, network: str) -> Numbers:
    return {
        "data.name": data,
        "partition.clients": clients,
        "partition.k": labels,
        "network.name": network,
        "network.norm": "group",
        "method.batch_size": 50,
        "method.local_epochs": 5,
        "method.fedrep.head_epochs": 5,
        "method.plgu-grep.head_epochs": 5,
        "method.plgu-lf.personal_layers": 5,
        "method.PLGU.rho": 0.05,
    }


def _persfl(data: str, split: str, rounds: Mapping[str, int]) -> Numbers:
    return {
        "data.name": data,
        "partition.name": split,
        "partition.clients": 10,
        **{"ds1": {"partition.k": 4}, "ds2": {"partition.alpha": 0.9}, "ds3": {"partition.k": 2}}.get(split, {}),
        "network.name": "lenet" if data == "cifar10" else "mlp",
        "seeds": 5,
        "partition seed": True,
        **{f"federation.{name}.rounds": count for name, count in rounds.items()},
    }


def _rounds(fedavg: int, persfl: int, fedper: int, pfedme: int, per_fedavg: int) -> Mapping[str, int]:
    """A column of PersFL's Table 7."""
    return {"fedavg": fedavg, "persfl": persfl, "fedper": fedper, "pfedme": pfedme, "per-fedavg": per_fedavg}


_R18, _ALPHAS = _scd("cifar10", 100, "resnet18"), {"partition.alpha": {1.0, 0.1}}
_P10 = _plgu("cifar10", 100, 3, "resnet18")
_P100 = _plgu("cifar100", 100, 10, "wide-resnet") | {"network.depth": 28, "network.width": 10}
_TINY = _plgu("folder:tiny-imagenet-200", 20, 30, "resnet50") | {"federation.participation": 1.0}
_C = {"federation.participation": {0.1, 1.0}}  # C = 10 and 100 of 100
EXPECTED: dict[str, Numbers] = {
    "perada/table1-cifar10": _CIFAR,
    "perada/table1-officehome": _OFFICE,
    "perada/table1-chexpert": _CHEXPERT | {"partition.alpha": 0.3},
    "perada/table2": _CIFAR | {"method.feddf.kd_steps": 500, "method.feddf.kd_batch_size": 2048},
    "perada/figure1-resnet34": _OFFICE | {"network.name": "resnet34"},
    "perada/figure4-none": {k: v for k, v in _CIFAR.items() if k != "data.auxiliary" and ".kd_" not in k}
    | {"method.PerAda.kd_steps": 0},
    "perada/figure4-data": _CIFAR | {"method.PerAda.kd_steps": 100},
    "perada/figure4-sources": _CIFAR
    | {"method.PerAda.kd_steps": 100, "data.auxiliary": {"stl10-unlabelled", "cifar100", "server"}},
    "perada/figure4-steps": {k: v for k, v in _CIFAR.items() if k != "method.PerAda.kd_steps"},
    "perada/figure5": _CIFAR,
    "perada/figure5-start": {k: v for k, v in _CIFAR.items() if k != "data.auxiliary"},
    "perada/figure6": _CIFAR,
    "perada/figure7-officehome": {k: v for k, v in _OFFICE.items() if not k.endswith(".lam")},
    "perada/theory": _CIFAR | {"clients a round": 20},
    "perada/figure7": {k: v for k, v in _CIFAR.items() if not k.endswith(".lam")},
    "perada/table3": _CHEXPERT | {"partition.alpha": {1.0, 0.3}},
    "perada/table4": _PRIVATE | {"federation.dp_noise": {0.0, 0.8, 1.0, 1.5}},
    "scd/table1": _R18 | {"partition.alpha": {1.0, 0.5, 0.1}},
    "scd/table2": _scd("cifar100", 50, "resnet34") | _ALPHAS,
    "scd/table3": _scd("folder:inaturalist-2017@64", 20, "resnet50", lr=0.003, batch=128) | {"partition.alpha": 0.1},
    "scd/table4": _R18 | {"partition.alpha": 0.1, "method.personal_epochs": {3, 5}},
    "scd/table4-until-arrival": _R18 | {"partition.alpha": 0.1},
    "scd/table5": {k: v for k, v in _R18.items() if "lam_" not in k} | _ALPHAS,
    "scd/table6": _R18 | _ALPHAS | {"method.scd.tau": {0.0, 0.1, 0.3, 0.4, 0.5, 0.7, 0.9, 1.0}},
    "scd/table7": _R18 | {"partition.alpha": 1.0, "method.scd.lam_g": {0.01, 0.05, 0.1, 0.3}},
    "scd/table8": _R18 | {"partition.alpha": 1.0, "method.scd.lam_p": {0.01, 0.05, 0.1, 0.3}},
    "scd/table9": {k: v for k, v in _R18.items() if k != "federation.rounds"} | {"federation.ditto.rounds": 500},
    "scd/table10": _R18 | {"partition.alpha": 1.0, "federation.participation": {0.1, 0.2}},
    "scd/figure3": _R18 | {"federation.rounds": 300, "federation.new_clients": 20, "method.fine_tune_epochs": {5, 10}},
    "scd/forms": _R18 | _ALPHAS,
    "plgu/table1-cifar10": _P10 | _C,
    "plgu/table1-cifar100": _P100 | _C,
    "plgu/table1-tinyimagenet": _TINY,
    "plgu/table2-cifar10": _P10 | _C,
    "plgu/table2-cifar100": _P100 | _C,
    "plgu/table2-tinyimagenet": _TINY,
    "plgu/table3": {k: v for k, v in _P10.items() if "epochs" not in k}
    | {
        "federation.participation": 0.1,
        "method.plgu-lf.local_epochs": {1, 5, 10},
        "method.plgu-grep.head_epochs": {1, 5, 10},
    },
    "plgu/table4": _P10 | {"federation.participation": 0.1, "method.PLGU.rho": {0.05, 0.1, 0.5}},
    "plgu/figure5": _P10 | {"federation.participation": 0.1, "method.plgu-lf.personal_layers": {0, 1, 5, 10, 23, 41}},
    "persfl/table2-ds1": _persfl("cifar10", "ds1", _rounds(50, 50, 50, 800, 800)),
    "persfl/table2-ds2": _persfl("cifar10", "ds2", _rounds(25, 25, 25, 1000, 800)),
    "persfl/table2-ds3": _persfl("cifar10", "ds3", _rounds(100, 50, 100, 800, 1000)),
    "persfl/table3-ds1": _persfl("mnist", "ds1", _rounds(100, 100, 100, 800, 800)),
    "persfl/table3-ds2": _persfl("mnist", "ds2", _rounds(50, 25, 50, 800, 800)),
    "persfl/table3-ds3": _persfl("mnist", "ds3", _rounds(100, 100, 100, 800, 800)),
    **{
        f"persfl/table{table}-{data}": _persfl(data, "", {}) | {"partition.name": {"ds1", "ds2", "ds3"}}
        for table in (4, 6)
        for data in ("cifar10", "mnist")
    },
}


# PerAda's line 18 and objective, and PLGU's (7), weigh clients alike; SCD's p_i and PersFL's FedAvg by samples.
WEIGHTING = {"perada": "equal", "plgu": "equal", "scd": "samples", "persfl": "samples"}


def _id(path: Path) -> str:
    return str(path.relative_to(CONFIGS).with_suffix(""))


def _is(wanted: str, label: str, method: str) -> bool:
    """Whether a number of a method, or of a family of them, is of this one."""
    if wanted == "PLGU":
        return method.startswith("plgu")
    if wanted == "PerAda":
        return label == "perada"
    return wanted.lower() in (label.lower(), method)


def _found(key: str, label: str, experiment: Experiment, configuration: Configuration) -> Any:
    """The value of a number in a run; None where it is not of this one."""
    sections = experiment.sections()
    if key == "clients a round":
        return round(sections["federation"]["participation"] * sections["partition"]["clients"])
    if key == "seeds":
        return len(configuration.seeds or ())
    if key == "partition seed":
        return "seed" in sections["partition"]
    if key in ("metric", "statistic"):
        return getattr(configuration, key)
    section, _, rest = key.partition(".")
    wanted, _, option = rest.rpartition(".")
    if wanted and not _is(wanted, label, experiment.method):
        return None
    return sections[section].get(option)


@pytest.mark.parametrize("path", PAPER, ids=_id)
def test_every_number_of_the_paper_is_in_the_file(path: Path) -> None:
    configuration = Configuration.read(path)
    comparison = Comparison(configuration.sections, configuration.methods, (0,))
    every = [pair for point in points(comparison, configuration.sweep) for pair in point.comparison.experiments()]
    weighting = {WEIGHTING[path.parent.name]}
    for label, experiment in every:
        free = not any(option == "weighting" for option, _ in type(experiment.make_method()).refuses)
        assert {experiment.make_method().weighting} == (weighting if free else {"paper"}), label
    for key, expected in EXPECTED[_id(path)].items():
        found = [_found(key, label, experiment, configuration) for label, experiment in every]
        values = {value for value in found if value is not None}
        wanted = expected if isinstance(expected, set) else {expected}
        assert values == wanted or (not values and key.count(".") == 2), f"{key}: {values}, the paper has {wanted}"


def test_every_paper_scale_file_has_its_papers_numbers_here() -> None:
    assert {_id(path) for path in PAPER} == set(EXPECTED)
