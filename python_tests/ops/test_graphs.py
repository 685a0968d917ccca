"""Ops recorded in a CUDA graph: a replay on new numbers gives the bits of a call."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pfl_ext import ops
from pfl_ext.ops._declare import OPS

_SHAPES = ((5,), (7, 3), (2000,), (0,))
_LOGITS = ((9, 1100),) * 3


def _numbers(*shapes: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def _models(seed: int) -> list[Tensor]:
    """Three models of the same shapes, one after the other."""
    return _numbers(*_SHAPES * 3, seed=seed)


def _parts(x: list[Tensor]) -> tuple[list[Tensor], ...]:
    size = len(_SHAPES)
    return x[:size], x[size : 2 * size], x[2 * size :]


def _perturbed(x: list[Tensor]) -> list[Tensor]:
    params, grads, _ = _parts(x)
    ops.lwsam_perturb_(params, grads, rho=0.1)
    return params


def _restored(x: list[Tensor]) -> list[Tensor]:
    params, grads, _ = _parts(x)
    ops.restore_(params, ops.lwsam_perturb_(params, grads, rho=0.1))
    return params


def _stepped(x: list[Tensor]) -> list[Tensor]:
    params, grads, anchors = _parts(x)
    ops.proximal_sgd_step_(params, grads, anchors, lr=0.1, lam=0.5)
    return params


def _added(x: list[Tensor]) -> list[Tensor]:
    sums, client, _ = _parts(x)
    OPS["accumulate_"](sums, client, 0.5)
    return sums


def _labelled(seed: int) -> list[Tensor]:
    """Logits of a student and a teacher, classes and labels, of which some do not count."""
    student, teacher, noise = _numbers(*_LOGITS, seed=seed)
    return [student, teacher, noise[:, 0].sign().long(), noise.sign()]


def _with_labels(x: list[Tensor]) -> list[Tensor]:
    student, teacher, classes, labels = x
    one = ops.distillation_loss(student, teacher, classes, 0.5, 2.0, ignore_index=-1)
    several = ops.distillation_loss(student, teacher, labels, 0.5, 2.0, multilabel=True, ignore_index=-1)
    return [one, several]


def _divergence(x: list[Tensor]) -> list[Tensor]:
    log_q, total = OPS["spectral_teacher"](x[0][:1], 64, 64)
    return [OPS["half_spectrum_divergence_"](x[0], log_q, total, 64, 64, 0, True), x[0], log_q, total]


def _scaled(x: list[Tensor]) -> list[Tensor]:
    OPS["distillation_scale_"](*x)
    return x[:1]


def _averaged(x: list[Tensor]) -> list[Tensor]:
    return OPS["weighted_average"](x, torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64))


def _with_infinity(seed: int) -> list[Tensor]:
    """A model, some of whose numbers are none."""
    return [x.where(x < 2, torch.inf) for x in _numbers(*_SHAPES, seed=seed)]


_CASES: dict[str, tuple[Callable[[int], list[Tensor]], Callable[[list[Tensor]], list[Tensor]]]] = {
    "weighted_average": (_models, _averaged),
    "weighted_average_": (_models, lambda x: ops.weighted_average(list(_parts(x)), [1, 2, 3])),
    "server_update": (_models, lambda x: ops.server_update(_parts(x)[0], list(_parts(x)[1:]), [1, 2], lr=0.5)),
    "accumulate_": (_models, _added),
    "nonfinite": (_with_infinity, lambda x: [OPS["nonfinite"](x)]),
    "personalization_scores": (_models, lambda x: [ops.personalization_scores(*_parts(x)[:2])]),
    "lwsam_perturb_": (_models, _perturbed),
    "restore_": (_models, _restored),
    "proximal_sgd_step_": (_models, _stepped),
    "squared_distance": (_models, lambda x: [ops.squared_distance(*_parts(x)[:2])]),
    "squared_distance_backward": (
        lambda seed: _numbers((), *_SHAPES * 2, seed=seed),
        lambda x: OPS["squared_distance_backward"](x[0], x[1 : 1 + len(_SHAPES)], x[1 + len(_SHAPES) :], True, True),
    ),
    "ensemble_logits": (lambda seed: _numbers(*_LOGITS, seed=seed), lambda x: [ops.ensemble_logits(x)]),
    "ensemble_distillation_loss": (
        lambda seed: _numbers(*_LOGITS, seed=seed),
        lambda x: [ops.ensemble_distillation_loss(x[0], x[1:], temperature=2.0)],
    ),
    "distillation_loss": (_labelled, _with_labels),
    "distillation_scale_": (lambda seed: [*_numbers((9, 1100), (), (), seed=seed)], _scaled),
    "half_spectrum_divergence_": (lambda seed: _numbers((3, 33), seed=seed, dtype=torch.complex64), _divergence),
}


@pytest.mark.parametrize("name", _CASES)
def test_a_replayed_graph_gives_the_bits_of_a_call(name: str, device_type: str) -> None:
    if device_type == "cpu":
        pytest.skip("graphs are CUDA's")
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        pytest.skip("a graph needs torch's caching allocator")
    if name == "nonfinite" and "FAKEGPU_BUILD" in os.environ:
        pytest.skip("its flags are set to zero by torch, and a simulated GPU records no op of torch's")
    given, call = _CASES[name]
    static = [x.to(device_type) for x in given(0)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = call(static)
    for seed in (1, 2):
        fresh = [x.to(device_type) for x in given(seed)]
        for x, y in zip(static, fresh, strict=True):
            x.copy_(y)
        graph.replay()
        for x, y in zip(recorded, call(fresh), strict=True):
            assert torch.equal(x, y)


def test_every_op_with_a_cuda_kernel_is_among_them() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for given, call in _CASES.values():
            call(given(0))
    meant = {f"pfl_ext::{name}" for name, op in OPS.items() if "cuda" not in op.plain_on}
    assert {event.key for event in seen.key_averages()} >= meant
