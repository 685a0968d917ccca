"""The files in configs/: each can be read, and each scaled-down one runs, at a tiny size on data of its shape."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tiny_files import tiny

from pfl_ext.comparison import Comparison, points
from pfl_ext.configuration import Configuration

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.rglob("*.toml"))
SMALL = [path for path in FILES if path.stem.endswith("-small")]
EXPERIMENTS = sorted((CONFIGS.parent / "experiments").glob("*.toml"))


def _id(path: Path) -> str:
    return str(path.relative_to(CONFIGS.parent).with_suffix("")).removeprefix("configs/")


def _read(path: Path) -> tuple[Comparison, Mapping[str, Any]]:
    configuration = Configuration.read(path)
    comparison = Comparison(configuration.sections, configuration.methods, configuration.seeds)
    return comparison, configuration.sweep


@pytest.mark.parametrize("path", [*FILES, *EXPERIMENTS], ids=_id)
def test_every_file_describes_runs_that_can_be_made(path: Path) -> None:
    comparison, sweep = _read(path)
    assert path.read_text(encoding="utf-8").startswith("#"), "a comment on top says what of it is the paper's"
    for point in points(comparison, sweep):
        assert point.comparison.experiments()


@pytest.mark.parametrize("path", FILES, ids=_id)
def test_every_paper_scale_file_has_a_scaled_down_twin(path: Path) -> None:
    twin = path.with_name(path.stem.removesuffix("-small") + ".toml")
    assert path.with_name(f"{twin.stem}-small.toml").exists() and twin.exists()


@pytest.mark.parametrize("path", [*SMALL, *EXPERIMENTS], ids=_id)
def test_every_scaled_down_file_runs_at_a_tiny_size(path: Path, tmp_path: Path) -> None:
    comparison, sweep = _read(path)
    point = points(tiny(comparison, tmp_path), {name: values[:1] for name, values in sweep.items()})[0]
    for label, experiment in point.comparison.experiments():
        last = experiment.make(*experiment.make_data()).run()[-1]
        assert any("accuracy" in splits["test"] for splits in last["models"].values()), label


def test_no_seed_that_settings_are_chosen_on_is_one_of_those_reported() -> None:
    seeds = {path.stem: set(_read(path)[0].seeds or ()) for path in EXPERIMENTS}
    choosing = [of for name, of in seeds.items() if "-choose-" in name]
    reported = [of for name, of in seeds.items() if "-choose-" not in name]
    reported += [set(_read(path)[0].seeds or ()) for path in SMALL]
    assert choosing and reported
    assert not set.union(*choosing) & set.union(*reported)
