"""Tables: of any rows as Markdown, CSV or LaTeX, and the two that compare methods."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TextIO

import numpy as np

from pfl_ext.metrics import scale_of, sign_of

from .results import ResultsFolder, Runs
from .rounds import best_rounds, rounds_to_converge

__all__ = [
    "Spread",
    "Style",
    "best_cells",
    "comparison",
    "deviation",
    "in_parts",
    "main_columns",
    "on_terminal",
    "per_user",
    "table",
    "tails",
    "transpose",
]

WIDTH = 100
"""Characters that a printed table is wide at most."""

Style = Literal["markdown", "csv", "latex"]
Row = dict[str, object]


class Spread(NamedTuple):
    """A mean and a standard deviation; one cell ``mean ± std`` in Markdown and LaTeX, two columns in CSV."""

    mean: float
    std: float


def deviation(values: Sequence[float] | np.ndarray) -> float:
    """The standard deviation of a sample: 0 of numbers that rounding alone tells apart, NaN of a single one."""
    if len(values) < 2:
        return math.nan
    std = float(np.std(values, ddof=1))
    return 0.0 if std <= 1e-12 * float(np.max(np.abs(values))) else std


# ---- any rows --------------------------------------------------------------------------------------------------------


def table(
    rows: Sequence[Mapping[str, object]],
    columns: Sequence[str] | Mapping[str, str] | None = None,
    style: Style = "markdown",
    digits: int = 2,
    missing: str = "-",
    best: Sequence[Mapping[str, bool]] = (),
) -> str:
    r"""The rows as the text of a table, special characters of the style escaped.

    Args:
        rows: Numbers, text, `Spread` or None by column.
        columns: The columns to show, in order, or a mapping from column to heading. Default: all, in the order in which
            the rows name them first.
        style: ``"markdown"`` (padded, so that it also reads well in a terminal), ``"csv"`` (full precision) or
            ``"latex"`` (a ``tabular`` with the rules of the package ``booktabs``).
        digits: Decimals of a float in Markdown and LaTeX; a smaller number shows as many significant digits.
        missing: What stands for None, NaN and an absent column; nothing does in CSV, where NaN is ``nan``.
        best: For each row the columns to print in bold in Markdown and LaTeX, as `best_cells` finds them.

    Raises:
        ValueError: another style.
    """
    if style not in ("markdown", "csv", "latex"):
        raise ValueError(f"style must be markdown, csv or latex; got {style!r}")
    if columns is None:
        columns = list(dict.fromkeys(column for row in rows for column in row))
    headings = dict(columns) if isinstance(columns, Mapping) else {column: column for column in columns}
    cells = {column: [row.get(column) for row in rows] for column in headings}
    if style == "csv":
        return _csv(headings, cells)

    write, escape = (_latex_cell, _latex_text) if style == "latex" else (_markdown_cell, _markdown_text)
    bold = [[bool(best and best[i].get(column)) for column in headings] for i in range(len(rows))]
    emphasise, plain = (_latex_bold, "") if style == "latex" else ("**{}**".format, "  ")
    # The digits of a column stay below each other.
    beside = [plain if any(row[k] for row in bold) else "" for k in range(len(headings))]
    body = [
        [
            emphasise(cell) if strong else cell + (space if cell != missing else "")
            for cell, strong, space in zip(line, strongs, beside, strict=True)
        ]
        for line, strongs in (
            ([write(cells[c][i], digits, missing) for c in headings], bold[i]) for i in range(len(rows))
        )
    ]
    lines = [[escape(heading) for heading in headings.values()], *body]
    widths = [max(3, *(len(line[k]) for line in lines)) for k in range(len(headings))]
    right = [any(isinstance(value, int | float | Spread) for value in cells[column]) for column in headings]

    def padded(line: Sequence[str]) -> list[str]:
        return [
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(line, widths, right, strict=True)
        ]

    if style == "markdown":
        rule = ["-" * (width - 1) + (":" if flush else "-") for width, flush in zip(widths, right, strict=True)]
        return "".join(f"| {' | '.join(line)} |\n" for line in [padded(lines[0]), rule, *map(padded, body)])
    head, *tail = (" & ".join(padded(line)) + r" \\" + "\n" for line in lines)
    layout = "".join("r" if flush else "l" for flush in right)
    inner = "\\toprule\n" + head + "\\midrule\n" + "".join(tail) + "\\bottomrule\n"
    return f"\\begin{{tabular}}{{{layout}}}\n{inner}\\end{{tabular}}\n"


def best_cells(
    rows: Sequence[Mapping[str, object]], metric: str, digits: int = 2, within: Sequence[str] = ()
) -> list[dict[str, bool]]:
    """For each row the columns in which it has the best result, for `table` to print in bold.

    Results are the columns of a model, such as ``personal: local test``, and those over the clients that are made of
    them. The best is the highest, or the lowest of metrics such as the loss; all that are printed alike are. A column
    in which all are alike, or in which only one row has a number, has no best.

    Args:
        rows: those of `comparison` or `tails`.
        metric: what they show.
        digits: decimals that are printed.
        within: columns that divide the rows: each group of rows alike in them has a best of its own.
    """
    found: list[dict[str, bool]] = [{} for _ in rows]
    for column in dict.fromkeys(column for row in rows for column in row):
        model, colon, name = column.partition(": ")
        if not (column in _OF_CLIENTS or (colon and name != "std" and not model.startswith("epsilon"))):
            continue
        groups: dict[object, dict[int, float]] = {}
        for place, row in enumerate(rows):
            value = row.get(column)
            number = value.mean if isinstance(value, Spread) else value
            if isinstance(number, int | float) and not math.isnan(number):
                group = tuple(str(row.get(other)) for other in within)
                groups.setdefault(group, {})[place] = round(sign_of(metric) * number, digits)
        for values in groups.values():
            if len(set(values.values())) > 1:
                for place, number in values.items():
                    found[place][column] = number == max(values.values())
    return found


_OF_CLIENTS = ("lowest 5 %", "top 5 %", "best by validation")


def main_columns(rows: Sequence[Mapping[str, object]], first: Sequence[str] = (), digits: int = 2) -> list[str]:
    """The columns of a comparison that answer which method is best: not wider than 100 characters together.

    The local test of the personal and of the global model (of others, if there are neither), on the global test set
    where clients are not evaluated; then what was asked for beside it, such as extra test sets and new clients; and the
    lowest 5 % of the clients. The last ones are left out where they do not fit. After the first, where rows differ in
    it, over how many clients their means are; before it, where some did, how many runs diverged.

    Args:
        rows: those of `comparison`, in a sweep with the options that differ.
        first: columns that stand before the method, such as these options.
        digits: decimals that are printed.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    models = list(dict.fromkeys(column.partition(": ")[0] for column in columns if _is_result(column)))
    chosen = []
    for model in (shown := [model for model in models if model in ("personal", "global")] or models[:2]):
        tests = [column for column in columns if column.partition(": ")[0] == model and _is_result(column)]
        chosen += tests[:1]
    chosen += [
        column
        for column in columns
        if column.partition(": ")[0] in shown and not _is_result(column) and not column.endswith(": std")
    ]
    chosen += [column for column in ("lowest 5 %",) if column in columns]
    if len({str(row.get("clients")) for row in rows}) > 1:  # means over different clients do not compare
        chosen.insert(1, "clients")
    if "diverged" in columns:  # so are means over different seeds
        chosen.insert(0, "diverged")
    while len(chosen) > 1 and _width(rows, [*first, "method", *chosen], digits) > WIDTH:
        chosen.pop()
    return [*first, "method", *chosen]


