from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from example_files import EXAMPLES, load_file

HERE = Path(__file__).parent


class Simulated(NamedTuple):
    """What came of the one simulation."""

    code: ModuleType
    """Its script."""
    found: dict[str, Any]
    tensors: dict[str, Any]
    folder: Path
    log: str


@pytest.fixture(scope="session")
def flower_environment() -> dict[str, str]:
    """Of processes of Flower: none of them calls home."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ,
        "PATH": path,
        # The package of these tests, where that is not the installed one.
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory, flower_environment: dict[str, str]) -> Simulated:
    from safetensors.torch import load_file as load_tensors

    folder = tmp_path_factory.mktemp("simulation")
    command = [sys.executable, str(HERE / "in_simulation.py"), str(folder)]
    done = subprocess.run(
        command, cwd=folder, env=flower_environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((folder / "found.json").read_text())
    code = load_file(HERE / "in_simulation.py")
    return Simulated(code, found, load_tensors(folder / "found.safetensors"), folder, done.stderr + done.stdout)
