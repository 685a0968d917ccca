"""From measured numbers to a CSV file, and from the CSV file to a Markdown table."""

from __future__ import annotations

import csv
import io
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any, get_type_hints

from .case import Case, Family
from .measure import Result

__all__ = [
    "Row",
    "by_case",
    "in_markdown",
    "markdown",
    "ms_text",
    "put_into",
    "ratio_text",
    "read_csv",
    "replace_between_markers",
    "results_folder",
    "rows_of",
    "write_atomically",
    "write_csv",
]


@dataclass(frozen=True)
class Row:
    """One contestant in one case: a line of the CSV file, whose columns are these fields."""

    family: str
    op: str
    shapes: str
    clients: int
    dtype: str
    threads: int
    contestant: str
    kind: str
    median_ms: float
    q25_ms: float
    q75_ms: float
    min_ms: float
    rounds: int
    ratio_to_ours: float
    """Its time by that of the case's first row; median of the rounds' ratios."""
    ratio_of_medians: float
    limit_ms: float
    """What any implementation must move, at the measured read bandwidth."""
    share_of_bandwidth: float
    """``limit_ms / median_ms``; above 1 where the data stay in the cache."""
    read_bandwidth_gb_s: float
    peak_extra_mib: float | None
    machine: str
    isa: str
    torch: str
    numpy: str
    python: str
    pfl_ext: str
    commit: str
    date: str

    @property
    def case(self) -> tuple[str, str, int, str, int]:
        """What the rows of one race have in common."""
        return self.op, self.shapes, self.clients, self.dtype, self.threads


def rows_of(family: str, case: Case, results: Sequence[Result], machine: Mapping[str, str]) -> list[Row]:
    """The lines of one case."""
    rows = []
    for result in results:
        q25, middle, q75 = result.quartiles
        limit = case.limit_bytes / result.read_bandwidth * 1e3
        rows.append(
            Row(
                family=family,
                op=case.spec.op,
                shapes=case.spec.shapes,
                clients=case.spec.clients,
                dtype=case.spec.dtype,
                threads=case.spec.threads,
                contestant=result.contestant.name,
                kind=result.contestant.kind,
                median_ms=middle,
                q25_ms=q25,
                q75_ms=q75,
                min_ms=min(result.times),
                rounds=len(result.times),
                ratio_to_ours=result.ratio_to_ours,
                ratio_of_medians=result.ratio_of_medians,
                limit_ms=limit,
                share_of_bandwidth=limit / middle,
                read_bandwidth_gb_s=result.read_bandwidth / 1e9,
                peak_extra_mib=None if result.peak_extra_bytes is None else result.peak_extra_bytes / 2**20,
                **machine,
            )
        )
    return rows


# ---- files ---------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, text: str) -> None:
    """Replace the file as a whole; an error or a crash leaves the old one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", newline="", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, path.stat().st_mode & 0o777 if path.exists() else 0o644)  # mkstemp's is private
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def write_csv(path: Path, rows: Iterable[Row]) -> None:
    """Replace the CSV file of a family."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([field.name for field in fields(Row)])
    for row in rows:
        writer.writerow(["" if v is None else f"{v:.6g}" if isinstance(v, float) else v for v in astuple(row)])
    write_atomically(path, text.getvalue())


def read_csv(path: Path) -> list[Row]:
    """The rows of a CSV file.

    Raises:
        ValueError: its columns are not those of this version.
    """
    types = get_type_hints(Row)
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != list(types):
            raise ValueError(f"{path} has the columns {reader.fieldnames}, expected {list(types)}; measure anew")
        return [Row(**{name: _parse(text, types[name]) for name, text in line.items()}) for line in reader]


def _parse(text: str, kind: object) -> Any:
    if kind is str:
        return text
    if kind is int:
        return int(text)
    return float(text) if text else None


def replace_between_markers(text: str, family: str, content: str) -> str:
    """The Markdown ``text`` with ``content`` between the family's two markers, which stay.

    Raises:
        ValueError: a marker is missing, double, or the two are in the wrong order.
    """
    begin, end = f"<!-- benchmark:{family}:begin -->", f"<!-- benchmark:{family}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the lines {begin} and {end} are needed, once each and in this order")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{content.strip()}\n{end}{after}"


def put_into(readme: Path, family: str, content: str) -> None:
    """Put ``content`` between the family's markers of a Markdown file.

    Raises:
        ValueError: it has no such markers. The file is as it was.
    """
    # Without newline translation, so that only the part between the markers can change.
    with readme.open(newline="", encoding="utf-8") as file:
        old = file.read()
    try:
        new = replace_between_markers(old, family, content)
    except ValueError as error:
        raise ValueError(f"{readme}: {error}") from None
    write_atomically(readme, new)


