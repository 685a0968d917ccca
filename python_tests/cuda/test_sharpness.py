"""csrc/cuda/kernels/sharpness.cuh, executed by the emulator and compared with the plain-torch reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from emulated_memory import DTYPES, arrays, clones, name, random_tensors, same_bits

from pfl_ext.ops._declare import OPS

CHUNK = 8192
# Around a chunk, a block's pass with the widest and the narrowest vector, a vector, and nothing.
SIZES = [0, 1, 7, 8, 9, 255, 257, 1025, 2047, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 0]
GROUPS = [t % 4 for t in range(len(SIZES))]
SCORES = [0.5, 0.25, 0.0, 2.0]


def run(emulator, params, grads, scores=(), groups=None, rho=0.1, p=2.0, literal=False, per_layer=False):
    backups = [torch.full_like(x, 7) for x in params]
    groups = list(range(len(params))) if groups is None else groups
    emulator.perturb(
        name(params[0].dtype),
        arrays(params),
        arrays(grads),
        arrays(backups),
        list(scores),
        groups,
        rho,
        p,
        literal,
        per_layer,
    )
    return backups


def reference(params, grads, scores, groups, rho, p, literal, per_layer):
    moved = clones(params)
    memory = torch.empty(sum(-(-x.nbytes // 64) * 64 for x in params), dtype=torch.uint8)
    vector = torch.tensor(scores, dtype=torch.float64) if len(scores) else None
    OPS["lwsam_perturb_"].reference(moved, memory, grads, vector, groups, max(groups) + 1, rho, p, literal, per_layer)
    return moved


def assert_agree(actual, expected, before, p):
    """The sums' order differs, so the scale may: by a unit of the accumulate type; half types may then round up."""
    for a, e, b in zip(actual, expected, before, strict=True):
        unit = torch.finfo(a.dtype).eps
        steps = (e.double() - b.double()).abs()
        relative = 2.0**-40 if a.dtype == torch.float64 else 2.0**-21 if p in (2.0, math.inf) else 2.0**-19
        bound = relative * steps + unit * (e.double().abs() + steps)
        assert bool(((a.double() - e.double()).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("offset", "per_layer"), [(0, True), (1, False)])
@pytest.mark.parametrize(
    ("p", "literal"), [(2.0, False), (2.0, True), (3.0, False), (1.25, True), (1.0, False), (math.inf, False)]
)
def test_the_perturbation_agrees_with_the_reference_over_chunk_boundaries(
    emulator, dtype, offset, p, literal, per_layer
):
    params, grads = random_tensors(SIZES, dtype, 0, offset), random_tensors(SIZES, dtype, 1, offset)
    before = clones(params)
    expected = reference(params, grads, SCORES, GROUPS, 0.1, p, literal, per_layer)
    backups = run(emulator, params, grads, SCORES, GROUPS, 0.1, p, literal, per_layer)
    assert same_bits(backups, before)
    assert_agree(params, expected, before, p)
    if math.isinf(p):
        assert same_bits(params, expected)
    emulator.restore(name(dtype), arrays(params), arrays(backups))
    assert same_bits(params, before)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0])
def test_a_zero_gradient_changes_nothing_and_nan_spreads(emulator, p):
    for value, expected in ((0.0, "same"), (math.inf, "same"), (math.nan, "nan")):
        params, grads = random_tensors([CHUNK + 5, 3], torch.float32, 0), [torch.zeros(CHUNK + 5), torch.ones(3)]
        grads[0][CHUNK + 1] = value
        before = clones(params)
        run(emulator, params, grads, p=p, per_layer=True)
        assert same_bits(params[:1], before[:1]) if expected == "same" else bool(params[0].isnan().all())
        assert bool(params[1].isfinite().all()) and not same_bits(params[1:], before[1:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1])
def test_scores_agree_with_the_reference(emulator, dtype, offset):
    a, b = random_tensors(SIZES, dtype, 0, offset), random_tensors(SIZES, dtype, 1, offset)
    expected = OPS["personalization_scores"].reference(a, b, GROUPS, 4)
    # Sums of up to 2**16 float64 terms in another order.
    torch.testing.assert_close(
        torch.tensor(emulator.scores(name(dtype), arrays(a), arrays(b), GROUPS, 4), dtype=torch.float64),
        expected,
        rtol=2.0**-36,
        atol=0,
    )


def test_equal_models_give_equal_scores_and_an_empty_layer_none(emulator):
    a = random_tensors([5, 0, 7], torch.float32, 0)
    assert emulator.scores("float32", arrays(a), arrays(clones(a)), [0, 1, 2], 3) == [0.5, 0.0, 0.5]


def test_more_layers_than_a_block_has_threads(emulator):
    a, b = [torch.ones(1) for _ in range(600)], [torch.zeros(1) for _ in range(600)]
    np.testing.assert_allclose(
        emulator.scores("float32", arrays(a), arrays(b), list(range(600)), 600), 1 / 600, rtol=1e-12
    )


def test_order_of_threads_and_blocks_does_not_change_the_bits(emulator):
    for p in (2.0, 3.0):
        results = []
        for seed in range(3):
            emulator.set_seed(seed)
            params, grads = (
                random_tensors([CHUNK + 3, 5], torch.float32, 0),
                random_tensors([CHUNK + 3, 5], torch.float32, 1),
            )
            run(emulator, params, grads, p=p)
            results.append(
                [*params, torch.tensor(emulator.scores("float32", arrays(params), arrays(grads), [0, 1], 2))]
            )
        assert all(same_bits(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    ("tensors", "p", "launches"), [(62, 2.0, 3), (84, 3.0, 3), (584, 2.0, 3), (585, 2.0, 4), (84, math.inf, 1)]
)
def test_at_most_three_launches_for_a_model(emulator, tensors, p, launches):
    # (4091 - 3) // 7 = 584 tensors fit into the arguments of the perturbation.
    params, grads = (
        [torch.zeros(1) for _ in range(tensors)] + [torch.empty(0)],
        [torch.ones(1) for _ in range(tensors)] + [torch.empty(0)],
    )
    emulator.reset_launch_count()
    backups = run(emulator, params, grads, rho=1.0, p=p)
    assert emulator.launch_count() == launches
    emulator.reset_launch_count()
    emulator.restore("float32", arrays(params), arrays(backups))
    assert emulator.launch_count() == 1
    emulator.reset_launch_count()
    emulator.scores("float32", arrays(params), arrays(grads), [0] * len(params), 1)
    assert emulator.launch_count() == 3
