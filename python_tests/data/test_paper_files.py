"""The paper-scale files of configs/: their data are found in --data-root, in the layout of the real files, and cut."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from paper_data import write_data

from pfl_ext.comparison import Comparison, points

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIGS = Path(__file__).parents[2] / "configs"
PAPER = sorted(path for path in CONFIGS.rglob("*.toml") if not path.stem.endswith("-small"))
# Of one sample: the real data's shape, where images are scaled that of the file.
SHAPES = {
    "mnist": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "cifar100": (3, 32, 32),
    "folder:tiny-imagenet-200": (3, 64, 64),
    "folder:inaturalist-2017@64": (3, 64, 64),
    "folder:OfficeHome@224": (3, 224, 224),
    "chexpert": (3, 64, 64),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("data")
    write_data(made)
    return made


@pytest.mark.parametrize("path", PAPER, ids=lambda path: str(path.relative_to(CONFIGS).with_suffix("")))
def test_every_paper_file_reads_data_of_the_real_layout_from_the_root(
    path: Path, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PFL_EXT_DATA", raising=False)
    config = tomllib.loads(path.read_text(encoding="utf-8"))
    sections = {name: table for name, table in config.items() if isinstance(table, dict)}
    sweep = {name: values for name, values in sections.pop("sweep", {}).items() if name != "data.auxiliary_samples"}
    sections["data"] = {**sections["data"], "root": str(root), "auxiliary_samples": 20}  # root as --data-root sets it
    seen = set()
    for point in points(Comparison(sections, tuple(config["methods"]), (0,)), sweep):
        _, experiment = point.comparison.experiments()[0]
        cut = experiment.partition, tuple(experiment.partition_options.items())
        if cut in seen:
            continue
        seen.add(cut)
        dataset, partition = experiment.make_data()
        assert dataset.input_shape == SHAPES[experiment.data]
        assert partition.clients == experiment.clients
        assert sum(map(len, partition.test)) > 0
        auxiliary = experiment.make_auxiliary(dataset, partition)
        assert (auxiliary is None) == ("auxiliary" not in sections["data"])
        assert list(experiment.make_extra_tests(dataset)) == list(sections["data"].get("extra_tests", {}))
