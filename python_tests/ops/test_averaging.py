from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pfl_ext import _native
from pfl_ext.ops import StreamingAverage, all_finite, server_update, weighted_average
from pfl_ext.ops._declare import OPS

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Around the kernels' block (2048), the thread's bundle (16384), vectors of 4, 8 and 16, and a prime.
SIZES = [0, 1, 3, 7, 8, 9, 2047, 2048, 2049, 16383, 16384, 16385, 40009]
SHAPES = [(0,), (3,), (), (2, 0, 5), (7, 5), (1,), (4, 3, 3, 3), (0, 4)]


def random_clients(count, shapes, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(s, generator=generator).to(dtype).to(device) for s in shapes] for _ in range(count)]


def exact(clients, weights, server=None, lr=1.0):
    """Float64, straight from the definition."""
    total = sum(weights)
    result = []
    for t in range(len(clients[0])):
        start = torch.zeros_like(clients[0][t], dtype=torch.float64) if server is None else server[t].double()
        step = sum(w / total * (c[t].double() - start) for w, c in zip(weights, clients, strict=True))
        result.append(step if server is None else start + lr * step)
    return result


def assert_within_rounding(actual, expected, clients, weights):
    """Rounding of each product and sum in the accumulate type, then one rounding to the storage type."""
    total = sum(map(abs, weights))
    for t, (a, e) in enumerate(zip(actual, expected, strict=True)):
        unit = 2.0**-53 if a.dtype == torch.float64 else 2.0**-24
        scale = sum(abs(w) / total * c[t].double().abs() for w, c in zip(weights, clients, strict=True))
        bound = (len(clients) + 3) * unit * scale
        if a.dtype in (torch.float16, torch.bfloat16):
            # Half a unit in the last place, or of the subnormals' spacing.
            bound = bound + torch.finfo(a.dtype).eps / 2 * (e.abs() + bound) + torch.finfo(a.dtype).smallest_normal
        assert a.shape == e.shape
        assert bool(((a.double() - e).abs() <= bound).all())


def bits(x):
    return x.contiguous().view(
        torch.uint8 if x.element_size() == 1 else {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    )


def assert_same_bits(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert torch.equal(bits(a), bits(e))


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 9])
def test_average_is_within_rounding_of_the_definition(device, dtype, count):
    clients = random_clients(count, [(n,) for n in SIZES], dtype, device)
    weights = [float(c + 1) for c in range(count)]
    assert_within_rounding(weighted_average(clients, weights), exact(clients, weights), clients, weights)


@pytest.mark.parametrize("dtype", FLOATS)
def test_server_update_is_within_rounding_of_the_definition(device, dtype):
    shapes = [(n,) for n in SIZES]
    clients, (server,) = random_clients(5, shapes, dtype, device), random_clients(1, shapes, dtype, device, seed=1)
    weights = [5.0, 1.0, 2.0, 0.0, 3.0]
    new = server_update(server, clients, weights, lr=0.5)
    # The difference to the server takes part in every product: its size bounds the rounding too.
    spread = [[x.double().abs() + s.double().abs() * 4 for x, s in zip(c, server, strict=True)] for c in clients]
    assert_within_rounding(new, exact(clients, weights, server, 0.5), spread, weights)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["weighted_average", "weighted_average_", "server_update_", "accumulate_"])
def test_native_kernel_gives_the_bits_of_the_reference(device, dtype, name):
    shapes = [(n,) for n in SIZES]
    clients = random_clients(6, shapes, dtype, device)
    (server,) = random_clients(1, shapes, dtype, device, seed=1)
    weights = torch.tensor([0.1, 0.2, 0.05, 0.3, 0.15, 0.2], dtype=torch.float64)
    flat = [x for c in clients for x in c]
    op = OPS[name]
    results = []
    for run in (op, op.reference):
        if name == "weighted_average":
            results.append(run(flat, weights))
        elif name == "accumulate_":
            sums = [s.to(torch.float64 if dtype == torch.float64 else torch.float32) for s in copy.deepcopy(server)]
            run(sums, clients[0], 0.3)
            results.append(sums)
        else:
            out = [torch.empty_like(s) for s in server]
            run(*((out, server, flat, weights, 0.7) if name == "server_update_" else (out, flat, weights)))
            results.append(out)
    if device == "cpu" and _native.status()["cpu"].loaded:
        assert op.has_kernel("CPU")
    assert_same_bits(*results)


@pytest.mark.parametrize("dtype", FLOATS)
def test_average_of_extreme_values(device, dtype):
    largest = torch.finfo(dtype).max
    values = [largest, -largest, torch.finfo(dtype).smallest_normal, 0.0, -0.0, torch.finfo(dtype).eps]
    client = [torch.tensor(values, dtype=dtype, device=device)]
    assert torch.equal(weighted_average([client, client])[0], client[0])
    # Half of the smallest subnormal is exact only where the accumulate type is wider; one client needs no halving.
    smallest = [client[0].new_tensor([torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps])]
    copies = 1 if dtype in (torch.float32, torch.float64) else 2
    assert torch.equal(weighted_average([smallest] * copies)[0], smallest[0])


