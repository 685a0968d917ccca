"""What clients send, in memory or in files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from pfl_ext.algorithms import Ditto
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings, Uploads, uploads
from pfl_ext.federation.mapped import MappedTensor


def in_files(vectors: list[torch.Tensor], folder: Path) -> Uploads:
    files = [{"model": MappedTensor.copy(v, folder / f"{i}")} for i, v in enumerate(vectors)]
    return Uploads(list(range(len(vectors))), [i + 1 for i in range(len(vectors))], files)


@pytest.fixture
def vectors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1003, generator=generator) for _ in range(5)]


@pytest.mark.parametrize("numbers", [1, 16, 37, 1003, 5000])
def test_an_average_in_pieces_is_the_average_to_the_bit(vectors, numbers, tmp_path, monkeypatch):
    reads = []

    def read(self, begin, count, original=MappedTensor.read):
        reads.append((begin, count))
        return original(self, begin, count)

    monkeypatch.setattr(uploads, "_PIECES", numbers * 5 * 4)
    monkeypatch.setattr(MappedTensor, "read", read)
    spilled = in_files(vectors, tmp_path)
    in_memory = Uploads(spilled.clients, spilled.samples, [{"model": v} for v in vectors])
    assert torch.equal(spilled.average(), in_memory.average())
    assert len(reads) == 5 * -(-1003 // numbers) and max(count for _, count in reads) == min(numbers, 1003)
    assert torch.equal(spilled.average(equally=True), in_memory.average(equally=True))
    weights = [0.5, -1.0, 2.0, 0.0, 3.0]
    assert torch.equal(spilled.sum("model", weights), in_memory.sum("model", weights))
    assert (spilled.parameters(), spilled.bytes()) == (in_memory.parameters(), in_memory.bytes()) == (5015, 20060)


def test_vectors_in_files_are_there_whole_too_and_outlive_their_files(vectors, tmp_path):
    spilled = in_files(vectors, tmp_path)
    whole = spilled.each("model")
    spilled.release()
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(a, b) for a, b in zip(whole, vectors, strict=True))


def test_averages_and_sums_are_those_by_hand(vectors):
    there = Uploads([0, 3], [1, 3], [{"a": vectors[0]}, {"a": vectors[1]}])
    torch.testing.assert_close(there.average("a"), 0.25 * vectors[0] + 0.75 * vectors[1])
    torch.testing.assert_close(there.average("a", equally=True), (vectors[0] + vectors[1]) / 2)
    torch.testing.assert_close(there.sum("a", [2.0, -1.0]), 2 * vectors[0] - vectors[1])
    assert len(there) == 2 and there.staleness == [0, 0]


def federation(clients: int, width: int, store: str) -> Federation:
    """Clients of one sample each and 64 * (width + 1) parameters."""
    dataset = Dataset.from_tensors(torch.randn(clients, width), torch.arange(clients) % 64)
    none = torch.empty(0, dtype=torch.int64)
    partition = Partition(torch.arange(clients).split(1), (none,) * clients, (none,) * clients, none, none)
    settings = Settings(rounds=1, store=store)
    return Federation(Ditto(), torch.nn.Linear(width, 64), dataset, partition, settings)


def test_a_mapped_run_is_the_run_in_memory_to_the_bit():
    torch.manual_seed(0)
    runs = []
    for store in ("memory", "mapped"):
        torch.manual_seed(0)
        run = federation(70, 300, store)
        assert run.server["model"].nbytes > 1 << 16  # large enough to be kept in a file
        runs.append((run, run.run()))
    (a, ours), (b, theirs) = runs
    assert torch.equal(a.server["model"], b.server["model"])
    rows = [[run.engine.store.read(k, "personal") for k in range(70)] for run in (a, b)]
    assert all(torch.equal(x, y) for x, y in zip(*rows, strict=True))
    assert ours[0]["communication"] == theirs[0]["communication"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no high-water mark of memory to reset")
def test_a_mapped_run_needs_no_memory_that_grows_with_clients(monkeypatch):
    def status(key: str) -> int:
        line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
        return int(line.split()[1]) * 1024

    monkeypatch.setattr(uploads, "_PIECES", 1 << 22)
    run = federation(600, 300, "mapped")  # 77 kB a client: 46 MB of personal models, and as much is sent
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the high-water mark of memory cannot be reset here")
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    run.run()
    assert status("VmHWM") - before < 30e6


def test_turns_leave_nothing_behind_for_a_device_that_is_never_used():
    waiting = torch.cuda._queued_calls
    before = len(waiting)
    federation(3, 8, "memory").run()
    assert len(waiting) == before
