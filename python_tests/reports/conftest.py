from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pfl_ext.metrics import summarize
from pfl_ext.reports import ResultsFolder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., ResultsFolder]:
    """Writes a run whose clients have these accuracies in the last round, and half of them in the first."""

    def make(
        name: str, clients: Sequence[float], models: Sequence[str] = ("personal", "global"), rounds: int = 4
    ) -> ResultsFolder:
        folder = ResultsFolder.create(tmp_path / name)
        for number in range(1, rounds + 1):
            record = {
                "round": number,
                "seconds": float(number),
                "clients": [0],
                "communication": {"up_bytes": 1_000_000, "down_bytes": 500_000},
                "training": {"loss": 1.0, "trained_parameters": 62006},
            }
            if number in (1, rounds):
                accuracies = [a * (0.5 if number == 1 else 1.0) for a in clients]
                # The validation data prefer the first round.
                result = {
                    "test": {"accuracy": summarize(accuracies)},
                    "validation": {"accuracy": summarize([1 - a for a in accuracies])},
                }
                record["models"] = {
                    model: {**result, "global_test": {"accuracy": summarize([0.25]) if model == "personal" else 0.75}}
                    for model in models
                }
            folder.append(record)
        folder.write_clients(
            [{"client": k, **{f"{m}/test/accuracy": a for m in models}, "lambda": 0.5} for k, a in enumerate(clients)]
        )
        return folder

    return make
