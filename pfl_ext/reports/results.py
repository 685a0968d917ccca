r"""The folder of a run's results, written so that no moment of a kill, a full disk or a crash loses what was there.

======================  ===========================================================================================
config.toml             the run's options, as ``--config`` takes them
versions.json           what it ran with
metrics.jsonl           one round record a line, appended round by round: the source of everything below
metrics.csv             the same as a wide table, made from it: one line per round, one column per number
metrics-long.csv        the same as a long ("tidy") table: one line per number (:func:`tidy`)
clients.csv             the per-client results of the last evaluation
clients/round-\*.csv    the same of every evaluation
classes.csv             how many training samples of each class each client holds
\*.safetensors, \*.png  what else a run leaves, through :meth:`ResultsFolder.replacing`
======================  ===========================================================================================

A round record is ``{"round", "seconds", "clients", "communication", "training", "models"}``, the last only in rounds
that were evaluated: ``{"personal": {"test": {"accuracy": summarize(...)}, "validation": ..., "global_test": ...}}``.

JSON has no word for NaN and infinity. They are written as the strings "NaN", "Infinity" and "-Infinity", which any
reader can parse and `ResultsFolder` turns back into floats.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from pfl_ext.toml import as_toml, read_toml

__all__ = [
    "CONFIG",
    "LOCK",
    "TIDY",
    "ResultsError",
    "ResultsFolder",
    "Runs",
    "flatten",
    "folder_name",
    "lock",
    "read_config",
    "tidy",
    "versions",
]

CONFIG = "config.toml"
"""The file of a results folder with the run's options."""

LOCK = ".lock"
"""The file of a results folder that the process which writes there has locked."""
_PATIENCE = 2.0  # seconds
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class ResultsError(OSError):
    """Results cannot be written or read; what was there before is still there."""