def _is_result(column: str) -> bool:
    return column.partition(": ")[2] in ("local test", "weighted local test", "global test")


def _width(rows: Sequence[Mapping[str, object]], columns: Sequence[str], digits: int) -> int:
    """Of the printed table, with cells in bold."""
    best = [dict.fromkeys(columns, False) for _ in rows]
    best[:1] = [dict.fromkeys(columns[-3:], True)]
    return len(table(rows, columns, digits=digits, best=best).partition("\n")[0])


def in_parts(rows: Sequence[Mapping[str, object]], digits: int = 2) -> str:
    """A Markdown table that is not wider than 100 characters: else several, below each other, of some columns each.

    Each begins with the first column. A column whose name begins with that of the one before it and a comma, such as
    the paper's number beside ours, stays with it.

    Args:
        rows: as of `table`.
        digits: decimals of a float.
    """
    first, *columns = dict.fromkeys(column for row in rows for column in row)
    together: list[list[str]] = []
    for column in columns:
        if together and column.startswith(f"{together[-1][0]}, "):
            together[-1].append(column)
        else:
            together.append([column])
    parts: list[list[str]] = [[first]]
    for group in together:
        if len(parts[-1]) > 1 and _width(rows, [*parts[-1], *group], digits) > WIDTH:
            parts.append([first])
        parts[-1] += group
    return "\n".join(table(rows, part, digits=digits) for part in parts)