@given(st.integers(0, 4), st.integers(1, 200), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_average_of_2_to_the_k_equal_models_is_the_model(k, size, random):
    values = torch.tensor([random.uniform(-1e3, 1e3) for _ in range(size)])
    # The weight 2**-k is exact; each of the 2**k products and sums rounds once, by a subnormal's spacing at least.
    (result,) = weighted_average([[values]] * 2**k)
    torch.testing.assert_close(result, values, rtol=2**k * 2.0**-24, atol=2**k * 2.0**-149)


def test_a_client_that_did_not_move_leaves_the_server_as_it_was(device):
    (server,) = random_clients(1, [(1001,), (3, 4)], device=device)
    new = server_update(server, [server, server, server], [1, 2, 3], lr=0.37)
    assert_same_bits(new, server)


def test_a_client_of_weight_zero_does_not_count(device):
    clients = random_clients(3, [(100,)], device=device)
    with_it = weighted_average(clients, [1, 0, 3])
    without = weighted_average([clients[0], clients[2]], [1, 3])
    assert torch.equal(with_it[0], without[0])


def test_weights_are_used_as_they_are_without_normalization(device):
    clients = [[torch.tensor([1.0, 2.0], device=device)], [torch.tensor([10.0, 20.0], device=device)]]
    (result,) = weighted_average(clients, [2, -0.5], normalize=False)
    assert result.tolist() == [-3.0, -6.0]


def test_default_weights_are_equal(device):
    clients = [[torch.tensor([1.0], device=device)], [torch.tensor([3.0], device=device)]]
    assert weighted_average(clients)[0].item() == 2.0


def test_more_clients_than_one_gpu_launch_takes(device):
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(2500, 33, generator=generator, dtype=torch.float64).to(device)
    result = weighted_average(matrix)
    torch.testing.assert_close(result, matrix.mean(0), rtol=0, atol=2503 * 2.0**-53 * matrix.abs().mean(0).max().item())


# ---- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bits_do_not_depend_on_threads_or_runs(device, dtype):
    clients = random_clients(7, [(70001,), (13,), (4099, 3)], dtype, device)
    weights = [1, 2, 3, 4, 5, 6, 7]
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4, 1):
            torch.set_num_threads(threads)
            results.append(weighted_average(clients, weights))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_same_bits(results[0], other)


def test_the_bits_do_not_depend_on_how_a_model_is_cut_into_tensors(device):
    (whole,) = zip(*random_clients(5, [(50000,)], device=device), strict=True)
    cuts = [0, 1, 2, 1000, 1000, 17384, 33333, 50000]
    pieces = [[x[a:b] for a, b in itertools.pairwise(cuts)] for x in whole]
    cut = torch.cat(weighted_average(pieces, [1, 2, 3, 4, 5]))
    assert_same_bits([cut], weighted_average([[x] for x in whole], [1, 2, 3, 4, 5]))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bits_do_not_depend_on_the_instruction_set(dtype):
    if len(_native.available_isas()) < 2:
        pytest.skip("this machine and library have only one instruction set")
    clients = random_clients(6, [(5003,), (8,)], dtype)
    before, results = _native.isa(), []
    for isa in _native.available_isas():
        _native.set_isa(isa)
        results.append(weighted_average(clients, [3, 1, 4, 1, 5, 9]))
    _native.set_isa(before)
    for other in results[1:]:
        assert_same_bits(results[0], other)


# ---- forms of input and output ---------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 2)


def trained_nets(count, device="cpu"):
    nets = []
    for c in range(count):
        torch.manual_seed(c)
        net = Net()
        for _ in range(c + 1):
            net.features(torch.randn(2, 3, 8, 8))
        nets.append(net.to(device))
    return nets


def test_modules_state_dicts_and_lists_give_the_same(device):
    nets = trained_nets(3, device)
    from_modules = weighted_average(nets, [1, 2, 3])
    from_dicts = weighted_average([n.state_dict() for n in nets], [1, 2, 3])
    from_lists = weighted_average([list(n.state_dict().values()) for n in nets], [1, 2, 3])
    assert list(from_modules) == list(nets[0].state_dict())
    assert isinstance(from_lists, list)
    for name, a, b in zip(from_modules, from_dicts.values(), from_lists, strict=True):
        assert torch.equal(from_modules[name], a)
        assert torch.equal(a, b)
    Net().to(device).load_state_dict(from_modules)


def test_state_dicts_in_another_order_are_matched_by_name(device):
    first = {"a": torch.zeros(2, device=device), "b": torch.ones(2, device=device)}
    second = {"b": torch.full((2,), 3.0, device=device), "a": torch.full((2,), 4.0, device=device)}
    result = weighted_average([first, second])
    assert result["a"].tolist() == [2.0, 2.0]
    assert result["b"].tolist() == [2.0, 2.0]


def test_rows_of_a_matrix_are_clients(device):
    matrix = torch.arange(6.0, device=device).view(3, 2)
    assert weighted_average(matrix, [1, 1, 2]).tolist() == [2.5, 3.5]
    out = torch.empty(2, device=device)
    assert weighted_average(matrix, [1, 1, 2], out=out) is out
    assert out.tolist() == [2.5, 3.5]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["rows", "columns", "parts of rows", "one row again and again"])
