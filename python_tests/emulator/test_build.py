"""The build script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


def test_a_missing_compiler_is_named(emulator_build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(emulator_build.CompilerMissing, match="tried no-such-compiler; install g"):
        emulator_build.build()


def test_an_unknown_variant_is_named(emulator_build: ModuleType) -> None:
    with pytest.raises(ValueError, match="unknown variant 'fast': choose one of plain, sanitized, ucontext"):
        emulator_build.build("fast")


def test_a_build_that_is_up_to_date_compiles_nothing(
    emulator: ModuleType, emulator_build: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    variant = os.environ.get("PFL_EMULATOR_VARIANT", "plain")
    path = emulator_build.build(variant, verbose=True)
    assert str(path) == emulator.__file__
    assert "no work to do" in capsys.readouterr().out


def test_the_sanitized_variant_asks_for_its_runtime(
    emulator_build: ModuleType, run_sanitized: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    with pytest.raises(RuntimeError, match=r"start Python with LD_PRELOAD=.*libasan.*libstdc"):
        emulator_build.load.__wrapped__("sanitized")


def test_the_command_line_explains_itself(emulator_build: ModuleType) -> None:
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("build.py")), "--help"], capture_output=True, text=True
    )
    assert result.returncode == 0
    assert all(variant in result.stdout for variant in emulator_build.VARIANTS)
