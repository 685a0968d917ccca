"""Rounds of FedAvg on many small clients, the way of Apple's pfl.

What pfl does in a round was read in its sources of 2023 and 2024 (``algorithm/base.py``,
``algorithm/federated_averaging.py``, ``aggregate/simulate.py``, ``model/pytorch.py``, ``data/dataset.py``,
``internal/ops/pytorch_ops.py``), and is re-typed here from that:

- A user's batches are slices of its tensors, made once and kept, in the order of the samples: nothing is shuffled.
- One model is trained for one user after the other. Its parameters are copied to a buffer before each user and back
  after it, parameter by parameter; each user gets a new ``SGD``.
- A user's update is the parameters minus those of the buffer, in tensors that are kept. The first user's is cloned,
  those of the others are added to it in place.
- With several processes each trains a part of the cohort and has all of the model. At the end of a round the sums are
  made one vector, which one reduction adds up; a second one adds up what is counted. Every process then takes the same
  step of a central ``SGD``, with the average update as its gradient.
- The central evaluation is one pass over a test set, of which each process takes its part, and a reduction.

Users are given here with the samples in an order of the caller's, so that the first round can be compared with one that
shuffles. Left out, to pfl's advantage: its lists of postprocessors and callbacks, its contexts and names of metrics.
"""

from __future__ import annotations

import copy
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["PflRun", "Task", "run"]


@dataclass(frozen=True)
class Task:
    """A federation as this opponent takes it: network, users, rounds, step size."""

    network: nn.Module
    x: Tensor
    """Of all users, [users, samples, ...]."""
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    cohorts: Sequence[Sequence[int]]
    """The users of each round."""
    batch_size: int
    lr: float
    evaluate_every: int


@dataclass(frozen=True)
class PflRun:
    """Times, models and accuracy of a run of this opponent."""

    seconds: list[float]
    """Of each round, without its evaluation."""
    evaluations: list[float]
    """Seconds of each evaluation."""
    first: nn.Module
    """The model after the first round."""
    accuracy: float
    """The global model's in the last evaluation."""


def run(task: Task, processes: int = 1) -> PflRun:
    """Run all rounds, in this process or in new ones, each of one thread."""
    if processes == 1:
        return _Rank(task, 0, 1).run()
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pfl-") as name:
        folder = Path(name)
        torch.save(task, folder / "task.pt")
        ranks = [context.Process(target=_process, args=(folder, i, processes)) for i in range(processes)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise ChildProcessError(f"pfl's processes ended with {[rank.exitcode for rank in ranks]}")
        found: PflRun = torch.load(folder / "run.pt", weights_only=False)
        return found


def _process(folder: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/group", rank=rank, world_size=size)
    found = _Rank(torch.load(folder / "task.pt", weights_only=False), rank, size).run()
    if rank == 0:
        torch.save(found, folder / "run.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


class _User:
    """A user's data, its batches kept."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y
        self._batches: dict[int, list[list[Tensor]]] = {}

    def batches(self, size: int) -> list[list[Tensor]]:
        if size not in self._batches:
            begins = range(0, len(self.x), size)
            self._batches = {size: [[data[i : i + size] for data in (self.x, self.y)] for i in begins]}
        return self._batches[size]


class _Rank:
    """One process's part of the run."""

    def __init__(self, task: Task, rank: int, size: int) -> None:
        self._task, self._rank, self._size = task, rank, size
        self._model = copy.deepcopy(task.network)
        self._variables = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._central = torch.optim.SGD(self._model.parameters(), lr=1.0)
        self._initial: dict[str, Tensor] = {}
        self._difference = {name: torch.empty_like(p) for name, p in self._variables.items()}
        self._users = [_User(x, y) for x, y in zip(task.x, task.y, strict=True)]
        part = slice(rank * len(task.test_x) // size, (rank + 1) * len(task.test_x) // size)
        self._test = (task.test_x[part], task.test_y[part])

    def run(self) -> PflRun:
        seconds, evaluations, first, accuracy = [], [], self._model, float("nan")
        for t, cohort in enumerate(self._task.cohorts, 1):
            if self._size > 1:
                torch.distributed.barrier()
            begin = time.perf_counter()
            self._round(cohort)
            seconds.append(time.perf_counter() - begin)
            if t == 1:
                first = copy.deepcopy(self._model)
            if t % self._task.evaluate_every == 0:
                begin = time.perf_counter()
                accuracy = self._evaluate()
                evaluations.append(time.perf_counter() - begin)
        return PflRun(seconds, evaluations, first, accuracy)

    def _round(self, cohort: Sequence[int]) -> None:
        total: dict[str, Tensor] = {}
        counts = torch.zeros(2)
        for k in cohort[self._rank :: self._size]:
            update = self._train(self._users[k])
            if not total:
                total = {name: x.clone() for name, x in update.items()}
            else:
                for name, x in update.items():
                    total[name] += x
            counts += torch.tensor([1.0, float(len(self._users[k].x))])
        if self._size > 1:
            flat = torch.cat([x.reshape(-1) for x in total.values()])
            torch.distributed.all_reduce(flat)
            begin = 0
            for x in total.values():
                x.copy_(flat[begin : begin + x.numel()].reshape(x.shape))
                begin += x.numel()
            torch.distributed.all_reduce(counts)
        for x in total.values():
            x /= float(counts[0])
        self._central.zero_grad()
        for name, variable in self._variables.items():
            if variable.grad is None:
                variable.grad = torch.zeros_like(variable)
            variable.grad.data.copy_(-1 * total[name])
        self._central.step()

    def _train(self, user: _User) -> dict[str, Tensor]:
        """The update of a user, whose model is taken back."""
        if not self._initial:
            self._initial = {name: p.detach().clone() for name, p in self._variables.items()}
        else:
            for name, p in self._variables.items():
                self._initial[name].data.copy_(p)
        optimizer = torch.optim.SGD(self._model.parameters(), lr=self._task.lr)
        self._model.train()
        for x, y in user.batches(self._task.batch_size):
            optimizer.zero_grad()
            F.cross_entropy(self._model(x), y).backward()
            optimizer.step()
        for name, p in self._variables.items():
            self._difference[name].data.copy_(p).sub_(self._initial[name])
        for name, p in self._variables.items():
            p.data.copy_(self._initial[name])
        return self._difference

    @torch.no_grad()
    def _evaluate(self) -> float:
        self._model.eval()
        x, y = self._test
        logits = self._model(x)
        sums = [F.cross_entropy(logits, y, reduction="sum").item(), (logits.argmax(1) == y).sum().item(), len(y)]
        found = torch.tensor(sums)
        if self._size > 1:
            torch.distributed.all_reduce(found)
        return float(found[1] / found[2])
