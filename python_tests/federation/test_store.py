from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pfl_ext.federation import ClientStore, mapped
from pfl_ext.federation.mapped import MappedTensor, scratch_folder


@pytest.fixture(params=["memory", "mapped"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path if request.param == "mapped" else None


def test_an_unwritten_row_reads_as_the_initial_vector(folder: Path | None) -> None:
    store = ClientStore(3, {"v": torch.tensor([1.0, 2.0])}, folder)
    store.write(1, "v", torch.tensor([5.0, 6.0]))
    assert store.read(0, "v").tolist() == [1, 2] and store.read(1, "v").tolist() == [5, 6]
    assert [store.written(k, "v") for k in range(3)] == [False, True, False]


def test_what_is_read_is_a_copy(folder: Path | None) -> None:
    store = ClientStore(1, {"v": torch.zeros(2)}, folder)
    store.read(0, "v").fill_(9)
    assert store.read(0, "v").tolist() == [0, 0]
    store.write(0, "v", torch.ones(2))
    store.read(0, "v").fill_(9)
    assert store.read(0, "v").tolist() == [1, 1]


def test_saved_rows_come_back_in_another_kind_of_store(folder: Path | None, tmp_path: Path) -> None:
    initial = {"v": torch.zeros(2), "n": torch.zeros(1, dtype=torch.int64)}
    store = ClientStore(4, initial, folder)
    store.write(2, "v", torch.tensor([1.0, -1.0]))
    store.write(3, "n", torch.tensor([7]))
    other = ClientStore(4, initial, None if folder else tmp_path / "other")
    other.write(0, "v", torch.ones(2))  # is not in what is saved, and goes
    other.restore({name: tensor.clone() for name, tensor in store.tensors().items()})
    for name in initial:
        assert [other.written(k, name) for k in range(4)] == [store.written(k, name) for k in range(4)]
        for k in range(4):
            assert torch.equal(other.read(k, name), store.read(k, name))


def test_a_mapped_store_takes_disk_only_for_written_rows(tmp_path: Path) -> None:
    store = ClientStore(10_000, {"v": torch.zeros(62_006)}, tmp_path)
    store.write(77, "v", torch.ones(62_006))
    assert (tmp_path / "v.rows").stat().st_size == 10_000 * 62_006 * 4
    assert (tmp_path / "v.rows").stat().st_blocks * 512 < 1 << 20


def test_a_store_in_memory_takes_memory_only_for_written_rows() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc")
    before = resident()
    store = ClientStore(4000, {"v": torch.zeros(62_006)})
    store.write(5, "v", torch.ones(62_006))
    assert resident() - before < 64 << 20  # all rows would take 946 MiB


def test_another_process_sees_the_same_rows(tmp_path: Path) -> None:
    store = ClientStore(2, {"v": torch.zeros(2)}, tmp_path)
    other = pickle.loads(pickle.dumps(store))  # as multiprocessing hands it over
    other.write(1, "v", torch.ones(2))
    assert store.written(1, "v") and store.read(1, "v").tolist() == [1, 1]


def test_a_store_in_memory_is_not_handed_over_by_copy() -> None:
    with pytest.raises(TypeError, match="only a store with a folder"):
        pickle.dumps(ClientStore(2, {"v": torch.zeros(2)}))


def test_clients_with_different_networks_have_rows_of_different_lengths(folder: Path | None, tmp_path: Path) -> None:
    initial = {"v": torch.zeros(2), "v@1": torch.zeros(3)}
    networks = {2: 1, 4: 0, 5: 1, 9: 1}
    store = ClientStore(networks, initial, folder)
    store.write(9, "v", torch.ones(3))
    assert store.read(9, "v").tolist() == [1, 1, 1] and store.read(5, "v").tolist() == [0, 0, 0]
    assert store.read(4, "v").tolist() == [0, 0] and not store.written(5, "v")
    with pytest.raises(ValueError, match=r"v of client 4 is \[3\]; \[2\] is kept"):
        store.write(4, "v", torch.ones(3))
    saved = store.tensors()
    assert (
        saved["v@1/clients"].tolist() == [9] and saved["v@1/rows"].shape == (1, 3) and saved["v/rows"].shape == (0, 2)
    )
    other = ClientStore(networks, initial, tmp_path / "other")
    other.restore(saved)
    assert other.read(9, "v").tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="saved rows of v@1"):  # of a client that has another network
        other.restore(saved | {"v@1/clients": torch.tensor([4])})
    if folder is not None:
        again = pickle.loads(pickle.dumps(store))
        again.write(5, "v", torch.full((3,), 2.0))
        assert store.read(5, "v").tolist() == [2, 2, 2] and store.read(9, "v").tolist() == [1, 1, 1]


def test_wrong_shapes_are_refused_and_change_nothing(folder: Path | None) -> None:
    store = ClientStore(2, {"v": torch.zeros(2)}, folder)
    with pytest.raises(ValueError, match=r"v of client 1 is \[3\]; \[2\] is kept"):
        store.write(1, "v", torch.ones(3))
    with pytest.raises(ValueError, match="saved rows of v"):
        store.restore({"v/clients": torch.tensor([0]), "v/rows": torch.ones(1, 3)})
    assert not store.written(0, "v") and not store.written(1, "v")
    with pytest.raises(ValueError, match="made of vectors"):
        ClientStore(2, {"v": torch.zeros(2, 2)})


def test_an_empty_tensor_can_be_mapped(tmp_path: Path) -> None:
    assert MappedTensor.copy(torch.empty(0, 3), tmp_path / "x").open().shape == (0, 3)


class _Owner:
    pass


def test_a_scratch_folder_goes_with_its_owner() -> None:
    owner = _Owner()
    folder = scratch_folder(owner, 1)
    assert folder.is_dir()
    del owner
    assert not folder.exists()


KILLED = """
import os, signal, sys
from pfl_ext.federation.mapped import scratch_folder
owner = type("Owner", (), {})()
print(scratch_folder(owner, int(sys.argv[1])), flush=True)
if len(sys.argv) == 2:
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for temporary files of this process and those it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    tempfile.tempdir = None


@pytest.mark.parametrize("size", [1, 1 << 62], ids=["memory", "disk"])
def test_the_folder_of_a_killed_process_is_removed_by_the_next_and_that_of_a_living_one_is_not(
    size: int, temporary: Path
) -> None:
    command = [sys.executable, "-c", KILLED, str(size)]
    killed = subprocess.run(command, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    abandoned = Path(killed.stdout.strip())
    assert (abandoned.parent == temporary) == (size > 1 or not Path("/dev/shm").is_dir())
    with subprocess.Popen([*command, "live"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as living:
        assert living.stdout is not None and living.stdin is not None
        theirs = Path(living.stdout.readline().strip())
        assert theirs.is_dir()  # its process has removed what was abandoned
        assert not abandoned.exists()
        owner = _Owner()
        ours = scratch_folder(owner, size)
        assert ours.is_dir() and theirs.is_dir()
        living.stdin.close()
    assert not theirs.exists() and ours.is_dir()


def test_a_folder_that_is_being_made_is_not_taken_for_an_abandoned_one(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def another_process_begins(file: Any, operation: int) -> None:
        monkeypatch.setattr(mapped.fcntl, "flock", flock)
        mapped._remove_abandoned(temporary)
        flock(file, operation)

    monkeypatch.setattr(mapped.fcntl, "flock", another_process_begins)
    owner = _Owner()
    folder = scratch_folder(owner, 1 << 62)
    assert folder.parent == temporary and (folder / "owner.lock").exists()
    mapped._remove_abandoned(temporary)
    assert folder.is_dir()


def test_a_scratch_folder_is_in_memory_only_where_there_is_room(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 << 20, 0, 64 << 20))
    small, large = _Owner(), _Owner()
    assert scratch_folder(small, 1 << 20).parent == (Path("/dev/shm") if Path("/dev/shm").is_dir() else temporary)
    assert scratch_folder(large, 40 << 20).parent == temporary