# ---- the table -----------------------------------------------------------------------------------------------------


def by_case(rows: Iterable[Row]) -> list[list[Row]]:
    """The rows of each case, ours first, in the order of the file."""
    return [list(group) for _, group in groupby(rows, key=lambda row: row.case)]


def ms_text(value: float) -> str:
    """Milliseconds to three figures."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def ratio_text(value: float) -> str:
    """A multiple of our time, as in ``2.90x``."""
    return f"{value:.0f}x" if value >= 100 else f"{value:.3g}x" if value >= 10 else f"{value:.2f}x"


def _mib(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _memory(rows: Sequence[Row]) -> str:
    ours, others = rows[0].peak_extra_mib, [r.peak_extra_mib for r in rows if r.kind != "ours"]
    known = [value for value in others if value is not None]
    if ours is None or not known:
        return "-"
    low, high = _mib(min(known)), _mib(max(known))
    return f"{_mib(ours)} / {low if low == high else f'{low} to {high}'}"


def markdown(family: Family, rows: Sequence[Row]) -> str:
    """One table per op, one line per case, and what a reader needs to judge the numbers."""
    parts = [
        "pfl_ext: median in ms [quartiles]. Others: their time as a multiple of ours, so 2.00x took twice as long. "
        "Bandwidth: the bytes that must be read and written by our time, as a share of the read bandwidth measured in "
        "the same rounds with the same threads (above 100%: the data stay in the cache). Memory: peak beyond the input "
        "in MiB, ours / others."
    ]
    cases = by_case(rows)
    for op in dict.fromkeys(case[0].op for case in cases):
        parts.append(f"**{family.ops.get(op, op)}**\n\n" + _op_table([case for case in cases if case[0].op == op]))
    present = {row.contestant: row.kind for row in rows}
    for kind, label in (("naive", "Naive peers"), ("skilled", "Skilled users"), ("yardstick", "Yardsticks")):
        names = [name for name, its_kind in present.items() if its_kind == kind]
        if names:
            parts.append(f"{label}: " + "; ".join(_explained(name, family.notes) for name in names) + ".")
    for row in dict.fromkeys((r.machine, r.isa, r.torch, r.numpy, r.python, r.pfl_ext, r.commit, r.date) for r in rows):
        machine, isa, torch, numpy, python, version, commit, date = row
        source = f"pfl_ext {version}" + (f" at commit {commit}" if commit else "")
        parts.append(
            f"Measured on {date}: {machine}, {isa} kernels, {source}, torch {torch}, NumPy {numpy}, Python {python}. "
            f"Reproduce: `pfl-ext bench {family.name}`."
        )
    return "\n\n".join(parts) + "\n"


def _explained(name: str, notes: Mapping[str, str]) -> str:
    return f"{in_markdown(name)} ({notes[name]})" if name in notes else in_markdown(name)


def in_markdown(name: str) -> str:
    """A contestant's name as it is: ``_foreach_add_`` would be emphasis, and lose its underscores."""
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", name)


def _op_table(cases: Sequence[Sequence[Row]]) -> str:
    others = list(dict.fromkeys(row.contestant for case in cases for row in case[1:]))
    header = [
        "shapes",
        "C",
        "dtype",
        "threads",
        cases[0][0].contestant,
        "bandwidth",
        *map(in_markdown, others),
        "memory",
    ]
    lines = [header, ["---", "--:", "---", *["--:"] * (len(header) - 3)]]
    for case in cases:
        ours, ratios = case[0], {row.contestant: ratio_text(row.ratio_to_ours) for row in case[1:]}
        time = f"{ms_text(ours.median_ms)} [{ms_text(ours.q25_ms)}, {ms_text(ours.q75_ms)}]"
        where = [ours.shapes, str(ours.clients), ours.dtype, str(ours.threads)]
        numbers = [ratios.get(name, "-") for name in others]
        lines.append([*where, time, f"{ours.share_of_bandwidth:.0%}", *numbers, _memory(case)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def results_folder(chosen: Path | None) -> Path:
    """Where CSV files go: the chosen folder, else the source tree's, else one beside the caller."""
    if chosen is not None:
        return chosen
    results = Path("benchmarks", "results")
    return results if results.is_dir() else Path("pfl_ext_benchmarks")