def test_the_average_of_rows_has_the_bits_of_the_average_of_lists(device, dtype, layout):
    numbers = torch.randn(6, 40_000, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    matrix = {
        "rows": numbers,
        "columns": numbers.t().contiguous().t(),
        "parts of rows": numbers[:, 7:-2],
        "one row again and again": numbers[:1].expand(6, -1),
    }[layout]
    weights = [0.1, 0.2, 0.05, 0.3, 0.15, 0.2]
    average = weighted_average(matrix, weights)
    assert_same_bits([average], weighted_average([[row] for row in matrix], weights))
    out = torch.empty_like(average)
    OPS["average_rows_"].reference(out, matrix, torch.tensor(weights, dtype=torch.float64) / sum(weights))
    assert_same_bits([average], [out])


@pytest.mark.parametrize("run", ["native", "reference"])
def test_the_op_on_rows_refuses_what_does_not_fit(device, run):
    op = OPS["average_rows_"] if run == "native" else OPS["average_rows_"].reference
    matrix, half = torch.ones(2, 4, device=device), torch.tensor([0.5, 0.5], dtype=torch.float64)
    out = torch.zeros(4, device=device)
    for arguments in [
        (out, matrix[0], half),
        (out, matrix, half[:1]),
        (out, matrix, half.float()),
        (out[:3], matrix, half),
        (out.double(), matrix, half),
        (torch.zeros(8, device=device)[::2], matrix, half),
        (out.long(), matrix.long(), half),
        (matrix[1], matrix, half),
    ]:
        with pytest.raises((RuntimeError, ValueError)):
            op(*arguments)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(matrix, torch.ones_like(matrix))


def test_a_generator_of_parameters_is_a_model(device):
    nets = trained_nets(2, device)
    result = weighted_average([n.parameters() for n in nets])
    assert len(result) == len(list(nets[0].parameters()))


def test_out_is_written_in_place_and_returned(device):
    nets = trained_nets(3, device)
    target = Net().to(device)
    pointers = [x.data_ptr() for x in target.state_dict().values()]
    expected = weighted_average(nets, [1, 2, 3])
    assert weighted_average(nets, [1, 2, 3], out=target) is target
    assert [x.data_ptr() for x in target.state_dict().values()] == pointers
    for name, x in target.state_dict().items():
        assert torch.equal(x, expected[name])


def test_out_may_be_one_of_the_clients(device):
    clients = random_clients(3, [(1000,), (7,)], device=device)
    expected = weighted_average(clients)
    weighted_average(clients, out=clients[1])
    assert_same_bits(clients[1], expected)


def test_server_may_be_updated_in_place(device):
    clients, (server,) = (
        random_clients(3, [(999,), (5, 5)], device=device),
        random_clients(1, [(999,), (5, 5)], device=device, seed=1),
    )
    expected = server_update(server, clients, lr=0.5)
    assert server_update(server, clients, lr=0.5, out=server) is server
    assert_same_bits(server, expected)


def test_out_that_overlaps_a_client_elsewhere_is_computed_as_if_all_were_read_first(device):
    # Larger than what a kernel reads before it writes.
    memory = torch.arange(60000.0, device=device)
    clients = [[memory[0:40000]], [memory[10000:50000]]]
    expected = weighted_average([[c[0].clone()] for c in clients])[0]
    out = [memory[9000:49000]]
    weighted_average(clients, out=out)
    assert torch.equal(out[0], expected)


def test_out_that_is_another_tensor_of_a_client_is_computed_as_if_all_were_read_first(device):
    a, b = torch.zeros(4, device=device), torch.full((4,), 8.0, device=device)
    weighted_average([[a, b], [a.clone(), b.clone()]], out=[b, a])
    assert b.tolist() == [0.0] * 4
    assert a.tolist() == [8.0] * 4


def test_out_that_overlaps_itself_is_refused(device):
    memory = torch.zeros(5, device=device)
    out, client = [memory.as_strided((3, 3), (1, 1))], [torch.arange(9.0, device=device).view(3, 3)]
    average = StreamingAverage()
    average.add(client)
    for call in (
        lambda: weighted_average([client], out=out),
        lambda: server_update(client, [client], out=out),
        lambda: average.result(out=out),
    ):
        with pytest.raises(ValueError, match="tensor 0 of out is expanded or overlaps itself"):
            call()
    assert not memory.any()


@pytest.mark.parametrize("run", ["native", "reference"])
def test_the_ops_refuse_outputs_that_overlap(device, run):
    memory = torch.zeros(5, device=device)
    clients, weights = [torch.ones(3, device=device) for _ in range(2)], torch.ones(1, dtype=torch.float64)
    one = memory.as_strided((3, 3), (1, 1))
    for name in ("weighted_average_", "server_update_"):
        op = OPS[name] if run == "native" else OPS[name].reference
        more = ([[c + 0 for c in clients]], [0.5]) if name == "server_update_" else ([], [])
        with pytest.raises((ValueError, RuntimeError), match=r"tensors? 0 .*of out.* overlap in memory"):
            op([memory[:3], memory[1:4]], *more[0], clients, weights, *more[1])
        more = ([[one + 0]], [0.5]) if name == "server_update_" else ([], [])
        with pytest.raises((ValueError, RuntimeError), match="tensor 0 of out is expanded or overlaps itself"):
            op([one], *more[0], [one + 1], weights, *more[1])
    assert not memory.any()
    # An empty one overlaps nothing, wherever it is.
    op = OPS["weighted_average_"] if run == "native" else OPS["weighted_average_"].reference
    op([memory, memory[2:2]], [torch.ones(5, device=device), torch.ones(0, device=device)], weights)
    assert memory.tolist() == [1.0] * 5


def test_tied_weights_are_updated_once(device):
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).to(device)
    net[1].weight = net[0].weight
    clients = [{k: torch.ones_like(v) for k, v in net.state_dict().items()}]
    with torch.no_grad():
        net[0].weight.zero_()
    server_update(net, clients, lr=0.5, out=net)
    assert net[0].weight.unique().tolist() == [0.5]


