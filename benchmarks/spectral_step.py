"""What the spectral term costs in a local step of SCD, beside forward and backward of the network.

``python -m pfl_ext.benchmarks.spectral_step`` prints a table: forward and backward of a step on a batch of images, and
the term with its gradient: fused, and by torch's own operations as a skilled and as a naive hand would write it. The
teacher's spectrum is cached in all three. Medians of runs that take turns, on one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from pfl_ext import nn
from pfl_ext.federation import WorkingModel, stream
from pfl_ext.ops import SpectralTeacher, spectral_divergence

from . import machine
from .opponents import spectral as opponents

__all__ = ["main", "step_times"]

NETWORKS = {"mlp": (1, 28, 28), "lenet": (3, 32, 32), "resnet18": (3, 32, 32)}
_CONTESTANTS = ("forward and backward", "term, fused", "term, rfft + autograd", "term, fft + autograd")


def step_times(network: str, batch: int, seconds: float) -> dict[str, float]:
    """Milliseconds of each part, medians of at least five runs and of as many as fit into the seconds."""
    shape = NETWORKS[network]
    options: dict[str, Any] = {"stem": "small"} if network.startswith("resnet") else {}
    model = WorkingModel(nn.build(network, shape, 10, stream(0, "network"), **options))
    generator = stream(0, "images")
    inputs = torch.randn(batch, *shape, generator=generator)
    targets = torch.randint(10, (batch,), generator=generator)
    weights = list(model.trained)
    teacher = [w.detach() + 0.01 * torch.randn(w.shape, generator=generator) for w in weights]
    cached = SpectralTeacher(teacher)

    def network_step() -> None:
        torch.autograd.grad(F.cross_entropy(model(inputs), targets), weights)

    def fused() -> None:
        torch.autograd.grad(spectral_divergence(weights, cached), weights)

    runs: dict[str, Callable[[], Any]] = dict(
        zip(
            _CONTESTANTS,
            (
                network_step,
                fused,
                partial(opponents.autograd_rfft, weights, *opponents.rfft_teacher(teacher)),
                partial(opponents.autograd_fft, weights, opponents.fft_teacher(teacher)),
            ),
            strict=True,
        )
    )
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while len(times[_CONTESTANTS[0]]) < 5 or time.perf_counter() < end:
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {"parameters": sum(w.numel() for w in weights), **{name: median(found) for name, found in times.items()}}


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m pfl_ext.benchmarks.spectral_step", description=__doc__)
    parser.add_argument("--networks", nargs="+", choices=tuple(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each network")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| network | parameters | " + " | ".join(f"{name}, ms" for name in _CONTESTANTS) + " |")
    print("| --- | --: |" + " --: |" * len(_CONTESTANTS))
    for network in parsed.networks:
        found = step_times(network, parsed.batch, parsed.seconds)
        cells = [f"{found[name]:.2f}" for name in _CONTESTANTS]
        print(f"| {network} | {found['parameters']:,} | " + " | ".join(cells) + " |", flush=True)
    about = machine.describe()
    print(f"\n{about['machine']}, {about['isa']} kernels, torch {about['torch']}, one thread, batch {parsed.batch}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
