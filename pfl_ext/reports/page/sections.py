"""The page's text and tables, as HTML. Whatever comes from a file goes through :func:`escape`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from pfl_ext.metrics import digits_of, scale_of, sign_of, summarize, word_of

from ..tables import Spread, comparison, deviation
from .found import Cut, Found, Run, several, table_of
from .settings import differing, flat

__all__ = ["sections"]

Row = Mapping[str, Any]


def sections(found: Found) -> dict[str, str]:
    """Every part of the page that is text, by its name in page.html."""
    return {
        "title": escape(found.title),
        "summary": _summary(found),
        "missing": _missing(found.problems),
        "results": _results(found),
        "distribution": _distribution(found),
        "partitions": _partitions(found),
        "costs": _costs(found),
        "differences": _differences(found),
        "configuration": _configuration(found),
        "versions": _versions(found),
    }


# ---- tables ----------------------------------------------------------------------------------------------------------


def _table(
    caption: str,
    rows: Sequence[Row],
    *,
    digits: int | Callable[[str], int] = 2,
    best: Mapping[str, float] | None = None,
    hidden: bool = False,
) -> str:
    """A table with a heading in its first column; numbers flush right.

    Args:
        caption: what it shows.
        rows: one mapping per row; all columns of the first are shown.
        digits: decimals, for each column or for all.
        best: columns whose best cell is bold, and the sign that makes high good.
        hidden: the caption is for screen readers alone.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    decimals = digits if callable(digits) else lambda _: digits
    right = {c: all(isinstance(row.get(c), int | float | Spread | None) for row in rows) for c in columns}
    kinds = {c: ' class="n"' if right[c] else "" for c in columns}
    head = "".join(f'<th scope="col"{kinds[c]}>{escape(c)}</th>' for c in columns)
    body = []
    for row in rows:
        cells = []
        for place, c in enumerate(columns):
            text = _cell(row.get(c), decimals(c))
            if best and c in best and _is_best(row.get(c), [other.get(c) for other in rows], best[c]):
                text = f"<strong>{text}</strong>"
            cells.append(f'<th scope="row"{kinds[c]}>{text}</th>' if place == 0 else f"<td{kinds[c]}>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    kind = ' class="for-readers"' if hidden else ""
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table>'
        f"<caption{kind}><span>{escape(caption)}</span></caption><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(value: Any, digits: int) -> str:
    if isinstance(value, Spread):
        spread = "" if math.isnan(value.std) else f' <span class="spread">± {_number(value.std, digits)}</span>'
        return _number(value.mean, digits) + spread
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(value, digits)
    return '<span class="none">\u2013</span>' if value is None or value == "" else escape(str(value))


def _number(value: float, digits: int) -> str:
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    if not math.isfinite(value):
        return '<span class="none">\u2013</span>' if math.isnan(value) else ("∞" if value > 0 else "\u2212∞")
    fixed = f"{value:,.{digits}f}".replace(",", "\u202f")
    return (f"{value:.2g}" if value and float(f"{value:.{digits}f}") == 0 else fixed).replace("-", "\u2212")


def _mean_of(value: Any) -> float:
    number = value.mean if isinstance(value, Spread) else value
    return float(number) if isinstance(number, int | float) else math.nan


def _is_best(value: Any, others: Sequence[Any], sign: float) -> bool:
    known = [sign * number for other in others if not math.isnan(number := _mean_of(other))]
    return len(known) > 1 and sign * _mean_of(value) == max(known)


def _more(summary: str, inside: str, key: str) -> str:
    return f'<details data-key="{escape(key)}"><summary>{escape(summary)}</summary>{inside}</details>'


def _counted(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}".replace(",", "\u202f")


def _over(values: Sequence[float | None]) -> Any:
    """Of the seeds: the one number, or mean and spread."""
    known = [value for value in values if value is not None and not math.isnan(value)]
    if not known:
        return None
    if len(values) == 1:
        return known[0]
    spread = deviation(known)
    return Spread(float(np.mean(known)), spread) if spread else float(np.mean(known))


# ---- what is shown ---------------------------------------------------------------------------------------------------


def _summary(found: Found) -> str:
    runs = found.runs
    seeds = {run.seed for run in runs}
    facts = [_counted(len(found.groups), "method" if _is_comparison(found) else "run")]
    if len(runs) > len(found.groups):
        facts.append(_counted(len(seeds), "seed"))
    cuts = [run.cut for run in runs if run.cut is not None]
    facts += list(dict.fromkeys(str(cut.description.get("dataset", "")) for cut in cuts if cut.description))
    clients = sorted({len(cut.sizes["train"]) for cut in cuts})
    if clients:
        facts.append(_counted(clients[-1], "client") if len(clients) == 1 else f"{clients[0]} to {clients[-1]} clients")
    over, planned = sum(run.rounds for run in runs), sum(run.planned or run.rounds for run in runs)
    done = over >= planned
    facts.append(f"{_counted(max(run.rounds for run in runs), 'round')}" if done else f"{over} of {planned} rounds")
    state = "finished" if done else "unfinished"
    return "".join(f"<li>{escape(fact)}</li>" for fact in facts) + f'<li class="state {state}">{state}</li>'


def _is_comparison(found: Found) -> bool:
    names = [table_of(run.config, "method").get("name") for run in found.runs]
    return len(found.groups) > 1 and len(set(names)) == len(found.groups)


def _missing(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    items = "".join(f"<li>{escape(problem)}</li>" for problem in problems)
    title = f"{_counted(len(problems), 'note')} on what is missing"
    open_ = " open" if len(problems) < 6 else ""
    return f'<details class="note" data-key="missing"{open_}><summary>{title}</summary><ul>{items}</ul></details>'


def _results(found: Found) -> str:
    rows = [dict(row) for row in comparison(found.groups, found.metric, found.statistic)]
    seeds = {len(group) for group in found.groups.values()}
    for row in rows:
        row.pop("model", None)
        if len(seeds) == 1:
            row.pop("seeds", None)
    sign, digits = sign_of(found.metric), digits_of(found.metric)
    judged = [c for c in (rows[0] if rows else ()) if _is_judged(c)]
    best = dict.fromkeys(judged if found.comparable else [], sign)
    chosen = [
        c
        for c in (rows[0] if rows else ())
        if c in ("method", "seeds", "rounds", "lowest 5 %", "top 5 %", "best by validation", "communicated MB")
        or c.endswith(("local test", ": new clients"))
    ]

    def decimals(column: str) -> int:
        return 2 if column in ("communicated MB", "seconds a round", "epsilon") else digits

    unit = ", per cent" if scale_of(found.metric) == 100 else ""
    how = "weighted by test samples" if found.statistic == "weighted_mean" else "mean over clients"
    caption = f"{word_of(found.metric).capitalize()} after the last round{unit}, {how}"
    shown = _table(caption, [{c: row.get(c) for c in chosen} for row in rows], digits=decimals, best=best)
    note = ""
    if len(rows) > 1:
        note = (
            "The best of each column is bold." if best else "The runs have different partitions: none is called best."
        )
    if max(seeds) > 1:
        many = str(max(seeds)) if len(seeds) == 1 else "the"
        note += f" Numbers are means over {many} seeds, ± their standard deviation."
    if any("best by validation" in row for row in rows):
        note += " “Best by validation” is the test result of the round that validation data choose."
    every = _table(caption, rows, digits=decimals, best=best, hidden=True)
    return shown + (f"<p>{note.strip()}</p>" if note else "") + _more("All columns", every, "all columns")


def _is_judged(column: str) -> bool:
    return column.endswith(("local test", "global test", "new clients")) or column in (
        "lowest 5 %",
        "top 5 %",
        "best by validation",
        "best on test",
    )


def _distribution(found: Found) -> str:
    scale, digits = scale_of(found.metric), digits_of(found.metric)
    rows = []
    for label, runs in found.groups.items():
        each = [summarize([scale * v for v in values]) for run in runs if len(values := _values(run, found.metric))]
        if not each:
            continue
        columns = {
            "clients": each[0]["count"] if len({one["count"] for one in each}) == 1 else None,
            **{
                title: _over([float(one[key]) for one in each])
                for title, key in (
                    ("lowest", "min"),
                    ("lowest 5 %", "lowest5"),
                    ("quarter", "q25"),
                    ("median", "median"),
                    ("three quarters", "q75"),
                    ("top 5 %", "top5"),
                    ("highest", "max"),
                    ("mean", "mean"),
                    ("std", "std"),
                )
            },
        }
        rows.append({"method": label, **columns})
    if not rows:
        return "<p>There is nothing to show yet: no client was evaluated.</p>"
    whose = "personal models (global where there is none)"
    caption = f"{word_of(found.metric).capitalize()} of the clients in the last evaluation, {whose}"
    judged = ("lowest", "lowest 5 %", "quarter", "median", "three quarters", "top 5 %", "mean")
    best = dict.fromkeys(judged if found.comparable else (), sign_of(found.metric))
    return _table(caption, rows, digits=digits, best=best)


def _values(run: Run, metric: str) -> list[float]:
    """The result of every client on its own test data, without those that joined late."""
    for model in ("personal", "global"):
        column = f"{model}/test/{metric}"
        if any(column in row for row in run.rows):
            return [float(row.get(column, math.nan)) for row in run.rows if row.get("new") != "True"]
    return []


def _partitions(found: Found) -> str:
    cuts: dict[str, Cut] = {}
    runs: dict[str, list[str]] = {}
    for run in found.runs:
        if run.cut is not None:
            cuts.setdefault(run.cut.fingerprint, run.cut)
            runs.setdefault(run.cut.fingerprint, []).append(found.name(run))
    if not cuts:
        return "<p>No run has a partition that can be read.</p>"
    rows = []
    for fingerprint, cut in cuts.items():
        train = np.asarray(cut.sizes["train"])
        row = {
            "partition": cut.name,
            "runs": several(runs[fingerprint]) if len(cuts) > 1 else len(runs[fingerprint]),
            "clients": len(train),
            **{f"{part} samples": int(sum(sizes)) for part, sizes in cut.sizes.items()},
            **({"at the server": cut.server} if any(other.server for other in cuts.values()) else {}),
            "global test": cut.global_test,
            "training samples of a client": _range(train),
        }
        if cut.counts is not None:
            held = (cut.counts > 0).sum(1)
            row["classes of a client"] = _range(held)
        rows.append({**row, "fingerprint": fingerprint[:8]})
    text = _table("Which partitions there are", rows)
    if len(cuts) > 1:
        text += (
            "<p>The runs have several partitions: client 0 of one is not client 0 of another, and only runs of one "
            "partition are compared client by client.</p>"
        )
    for cut in cuts.values():
        if cut.counts is not None:
            classes = [
                {"class": name, "training samples": int(column.sum()), "clients that hold it": int((column > 0).sum())}
                for name, column in zip(cut.classes, cut.counts.T, strict=True)
            ]
            name = "Classes" if len(cuts) == 1 else f"Classes: {cut.name}; {several(runs[cut.fingerprint])}"
            text += _more(name, _table(name, classes, hidden=True), f"classes {cut.fingerprint}")
    return text


def _range(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return str(low) if low == high else f"{low} to {high}, median {np.median(values):g}"


def _costs(found: Found) -> str:
    rows = []
    for label, runs in found.groups.items():
        traffic = [[r["communication"] for r in run.history if "communication" in r] for run in runs]
        up, down = ([sum(t.get(way, 0) for t in own) / 1e6 for own in traffic] for way in ("up_bytes", "down_bytes"))
        clocks: list[Mapping[str, float]] = [
            next((r["clock"] for r in reversed(run.history) if "clock" in r), {}) for run in runs
        ]
        protocols = list(dict.fromkeys(protocol for clock in clocks for protocol in clock))
        trained = [r["training"]["trained_parameters"] for run in runs for r in run.history if _trains(r)]
        over = [max(run.rounds, 1) for run in runs]
        rows.append(
            {
                "method": label,
                "MB up": _over(up),
                "MB down": _over(down),
                "MB a round": _over([(a + b) / n for a, b, n in zip(up, down, over, strict=True)]),
                "trained parameters": trained[-1] if trained else None,
                **{f"virtual s, {p}": _over([clock.get(p, math.nan) for clock in clocks]) for p in protocols},
                "seconds measured": _over([sum(r.get("seconds", 0.0) for r in run.history) for run in runs]),
            }
        )
    text = _table("What all rounds took", rows)
    if not any(column.startswith("virtual") for row in rows for column in row):
        text += "<p>The runs have no virtual clock: <code>--clock</code> of <code>pfl-ext run</code> gives one.</p>"
    return text


def _trains(record: Row) -> bool:
    return "trained_parameters" in record.get("training", {})


def _differences(found: Found) -> str:
    if len(found.groups) < 2:
        return "<p>There is one run, or one with several seeds: nothing differs.</p>"
    settings = {label: flat(runs[0].config) for label, runs in found.groups.items()}
    names = differing(settings)
    rows = [
        {"method": label, **{n: _value(own[n]) if n in own else None for n in names}} for label, own in settings.items()
    ]
    text = (
        _table("Options that differ between those that have them", rows)
        if names
        else "<p>No option that they share differs.</p>"
    )
    everywhere = [name for own in settings.values() for name in own]
    alone = [
        {
            "method": label,
            "options": ", ".join(f"{n} = {_value(own[n])}" for n in own if _is_alone(n, everywhere, names, settings)),
        }
        for label, own in settings.items()
    ]
    if any(row["options"] for row in alone):
        text += _more(
            "Options that only some of them have",
            _table("Options that only some of them have", alone, hidden=True),
            "own options",
        )
    return text


def _is_alone(name: str, everywhere: Sequence[str], differ: Sequence[str], settings: Mapping[str, Any]) -> bool:
    return everywhere.count(name) < len(settings) and name not in differ


def _value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _configuration(found: Found) -> str:
    text = ""
    for label, runs in found.groups.items():
        settings = flat(runs[0].config)
        if not settings:
            text += f"<p>{escape(label)}: its configuration is missing.</p>"
            continue
        rows = [{"option": name, "value": _value(value) or None} for name, value in settings.items()]
        text += _more(label, _table(f"Configuration of {label}", rows, hidden=True), f"configuration {label}")
    return text


def _versions(found: Found) -> str:
    """A column for all runs that ran with the same."""
    kinds: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for run in found.runs:
        key = tuple((str(name), "none" if value is None else str(value)) for name, value in run.versions.items())
        kinds.setdefault(key, []).append(found.name(run))
    if list(kinds) == [()]:
        return "<p>No run says what it ran with.</p>"
    names = dict.fromkeys(name for kind in kinds for name, _ in kind)
    titles = {k: "all runs" if len(kinds) == 1 else several(own) for k, own in kinds.items()}
    rows = [{"software": name, **{titles[kind]: dict(kind).get(name) for kind in kinds}} for name in names]
    return _table("What the runs ran with", rows)