@pytest.mark.parametrize("dtype", FLOATS)
def test_non_contiguous_and_offset_views_give_what_their_copies_give(device, dtype):
    base = random_clients(1, [(6, 50, 40)], dtype, device)[0][0]
    views = [
        [
            b.t(),
            b[::2, 1:],
            b.flatten()[3:1003],
            b[3],
            b.t().unsqueeze(0).expand(2, -1, -1),
            b.view(50, 8, 5).permute(2, 0, 1),
        ]
        for b in base
    ]
    copies = [[v.contiguous().clone() for v in client] for client in views]
    assert_same_bits(weighted_average(views), weighted_average(copies))
    out = [torch.empty(40, 50, dtype=dtype, device=device).t() for _ in range(2)]
    weighted_average([[b, b] for b in base], out=out)
    assert_same_bits([o.contiguous() for o in out], weighted_average([[b, b] for b in base]))


def test_channels_last_tensors_are_averaged_where_they_are(device):
    clients = random_clients(3, [(2, 3, 4, 5)], device=device)
    last = [[x.to(memory_format=torch.channels_last) for x in c] for c in clients]
    (result,) = weighted_average(last)
    assert result.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(result, weighted_average(clients)[0])


def test_empty_tensors_first_in_the_middle_and_last_are_skipped(device):
    clients = random_clients(3, SHAPES, device=device)
    result = weighted_average(clients, [1, 2, 3])
    assert [x.shape for x in result] == [torch.Size(s) for s in SHAPES]
    assert_within_rounding(result, exact(clients, [1, 2, 3]), clients, [1.0, 2.0, 3.0])


def test_only_empty_tensors(device):
    assert weighted_average([[torch.empty(0, device=device)]] * 2)[0].shape == (0,)


def test_a_model_without_tensors():
    assert weighted_average([[], []]) == []
    assert weighted_average([{}, {}]) == {}


def test_mixed_types_in_one_list(device):
    clients = [[x.to(d).to(device) for x, d in zip(c, FLOATS, strict=True)] for c in random_clients(4, [(3001,)] * 4)]
    result = weighted_average(clients, [4, 3, 2, 1])
    assert [x.dtype for x in result] == FLOATS
    assert_within_rounding(result, exact(clients, [4, 3, 2, 1]), clients, [4.0, 3.0, 2.0, 1.0])


def test_version_counters_tell_autograd_of_the_write(device):
    x = torch.ones(3, device=device, requires_grad=True)
    square = x * x
    weighted_average([[torch.zeros(3, device=device)]], out=[x])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


# ---- integers --------------------------------------------------------------------------------------------------------


def test_integers_are_averaged_and_rounded(device):
    clients = [[torch.tensor(v, device=device)] for v in ([1, 4, -3], [2, 5, -8])]
    (result,) = weighted_average(clients)
    assert result.dtype == torch.int64
    assert result.tolist() == [2, 4, -6]  # 1.5, 4.5 and -5.5: halves go to the even number


def test_bools_follow_the_majority(device):
    clients = [[torch.tensor(v, device=device)] for v in ([True, False], [True, False], [False, True])]
    assert weighted_average(clients)[0].tolist() == [True, False]


def test_integers_first_and_server(device):
    clients = [[torch.tensor([5], device=device)], [torch.tensor([7], device=device)]]
    server = [torch.tensor([100], device=device)]
    assert weighted_average(clients, integers="first")[0].item() == 5
    assert weighted_average(clients, integers="server", out=server)[0].item() == 100
    assert server_update(server, clients, integers="server")[0].item() == 100
    assert server_update(server, clients, integers="first", out=[torch.empty_like(server[0])])[0].item() == 5
    assert server_update(server, clients, lr=0.5)[0].item() == 53


def test_integers_server_without_a_server_is_refused(device):
    with pytest.raises(ValueError, match="give the server's model as out="):
        weighted_average([[torch.tensor([5], device=device)]], integers="server")


def test_small_integers_saturate(device):
    (result,) = weighted_average([[torch.tensor([100, -100], dtype=torch.int8, device=device)]], [3], normalize=False)
    assert result.tolist() == [127, -128]


