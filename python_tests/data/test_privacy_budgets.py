"""Table 4 of PerAda: what its file's split, batches and noise cost each client, against the printed budgets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pfl_ext.comparison import Comparison, points
from pfl_ext.configuration import Configuration
from pfl_ext.experiment import Experiment
from pfl_ext.federation.privacy import epsilon, sampling

FILE = Path(__file__).parents[2] / "configs" / "perada" / "table4.toml"
PRINTED = {0.8: 5.99, 1.0: 3.7, 1.5: 1.81}
SEEDS = (0,)


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> list[Experiment]:
    """Every point of the file on CIFAR-10's labels, whose images say nothing of the budgets."""
    path = tmp_path_factory.mktemp("labels") / "labels.npz"
    parts = {"train": 5000, "test": 1000}
    images = {f"x_{part}": np.zeros((10 * each, 1, 1, 3), np.uint8) for part, each in parts.items()}
    np.savez(path, **images, **{f"y_{part}": np.tile(np.arange(10), each) for part, each in parts.items()})
    configuration = Configuration.read(FILE)
    sections = {**configuration.sections, "data": {"name": f"npz:{path}"}}
    every = points(Comparison(sections, ("perada",), SEEDS), configuration.sweep)
    return [experiment for point in every for _, experiment in point.comparison.experiments()]


def _budget(experiment: Experiment, sizes: list[int], batch_size: int, models: int) -> float:
    """The clients' mean."""
    s, method = experiment.settings, experiment.make_method()
    found = []
    for samples in sizes:
        rate, batches = sampling(samples, batch_size)
        steps = models * s.rounds * method.local_epochs * batches
        found.append(epsilon(rate, s.dp_noise, steps, s.dp_delta))
    return float(np.mean(found))


def test_the_files_batches_with_one_model_counted_are_nearest_to_the_printed_budgets(
    experiments: list[Experiment],
) -> None:
    private = [experiment for experiment in experiments if experiment.settings.dp_noise]
    assert {experiment.settings.dp_noise for experiment in private} == set(PRINTED)
    assert {experiment.make_method().batch_size for experiment in private} == {32}
    off = dict[tuple[int, int], list[float]]()
    for experiment in private:
        sizes = [len(rows) for rows in experiment.make_data()[1].train]
        for batch_size in (32, 64):
            for models in (1, 2):
                budget = _budget(experiment, sizes, batch_size, models)
                off.setdefault((batch_size, models), []).append(np.log(budget / PRINTED[experiment.settings.dp_noise]))
    means = {reading: abs(float(np.mean(found))) for reading, found in off.items()}
    assert min(means, key=lambda reading: means[reading]) == (32, 1), means
    assert means[32, 1] < 0.3  # unequal clients spend unequally: another draw of the split has another mean


def test_the_column_without_privacy_neither_adds_noise_nor_clips(experiments: list[Experiment]) -> None:
    open_ones = [experiment for experiment in experiments if not experiment.settings.dp_noise]
    assert len(open_ones) == len(SEEDS)
    assert all(experiment.settings.privacy is None for experiment in open_ones)
