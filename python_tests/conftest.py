from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

import pytest

if "FAKEGPU_BUILD" in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    # On a simulated GPU (`make gpu-check`): it was started in the process that starts this one, and must be here too,
    # before anything asks for torch's devices.
    import fakegpu

    fakegpu.start()

import torch

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device_type(request: pytest.FixtureRequest) -> str:
    """Each device there is, once: the CPU's kernels with the instruction set that is taken by default."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def emulator_build() -> ModuleType:
    """The build script of the emulator."""
    # By path: in pytest's importlib mode the folders of tests are no packages.
    spec = importlib.util.spec_from_file_location("emulator_build", Path(__file__).parent / "emulator" / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def emulator(emulator_build: ModuleType) -> ModuleType:
    """The CUDA kernels, executed on the host. PFL_EMULATOR_VARIANT chooses how they are compiled."""
    try:
        module = emulator_build.load(os.environ.get("PFL_EMULATOR_VARIANT", "plain"))
    except emulator_build.CompilerMissing as error:
        pytest.skip(str(error))
    assert isinstance(module, ModuleType)
    return module


@pytest.fixture(params=range(4), ids=lambda seed: f"order{seed}")
def reordered_emulator(emulator: ModuleType, request: pytest.FixtureRequest) -> ModuleType:
    """The emulator with several orders of blocks and threads, one after another."""
    emulator.set_seed(request.param)
    return emulator