# ---- infinities and NaNs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 2047, 2048, 20000])
def test_a_non_finite_value_is_found_wherever_it_is(device, dtype, bad, place):
    clients = [
        {"a": torch.ones(5, dtype=dtype, device=device), "b": torch.ones(20001, dtype=dtype, device=device)}
        for _ in range(3)
    ]
    clients[1]["b"][place] = bad
    with pytest.raises(ValueError, match="tensor 'b' of client 1 holds infinity or NaN"):
        weighted_average(clients, nonfinite="raise")
    assert not weighted_average(clients)["b"][place].isfinite()
    skipped = weighted_average(clients, [1, 5, 3], nonfinite="skip")
    assert torch.equal(skipped["b"], torch.ones(20001, dtype=dtype, device=device))


def test_the_largest_finite_values_are_not_taken_for_infinity(device):
    for dtype in FLOATS:
        limits = torch.finfo(dtype)
        client = [torch.tensor([limits.max, limits.min, limits.smallest_normal, 0.0], dtype=dtype, device=device)]
        weighted_average([client], nonfinite="raise")


def test_skipping_gives_the_weight_of_the_skipped_to_the_others(device):
    clients = [[torch.tensor([v], device=device)] for v in (1.0, float("nan"), 4.0)]
    assert weighted_average(clients, [1, 1, 2], nonfinite="skip")[0].item() == 3.0
    # Not normalised: the sum of the weights, 8, is kept.
    assert weighted_average(clients, [2, 2, 4], nonfinite="skip", normalize=False)[0].item() == pytest.approx(24.0)


def test_clients_whose_weights_cancel_cannot_share_the_weight_of_a_skipped_one(device):
    clients = [[torch.tensor([value], device=device)] for value in (float("inf"), 2.0, 4.0)]
    with pytest.raises(ValueError, match="add up to 0"):
        weighted_average(clients, [2, -1, 1], nonfinite="skip", normalize=False)


def test_weights_that_add_up_to_0_with_a_skipped_one_average_to_0(device):
    clients = [[torch.tensor([value], device=device)] for value in (3.0, float("inf"))]
    assert weighted_average(clients, [1, -1], nonfinite="skip", normalize=False)[0].item() == 0
    average = StreamingAverage(nonfinite="skip", normalize=False)
    for client, weight in zip(clients, (1, -1), strict=True):
        average.add(client, weight)
    assert average.result()[0].item() == 0


def test_nothing_left_after_skipping_is_an_error(device):
    out = [torch.full((1,), 9.0, device=device)]
    with pytest.raises(ValueError, match="nothing is left"):
        weighted_average([[torch.tensor([float("nan")], device=device)]], nonfinite="skip", out=out)
    assert out[0].item() == 9.0


# ---- bad input -------------------------------------------------------------------------------------------------------


def net_dicts(device="cpu"):
    return [n.state_dict() for n in trained_nets(3, device)]


def broken(change, device):
    dicts = net_dicts(device)
    change(dicts[2])
    return dicts


BAD_CLIENTS = {
    "shape": (lambda d: d.update({"head.weight": torch.zeros(2, 5)}), r"'head.weight' of client 2 is float32 \[2, 5\]"),
    "same size, other shape": (lambda d: d.update({"head.weight": torch.zeros(4, 2)}), "'head.weight' of client 2"),
    "dtype": (lambda d: d.update({"head.bias": d["head.bias"].double()}), "'head.bias' of client 2 is float64"),
    "device": (lambda d: d.update({"head.bias": d["head.bias"].to("meta")}), "'head.bias' of client 2 .* on meta"),
    "missing": (lambda d: d.pop("head.bias"), r"client 2 .* missing \['head.bias'\]"),
    "unexpected": (lambda d: d.update({"new": torch.zeros(1)}), r"client 2 .* unexpected \['new'\]"),
    "no tensor": (lambda d: d.update({"head.bias": 3.0}), "client 2: .*head.bias.* is a float"),
}


@pytest.mark.parametrize("case", BAD_CLIENTS)
@pytest.mark.parametrize("form", ["average", "update"])
def test_a_client_that_does_not_fit_is_named_and_nothing_is_written(device, case, form):
    change, message = BAD_CLIENTS[case]
    target = Net().to(device)
    before = copy.deepcopy(target.state_dict())
    with pytest.raises((ValueError, TypeError), match=message):
        if form == "average":
            weighted_average(broken(change, device), out=target)
        else:
            server_update(target, broken(change, device), out=target)
    for name, x in target.state_dict().items():
        assert torch.equal(x, before[name])


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 2], "2 weights for 3 clients"),
        ([0, 0, 0], "add up to 0"),
        ([1, -1, 1], "weight of client 1 is -1"),
        ([1, float("nan"), 1], "weight of client 1 is nan"),
        (torch.ones(3, 1), "weights of shape"),
    ],
)
def test_bad_weights_are_refused_and_nothing_is_written(device, weights, message):
    out = [torch.full((2,), 7.0, device=device)]
    with pytest.raises(ValueError, match=message):
        weighted_average(random_clients(3, [(2,)], device=device), weights, out=out)
    assert out[0].tolist() == [7.0, 7.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: weighted_average([]), "no clients given"),
        (lambda x: weighted_average(x), "a matrix with a row for each client"),
        (lambda x: weighted_average(Net()), "a sequence of models"),
        (lambda x: weighted_average([3]), "client 0 is a int"),
        (lambda x: weighted_average([[x], [x, x]]), "client 1 has 2 tensors"),
        (lambda x: weighted_average([[x]], integers="floor"), "integers='floor'"),
        (lambda x: weighted_average([[x]], nonfinite="ignore"), "nonfinite='ignore'"),
        (lambda x: weighted_average([[x.to(torch.complex64)]]), "complex64"),
        (lambda x: weighted_average([[x]], out=[x, x]), "out has 2 tensors"),
        (lambda x: weighted_average([{"a": x}], out=[x]), "both have names"),
        (lambda x: weighted_average([[x, x]], out=[x, x[:2]]), "overlap in memory|of out is"),
        (lambda x: weighted_average([[x[:2], x[:2]]], out=[x[0:2], x[1:3]]), "overlap in memory"),
        (lambda x: weighted_average([[x]], out=[x[:1].expand(3)]), "is expanded"),
        (lambda x: server_update([x], [[x]], lr=float("inf")), "lr is inf"),
        (lambda x: server_update(None, [[x]]), "server is None"),
        (lambda x: server_update([x[:2]], [[x]]), "of server is float32"),
    ],
)
def test_bad_calls_say_what_is_accepted(device, call, message):
    x = torch.tensor([1.0, 2.0, 3.0], device=device)
    with pytest.raises((ValueError, TypeError), match=message):
        call(x)
    assert x.tolist() == [1.0, 2.0, 3.0]


