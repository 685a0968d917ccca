"""The files in configs/: each can be read, and each scaled-down one runs, at a tiny size on data of its shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pfl_ext.comparison import Comparison, method_of, points, variant
from pfl_ext.configuration import Configuration
from pfl_ext.sections import method_options

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.rglob("*.toml"))
SMALL = [path for path in FILES if path.stem.endswith("-small")]
EXPERIMENTS = sorted((CONFIGS.parent / "experiments").glob("*.toml"))
SHAPES = {"mnist": (28, 28), "fashion-mnist": (28, 28), "cifar10": (32, 32, 3), "cifar100": (32, 32, 3)}
# Where a method has the option: no more than this, and what is off stays off.
TINY = {
    "local_epochs": 1,
    "batch_size": 16,
    "personal_epochs": 1,
    "head_epochs": 1,
    "fine_tune_epochs": 1,
    "distill_epochs": 1,
    "kd_steps": 1,
    "kd_batch_size": 4,
}
FIXED = {"local_steps": 1, "temperatures": (1.0,), "lambdas": (0.5,)}


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


def _made_up(shape: tuple[int, ...], path: Path, domains: Sequence[str] = ()) -> str:
    """A file of ten classes with 16 training and 4 test images each, or with 4 in each domain."""
    random = np.random.default_rng(0)
    parts = {f"_{domain}": 4 for domain in domains} or {"_train": 16, "_test": 4}
    arrays = {}
    for part, each in parts.items():
        arrays[f"x{part}"] = random.integers(0, 256, (10 * each, *shape), dtype=np.uint8)
        arrays[f"y{part}"] = np.tile(np.arange(10), each)
    np.savez(path, **arrays)
    return f"npz:{path}"


def _tiny(comparison: Comparison, folder: Path) -> Comparison:
    """The same methods and variants on a few samples of four clients, for one round."""
    sections = {name: dict(table) for name, table in comparison.sections.items()}
    domains = "abcd" if sections["partition"].get("name") == "by_domain" else ""
    for name in ("name", "auxiliary"):
        source = sections["data"].get(name, "server")
        if source != "server":
            path = folder / f"{name}.npz"
            sections["data"][name] = _made_up(SHAPES.get(source, (64, 64, 3)), path, domains if name == "name" else "")
    for name in ("train_samples", "test_samples", "auxiliary_samples"):
        sections["data"].pop(name, None)
    if sections["network"].get("name", "").startswith("resnet"):  # one of 78,000 parameters for one of millions
        sections["network"] |= {"name": "wide-resnet", "depth": 10, "width": 1}
        sections["network"].pop("stem", None)
    cut = sections["partition"]
    cut["clients"] = 4
    if cut.get("server", 0.0) > 0.5:  # a way to use a part of the data
        cut["server"] = 0.0
    late = min(1, sections["federation"].get("new_clients", 0))
    for own in (sections["federation"], *(t for t in sections["federation"].values() if isinstance(t, dict))):
        own.update({"rounds": 1, "workers": 1, "participation": 1.0, "new_clients": late})
    sections.setdefault("method", {})
    for label in comparison.labels:
        known = method_options(method_of(label, sections))
        asked = variant(sections, label)["method"]
        own = {name: min(most, asked.get(name, known[name].default)) for name, most in TINY.items() if name in known}
        own |= {name: value for name, value in FIXED.items() if name in known}
        sections["method"][label] = {**sections["method"].get(label, {}), **own}
    return Comparison(sections, comparison.labels, (0,))


@pytest.mark.parametrize("path", [*SMALL, *EXPERIMENTS], ids=_id)
def test_every_scaled_down_file_runs_at_a_tiny_size(path: Path, tmp_path: Path) -> None:
    comparison, sweep = _read(path)
    point = points(_tiny(comparison, tmp_path), {name: values[:1] for name, values in sweep.items()})[0]
    for label, experiment in point.comparison.experiments():
        last = experiment.make(*experiment.make_data()).run()[-1]
        assert any("accuracy" in splits["test"] for splits in last["models"].values()), label


def test_no_seed_that_settings_are_chosen_on_is_one_of_those_reported() -> None:
    seeds = {path.stem: set(_read(path)[0].seeds or ()) for path in EXPERIMENTS}
    choosing = [of for name, of in seeds.items() if "-choose-" in name]
    reported = [of for name, of in seeds.items() if "-choose-" not in name]
    assert choosing and reported
    assert not set.union(*choosing) & set.union(*reported)
