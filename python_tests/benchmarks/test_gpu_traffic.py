"""What the CUDA kernels read and write, launch and wait for, counted on a simulated GPU (`make gpu-check`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pfl_ext.benchmarks import gpu_model
from pfl_ext.benchmarks.gpu_cases import GpuCase, distillation_cases, list_cases, spectral_cases

pytestmark = pytest.mark.skipif(not gpu_model.simulated(), reason="traffic is counted on a simulated GPU alone")

_MOST = 1.03
_MOST_LONG = 1.1  # rows of 32,000 classes


def _check(cases: Iterator[GpuCase], most: float = _MOST) -> None:
    for case in cases:
        found = gpu_model.count(case)
        what = f"{case.op}, {case.size}, {case.dtype}: {found}"
        assert found.local_bytes == 0, what
        assert found.waits == (case.op == "all_finite"), what  # whose answer is Python's
        if found.launches:
            assert found.read_ratio <= most, what
            assert found.write_ratio <= most, what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_lists_on_cuda_are_read_and_written_once_by_whole_sectors(dtype: torch.dtype) -> None:
    _check(list_cases("adapters", dtype, "cuda"))


def test_half_spectra_on_cuda_are_read_and_written_by_whole_sectors() -> None:
    _check(spectral_cases(4, 62_006, "cuda"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "classes", "most"), [(16_384, 10, _MOST), (2_048, 100, _MOST), (64, 1_000, _MOST), (4, 32_000, _MOST_LONG)]
)
def test_logits_on_cuda_are_read_and_gradients_written_once(
    rows: int, classes: int, most: float, dtype: torch.dtype
) -> None:
    _check(distillation_cases(rows, classes, dtype, "cuda"), most)


def test_a_multi_label_count_on_cuda_is_the_work_of_many_blocks() -> None:
    import fakegpu

    from pfl_ext.ops import distillation_loss

    student, teacher, target = (torch.rand(4_096, 14, device="cuda") for _ in range(3))
    with fakegpu.Recording() as record:
        distillation_loss(student, teacher, target.round(), 0.5, 2.0, multilabel=True)
    counting = [launch for launch in record.launches if "count_kernel" in launch.name]
    assert counting and counting[0].grid[0] == -(-4_096 * 14 // 4_096)


def test_the_table_is_marked_as_an_estimate() -> None:
    counted = [gpu_model.count(case) for case in spectral_cases(1, 1_000, "cuda")]
    assert gpu_model.markdown(counted).startswith("**An estimate, not a measurement.**")