class ResultsFolder:
    """A run's results on disk. One process writes; any number may read meanwhile."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Touch nothing: `create` begins a run, `open` finds one."""
        self.path = Path(path)
        self._last_round: float | None = None  # of metrics.jsonl once this object has made sure that it ends in a line

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> ResultsFolder:
        """Make the folder; it may exist, but not with a round of another run in it.

        Raises:
            FileExistsError: there are rounds already.
            ResultsError: the folder cannot be made or written to.
        """
        folder = cls(path)
        metrics = folder.path / "metrics.jsonl"
        try:
            if metrics.exists() and metrics.stat().st_size:
                raise FileExistsError(
                    f"{folder.path} holds the results of another run: resume that run, or name another folder"
                )
            folder.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            if error.errno is None:
                raise
            raise ResultsError(f"cannot make the results folder {folder.path}: a file has that name") from error
        except OSError as error:
            raise ResultsError(f"cannot make the results folder {folder.path}: {error.strerror or error}") from error
        with folder.replacing(
            "metrics.jsonl"
        ) as temporary:  # tells now, not after the first round, whether one can write
            temporary.touch()
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ResultsFolder:
        """The results of a run that was started.

        Raises:
            FileNotFoundError: there are none.
        """
        folder = cls(path)
        if not (folder.path / "metrics.jsonl").is_file():
            raise FileNotFoundError(f"{folder.path} holds no results: it has no metrics.jsonl")
        return folder

    def __repr__(self) -> str:
        """The call that names this folder."""
        return f"ResultsFolder({str(self.path)!r})"

    # ---- rounds ------------------------------------------------------------------------------------------------------

    def append(self, record: Mapping[str, Any]) -> None:
        """Add the record of the next round.

        Raises:
            ValueError: a round that is not after the last one; `truncate` first to repeat rounds.
            ResultsError: it cannot be written; metrics.jsonl then ends with the record before.
        """
        if self._last_round is None:
            records, intact = self._read()
            if not intact:
                self._write_records(records)
            self._last_round = records[-1]["round"] if records else -math.inf
        if not record["round"] > self._last_round:
            raise ValueError(
                f"round {record['round']} cannot follow round {self._last_round} in {self.path / 'metrics.jsonl'}; "
                f"truncate({record['round'] - 1}) drops that round and those after it"
            )
        line = _to_json(record).encode() + b"\n"
        target = self.path / "metrics.jsonl"
        try:
            with target.open("ab", buffering=0) as file:
                size = file.seek(0, os.SEEK_END)
                try:
                    written = 0
                    while written < len(line):  # a full disk takes a part first and fails then
                        written += file.write(line[written:]) or 0
                except BaseException:
                    with suppress(OSError):
                        file.truncate(size)
                    raise
        except OSError as error:
            self._last_round = None  # look at the file again before the next line
            raise _cannot_write(target, error) from error
        self._last_round = record["round"]

    def records(self) -> list[dict[str, Any]]:
        """All round records. A last line that a killed run left half-written is passed over.

        Raises:
            ResultsError: another line is no record; the message names it.
        """
        return self._read()[0]

    def truncate(self, round: int) -> None:
        """Drop the records after ``round``, for a run that resumes from its checkpoint of that round. Atomic."""
        self._write_records([record for record in self.records() if record["round"] <= round])
        if (self.path / "metrics.csv").exists():
            self.write_csv()

    def write_csv(self) -> None:
        """Make metrics.csv and metrics-long.csv from metrics.jsonl.

        The first has one line per round and columns such as ``personal/test/accuracy/mean``, the second one per number
        (`tidy`).
        """
        records = self.records()
        self._write_table("metrics.csv", [flatten(record) for record in records])
        self._write_table("metrics-long.csv", [row for record in records for row in tidy(record)], TIDY)

    def _read(self) -> tuple[list[dict[str, Any]], bool]:
        """The records, and whether the file is exactly these lines."""
        target = self.path / "metrics.jsonl"
        try:
            content = target.read_bytes()
        except OSError as error:
            raise ResultsError(f"cannot read {target}: {error.strerror or error}") from error
        *lines, rest = content.split(b"\n")
        records = []
        for number, line in enumerate([*lines, rest] if rest else lines, 1):
            try:
                record = _restore(json.loads(line))
                _check_record(record)
            except (ValueError, RecursionError) as error:
                if number > len(lines):
                    break
                raise ResultsError(
                    f"{target}, line {number} is damaged ({error}); delete it to read the rest"
                ) from None
            records.append(record)
        return records, not rest

    def _write_records(self, records: Sequence[Mapping[str, Any]]) -> None:
        self._write("metrics.jsonl", "".join(_to_json(record) + "\n" for record in records))
        self._last_round = records[-1]["round"] if records else -math.inf

    # ---- clients and other files -------------------------------------------------------------------------------------

    def write_clients(self, rows: Sequence[Mapping[str, Any]], round: int | None = None) -> None:
        """Replace clients.csv, or the file of that round: one row per client, columns in order of appearance."""
        if round is None:
            self._write_table("clients.csv", rows)
        else:
            self._write_table(f"clients/round-{round:05d}.csv", rows)

    def write_classes(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace classes.csv by the rows of :meth:`pfl_ext.data.Partition.classes`."""
        self._write_table("classes.csv", rows)

    def clients(self) -> list[dict[str, Any]]:
        """The rows of clients.csv with numbers as numbers, empty cells left out; empty before the first evaluation."""
        try:
            text = (self.path / "clients.csv").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ResultsError(f"cannot read {self.path / 'clients.csv'}: {error.strerror or error}") from error
        rows = csv.DictReader(io.StringIO(text, newline=""))
        return [{name: _number(cell) for name, cell in row.items() if cell} for row in rows]

    def write_json(self, name: str, value: object) -> None:
        """Replace the file ``name`` by ``value`` as JSON; tensors, arrays and paths may be in it."""
        self._write(name, _to_json(value, indent=2) + "\n")

    def write_toml(self, name: str, content: Mapping[str, Any]) -> None:
        """Replace the file ``name`` by tables as TOML."""
        self._write(name, as_toml(content))

    def read_json(self, name: str) -> Any:
        """What `write_json` wrote.

        Raises:
            ResultsError: there is no such file, or it is not JSON.
        """
        target = self.path / name
        try:
            return _restore(json.loads(target.read_text(encoding="utf-8")))
        except OSError as error:
            raise ResultsError(f"cannot read {target}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:
            raise ResultsError(f"{target} is not JSON: {error}") from None

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """A path to write to, which becomes the file ``name`` when the block ends well::

            with folder.replacing("partition.safetensors") as path:
                save_file(tensors, path)

        Raises:
            ResultsError: it cannot be written; a file ``name`` of before is untouched.
        """
        target = self.path / name
        temporary = target.with_name(f".tmp-{target.name}")  # the suffix stays: it tells matplotlib the format
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                yield temporary
                with temporary.open("rb") as file:  # else a power cut may leave the new name with the content missing
                    os.fsync(file.fileno())
                temporary.replace(target)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise
        except OSError as error:
            raise _cannot_write(target, error) from error

    def _write(self, name: str, text: str) -> None:
        with self.replacing(name) as path:
            path.write_text(text, encoding="utf-8", newline="")

    def _write_table(self, name: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> None:
        columns = columns or list(dict.fromkeys(column for row in rows for column in row))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_plain(row[c]) if row.get(c) is not None else "" for c in columns] for row in rows)
        self._write(name, text.getvalue())


def folder_name(text: str) -> str:
    """The text as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.=+]+", "-", text).strip("-").lower()


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's ``config.toml``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not TOML.
    """
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no results: it has no {CONFIG}")
    return read_toml(folder / CONFIG)


def _locked(file: IO[str]) -> bool:
    """Lock a file, unless another process has it locked."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold a results folder for this process alone; the lock ends with the process, however that ends.

    Raises:
        ResultsError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        # A process that is killed while it starts another leaves its locks with that one for a moment.
        until = time.monotonic() + _PATIENCE
        while not _locked(file):
            if time.monotonic() < until:
                time.sleep(0.02)
                continue
            file.seek(0)
            raise ResultsError(
                f"a run is writing to {folder} (process {file.read().strip() or 'unknown'}): wait for it, or name "
                "another folder"
            )
        try:
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        except OSError as error:
            raise _cannot_write(folder / LOCK, error) from error
        yield
    # The file stays: removed, it could be locked twice by processes that had opened it before and after.


