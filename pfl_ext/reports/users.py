"""The users of a comparison one by one, as PersFL's tables have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pfl_ext.data import Partition
from pfl_ext.metrics import scale_of, word_of

from .results import ResultsFolder, Runs
from .tables import folders_of, per_user, table, transpose

__all__ = ["partitions", "users"]

_CHOSEN = {
    "temperature": "Temperature T that each user chose",
    "lambda": "Imitation lambda that each user chose",
    "teacher_round": "Round of each user's optimal teacher",
}


def users(runs: Runs, metric: str = "accuracy") -> str:
    """PersFL's Tables 2 to 6 as Markdown: a row a user, for a metric and for what clients chose where they did."""
    unit, word = ", per cent" if scale_of(metric) == 100 else "", word_of(metric)
    text = f"{word[0].upper()}{word[1:]} of each user's personal model (global where a method has none){unit}\n\n"
    text += table(transpose(per_user(runs, f"personal/test/{metric}"), "user"))
    for column, title in _CHOSEN.items():
        chosen = {name: run for name, run in runs.items() if _has(folders_of(run), column)}
        if chosen:
            text += f"\n{title}\n\n" + table(transpose(per_user(chosen, column), "user"))
    return text + "\n" + _note(runs)


def _has(folders: Sequence[ResultsFolder], column: str) -> bool:
    return any(column in row for folder in folders for row in folder.clients()[:1])


def _note(runs: Runs) -> str:
    """How the numbers below the users are meant, and whether a user is one person."""
    text = (
        "Mean over the seeds. Standard deviation and variance are of these means over the users, with divisor n - 1.\n"
    )
    count = len(partitions(runs))
    if count > 1:
        text += (
            f"\nThe seeds have {count} partitions: user 0 of one seed is not user 0 of another, and the rows are means "
            "over different people. With a seed of its own for the partition (--partition-seed) a user is one person.\n"
        )
    return text


def partitions(runs: Runs) -> Mapping[str, Sequence[ResultsFolder]]:
    """The runs of each partition that there is among them, by its fingerprint."""
    found: dict[str, list[ResultsFolder]] = {}
    for run in runs.values():
        for folder in folders_of(run):
            path = folder.path / "partition.safetensors"
            if path.exists():
                found.setdefault(Partition.load(path).fingerprint, []).append(folder)
    return found
