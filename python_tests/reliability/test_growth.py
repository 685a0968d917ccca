"""A long run: nothing grows with the rounds but the results themselves."""

from __future__ import annotations

import gc
import os
import struct
import time
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn

from pfl_ext.algorithms import Ditto, FedBuff
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Method, Settings
from pfl_ext.reports import ResultsFolder, recorded

ROUNDS, CLIENTS = 300, 1000


def _data() -> tuple[Dataset, Partition]:
    samples = 4 * CLIENTS
    y = torch.arange(samples) % 3
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(4)[y]
    dataset = Dataset("points", x, y, ("a", "b", "c"), torch.zeros(samples, dtype=torch.bool))
    parts = torch.arange(samples).view(CLIENTS, 4)
    nothing = torch.empty(0, dtype=torch.int64)
    train, test = tuple(parts[:, :3]), tuple(parts[:, 3:])
    return dataset, Partition(train, (nothing,) * CLIENTS, test, nothing, torch.cat(test))


def _resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _header(folder: Path) -> int:
    """Bytes of the newest checkpoint's header."""
    with sorted((folder / "checkpoints").iterdir())[-1].open("rb") as file:
        return int(struct.unpack("<Q", file.read(8))[0])


@pytest.mark.parametrize(
    ("method", "store"),
    [(Ditto(lr=0.1, batch_size=3), "mapped"), (FedBuff(lr=0.1, batch_size=3, buffer=5), "memory")],
    ids=["ditto-mapped", "fedbuff-memory"],
)
def test_memory_files_time_and_checkpoints_stay_as_they_are(tmp_path: Path, method: Method, store: str) -> None:
    dataset, partition = _data()
    torch.manual_seed(0)
    settings = Settings(
        rounds=ROUNDS, participation=0.005, evaluate_every=ROUNDS, checkpoint_every=10, store=store, clock="log-normal"
    )
    run = Federation(method, nn.Linear(4, 3), dataset, partition, settings, folder=tmp_path)
    seconds, memory, files, headers = [], [], [], {}
    begin = time.perf_counter()
    for record in recorded(run, ResultsFolder.create(tmp_path)):
        t = record["round"]
        if t % 10 == 1 and t > 1:  # the checkpoint of the round before is there
            headers[t - 1] = _header(tmp_path)
            gc.collect()
            memory.append(_resident())
            files.append(len(os.listdir("/proc/self/fd")))
        elif t % 10:  # neither a checkpoint nor what is measured here
            seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    assert len(headers) == 29
    # The first third is warm-up: what is loaded late, and what the allocator keeps.
    assert memory[-1] - memory[9] < 8 << 20, f"memory in MB: {[m >> 20 for m in memory]}"
    assert len(set(files)) == 1, f"open files: {files}"
    third = len(seconds) // 3
    first, last = median(seconds[:third]), median(seconds[-third:])
    assert last < 2 * first + 0.002, f"a round took {first:.4f} s, then {last:.4f} s"
    # Numbers get more digits, and there are a few more or fewer turns in flight; nothing is added round by round.
    sizes = list(headers.values())
    assert max(sizes[-9:]) < 1.02 * max(sizes[:9]) + 200, f"bytes of the checkpoints' headers: {headers}"
