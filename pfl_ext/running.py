"""Runs and comparisons from beginning to end: their folders, tables and pictures, and the models that come out.

The command line and ``pfl_ext.run`` and ``pfl_ext.compare`` both go this way.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from .data import Dataset, Partition
from .engines import kept_processes, restarted
from .experiment import Experiment, restored
from .federation import Diverged, Federation
from .metrics import digits_of, scale_of
from .reports import (
    CONFIG,
    LoggerFactory,
    Look,
    Progress,
    ResultsFolder,
    best_cells,
    check_loggers,
    comparison,
    folder_name,
    main_columns,
    table,
    tails,
    users,
)
from .reports.tables import Style
from .runs import draw, has_results, run_in

__all__ = [
    "Compared",
    "Output",
    "Run",
    "compare_all",
    "data_name",
    "folders_of",
    "printed",
    "run_all",
    "run_name",
    "run_one",
    "with_config",
    "write_tables",
]

_SUFFIXES: dict[Style, str] = {"markdown": "md", "csv": "csv", "latex": "tex"}


@dataclass(frozen=True)
class Output:
    """Where results go, and what is made of them."""

    folder: Path
    resume: bool = False
    overwrite: bool = False
    quiet: bool = False
    log: tuple[str | LoggerFactory, ...] = ()
    plots: bool = True

    def workers(self) -> contextlib.AbstractContextManager[None]:
        """A block whose runs share worker processes, which says so where these were not worth their start."""
        return kept_processes(lambda note: None if self.quiet else print(f"note: {note}", file=sys.stderr))

    def check(self, runs: Sequence[Path]) -> None:
        """Refuse folders that runs cannot be written to, before the first of them begins.

        Args:
            runs: the folders of all runs.
        """
        check_loggers(self.log)
        if self.resume and not self.folder.exists():
            raise ValueError(
                f"resume=True: there is no folder {self.folder}, so there is nothing to go on with; leave it out to "
                "begin, or name the run's folder by output=FOLDER"
            )
        if self.resume or self.overwrite or restarted():  # before torchrun started it again, all was checked
            return
        for folder in runs:
            if has_results(folder):
                raise ValueError(
                    f"{folder} holds the results of an earlier run: resume=True goes on with it, overwrite=True "
                    "removes its results, output=FOLDER names another folder"
                )


def data_name(experiment: Experiment) -> str:
    """The data and partition of an experiment as part of a folder's name."""
    name = Path(experiment.data).name if ".py:" in experiment.data else experiment.data
    return f"{name.replace(':', '-').replace('/', '-')}-{experiment.partition}"


def run_name(experiment: Experiment) -> str:
    """The name of an experiment's folder, unless another is given."""
    method = type(experiment.make_method()).__name__.lower() if ":" in experiment.method else experiment.method
    return f"{method}-{data_name(experiment)}-seed{experiment.settings.seed}"


# ---- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A finished run: what its folder has, and its models.

    >>> run = pfl_ext.run("ditto", rounds=20)                                                   # doctest: +SKIP
    >>> print(run)                                                                              # doctest: +SKIP
    >>> run.personal_model(3)(images).argmax(1)                                                 # doctest: +SKIP
    """

    folder: Path
    experiment: Experiment
    look: Look

    @property
    def results(self) -> ResultsFolder:
        """Records and tables of the folder."""
        return ResultsFolder.open(self.folder)

    @cached_property
    def federation(self) -> Federation:
        """The run as its last checkpoint has it."""
        return restored(self.folder, self.experiment)

    def global_model(self) -> nn.Module:
        """The trained global model; see :meth:`pfl_ext.federation.Federation.global_model`."""
        return self.federation.global_model()

    def personal_model(self, client: int) -> nn.Module:
        """The client's personal model; see :meth:`pfl_ext.federation.Federation.personal_model`."""
        return self.federation.personal_model(client)

    def rows(self) -> list[dict[str, Any]]:
        """The last evaluation: a row for each model and each data it was evaluated on."""
        metric = self.look.metric or ""
        models = next(r["models"] for r in reversed(self.results.records()) if "models" in r)
        return [
            {"model": model, "data": split, **_cells(metrics[metric], metric)}
            for model, splits in models.items()
            for split, metrics in splits.items()
            if metric in metrics
        ]

    def __str__(self) -> str:
        """The last evaluation as a table."""
        return table(self.rows(), style=self.look.style)


