"""Runs that are killed, stopped or run out of disk end as unbroken ones, to the bit: over engines, stores and methods.

32 kills. `make soak` has hundreds, over more methods.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import kills
import pytest

_ONE, _WORKERS = 4, 2  # kills of each case
_SEED = int(os.environ.get("PFL_EXT_KILL_SEED", random.randrange(1 << 30)))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    print(f"PFL_EXT_KILL_SEED={_SEED} kills at the same moments, as far as a clock can repeat them")
    folder = tmp_path_factory.mktemp("whole")
    return {name: kills.whole(case, folder / name) for name, case in kills.CASES.items()}


@pytest.mark.parametrize("store", ["memory", "mapped"])
@pytest.mark.parametrize("name", ["ditto", "fedbabu", "fedbuff"])
def test_a_killed_run_in_one_process_ends_as_an_unbroken_one(
    unbroken: dict[str, Path], tmp_path: Path, name: str, store: str
) -> None:
    assert not kills.many(kills.CASES[name], unbroken[name], tmp_path, _ONE, _SEED, store=store)


@pytest.mark.parametrize("store", ["memory", "mapped"])
@pytest.mark.parametrize("name", ["ditto", "fedbuff"])
def test_a_killed_run_with_workers_ends_as_an_unbroken_one_in_one_process(
    unbroken: dict[str, Path], tmp_path: Path, name: str, store: str
) -> None:
    assert not kills.many(kills.CASES[name], unbroken[name], tmp_path, _WORKERS, _SEED, store=store, workers=2)


def test_a_signal_to_the_group_ends_a_run_with_workers_after_its_round(
    unbroken: dict[str, Path], tmp_path: Path
) -> None:
    kills.terminated_as_a_group(kills.CASES["ditto"], tmp_path / "run", random.Random(_SEED), workers=2)
    assert not kills.differences(unbroken["ditto"], tmp_path / "run")


def test_a_run_goes_on_after_one_of_its_workers_was_killed(unbroken: dict[str, Path], tmp_path: Path) -> None:
    kills.with_a_killed_worker(kills.CASES["ditto"], tmp_path / "run", random.Random(_SEED))
    assert not kills.differences(unbroken["ditto"], tmp_path / "run")


@pytest.mark.parametrize("store", ["memory", "mapped"])
def test_a_second_run_in_a_folder_is_refused_and_the_first_unharmed(
    unbroken: dict[str, Path], tmp_path: Path, store: str
) -> None:
    kills.two_in_one_folder(kills.CASES["fedbabu"], tmp_path / "run", random.Random(_SEED), store=store)
    assert not kills.differences(unbroken["fedbabu"], tmp_path / "run")


@pytest.mark.parametrize("store", ["memory", "mapped"])
def test_a_run_that_found_the_disk_full_goes_on_when_there_is_room(
    unbroken: dict[str, Path], tmp_path: Path, store: str
) -> None:
    kills.on_a_full_disk(kills.CASES["fedbuff"], tmp_path / "run", random.Random(_SEED), store=store)
    assert not kills.differences(unbroken["fedbuff"], tmp_path / "run")
