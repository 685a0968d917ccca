"""What the GPU's race and model run: every op with a CUDA kernel, beside opponents that compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pfl_ext.benchmarks.gpu_cases import UNLIKE, GpuCase, distillation_cases, list_cases, spectral_cases
from pfl_ext.ops._declare import OPS

# Parts of a step that has opponents as a whole.
_PARTS = {"spectral_teacher", "half_spectrum_divergence_"}


def _cases(device: str) -> Iterator[GpuCase]:
    return chain(
        list_cases("adapters", torch.float32, device),
        spectral_cases(2, 1_000, device),
        distillation_cases(6, 10, torch.float32, device),
    )


def _result(case: GpuCase, run: Callable[[], Any]) -> list[Tensor]:
    """What one call gives: what it has written, else what it returns. All is as it was before."""
    before = [x.clone() for x in case.written]
    found = run()
    result = [x.clone() for x in case.written]
    for x, old in zip(case.written, before, strict=True):
        x.copy_(old)
    if result:
        return result
    return [torch.as_tensor(x).clone() for x in (found if isinstance(found, list | tuple) else [found])]


def test_every_opponent_gives_what_the_op_gives(device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whole graphs, without the compiler of kernels: it takes minutes, and a simulated GPU has none.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager", fullgraph=True))
    for case in _cases(device_type):
        assert case.opponents or case.op in _PARTS, case.op
        expected = _result(case, case.run)
        for name, run in case.opponents.items():
            found = _result(case, run)
            if name == UNLIKE or case.op == "StreamingAverage.add":  # whose sums are its own
                continue
            for x, y in zip(found, expected, strict=True):
                assert x.device == y.device, (case.op, name)
                assert torch.allclose(x, y.to(x.dtype), rtol=1e-4, atol=1e-6), (case.op, name)


def test_no_opponent_mixes_devices() -> None:
    """A simulated GPU lets them: it computes torch's ops on the host. Torch's fake tensors do not."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for case in list_cases("adapters", torch.float32, "cuda"):
            if case.op != "all_finite" and "_foreach" in case.opponents:  # whose answer is a value
                case.opponents["_foreach"]()


def test_every_op_with_a_cuda_kernel_is_counted_and_raced() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for case in _cases("cpu"):
            case.run()
    meant = {name for name, op in OPS.items() if "cuda" not in op.plain_on}
    # The kernel of weighted_average_, for clients that are differentiated; what a gradient on a CPU does without.
    meant -= {"weighted_average", "distillation_scale_"}
    assert {event.key for event in seen.key_averages()} >= {f"pfl_ext::{name}" for name in meant}