def _cells(found: Mapping[str, float] | float, metric: str) -> dict[str, str]:
    """The cells of a metric over clients, or of one model on one set."""
    scale, digits = scale_of(metric), digits_of(metric)
    if not isinstance(found, Mapping):
        return {metric: f"{scale * found:.{digits}f}"}
    names = {"mean": metric, "std": "std over clients", "lowest5": "lowest 5 %", "top5": "top 5 %"}
    cells = {title: f"{scale * found[name]:.{digits}f}" for name, title in names.items()}
    return {**cells, "clients": str(found["count"])}


def run_one(experiment: Experiment, output: Output, look: Look) -> Run:
    """Run an experiment in its folder, and draw it."""
    output.check([output.folder])
    dataset, partition = experiment.make_data()
    look = look.of(experiment.make_task(dataset).metric)
    with output.workers():
        _run(output.folder, experiment, dataset, partition, output, look)
    if output.plots:
        draw({experiment.method: ResultsFolder.open(output.folder)}, output.folder, dataset, partition, look)
    return Run(output.folder, experiment, look)


def _run(
    folder: Path,
    experiment: Experiment,
    dataset: Dataset,
    partition: Partition,
    output: Output,
    look: Look,
    title: str = "",
    progress: Progress | None = None,
) -> None:
    run_in(
        folder,
        experiment,
        dataset,
        partition,
        look=look,
        label=title,
        progress=progress,
        resume=output.resume,
        overwrite=output.overwrite,
        quiet=output.quiet,
        log=output.log,
    )


# ---- a comparison ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compared(Mapping[str, Run]):
    """A finished comparison: its runs by their names (of several seeds the first), and its table."""

    folder: Path
    runs: Mapping[str, Sequence[Run]]
    """All that came to their end, one for each seed."""
    look: Look
    folders: Mapping[str, Sequence[ResultsFolder]] = field(repr=False)
    """Of the methods and variants of which at least one run did."""
    diverged: Mapping[str, Sequence[str]]
    """For each method and variant what its other runs said when they diverged; these are in no table."""

    def __getitem__(self, label: str) -> Run:
        """The run of a method or variant, with the first seed that did not diverge."""
        if label in self.runs and not self.runs[label]:
            raise KeyError(f"all runs of {label} diverged: {self.diverged[label][0]}")
        return self.runs[label][0]

    def __iter__(self) -> Iterator[str]:
        """The names of the methods and variants, in order."""
        return iter(self.runs)

    def __len__(self) -> int:
        """How many methods and variants there are."""
        return len(self.runs)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each method or variant (:func:`pfl_ext.reports.comparison`)."""
        return self._with_diverged(comparison(self.folders, self.look.metric or "", self.look.statistic))

    def tails(self) -> list[dict[str, Any]]:
        """Likewise the mean over clients and over their lowest and highest 5 % (:func:`pfl_ext.reports.tails`)."""
        return self._with_diverged(tails(self.folders, self.look.metric or ""))

    def _with_diverged(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rows with how many runs diverged, if any did, and with those of methods all of whose runs did."""
        if not any(self.diverged.values()):
            return rows
        found = {row["method"]: row for row in rows}
        return [{"method": label, "diverged": len(self.diverged[label]), **found.get(label, {})} for label in self.runs]

    def __str__(self) -> str:
        """The comparison as a table for the terminal."""
        return printed(self.rows(), self.look)


def folders_of(experiments: Sequence[tuple[str, Experiment]], folder: Path) -> list[Path]:
    """The folder of each run of a comparison."""
    return [folder / f"{folder_name(label)}-seed{made.settings.seed}" for label, made in experiments]


