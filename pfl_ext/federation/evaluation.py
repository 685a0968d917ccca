"""The evaluation of a round: what all clients' models come to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pfl_ext.data import Dataset, Partition
from pfl_ext.metrics import mean_metrics, summarize
from pfl_ext.tasks import Task

from .engine import Engine
from .messages import Diverged, Reply, Request, SharedTest
from .rounds import diverged
from .settings import Settings

__all__ = ["GLOBAL_TEST_PART", "SPLITS", "ClientResult", "Evaluator"]

SPLITS = ("train", "validation", "test")
"""The parts of a client's data."""
GLOBAL_TEST_PART = 2048
"""Samples of the global test set in one request."""

Models = dict[str, dict[str, dict[str, Any]]]
"""{model: {split: {metric: summary over clients}}}"""


class Reports(Protocol):
    """What clients reported, by their numbers."""

    def __getitem__(self, client: int) -> dict[str, float]:
        """The numbers that one client reported, by name."""


@dataclass
class ClientResult:
    """One client in the last evaluation."""

    client: int
    samples: dict[str, int]
    """How many samples it has for training, validation and testing."""
    new: bool | None
    """Whether it is one of those that join late; None where there are none."""
    metrics: dict[tuple[str, str], dict[str, float]]
    """The metrics of each model on each split: ``metrics["personal", "test"]["accuracy"]``."""
    report: dict[str, float]
    """What its method reported of it, the newest of each number."""


class Evaluator:
    """Evaluates all clients' models and the global one.

    Args:
        engine: runs the clients.
        task, settings, partition: the run's.
        tests: the test sets that belong to no client, as in the run's plan.
        global_models: how many global models there are: one, or none, or one for each network.
    """

    def __init__(
        self,
        engine: Engine,
        task: Task,
        settings: Settings,
        partition: Partition,
        tests: Mapping[str, Sequence[tuple[Dataset, Tensor]]],
        global_models: int,
    ) -> None:
        self.engine, self.task, self.settings, self.tests = engine, task, settings, tests
        self.sizes = [{split: len(getattr(partition, split)[k]) for split in SPLITS} for k in range(partition.clients)]
        self._old = partition.clients - settings.new_clients
        self._global_models = global_models
        if settings.evaluate == "global" or settings.evaluate_clients_every > 1:
            self._check_global()

    def _check_global(self) -> None:
        """Refuse a run of which nothing would be evaluated."""
        tested = any(len(rows) for _, rows in self.tests.get("global_test", ()))
        if not self._global_models or not tested:
            missing = "a global test set" if self._global_models else "a method that has a global model"
            s = self.settings
            raise ValueError(
                f"evaluate is {s.evaluate!r} and evaluate_clients_every {s.evaluate_clients_every}: testing the global "
                f"model alone needs {missing}"
            )

    def _replies(self, t: int) -> list[Reply]:
        """What clients' models come to after round t; empty replies where clients are not evaluated."""
        s, clients = self.settings, range(len(self.sizes))
        if s.evaluate == "global" or (t % s.evaluate_clients_every and t != s.rounds):
            return [Reply(k) for k in clients]
        splits = SPLITS if s.evaluate_train else SPLITS[1:]
        costs = [sum(sizes[split] for split in splits) for sizes in self.sizes]
        return list(self.engine.run([Request(k, t, "evaluate") for k in clients], costs))

    def __call__(
        self, t: int, reports: Reports, participants: Sequence[int] = ()
    ) -> tuple[dict[str, Models], list[ClientResult]]:
        """What a record says of the models after round t, and every client's results with what it reported.

        Args:
            t: the round.
            reports: what clients reported.
            participants: those that took part in it.
        """
        clients, replies = range(len(self.sizes)), self._replies(t)
        for reply in replies:
            diverged(self.settings, reply)  # where such clients are dropped, what they have no results of is missing
        late = self.settings.new_clients > 0
        results = [
            ClientResult(k, self.sizes[k], k >= self._old if late else None, replies[k].metrics, dict(report))
            # In an order that does not depend on when the run was resumed.
            for k, report in ((k, sorted(reports[k].items())) for k in clients)
        ]
        found = {"models": self._summaries(replies[: self._old])}
        if self._global_models:
            shared = found["models"].setdefault("global", {})
            # Extra test sets once, after the last round: they may be large.
            for test in self.tests if t == self.settings.rounds else ("global_test",):
                metrics = self._of_global_model(t, test)
                if metrics:
                    shared[test] = metrics
        if self.settings.evaluate_participants and any(replies[k].metrics for k in participants):
            found["participants"] = self._summaries([replies[k] for k in participants])
        if late:
            found["new_clients"] = self._summaries(replies[self._old :])
        return found, results

    def _of_global_model(self, t: int, test: str) -> dict[str, float]:
        """Metrics of the global model on a test set: the mean over its parts, and over the networks."""
        found = []
        parts = [(part, len(rows)) for part, (_, rows) in enumerate(self.tests.get(test, ()))]
        for network, (part, size) in itertools.product(range(self._global_models), parts):
            if size:
                requests = [Request(0, 0, "test", rows=some) for some in _pieces(test, part, size, network)]
                outputs = [reply.outputs for reply in self.engine.run(requests) if reply.outputs is not None]
                found_outputs, targets = (
                    torch.cat([self.engine.fetch(x) for x in both]) for both in zip(*outputs, strict=True)
                )
                for x in itertools.chain(*outputs):
                    self.engine.release(x)
                if bool(found_outputs.isnan().any()):
                    raise Diverged(None, t, f"global model's output on {test}")
                found.append(self.task.measured(found_outputs, targets))
        return mean_metrics(found)

    def _summaries(self, replies: Sequence[Reply]) -> Models:
        models: Models = {}
        kinds = {
            (model, split, metric)
            for reply in replies
            for (model, split), metrics in reply.metrics.items()
            for metric in metrics
        }
        for model, split, metric in sorted(kinds):
            values = [reply.metrics.get((model, split), {}).get(metric, math.nan) for reply in replies]
            weights = [self.sizes[reply.client].get(split, 1) for reply in replies]
            models.setdefault(model, {}).setdefault(split, {})[metric] = summarize(values, weights)
        return models


def _pieces(test: str, part: int, size: int, network: int) -> Iterator[SharedTest]:
    for begin in range(0, size, GLOBAL_TEST_PART):
        yield SharedTest(test, part, begin, min(begin + GLOBAL_TEST_PART, size), network)