def on_terminal(text: str, stream: TextIO) -> str:
    """A printed Markdown table with bold letters in place of ``**``, if the stream is a terminal that has them."""
    if not stream.isatty() or os.environ.get("TERM") in ("dumb", "unknown") or os.environ.get("NO_COLOR"):
        return text
    return re.sub(r"(?<=[| ])\*\*(\S[^|\n]*?)\*\*(?= \|)", "  \x1b[1m\\1\x1b[0m  ", text)


def transpose(rows: Sequence[Mapping[str, object]], heading: str) -> list[Row]:
    """Columns as rows: the first column of ``rows`` gives the new headings, their old ones stand under ``heading``."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return [
        {heading: column, **{str(row[columns[0]]): row[column] for row in rows if column in row}}
        for column in columns[1:]
    ]


def _csv(headings: Mapping[str, str], cells: Mapping[str, Sequence[object]]) -> str:
    flat: list[list[object]] = []
    for column, heading in headings.items():
        values = ["" if value is None else value for value in cells[column]]
        if any(isinstance(value, Spread) for value in values):
            pairs = [value if isinstance(value, Spread) else (value, "") for value in values]
            flat += [[heading, *(pair[0] for pair in pairs)], [f"{heading} ±", *(pair[1] for pair in pairs)]]
        else:
            flat.append([heading, *values])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(zip(*flat, strict=True))
    return text.getvalue()


def _number(value: float, digits: int, missing: str) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return missing
    fixed = f"{value:.{digits}f}"
    return f"{value:.{max(digits, 1)}g}" if value and float(fixed) == 0 else fixed


def _mean_and_std(value: Spread, digits: int, missing: str) -> tuple[str, str]:
    """Both with the same number of decimals."""
    mean = _number(value.mean, digits, missing)
    return mean, _number(
        value.std, digits, "nan"
    ) if "e" in mean or value.std != value.std else f"{value.std:.{digits}f}"


def _markdown_cell(value: object, digits: int, missing: str) -> str:
    if isinstance(value, Spread):
        mean, std = _mean_and_std(value, digits, missing)
        return mean if mean == missing else f"{mean} ± {std}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _number(value, digits, missing)
    return missing if value is None else _markdown_text(str(value))


def _markdown_text(text: str) -> str:
    text = re.sub(r"[\\`*|<>\[\]~$&]", r"\\\g<0>", " ".join(text.split()))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)  # inside a word it is an underscore already


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    **{character: f"\\{character}" for character in "{}$&#_%"},
}


def _latex_cell(value: object, digits: int, missing: str) -> str:
    if isinstance(value, Spread):
        mean, std = _mean_and_std(value, digits, missing)
        return _latex_text(missing) if mean == missing else rf"${_latex_number(mean)} \pm {_latex_number(std)}$"
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = _number(value, digits, missing)
        return _latex_text(missing) if number == missing else f"${_latex_number(number)}$"
    return _latex_text(missing if value is None else str(value))


def _latex_bold(cell: str) -> str:
    return rf"$\mathbf{{{cell[1:-1]}}}$" if cell.startswith("$") else rf"\textbf{{{cell}}}"


def _latex_number(text: str) -> str:
    mantissa, e, exponent = text.replace("inf", r"\infty").replace("nan", r"\mathrm{nan}").partition("e")
    return rf"{mantissa} \cdot 10^{{{int(exponent)}}}" if e else mantissa


def _latex_text(text: str) -> str:
    text = "".join(_LATEX.get(character, character) for character in " ".join(text.split()))
    # After the \\ of the row before, a first [ would begin its optional argument, and a * its starred form.
    return f"{{{text[0]}}}{text[1:]}" if text[:1] in ("[", "*") else text


# ---- methods against each other --------------------------------------------------------------------------------------


def comparison(runs: Runs, metric: str = "accuracy", statistic: str = "mean") -> list[Row]:
    """One row a method, from the last evaluated round unless the column says otherwise.

    For each model: ``local test`` is the statistic over the clients' own test sets, ``std`` the standard deviation over
    the clients, ``global test`` the result on the union of the test sets, then that on each extra test set under its
    name, ``new clients`` the statistic over those that joined late, who are in no other mean. Then, for the ``model``
    that the method gives its clients (the personal one if it has one): ``variance``, ``lowest 5 %`` and ``top 5 %``
    over the clients; ``best by validation``, the local test in the round that the validation data choose; ``best on
    test``, which is an upper bound and no result. Last, what it cost: the rounds until the global model (else the given
    one) was within 1 % of its best, the bytes up and down of all rounds, the parameters that a client trains
    (``trained_parameters`` in the records' ``training``), under differential privacy the mean epsilon of the clients of
    the last round, the median time of a round; last the clients' budgets of all their steps (``epsilon: mean, std over
    clients``) and of those for what they send, which is all that others see.

    Args:
        runs: One run per method, or several that differ in the seed. Then a cell is a `Spread`: the mean and the
            *sample* standard deviation over the seeds.
        metric: Any of the records; shares such as the accuracy are shown in per cent.
        statistic: ``"mean"`` or ``"weighted_mean"``, by the sizes of the test sets (``weighted local test``).

    Returns:
        Rows for `table`. A column that no method has is left out.
    """
    histories = {name: [folder.records() for folder in folders_of(run)] for name, run in runs.items()}
    models = models_of([history for seeds in histories.values() for history in seeds])
    extra = _extra_tests([history for seeds in histories.values() for history in seeds])
    rows: list[Row] = []
    for name, seeds in histories.items():
        results = [_result(history, models, extra, metric, statistic) for history in seeds]
        for result, folder in zip(results, folders_of(runs[name]), strict=True):
            result |= _budgets(folder)
        cells = {column: _over_seeds([result[column] for result in results]) for column in results[0]}
        rows.append({"method": name, "seeds": len(seeds) if len(seeds) > 1 else None, **cells})
    shown = [column for column in (rows[0] if rows else ()) if any(row[column] is not None for row in rows)]
    return [{column: row[column] for column in shown} for row in rows]


def tails(runs: Runs, metric: str = "accuracy", split: str = "test") -> list[Row]:
    """One row a method: of each of its models the mean over the clients and over their lowest and highest 5 %.

    Tables 1 to 4 of PLGU, from the last evaluated round. Of several seeds a cell is a `Spread`, as in `comparison`.

    Args:
        runs: As for `comparison`.
        metric: Any of the records; shares such as the accuracy are shown in per cent.
        split: ``"test"`` or ``"validation"``.
    """
    histories = {name: [folder.records() for folder in folders_of(run)] for name, run in runs.items()}
    models = models_of([history for seeds in histories.values() for history in seeds])
    names = {"mean": "mean", "lowest 5 %": "lowest5", "top 5 %": "top5"}
    rows: list[Row] = []
    for name, seeds in histories.items():
        last = [best_rounds(history, metric) for history in seeds]
        row: Row = {"method": name}
        clients = None  # that were evaluated
        for model in models:
            summaries = [(rounds.get(model, {}).get("last") or {}).get(split, {}).get(metric, {}) for rounds in last]
            for column, statistic in names.items():
                values = [summary[statistic] * scale_of(metric) if summary else None for summary in summaries]
                row[f"{model}: {column}"] = _over_seeds(values)
            counts = [summary["count"] for summary in summaries if summary]
            clients = _over_seeds(counts) if clients is None and counts else clients
        rows.append({**row, "clients": clients})
    shown = [column for column in (rows[0] if rows else ()) if any(row[column] is not None for row in rows)]
    return [{column: row[column] for column in shown} for row in rows]


def per_user(runs: Runs, metric: str = "personal/test/accuracy") -> list[Row]:
    """One row a method, a column a user: Tables 2 to 6 of PersFL; `transpose` puts the users down, as printed there.

    Several seeds are averaged user by user, which says something only where a user is one person over all of them: give
    the partition a seed of its own. ``mean``, ``std`` and ``variance`` are over the users, the latter two of the
    *sample* (divisor n - 1): with this divisor, and only with it, the "Std Dev" that the paper prints under its Tables
    2 and 3 is that of the numbers above it. Users that joined late come after them and are in none of the three.

    Args:
        runs: One run per method, or several that differ in the seed.
        metric: A column of the per-client results. Shares such as the accuracy are shown in per cent. A method without
            personal models is shown by its global one, as FedAvg is in these tables.
    """
    rows: list[Row] = []
    for name, run in runs.items():
        means, late = (_user_means(run, metric, new) for new in (False, True))
        present = np.array([value for value in means.values() if not math.isnan(value)])
        variance = float(present.var(ddof=1)) if len(present) > 1 else math.nan
        totals = {"mean": _mean(list(means.values())), "std": math.sqrt(variance), "variance": variance}
        of_late = {f"new user {user}": value for user, value in late.items()}
        rows.append({"method": name, **{f"user {user}": value for user, value in means.items()}, **totals, **of_late})
    last = ("mean", "std", "variance", *dict.fromkeys(c for row in rows for c in row if c.startswith("new user ")))
    users_first = dict.fromkeys(c for row in rows for c in row if c not in last)
    return [{c: row[c] for c in (*users_first, *last) if c in row} for row in rows]


def _user_means(run: ResultsFolder | Sequence[ResultsFolder], metric: str, new: bool) -> dict[object, float]:
    """Each user's mean over the seeds."""
    scale, users = scale_of(metric.rpartition("/")[2]), dict[object, list[float]]()
    for folder in folders_of(run):
        for user, value in client_values(folder, metric, new)[1].items():
            users.setdefault(user, []).append(scale * value)
    return {user: _mean(values) for user, values in users.items()}