Runs = Mapping[str, "ResultsFolder | Sequence[ResultsFolder]"]
"""What tables and plots compare: a name and its run, or its runs with several seeds."""


def versions() -> dict[str, str | int | None]:
    """What this process runs with, for versions.json."""
    from .. import __version__, _native

    return {
        "pfl_ext": __version__,
        "native": ", ".join(library.name for library in _native.status().values() if library.loaded) or "none",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }


def _cannot_write(target: Path, error: OSError) -> ResultsError:
    before = "it is as it was before" if target.exists() else "nothing was written"
    return ResultsError(f"cannot write {target}: {error.strerror or error}; {before}")


def _plain(value: Any) -> Any:
    """Tensors, arrays and their scalars as Python's own."""
    return value.tolist() if isinstance(value, torch.Tensor | np.ndarray | np.generic) else value


def _strict(value: Any) -> Any:
    """The value in what strict JSON can say."""
    value = _plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return next(name for name, number in _NON_FINITE.items() if str(number) == str(value))
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, os.PathLike) else value


def _restore(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _restore(item) for key, item in value.items()}
    return [_restore(item) for item in value] if isinstance(value, list) else value


def _check_record(record: Any) -> None:
    """Raise a ValueError if what tables, plots and clocks read of a record is not of its kind."""
    if not isinstance(record, dict) or "round" not in record:
        raise ValueError("no round record")
    if not _is_number(record["round"]):
        raise ValueError(f"round is {str(record['round'])[:40]!r}, a number is one")
    for name, depth in (("models", 3), ("clock", 1)):
        if name in record and not _has_numbers(record[name], depth):
            raise ValueError(f"{name} does not have numbers by their names")
    for name in ("training", "communication"):
        if not isinstance(record.get(name, {}), dict):
            raise ValueError(f"{name} does not have values by their names")
    works = record.get("work", [])
    if not isinstance(works, list) or not all(
        isinstance(work, list) and len(work) in (5, 6) and all(map(_is_number, work)) for work in works
    ):
        raise ValueError("work is not a list of clients' works")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _has_numbers(value: Any, depth: int) -> bool:
    """Whether it is a mapping, of mappings, with nothing but numbers in the end; ``depth`` of them at least."""
    if not isinstance(value, dict):
        return depth <= 0 and (value is None or _is_number(value))
    return all(_has_numbers(item, depth - 1) for item in value.values())


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(_strict(value), indent=indent, allow_nan=False)


def _number(cell: str) -> int | float | str:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(cell)
    return cell


def flatten(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with one level of ``a/b/c`` names; the list of clients as their number, the models without a prefix."""
    cells: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, item in value.items():
                add(f"{prefix}/{key}", item)
        elif isinstance(value, list):
            cells[prefix] = len(value)
        else:
            cells[prefix] = value

    for key, value in record.items():
        if key == "models":
            for model, results in value.items():
                add(model, results)
        else:
            add(key, value)
    return cells


TIDY = ("round", "stage", "group", "model", "data", "metric", "statistic", "value")
"""The columns of metrics-long.csv."""


def tidy(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A record in long form: a row for each of its numbers, all with the keys of `TIDY`.

    - ``round``: its number. What clients do on their own after the last round is no further round: it has the number
      of the last one and the ``stage`` "personalized". All else has the stage "round".
    - ``group``: what kind of number it is. ``models``: of an evaluation; ``new_clients``: of an evaluation of those
      that joined late; ``participants``: of those that took part in the round; ``training``, ``communication``,
      ``clock`` (virtual seconds by protocol), ``server``; ``round`` for the rest, such as ``seconds`` and ``clients``,
      how many took part.
    - ``model``, ``data``: which model on whose data, such as "personal" on "test" or "global" on "global_test"; None
      where the number is of no model.
    - ``metric``: such as "accuracy", "up_bytes" or "seconds".
    - ``statistic``: over the clients, such as "mean" or "lowest5"; None where it is one number.
    - ``value``: the number. Shares such as the accuracy are between 0 and 1.
    """
    stage = str(record.get("stage", "round"))
    first = {"round": record["round"] - (stage != "round"), "stage": stage}
    return [
        first | dict(zip(TIDY[2:], (*names, number), strict=True))
        for key, value in record.items()
        if key not in ("round", "stage", "work")
        for names, number in _numbers(key, value)
        if _is_number(number)
    ]


_Names = tuple[str, str | None, str | None, str, str | None]


def _numbers(key: str, value: Any) -> Iterator[tuple[_Names, Any]]:
    """The numbers of a record's part, each with its group, model, data, metric and statistic."""
    if key in ("models", "new_clients", "participants"):
        for model, splits in value.items():
            for data, metrics in splits.items():
                for metric, found in metrics.items():
                    for statistic, number in found.items() if isinstance(found, Mapping) else ((None, found),):
                        yield (key, model, data, metric, statistic), number
    else:
        group = key if isinstance(value, Mapping) else "round"
        for name, number in flatten({key: value}).items():
            yield (group, None, None, name.removeprefix(f"{group}/"), None), number