def test_the_ops_themselves_refuse_what_does_not_fit(device):
    x, y = torch.ones(3, device=device), torch.ones(4, device=device)
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for name, args in {
        "weighted_average": ([x, y], half),
        "weighted_average_": ([x], [x], half),
        "average_rows_": (x, torch.stack([y, y]), half),
        "server_update_": ([x], [y], [x, x], half, 1.0),
        "accumulate_": ([x], [y], 1.0),
        "nonfinite": ([x.long()],),
    }.items():
        if name == "nonfinite" and not OPS[name].has_kernel(device.upper()):
            continue  # plain torch takes integers too
        with pytest.raises((RuntimeError, ValueError)):
            OPS[name](*args)
    with pytest.raises((RuntimeError, ValueError), match="weights"):
        OPS["weighted_average"]([x, x], half.float())


# ---- streaming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_streaming_is_within_its_stated_bound_of_the_batch_form(device, dtype):
    clients = random_clients(20, [(n,) for n in SIZES], dtype, device)
    weights = [float(10 + 37 * c % 91) for c in range(20)]
    average = StreamingAverage()
    for client, weight in zip(clients, weights, strict=True):
        assert average.add(client, weight)
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24
    for t, (a, b) in enumerate(zip(average.result(), weighted_average(clients, weights), strict=True)):
        bound = (
            2 * 24 * unit * sum(w * c[t].double().abs() for w, c in zip(weights, clients, strict=True)) / sum(weights)
        )
        if dtype in (torch.float16, torch.bfloat16):
            bound = bound + torch.finfo(dtype).eps * b.double().abs() + torch.finfo(dtype).smallest_normal
        assert bool(((a.double() - b.double()).abs() <= bound).all())


def test_streaming_takes_modules_and_writes_into_a_module(device):
    nets = trained_nets(3, device)
    average = StreamingAverage()
    for weight, net in enumerate(nets, 1):
        average.add(net, weight)
    target = Net().to(device)
    assert average.result(out=target) is target
    expected = weighted_average(nets, [1, 2, 3])
    for name, x in target.state_dict().items():
        torch.testing.assert_close(x, expected[name])
    assert list(average.result()) == list(expected)


@pytest.mark.parametrize("weights", [[1e308, 1e308], [1e308, 5e307, 0.0], [5e-324, 1e-323], [1e-300, 1e300]])
def test_weights_of_any_size_count_by_what_they_are_to_each_other(device, weights):
    clients = [[torch.tensor([1.0 + c, -4.0 * c], device=device)] for c in range(len(weights))]
    largest = max(weights)
    shares = [w / largest for w in weights]
    expected = exact(clients, shares)[0]
    for some in (weights, torch.tensor(weights, dtype=torch.float64, requires_grad=True)):
        torch.testing.assert_close(weighted_average(clients, some)[0].double(), expected)
    torch.testing.assert_close(server_update(clients[0], clients, weights)[0].double(), expected)