def client_values(folder: ResultsFolder, metric: str, new: bool = False) -> tuple[str, dict[object, float]]:
    """A column of the per-client results by client, and its name.

    For a method without personal models, ``personal/...`` is ``global/...``. Of the clients that joined late, or of all
    others, which are those that every mean of a record is over.

    Raises:
        ValueError: there is no such column.
    """
    rows = folder.clients()
    columns = dict.fromkeys(column for row in rows for column in row)
    for name in (metric, re.sub("^personal/", "global/", metric)):
        if name in columns:
            return name, {row["client"]: row.get(name, math.nan) for row in rows if _is_new(row) == new}
    known = ", ".join(columns) or "none: no evaluation was saved"
    raise ValueError(f"{folder.path / 'clients.csv'} has no column {metric!r}; it has {known}")


def _is_new(row: Row) -> bool:
    return row.get("new") == "True"  # as CSV has it


def folders_of(run: ResultsFolder | Sequence[ResultsFolder]) -> Sequence[ResultsFolder]:
    """The runs of one name, one a seed."""
    return [run] if isinstance(run, ResultsFolder) else run


def models_of(histories: Sequence[Sequence[Mapping[str, Any]]], group: str = "models") -> list[str]:
    """The names of all models that were evaluated, the personal one first; ``group`` is where a record has them."""
    models = {model for history in histories for record in history for model in record.get(group, {})}
    return sorted(models, key=lambda model: (model != "personal", model))


