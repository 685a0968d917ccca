from __future__ import annotations

import torch

from pfl_ext.federation import seed_of, selected_clients, stream


def test_a_stream_depends_on_seed_and_every_part_of_its_name() -> None:
    names = [(0, "batches", 1, 2), (1, "batches", 1, 2), (0, "init", 1, 2), (0, "batches", 2, 1), (0, "batches", 12)]
    names += [(0, "batches", "1", 2)]  # text is not a number
    assert len({seed_of(*name) for name in names}) == len(names)


def test_a_stream_begins_at_the_same_place_each_time() -> None:
    draws = [torch.rand(3, generator=stream(7, "noise", 4)) for _ in range(2)]
    assert torch.equal(*draws)


def test_seeds_do_not_change_between_versions() -> None:
    # A saved run goes on with these numbers: to change them is to break every checkpoint.
    assert seed_of(0, "batches", 1, 2) == 5379977259474545159


def test_selection_is_sorted_distinct_and_as_many_as_asked_for() -> None:
    for round in range(1, 20):
        chosen = selected_clients(3, round, 20, 0.25)
        assert chosen == sorted(set(chosen)) and len(chosen) == 5 and max(chosen) < 20
    assert selected_clients(3, 1, 20, 0.25) != selected_clients(3, 2, 20, 0.25)
    assert len(selected_clients(0, 1, 10, 0.01)) == 1
    assert [len(selected_clients(0, 1, n, 0.5)) for n in (5, 7)] == [3, 4]  # halves go up
    assert selected_clients(0, 5, 4, 1.0) == [0, 1, 2, 3]


def test_every_client_is_selected_at_last() -> None:
    assert {k for t in range(1, 60) for k in selected_clients(0, t, 20, 0.2)} == set(range(20))