@pytest.mark.parametrize(
    "weights",
    [
        *([1e-46, 3e-46], [1e37, 3e37], [1e308, 1e308], [5e-324, 1e-323], [1e-46, 1e37, 1.0], [1e37, 1e-46]),
        *([0.0, 1e-46, 1e-46], [1.0] * 40, [2.0**k for k in range(60)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_streaming_average_takes_weights_of_any_size(device, dtype, weights):
    clients = [
        [torch.tensor([1.0 + c % 7, -300.0 * c], dtype=dtype, device=device), torch.tensor([4 * c], device=device)]
        for c in range(len(weights))
    ]
    average = StreamingAverage()
    for client, weight in zip(clients, weights, strict=True):
        average.add(client, weight)
    for a, b in zip(average.result(), weighted_average(clients, weights), strict=True):
        torch.testing.assert_close(a, b)


def test_a_large_weight_that_is_refused_costs_a_streaming_average_nothing(device):
    average = StreamingAverage()
    with pytest.raises(ValueError, match="on one device"):
        average.add([torch.ones(1, device=device), torch.ones(1, device="meta")], 1e300)
    average.add([torch.tensor([0.1], device=device)], 1.0)
    with pytest.raises(ValueError, match="client 1"):
        average.add([torch.ones(2, device=device)], 1e300)
    average.add([torch.tensor([0.2], device=device)], 2.0)
    torch.testing.assert_close(average.result()[0], torch.tensor([0.5 / 3], device=device))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool])
def test_the_largest_and_smallest_integers_average_to_themselves(device, dtype):
    limits = [False, True] if dtype == torch.bool else [torch.iinfo(dtype).min, torch.iinfo(dtype).max]
    client = [torch.tensor(limits, dtype=dtype, device=device)]
    average = StreamingAverage()
    average.add(client)
    average.add(client)
    for result in (weighted_average([client, client]), server_update(client, [client]), average.result()):
        assert result[0].tolist() == limits


def test_streaming_rows_and_more_clients_after_a_result_that_was_written(device):
    average, out = StreamingAverage(), torch.empty(2, device=device)
    average.add(torch.tensor([1.0, 2.0], device=device))
    assert average.result(out).tolist() == [1.0, 2.0]
    average.add(torch.tensor([3.0, 4.0], device=device), weight=3)
    assert average.result(out).tolist() == [2.5, 3.5]
    assert average.result().tolist() == [2.5, 3.5]
    assert average.clients == 2


def test_streaming_ends_with_a_result_that_is_its_sums(device):
    average = StreamingAverage()
    for value in (1.0, 3.0):
        average.add([torch.full((2,), value, device=device)])
    (result,) = average.result()
    with pytest.raises(RuntimeError, match=r"add\(\) comes before result\(\)"):
        average.add([torch.zeros(2, device=device)])
    for out in (None, [torch.zeros(2, device=device)]):
        with pytest.raises(RuntimeError, match="given already"):
            average.result(out)
    assert result.tolist() == [2.0, 2.0]


def test_streaming_parts_of_several_types_are_views_of_one_vector_a_type(device):
    client = [
        torch.ones(2, 3, device=device),
        torch.ones(1, dtype=torch.float64, device=device),
        torch.ones(4).to(device),
    ]
    average = StreamingAverage()
    average.add(client)
    result = average.result()
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(result, client, strict=True))
    assert result[0].untyped_storage().data_ptr() == result[2].untyped_storage().data_ptr()
    assert result[2].storage_offset() == 6


def test_streaming_a_second_client_of_another_type_is_refused(device):
    average = StreamingAverage()
    average.add([torch.ones(2, device=device)])
    with pytest.raises(ValueError, match=r"tensor 0 of client 1 is float16 \[2\]"):
        average.add([torch.ones(2, dtype=torch.float16, device=device)])
    average.add([torch.ones(2, device=device)])
    assert average.result()[0].tolist() == [1.0, 1.0]


def test_streaming_keeps_one_model_in_memory():
    average = StreamingAverage()
    for _ in range(3):
        average.add([torch.ones(1000), torch.ones(2, dtype=torch.int64)])
    kept = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in average._sums + average._first.tensors
    }
    assert sum(kept.values()) == 1000 * 4 + 2 * 8


def test_streaming_policies(device):
    average = StreamingAverage(nonfinite="skip")
    average.add([torch.tensor([2.0], device=device), torch.tensor([1], device=device)])
    assert not average.add([torch.tensor([float("inf")], device=device), torch.tensor([5], device=device)], weight=7)
    average.add([torch.tensor([4.0], device=device), torch.tensor([4], device=device)])
    assert [x.item() for x in average.result()] == [3.0, 2]
    assert (average.clients, average.skipped) == (2, 1)

    strict = StreamingAverage(nonfinite="raise", integers="first")
    strict.add([torch.tensor([2.0], device=device), torch.tensor([1], device=device)])
    with pytest.raises(ValueError, match="tensor 0 of client 1 holds"):
        strict.add([torch.tensor([float("nan")], device=device), torch.tensor([9], device=device)])
    assert [x.item() for x in strict.result()] == [2.0, 1]


def test_streaming_refuses_what_does_not_fit_and_stays_as_it_was(device):
    average = StreamingAverage()
    with pytest.raises(ValueError, match="no clients were added"):
        average.result()
    average.add({"a": torch.tensor([2.0], device=device)})
    for client, weight in [
        ({"a": torch.zeros(2, device=device)}, 1),
        ({"b": torch.zeros(1, device=device)}, 1),
        ({"a": torch.zeros(1, device=device)}, -1),
        ({"a": torch.zeros(1, device=device)}, float("nan")),
    ]:
        with pytest.raises(ValueError, match="client 1"):
            average.add(client, weight)
    assert average.result()["a"].item() == 2.0
    with pytest.raises(ValueError, match="integers='server'"):
        streaming = StreamingAverage(integers="server")
        streaming.add([torch.tensor([1], device=device)])
        streaming.result()


