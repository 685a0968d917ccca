"""Makes ``pfl_ext.benchmarks`` importable from the source tree too, where an installation has not put it in place."""

import importlib.util
import sys
from pathlib import Path

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
