"""Time and memory of a round with many clients, each with a personal model: how far one process goes.

Ditto with the LeNet of 62,006 parameters on made-up 3 x 32 x 32 images, four training samples and a test sample a
client: every client is selected, trains a step of both models and sends one, is evaluated, and keeps the other. Each
number of clients is measured in a process of its own, by the clock and by the processor time that the round took,
which does not count what ran beside it. The columns of the CSV file are those of the other families;
``peak_extra_mib`` is the whole process here, its imports and the data included.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from pfl_ext import nn
from pfl_ext.algorithms import Ditto
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, Settings, stream

from . import machine, report
from .measure import status_bytes

__all__ = ["CLIENTS", "markdown", "measure", "one_round"]

CLIENTS = (100, 1_000, 10_000)
_TRAIN = 4
_STORES = ("memory", "mapped")
_CLOCK, _PROCESSOR = "many clients", "many clients, processor time"
_MOST_IN_MEMORY = 1_000  # more are measured with the mapped store only


def one_round(clients: int, store: str) -> tuple[float, float]:
    """Seconds of a round of that many clients, and of processor time."""
    generator = stream(0, "images")
    held = _TRAIN + 1
    images = torch.randint(0, 256, (clients * held, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 10, (clients * held,), generator=generator)
    dataset = Dataset.from_tensors(images, labels, classes=[str(c) for c in range(10)])
    shares = torch.arange(clients * held).split(held)
    none = torch.empty(0, dtype=torch.int64)
    partition = Partition(
        train=tuple(share[:_TRAIN] for share in shares),
        validation=(none,) * clients,
        test=tuple(share[_TRAIN:] for share in shares),
        server=none,
        global_test=none,
    )
    network = nn.build("lenet", dataset.input_shape, 10, stream(0, "network"))
    run = Federation(Ditto(), network, dataset, partition, Settings(rounds=1, store=store))
    begin = time.process_time()
    seconds = float(run.run()[-1]["seconds"])
    return seconds, time.process_time() - begin


def _measured(clients: int, store: str, pipe: Connection) -> None:
    pipe.send((*one_round(clients, store), status_bytes("VmHWM")))


def measure(clients: Sequence[int], stores: Sequence[str] = _STORES) -> list[report.Row]:
    """A line for each number of clients and store."""
    about = machine.describe()
    context = multiprocessing.get_context("spawn")
    rows = []
    for count in clients:
        for store in stores:
            if store == "memory" and count > _MOST_IN_MEMORY:
                continue
            here, there = context.Pipe()
            process = context.Process(target=_measured, args=(count, store, there))
            process.start()
            there.close()
            try:
                seconds, processor, peak = here.recv()
            except EOFError:
                process.join()
                raise OSError(
                    f"the process with {count} clients and the {store} store ended with exit code {process.exitcode}"
                ) from None
            process.join()
            print(f"{count} clients, {store}: {seconds:.1f} s, {peak / 2**20:.0f} MiB", file=sys.stderr, flush=True)
            rows += [
                _row(op, count, store, spent, peak, about) for op, spent in ((_CLOCK, seconds), (_PROCESSOR, processor))
            ]
    return rows


def _row(op: str, clients: int, store: str, seconds: float, peak: float, about: dict[str, str]) -> report.Row:
    unknown = float("nan")
    return report.Row(
        family="federation",
        op=op,
        shapes="lenet",
        clients=clients,
        dtype="float32",
        threads=1,
        contestant=f"pfl_ext ({store})",
        kind="ours",
        median_ms=seconds * 1e3,
        q25_ms=seconds * 1e3,
        q75_ms=seconds * 1e3,
        min_ms=seconds * 1e3,
        rounds=1,
        ratio_to_ours=1.0,
        ratio_of_medians=1.0,
        limit_ms=unknown,
        share_of_bandwidth=unknown,
        read_bandwidth_gb_s=unknown,
        peak_extra_mib=peak / 2**20,
        **about,
    )


def markdown(rows: Sequence[report.Row]) -> str:
    """The table, and what was run."""
    lines = [
        "| clients | store | seconds a round | processor ms a client | peak memory, MiB |",
        "| --: | --- | --: | --: | --: |",
    ]
    processor = {(row.clients, row.contestant): row.median_ms for row in rows if row.op == _PROCESSOR}
    for row in rows:
        if row.op == _CLOCK:
            store = row.contestant.partition("(")[2].rstrip(")")
            each = processor[row.clients, row.contestant] / row.clients
            lines.append(
                f"| {row.clients} | {store} | {row.median_ms / 1e3:.1f} | {each:.1f} | {row.peak_extra_mib or 0:.0f} |"
            )
    first = rows[0]
    source = f"pfl_ext {first.pfl_ext}" + (f" at commit {first.commit}" if first.commit else "")
    return (
        "\n".join(lines)
        + f"\n\nOne round of Ditto with the LeNet of 62,006 parameters, all clients selected, {_TRAIN} training "
        "samples and a test sample each, a step of both models and the evaluation of both. One process of one thread; "
        "its peak resident memory, torch itself and the data included.\n\n"
        f"Measured on {first.date}: {first.machine}, {first.isa} kernels, {source}, torch {first.torch}, Python "
        f"{first.python}. Reproduce: `pfl-ext bench federation --memory`.\n"
    )