SEVERAL_DEVICES = {
    "weighted_average": lambda x, y: weighted_average([[x, y], [x, y]]),
    "server_update": lambda x, y: server_update([x, y], [[x, y]]),
    "streaming": lambda x, y: StreamingAverage().add([x, y]),
    "all_finite": all_finite,
}
MESSAGE = r"tensor 1 .*is float32 \[3\] on {}, tensor 0 is float32 \[3\] on {}; all tensors of .* must be on one device"


@pytest.mark.parametrize("call", SEVERAL_DEVICES)
def test_a_model_on_several_devices_is_refused(call):
    with pytest.raises(ValueError, match=MESSAGE.format("meta", "cpu")):
        SEVERAL_DEVICES[call](torch.ones(3), torch.ones(3, device="meta"))
    with FakeTensorMode(), pytest.raises(ValueError, match=MESSAGE.format("cuda:1", "cuda:0")):
        SEVERAL_DEVICES[call](torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("call", SEVERAL_DEVICES)
@pytest.mark.parametrize(("here", "there"), list(itertools.permutations(["cpu", "cuda:0", "cuda:1"], 2)))
def test_a_model_on_several_gpus_is_refused(call, here, there):
    with pytest.raises(ValueError, match=MESSAGE.format(there, here)):
        SEVERAL_DEVICES[call](torch.ones(3, device=here), torch.ones(3, device=there))


def test_a_first_client_that_is_refused_leaves_a_streaming_average_empty():
    average = StreamingAverage()
    with pytest.raises(ValueError, match="must be on one device"):
        average.add([torch.ones(3), torch.ones(3, device="meta")])
    average.add([torch.ones(2)])
    assert average.result()[0].tolist() == [1.0, 1.0]


def test_streaming_without_normalization_is_the_weighted_sum(device):
    average = StreamingAverage(normalize=False)
    average.add([torch.tensor([1.0], device=device)], 2)
    average.add([torch.tensor([10.0], device=device)], -1)
    assert average.result()[0].item() == -8.0


# ---- torch's own machinery -------------------------------------------------------------------------------------------


def op_arguments(device):
    clients = random_clients(3, [(5,), (0,), (2, 3)], torch.float64, device)
    (server,) = random_clients(1, [(5,), (0,), (2, 3)], torch.float64, device, seed=1)
    flat = [x for c in clients for x in c]
    weights = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    return {
        "weighted_average": (flat, weights),
        "weighted_average_": (copy.deepcopy(server), flat, weights),
        "average_rows_": (torch.zeros(5, dtype=torch.float64, device=device), torch.stack(flat[::3]), weights),
        "server_update_": (copy.deepcopy(server), server, flat, weights, 0.5),
        "accumulate_": (copy.deepcopy(server), clients[0], 0.5),
        "nonfinite": (flat,),
    }


@pytest.mark.parametrize(
    "name", ["weighted_average", "weighted_average_", "average_rows_", "server_update_", "accumulate_", "nonfinite"]
)
def test_opcheck(device_type, name):
    torch.library.opcheck(OPS[name].overload, op_arguments(device_type)[name])


def test_every_op_of_the_family_is_checked():
    assert set(op_arguments("cpu")) == {
        name for name, op in OPS.items() if op.reference.__module__.endswith("averaging")
    }


def test_gradients_in_clients_and_weights(device):
    clients = [x.requires_grad_() for c in random_clients(3, [(5,), (2, 3)], torch.float64, device) for x in c]
    weights = torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64, requires_grad=True)

    def run(weights, *flat):
        return tuple(weighted_average([list(flat[2 * c : 2 * c + 2]) for c in range(3)], weights))

    assert torch.autograd.gradcheck(run, (weights, *clients))
    run(weights, *clients)[0].sum().backward()
    assert clients[0].grad.abs().min() > 0
    assert weights.grad.abs().min() > 0


def test_the_public_functions_compile_without_a_graph_break(device_type):
    clients, (server,) = (
        random_clients(3, [(50,), (0,), (4, 3)], device=device_type),
        random_clients(1, [(50,), (0,), (4, 3)], device=device_type, seed=1),
    )

    def step(server, clients):
        return weighted_average(clients, [1.0, 2.0, 3.0]), server_update(server, clients, [1.0, 2.0, 3.0], lr=0.5)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(server, clients), step(server, clients), strict=True):
        assert_same_bits(a, b)


def test_fake_tensors_on_a_cuda_device_need_no_gpu():
    with FakeTensorMode():
        clients = [[torch.empty(5, 3, device="cuda", dtype=torch.bfloat16)] for _ in range(3)]
        flat = [x for c in clients for x in c]
        (result,) = torch.ops.pfl_ext.weighted_average(flat, torch.ones(3, dtype=torch.float64))
    assert (result.shape, result.dtype, result.device.type) == (torch.Size([5, 3]), torch.bfloat16, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_all_finite_finds_one_bad_number_among_many(device, dtype, bad):
    tensors = [torch.ones(n, dtype=dtype, device=device) for n in (3, 0, 40_009)]
    assert all_finite(*tensors) and all_finite() and all_finite(torch.ones(3, dtype=torch.int64, device=device))
    tensors[2][40_008] = bad
    assert not all_finite(*tensors)