def run_all(
    experiments: Sequence[tuple[str, Experiment]],
    folder: Path,
    output: Output,
    look: Look,
    progress: Progress,
    where: str = "",
) -> tuple[Compared, Dataset, Partition]:
    """Run them one after the other, each in a folder of its own; returns these by label, and the data of the last.

    A run that diverges does not end the others: its folder has what it had done, and no table has it.

    Args:
        experiments: every run by its label.
        folder: their folders are in it.
        output, look: how they run, and what is shown of them.
        progress: the display of all runs.
        where: stands in it beside the label and the seed, such as the point of a sweep.
    """
    runs: dict[str, list[Run]] = {label: [] for label, _ in experiments}
    diverged: dict[str, list[str]] = {label: [] for label, _ in experiments}
    made: dict[int, tuple[Dataset, Partition]] = {}
    several = len({experiment.settings.seed for _, experiment in experiments}) > 1
    with output.workers():
        for (label, experiment), own in zip(experiments, folders_of(experiments, folder), strict=True):
            seed = experiment.data_seed
            if seed not in made:
                made = {seed: experiment.make_data()}  # one at a time: they are large
            look = look.of(experiment.make_task(made[seed][0]).metric)
            parts = (label, f"seed {experiment.settings.seed}" if several else "", where)
            title = ", ".join(part for part in parts if part)
            try:
                _run(own, experiment, *made[seed], output, look, title, progress)
            except Diverged as error:  # the others have their results all the same
                diverged[label].append(f"{title}: {error}")
                progress.message(f"{title}: {error}. The next run begins")
            else:
                runs[label].append(Run(own, experiment, look))
    folders = {label: [run.results for run in some] for label, some in runs.items() if some}
    return Compared(folder, runs, look, folders, diverged), *made[seed]


@contextlib.contextmanager
def with_config(folder: Path, config: Mapping[str, Any]) -> Iterator[None]:
    """Write ``config.toml`` of a comparison before it begins; it goes again where no run could begin."""
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    ResultsFolder(folder).write_toml(CONFIG, config)
    try:
        yield
    except BaseException:
        if absent and {path.name for path in folder.iterdir()} == {CONFIG}:
            (folder / CONFIG).unlink()
            for path in absent:
                with contextlib.suppress(OSError):
                    path.rmdir()
        raise


def compare_all(
    experiments: Sequence[tuple[str, Experiment]], config: Mapping[str, Any], output: Output, look: Look
) -> Compared:
    """Run a comparison in its folder, write its tables and draw it.

    Args:
        experiments: every run by its label.
        config: what makes the same comparison again, for ``config.toml``.
        output, look: where it goes, and what the tables show.
    """
    output.check(folders_of(experiments, output.folder))
    labels = [label for label, _ in experiments]
    with with_config(output.folder, config), Progress(labels, quiet=output.quiet) as progress:
        found, dataset, partition = run_all(experiments, output.folder, output, look, progress)
    write_tables(found.rows(), output.folder, "comparison", found.look)
    write_tables(found.tails(), output.folder, "tails", found.look, whole=True)
    (output.folder / "users.md").write_text(users(found.folders, found.look.metric or ""), encoding="utf-8")
    if output.plots and found.folders:
        draw(found.folders, output.folder, dataset, partition, found.look)
    return found


def write_tables(
    rows: Sequence[Mapping[str, Any]],
    folder: Path,
    name: str,
    look: Look,
    *,
    varied: Mapping[str, bool] | None = None,
    whole: bool = False,
) -> None:
    """Write a table in all styles: CSV and Markdown with all columns, LaTeX with those that are printed.

    Args:
        rows: its rows.
        folder, name: where.
        look: with the columns that the user chose, if any: for Markdown and LaTeX.
        varied: as of `printed`.
        whole: all columns in LaTeX too.
    """
    for style, suffix in _SUFFIXES.items():
        every = style != "latex" and (style == "csv" or look.columns is None)
        text = printed(rows, replace(look, style=style), varied=varied, whole=whole or every)
        (folder / f"{name}.{suffix}").write_text(text, encoding="utf-8")


def printed(
    rows: Sequence[Mapping[str, Any]], look: Look, *, varied: Mapping[str, bool] | None = None, whole: bool = False
) -> str:
    """A table of methods as it is printed: with the columns that were chosen, the best results in bold.

    Args:
        rows: a row for each method.
        look: without columns, those that answer which method is best (`main_columns`); in CSV all.
        varied: the options of a sweep that stand before the method, and whether each is one of methods. Only rows on
            the same data and network are compared.
        whole: all columns, whatever the look says.
    """
    varied, metric = varied or {}, look.metric or "accuracy"
    if whole or (look.columns is None and look.style == "csv"):
        columns = None
    elif look.columns is None:
        columns = main_columns(rows, [*varied], look.digits)
    else:
        columns = [*varied, *look.columns]
    best = best_cells(rows, metric, look.digits, [name for name, of_method in varied.items() if not of_method])
    return table(rows, columns, look.style, look.digits, best=best)
