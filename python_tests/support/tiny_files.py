"""Configuration files at a tiny size: their methods and variants on a few samples, in networks of a few weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pfl_ext.comparison import Comparison, method_of, variant
from pfl_ext.sections import method_options

__all__ = ["tiny"]

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


def tiny(comparison: Comparison, folder: Path | None = None) -> Comparison:
    """The same methods and variants on a few samples of four clients, for one round.

    Args:
        comparison: of a configuration file.
        folder: for data of made-up samples in the place of the file's; None: some of the file's own.
    """
    sections = {name: dict(table) for name, table in comparison.sections.items()}
    domains = "abcd" if sections["partition"].get("name") == "by_domain" else ""
    for name in ("name", "auxiliary"):
        source = sections["data"].get(name, "server")
        if folder is not None and source != "server":
            path = folder / f"{name}.npz"
            sections["data"][name] = _made_up(SHAPES.get(source, (64, 64, 3)), path, domains if name == "name" else "")
    for name in ("train_samples", "test_samples", "auxiliary_samples"):
        sections["data"].pop(name, None)
    if folder is None:  # as many as the data of paper_data have at least
        few = sections["network"].get("name") == "resnet18"  # whose convolutions take long
        sections["data"] |= {"train_samples": 120 if few or domains else 320}
        sections["data"] |= {} if domains else {"test_samples": 60}
        sections["data"] |= {"auxiliary_samples": 10} if "auxiliary" in sections["data"] else {}
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