def _mean(values: Sequence[float]) -> float:
    present = [value for value in values if not math.isnan(value)]
    return sum(present) / len(present) if present else math.nan


def _extra_tests(histories: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """The names of the test sets beside those that every run has."""
    evaluated = [model for history in histories for r in history for model in r.get("models", {}).values()]
    found = dict.fromkeys(split for splits in evaluated for split in splits)
    return [split for split in found if split not in ("train", "validation", "test", "global_test")]


def _result(
    history: Sequence[Mapping[str, Any]], models: Sequence[str], extra: Sequence[str], metric: str, statistic: str
) -> dict[str, Any]:
    """The cells of one run, None where it has nothing to say."""
    rounds = best_rounds(history, metric, statistic)
    given = next((model for model in models if model in rounds), None)
    scale = scale_of(metric)

    def cell(model: str | None, which: str, split: str, name: str, scale: float = scale) -> float | None:
        entry = rounds.get(model or "", {}).get(which) or {}
        value = entry.get(split, {}).get(metric)
        value = value.get(name) if isinstance(value, Mapping) else value  # one model has one global test, no summary
        return None if value is None else scale * value

    # What clients do on their own after the last round is a record too, and no round.
    rounds_only = [record for record in history if record["round"] > 0 and "stage" not in record]
    cells: dict[str, Any] = {"rounds": len(rounds_only)}
    local = "weighted local test" if statistic == "weighted_mean" else "local test"
    joined: Mapping[str, Any] = next(
        (record["new_clients"] for record in reversed(history) if "new_clients" in record), {}
    )
    for model in models:
        cells[f"{model}: {local}"] = cell(model, "last", "test", statistic)
        cells[f"{model}: std"] = cell(model, "last", "test", "std")
        cells[f"{model}: global test"] = cell(model, "last", "global_test", statistic)
        cells |= {f"{model}: {name}": cell(model, "last", name, statistic) for name in extra}
        late = joined.get(model, {}).get("test", {}).get(metric, {}).get(statistic)
        cells[f"{model}: new clients"] = None if late is None else scale * late
    cells["model"] = given
    cells["variance"] = cell(given, "last", "test", "variance", scale**2)
    cells["lowest 5 %"] = cell(given, "last", "test", "lowest5")
    cells["top 5 %"] = cell(given, "last", "test", "top5")
    cells["clients"] = cell(given, "last", "test", "count", 1)  # that were evaluated: over whom the mean is
    cells["best by validation"] = cell(given, "best_by_validation", "test", statistic)
    cells["best on test"] = cell(given, "best_on_test", "test", statistic)

    cells["rounds to 99 %"] = rounds_to_converge(
        rounds_only, "global" if "global" in rounds else given or "", metric=metric
    )
    traffic = [record["communication"] for record in history if "communication" in record]
    trained = [record.get("training", {}).get("trained_parameters") for record in history]
    seconds = [record["seconds"] for record in rounds_only if "seconds" in record]
    cells["communicated MB"] = sum(t["up_bytes"] + t["down_bytes"] for t in traffic) / 1e6 if traffic else None
    cells["trained parameters"] = next((count for count in reversed(trained) if count is not None), None)
    spent = [record.get("training", {}).get("epsilon") for record in history]
    cells["epsilon"] = next((epsilon for epsilon in reversed(spent) if epsilon is not None), None)
    cells["seconds a round"] = float(np.median(seconds)) if seconds else None
    return cells


def _budgets(folder: ResultsFolder) -> dict[str, Any]:
    """What the clients have spent, over them: with the steps of a model of their own, and without."""
    rows, cells = folder.clients(), dict[str, Any]()
    for column in ("epsilon", "epsilon_sent"):
        spent = np.array([float(row[column]) for row in rows if column in row])
        words = column.replace("_", " ")
        with np.errstate(invalid="ignore"):  # infinity has no spread
            cells[f"{words}: mean over clients"] = float(spent.mean()) if len(spent) else None
            cells[f"{words}: std over clients"] = float(spent.std()) if len(spent) else None
    return cells


def _over_seeds(values: Sequence[Any]) -> Any:
    present = [value for value in values if value is not None]
    if not present or len(values) == 1:
        return present[0] if present else None
    if not any(isinstance(value, float) and math.isfinite(value) for value in present) and len(set(present)) == 1:
        return present[0]  # the same number of rounds or parameters needs no spread, and infinity has none
    if any(isinstance(value, str) for value in present):
        return ", ".join(dict.fromkeys(present))
    return Spread(float(np.mean(present)), deviation(present))
