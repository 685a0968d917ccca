"""The measurement's own behaviour. Nothing here depends on how fast the machine is."""

import gc

import pytest
import torch

from pfl_ext.benchmarks import measure
from pfl_ext.benchmarks.case import Case, Contestant, Expected, Spec, WrongResult
from pfl_ext.benchmarks.measure import MIN_ROUNDS, ReadBandwidth, Result, peak_extra_bytes, race, threads


class SmallBandwidth(ReadBandwidth):
    """Reads 1 MB instead of 256."""

    def __init__(self):
        super().__init__()
        self.floor = 10**6


def small_case(*runs, data_bytes=8):
    expected = Expected(torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64), roundings=1)
    contestants = [
        Contestant(f"contestant {i}", "naive" if i else "ours", run, torch.float32) for i, run in enumerate(runs)
    ]
    return Case(Spec("average", "lenet", 1, "float32", 1), contestants, expected, data_bytes, limit_bytes=16)


def test_every_contestant_runs_in_every_round_and_the_first_moves_on():
    order = []

    def run(name):
        order.append(name)
        return torch.ones(2)

    # As large as the bandwidth buffer, so that there are no untimed calls in between.
    case = small_case(lambda: run("a"), lambda: run("b"), lambda: run("c"), data_bytes=10**6)
    results = race(case, 3, 60.0, SmallBandwidth())
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"  # checks, then three rounds
    assert [len(r.times) for r in results] == [3, 3, 3]
    assert results[0].ratio_to_ours == results[0].ratio_of_medians == 1


def test_data_that_fit_a_cache_are_timed_after_an_untimed_call():
    calls = []
    case = small_case(lambda: calls.append(0) or torch.ones(2), lambda: torch.ones(2))
    race(case, 4, 60.0, SmallBandwidth())
    assert len(calls) == 2 + 2 * 4


def test_an_opponent_out_of_time_sits_out_after_the_fewest_rounds():
    case = small_case(lambda: torch.ones(2), lambda: torch.ones(2))
    ours, theirs = race(case, 50, 1e-9, SmallBandwidth())
    assert len(ours.times) == len(theirs.times) == MIN_ROUNDS


def test_a_wrong_contestant_is_an_error_before_anything_is_timed():
    calls = []
    case = small_case(lambda: calls.append(0) or torch.ones(2), lambda: torch.tensor([1.0, 1.1]))
    with pytest.raises(WrongResult, match="contestant 1 is wrong in 1 of 2 values, first number 1"):
        race(case, 5, 1.0, SmallBandwidth())
    assert len(calls) == 2


def test_garbage_collection_and_threads_are_as_before_afterwards():
    before = torch.get_num_threads()
    seen = []

    def run():
        seen.append((gc.isenabled(), torch.get_num_threads()))
        return torch.ones(2)

    race(small_case(run, lambda: torch.ones(2)), 2, 1.0, SmallBandwidth())
    assert seen[-1] == (False, 1)
    assert gc.isenabled() and torch.get_num_threads() == before
    with pytest.raises(KeyError), threads(1):
        raise KeyError
    assert torch.get_num_threads() == before


def test_ratio_is_the_median_of_the_rounds_in_which_both_ran():
    # Ours 1, 2, 3, 40 ms and theirs 2, 4, 9 ms: the rounds' ratios are 2, 2, 3.
    contestants = small_case(list, list).contestants
    times = {"contestant 0": [1.0, 2.0, 3.0, 40.0], "contestant 1": [2.0, 4.0, 9.0]}
    _, theirs = measure._results(contestants, times, dict.fromkeys(times), 1e9)
    assert theirs.ratio_to_ours == 2
    assert theirs.ratio_of_medians == 4 / 2.5


def test_quartiles():
    result = Result(small_case(list).contestants[0], [5.0, 1.0, 2.0, 4.0, 3.0], 1, 1, 1e9, None)
    assert result.quartiles == (2, 3, 4)


def test_peak_memory_sees_what_was_freed_again():
    def run():
        for size in (64, 16):
            torch.ones(size * 2**20, dtype=torch.uint8)
        return torch.ones(2**20, dtype=torch.uint8)

    result, peak = peak_extra_bytes(run)
    assert result.numel() == 2**20
    if peak is None:
        pytest.skip("this system keeps no high-water mark")
    # At least the largest; at most all together, should the allocator keep what was freed.
    assert 60 * 2**20 < peak < (64 + 16 + 1 + 8) * 2**20


def test_bandwidth_is_read_from_a_large_enough_buffer():
    bandwidth = ReadBandwidth()
    assert bandwidth.size(1) >= 256 * 10**6
    assert bandwidth.size(2**40) == 2**40
    small = SmallBandwidth()
    offered = torch.full((500_000,), 2.0)
    assert small.ways(1_600_000, offered)["sum"]().item() == 800_000  # 400,000 of the offered 2s
    assert small.ways(2_400_000, offered)["sum"]().item() == 600_000  # too small an offer: a buffer of 1s
    assert small.ways(1, torch.ones(10**6, dtype=torch.float64))["max"]().dtype == torch.float32
