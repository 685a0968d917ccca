"""Makes ``pfl_ext.benchmarks`` importable in the source tree too, where no installation has put it in place."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pfl_ext

if importlib.util.find_spec("pfl_ext.benchmarks") is None:
    folder = Path(__file__).parents[2] / "benchmarks"
    spec = importlib.util.spec_from_file_location(
        "pfl_ext.benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["pfl_ext.benchmarks"] = package
    spec.loader.exec_module(package)
    pfl_ext.benchmarks = package  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other on a busy machine are all that could make these tests slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
