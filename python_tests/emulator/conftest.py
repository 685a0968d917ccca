from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

RunSanitized = Callable[[str], "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def run_sanitized(emulator_build: ModuleType) -> RunSanitized:
    """Runs Python code that sees the sanitized emulator as `emulator`, in a process of its own: a finding ends it."""
    try:
        environment = emulator_build.sanitizer_environment()
        emulator_build.build("sanitized")
    except emulator_build.CompilerMissing as error:
        pytest.skip(str(error))
    preamble = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import build, numpy as np\n"
        "emulator = build.load('sanitized')\n"
        "selftest = emulator.selftest\n"
    )

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", preamble + code],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run
