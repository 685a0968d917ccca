from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

from pfl_ext import _native
from pfl_ext.ops import (
    Prepared,
    StreamingAverage,
    lwsam_perturb_,
    personalization_scores,
    prepare,
    proximal_sgd_step_,
    restore_,
    squared_distance,
    weighted_average,
)
from pfl_ext.ops._declare import OPS

# Empty ones, and some on both sides of the piece that a thread takes (16384).
SHAPES = [(3,), (0,), (), (70, 300), (2, 3, 4, 5), (16384,)]


def tensors(seed, device="cpu", shapes=SHAPES):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def views(flat, shapes=SHAPES):
    """The same shapes one after the other in one vector."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def steps(params, grads, anchors, buffers, ready=list):
    """Three steps with momentum and one without."""
    given = [ready(x) for x in (params, grads, anchors, buffers)]
    for first in (True, False, False):
        proximal_sgd_step_(*given[:3], 0.1, 0.5, 0.9, 0.01, momentum_buffers=given[3], first=first)
    proximal_sgd_step_(*given[:2], [], 0.2, 0.0)


def test_steps_of_prepared_lists_have_the_bits_of_other_steps(device):
    expected = [tensors(seed, device) for seed in range(4)]
    actual = copy.deepcopy(expected)
    steps(*expected)
    steps(*actual, ready=prepare)
    assert all(same(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("ready", [list, prepare])
def test_views_of_flat_vectors_are_stepped_with_the_same_bits(device, ready):
    expected = [tensors(seed, device) for seed in range(4)]
    flat = [torch.cat([x.flatten() for x in some]) for some in expected]
    around = [torch.cat([x, torch.full((5,), 7.0, device=device)]) for x in flat]
    steps(*expected)
    steps(*(views(x[: flat[0].numel()]) for x in around), ready=ready)
    for x, some in zip(around, expected, strict=True):
        assert torch.equal(x[:-5], torch.cat([y.flatten() for y in some]))
        assert bool((x[-5:] == 7).all())  # nothing past the end


def test_perturbation_of_prepared_lists_has_the_same_bits_and_is_undone(device):
    expected, grads = tensors(0, device), tensors(1, device)
    actual = prepare(copy.deepcopy(expected))
    before = copy.deepcopy(expected)
    lwsam_perturb_(expected, grads, rho=0.3)
    backup = lwsam_perturb_(actual, prepare(grads), rho=0.3)
    assert same(actual, expected)
    restore_(actual, backup)
    assert same(actual, before)


def test_a_perturbation_does_not_depend_on_where_tensors_lie(device):
    apart, grads = tensors(0, device), tensors(1, device)
    beside = views(torch.cat([x.flatten() for x in apart]))
    beside_grads = views(torch.cat([x.flatten() for x in grads]))
    lwsam_perturb_(apart, grads, rho=0.3)
    lwsam_perturb_(prepare(beside), prepare(beside_grads), rho=0.3)
    assert same(apart, beside)


def test_other_memory_behind_a_prepared_tensor_is_noticed():
    params, grads = prepare([torch.nn.Parameter(torch.zeros(3)), torch.zeros(2)]), prepare(tensors(0, shapes=[3, 2]))
    proximal_sgd_step_(params, grads, [], 1.0, 0.0)
    old = params[0].data
    params[0].data = torch.ones(3)
    grads[1].set_(torch.full((2,), 5.0))
    kept = old.clone()
    proximal_sgd_step_(params, grads, [], 1.0, 0.0)
    assert torch.equal(params[0].detach(), 1 - grads[0])
    assert torch.equal(old, kept)
    assert params[1].tolist() == pytest.approx([-g - 5 for g in tensors(0, shapes=[3, 2])[1].tolist()])


def test_another_shape_order_or_type_of_a_prepared_tensor_is_noticed():
    params, grads = prepare(tensors(0, shapes=[(4, 4), (2,)])), prepare(tensors(1, shapes=[(4, 4), (2,)]))
    proximal_sgd_step_(params, grads, [], 0.5, 0.0)
    grads[0].data = grads[0].data.t()
    expected = params[0] - 0.5 * grads[0]
    proximal_sgd_step_(params, grads, [], 0.5, 0.0)
    assert torch.equal(params[0], expected)

    grads[1].resize_(3)
    before = [p.clone() for p in params]
    with pytest.raises(ValueError, match=r"tensor 1 of grads is float32 \[3\] on cpu, of params float32 \[2\]"):
        proximal_sgd_step_(params, grads, [], 0.5, 0.0)
    grads[1].resize_(2)
    params[0].data = params[0].data.double()
    with pytest.raises(ValueError, match="tensor 0 of grads is float32"):
        proximal_sgd_step_(params, grads, [], 0.5, 0.0)
    assert same([params[0].float(), params[1]], before)


def test_prepared_lists_that_do_not_fit_are_refused_as_others_are():
    params, grads = prepare(tensors(0)), prepare(tensors(1)[:-1])
    before = copy.deepcopy(params.tensors)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{len(grads)} grads for {len(params)} params"):
            proximal_sgd_step_(params, grads, [], 0.1, 0.0)
    with pytest.raises(ValueError, match="lr is nan"):
        proximal_sgd_step_(params, prepare(tensors(1)), [], float("nan"), 0.0)
    shared = torch.zeros(4)
    with pytest.raises(ValueError, match="overlap in memory"):
        proximal_sgd_step_(prepare([shared[:3]]), prepare([shared[1:]]), [], 0.1, 0.0)
    assert same(params, before)


def test_prepared_beside_other_lists(device):
    params, grads = tensors(0, device), tensors(1, device)
    expected = copy.deepcopy(params)
    proximal_sgd_step_(expected, grads, expected[:0], 0.1, 0.0)
    for given in ((prepare(copy.deepcopy(params)), grads), (copy.deepcopy(params), prepare(grads))):
        proximal_sgd_step_(*given, [], 0.1, 0.0)
        assert same(given[0], expected)


def test_a_changed_number_is_not_taken_for_the_last_one():
    params, grads = prepare([torch.zeros(2)]), prepare([torch.ones(2)])
    for lr in (1.0, 2.0, 1.0):
        proximal_sgd_step_(params, grads, [], lr, 0.0)
    other = prepare([torch.full((2,), 10.0)])
    proximal_sgd_step_(params, other, [], 1.0, 0.0)
    assert params[0].tolist() == [-14.0, -14.0]


def test_autograd_learns_of_a_prepared_step():
    params, grads = prepare([torch.nn.Parameter(torch.ones(2))]), prepare([torch.ones(2)])
    loss = (params[0] ** 2).sum()
    proximal_sgd_step_(params, grads, [], 1.0, 0.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert torch.is_grad_enabled()


def test_other_functions_take_prepared_lists_like_any():
    a, b = tensors(0), tensors(1)
    assert torch.equal(squared_distance(prepare(a), prepare(b)), squared_distance(a, b))
    assert torch.equal(personalization_scores(prepare(a), prepare(b)), personalization_scores(a, b))
    assert same(weighted_average([prepare(a), prepare(b)], [1, 3]), weighted_average([a, b], [1, 3]))
    averages = StreamingAverage(), StreamingAverage()
    for client in (a, b, b):
        averages[0].add(client)
        averages[1].add(prepare(client))
    assert same(averages[0].result(), averages[1].result())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixed", [False, True])
def test_prepared_clients_are_averaged_to_the_same_bits(device, dtype, mixed):
    clients = [[x.to(dtype) for x in tensors(seed, device)] for seed in range(5)]
    ready = [c if mixed and i == 2 else prepare(c) for i, c in enumerate(clients)]
    average, expected = StreamingAverage(), StreamingAverage()
    for samples, (client, prepared) in enumerate(zip(clients, ready, strict=True), 1):
        expected.add(client, samples)
        average.add(prepared, samples)
    assert same(average.result(), expected.result())
    assert same(weighted_average(ready, [1, 2, 3, 4, 5]), weighted_average(clients, [1, 2, 3, 4, 5]))
    # As they come in another form, which is looked at more closely.
    assert same(weighted_average(ready, [1, 2, 3, 4, 5]), weighted_average(tuple(clients), [1, 2, 3, 4, 5]))


@pytest.mark.skipif(_native.isa() is None, reason="needs the CPU library")
def test_tickets_stand_for_clients_in_the_op_itself():
    clients, weights = [tensors(seed) for seed in range(3)], torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    ready = [prepare(client) for client in clients]
    out, expected = tensors(3), tensors(4)
    OPS["weighted_average_"](expected, [x for client in clients for x in client], weights)
    OPS["weighted_average_"](out, [client.ticket for client in ready], weights)
    assert same(out, expected)
    gone = prepare(tensors(0)).ticket
    with pytest.raises(RuntimeError, match="a prepared list is gone"):
        OPS["weighted_average_"](out, [gone, gone, gone], weights)
    assert same(out, expected)


def test_prepared_clients_that_do_not_fit_are_refused():
    clients = [prepare(tensors(seed)) for seed in range(2)]
    with pytest.raises(ValueError, match="client 2"):
        weighted_average([*clients, prepare([torch.zeros(4), *clients[0][1:]])])
    average = StreamingAverage()
    for client in clients:
        average.add(client)
    with pytest.raises(ValueError, match=r"of client 1 is float32 \[4\]"):
        average.add(prepare([torch.zeros(4), *clients[0][1:]]))
    assert same(average.result(), weighted_average(clients))


def test_a_compiled_step_of_prepared_lists_is_the_same():
    expected, grads = tensors(0, shapes=[(3,), (2, 2)]), tensors(1, shapes=[(3,), (2, 2)])
    params, prepared = prepare(copy.deepcopy(expected)), prepare(grads)
    proximal_sgd_step_(expected, grads, [], 0.1, 0.0)

    def step():
        proximal_sgd_step_(params, prepared, [], 0.1, 0.0)

    torch.compile(step, backend="eager")()
    assert same(params, expected)


def test_a_mode_that_looks_at_ops_sees_the_tensors():
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((str(func), [x.shape for x in args[0]]))
            return func(*args, **(kwargs or {}))

    params, grads = prepare(tensors(0)), prepare(tensors(1))
    with Watch():
        proximal_sgd_step_(params, grads, [], 0.1, 0.0)
    assert seen == [("pfl_ext.proximal_sgd_step_.default", [torch.Size(s) for s in SHAPES])]


def test_prepared_is_read_like_a_tuple_and_prepared_once():
    given = tensors(0)
    prepared = prepare(x for x in given)
    assert isinstance(prepared, Prepared)
    assert prepare(prepared) is prepared
    assert len(prepared) == len(given)
    assert all(a is b for a, b in zip(prepared, given, strict=True))
    assert prepared[-1] is given[-1]
    assert prepared[1:3] == given[1:3]
    assert len(prepare([])) == 0


def test_a_copy_of_a_prepared_list_is_of_its_own_tensors():
    params, grads = prepare([torch.zeros(2)]), prepare([torch.ones(2)])
    copied = copy.deepcopy(params)
    proximal_sgd_step_(copied, grads, [], 1.0, 0.0)
    assert params[0].tolist() == [0.0, 0.0]
    assert copied[0].tolist() == [-1.0, -1.0]


def test_what_is_no_list_of_tensors_is_refused():
    with pytest.raises(TypeError, match="tensors is float32"):
        prepare(torch.zeros(2))
    with pytest.raises(TypeError, match="tensor 1 is a float, not a tensor"):
        prepare([torch.zeros(2), 1.0])


@pytest.mark.skipif(_native.isa() is None, reason="needs the CPU library")
def test_the_tensors_of_a_prepared_list_live_as_long_as_it_does():
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)
    prepared, grads = prepare([tensor]), prepare([torch.ones(3)])
    for _ in range(2):
        proximal_sgd_step_(prepared, grads, [], 0.1, 0.0)
    ticket = prepared.ticket
    gc.disable()  # it is gone at once, not when garbage is collected
    try:
        del tensor
        assert gone() is not None
        del prepared
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(RuntimeError, match="Long"):
        OPS["proximal_sgd_step_"]([ticket], [], [ticket], [], 0.1, 0.0, 0.0, 0.0, 0.0, False, False, False)


@pytest.mark.parametrize("words", [[0, 1], [1, 2], [2**62, 1]])
def test_somebodys_integers_are_no_ticket(words):
    kept = prepare([torch.zeros(3)])
    with pytest.raises(ValueError, match="int64"):
        proximal_sgd_step_([torch.tensor(words)], [torch.tensor(words)], [], 0.1, 0.0)
    with pytest.raises((RuntimeError, ValueError), match="the call is"):
        OPS["proximal_sgd_step_again_"](torch.tensor([words[0], *range(12)]))
    assert kept[0].tolist() == [0, 0, 0]
