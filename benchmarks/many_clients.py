"""Time and memory of a round with many clients, each with a personal model: how far one process goes.

Ditto with the LeNet of 62,006 parameters on made-up 3 x 32 x 32 images, four training samples and a test sample a
client: every client is selected, trains a step of both models and sends one, is evaluated, and keeps the other. Each
number of clients is measured in a process of its own. The columns of the CSV file are those of the other families;
``peak_extra_mib`` is the whole process here, its imports and the data included.
"""

from __future__ import annotations

import multiprocessing
import sys
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
_MOST_IN_MEMORY = 1_000  # more are measured with the mapped store only


def one_round(clients: int, store: str) -> float:
    """Seconds of a round of that many clients."""
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
    return float(run.run()["seconds"])


def _measured(clients: int, store: str, pipe: Connection) -> None:
    seconds = one_round(clients, store)
    pipe.send((seconds, status_bytes("VmHWM")))


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
                seconds, peak = here.recv()
            except EOFError:
                process.join()
                raise OSError(
                    f"the process with {count} clients and the {store} store ended with exit code {process.exitcode}"
                ) from None
            process.join()
            print(f"{count} clients, {store}: {seconds:.1f} s, {peak / 2**20:.0f} MiB", file=sys.stderr, flush=True)
            unknown = float("nan")
            rows.append(
                report.Row(
                    family="federation",
                    op="many clients",
                    shapes="lenet",
                    clients=count,
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
            )
    return rows


def markdown(rows: Sequence[report.Row]) -> str:
    """The table, and what was run."""
    lines = [
        "| clients | store | seconds a round | ms a client | peak memory, MiB |",
        "| --: | --- | --: | --: | --: |",
    ]
    for row in rows:
        store = row.contestant.partition("(")[2].rstrip(")")
        lines.append(
            f"| {row.clients} | {store} | {row.median_ms / 1e3:.1f} | {row.median_ms / row.clients:.1f} "
            f"| {row.peak_extra_mib or 0:.0f} |"
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
