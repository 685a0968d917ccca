"""Faults that the sanitizers find. A finding ends the process, so each runs in its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

RunSanitized = Callable[[str], "subprocess.CompletedProcess[str]"]

# What is wrong, the faulty call, its correct twin, and what the report says.
FAULTS = {
    "read past the end of global memory": (
        "selftest.read_at(np.zeros(5, np.float32), 5)",
        "selftest.read_at(np.zeros(5, np.float32), 4)",
        ["heap-buffer-overflow", "read_at"],
    ),
    "read before the start of global memory": (
        "selftest.read_at(np.zeros(5, np.float32), -1)",
        "selftest.read_at(np.zeros(5, np.float32), 0)",
        ["heap-buffer-overflow", "read_at"],
    ),
    "write past the end of global memory": (
        "selftest.write_at(np.zeros(1000, np.float32), 1000)",
        "selftest.write_at(np.zeros(1000, np.float32), 999)",
        ["heap-buffer-overflow", "write_at"],
    ),
    "dynamic shared memory too small": (
        "selftest.reverse_blocks(np.zeros(64), 32, 31 * 8)",
        "selftest.reverse_blocks(np.zeros(64), 32, 32 * 8)",
        ["heap-buffer-overflow", "reverse_blocks"],
    ),
    "static shared memory overrun": (
        "selftest.write_static_shared_at(8)",
        "selftest.write_static_shared_at(7)",
        ["index 8 out of bounds for type 'float [8]'", "selftest.cpp"],
    ),
    "local array overrun": (
        "selftest.read_local_array_at(4)",
        "selftest.read_local_array_at(3)",
        ["stack-buffer-overflow", "read_local_array_at"],
    ),
    "misaligned vector access": (
        "selftest.copy_vector(np.zeros(8, np.float32), 1, False)",
        "selftest.copy_vector(np.zeros(8, np.float32), 4, False)",
        ["misaligned address", "float4", "selftest.cpp"],
    ),
    "integer overflow": (
        "selftest.multiply_integers(1 << 20, 1 << 20)",
        "selftest.multiply_integers(1 << 20, 1 << 10)",
        ["signed integer overflow", "selftest.cpp"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported(run_sanitized: RunSanitized, fault: str) -> None:
    result = run_sanitized(FAULTS[fault][0])
    assert result.returncode != 0
    for expected in FAULTS[fault][2]:
        assert expected in result.stderr


@pytest.mark.parametrize("fault", FAULTS)
def test_its_correct_twin_is_not(run_sanitized: RunSanitized, fault: str) -> None:
    result = run_sanitized(FAULTS[fault][1])
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_an_error_in_a_kernel_is_no_fault_of_the_emulator(run_sanitized: RunSanitized) -> None:
    code = """
for seed in range(20):
    emulator.set_seed(seed)
    for fail in (lambda: selftest.fail_with_live_objects(True), lambda: selftest.exit_before_barrier(3, 64)):
        try:
            fail()
        except emulator.EmulatorError:
            continue
        raise AssertionError("no error")
print("survived")
"""
    result = run_sanitized(code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "survived\n", "")


def test_a_misaligned_access_with_a_cache_hint_is_reported_in_every_build(emulator: ModuleType) -> None:
    x = np.arange(8, dtype=np.float32)
    assert emulator.selftest.copy_vector(x, 4, True) == [4, 5, 6, 7]
    with pytest.raises(emulator.EmulatorError, match=r"__ldg at csrc/.*misaligned address: .* not a multiple of 16"):
        emulator.selftest.copy_vector(x, 1, True)
