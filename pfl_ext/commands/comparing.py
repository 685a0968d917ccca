"""What ``pfl-ext compare`` and ``sweep`` share: their options."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pfl_ext.algorithms import METHODS
from pfl_ext.comparison import Comparison, method_of
from pfl_ext.options import Option, nearest
from pfl_ext.reports import Look
from pfl_ext.sections import method_options

from .flags import add_option
from .parser import Parser, UsageError
from .parsing import Basis, Words, add_data, add_output, add_settings, hide_rare, listed, look_of, words_of
from .trust import load_code

__all__ = ["Compared", "compared", "more_columns", "status_of"]


@dataclass(frozen=True)
class Compared:
    """What a command line and its configuration file compare, and what they sweep over."""

    words: Words
    comparison: Comparison
    vary: Mapping[str, Sequence[Any]]
    look: Look
    notes: Sequence[str]
    """What the command line does not override."""


def compared(command: str, arguments: Sequence[str], description: str) -> Compared:
    """Parse the command line of ``compare`` or ``sweep``."""
    basis = Basis.of(command, arguments)
    configuration = basis.configuration
    parser = Parser(
        command,
        " METHOD METHOD ...",
        description=f"{description}\n"
        "A method's own options: --set ditto.lam=0.1, or a table [method.ditto] in the configuration file, which may\n"
        "also list the methods, seeds, metric, statistic, columns, and variants of a method under names of their own\n"
        "(docs/methods.md).",
        epilog=listed(),
    )
    _add_options(parser, command, basis)
    words = words_of(parser, arguments, {"partition": basis.partition})
    rest = words.rest
    methods = rest["methods"] or list(configuration.methods)
    if not methods:
        raise UsageError(f"name the methods to compare; known are {', '.join(METHODS)}")
    sections = words.over(configuration.sections)
    notes = _not_overridden(words.tables, configuration.sections, methods)
    _set_own(sections, rest["set"], methods)
    for label in methods:
        name = method_of(label, sections)
        load_code("method", name, trusted=name in rest["methods"] or basis.trust_code)
    seeds = configuration.seeds
    if rest["seeds"] is not None:
        seeds = Option("--seeds", tuple[int, ...], (), "").parse(rest["seeds"])
    return Compared(
        words,
        Comparison(sections, tuple(methods), seeds),
        {**configuration.sweep, **_varied(rest.get("vary", ()))},
        look_of(words, configuration),
        notes,
    )


def more_columns(look: Look) -> str:
    """What is said below a table of some columns."""
    some = look.columns is None and look.style != "csv"
    return " (the files there have all columns; --columns chooses)" if some else ""


def status_of(diverged: Sequence[str]) -> int:
    """The exit status of a comparison, after saying which of its runs diverged."""
    for what in diverged:
        print(f"left out of the tables: {what}", file=sys.stderr)
    return 1 if diverged else 0


def _add_options(parser: Parser, command: str, basis: Basis) -> None:
    parser.add_argument(
        "methods", nargs="*", metavar="METHOD", help="methods, or variants that the --config file names"
    )
    group = parser.add_argument_group("options of all methods")
    for option in method_options("fedavg").values():
        add_option(group, option, "method")
    add_data(parser, basis.partition)
    add_settings(parser)
    add_output(parser, f"results/{command}-DATA-PARTITION")
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--set", action="append", default=[], metavar="METHOD.OPTION=VALUE", help="an option of one method"
    )
    if command == "sweep":
        group.add_argument(
            "--vary",
            action="append",
            default=[],
            metavar="SECTION.OPTION=A,B,...",
            help="an option and the values to try, such as method.lr=0.01,0.1; more than one: all combinations",
        )
    group.add_argument(
        "--seeds", help="run with each of these seeds, such as 0,1,2; the table has mean and standard deviation"
    )
    hide_rare(parser, basis)
    styles = ("markdown", "csv", "latex")
    group.add_argument(
        "--style", choices=styles, default="markdown", help="format of the printed table (default: markdown)"
    )


def _set_own(sections: dict[str, dict[str, Any]], settings: Sequence[str], methods: Sequence[str]) -> None:
    """Set the options of one method that --set names."""
    for setting in settings:
        target, equals, value = setting.partition("=")
        method, dot, name = target.rpartition(".")
        if not (equals and dot):
            raise UsageError(f"--set {setting}: METHOD.OPTION=VALUE is accepted, such as ditto.lam=0.1")
        if method not in methods:
            raise UsageError(f"--set {setting}: {method} is not compared{nearest(method, methods)}")
        if name == "optimizer":
            load_code("optimizer", value, trusted=True)
        own = sections.setdefault("method", {})
        own[method] = {**own.get(method, {}), name: value}


def _not_overridden(
    words: Mapping[str, Mapping[str, Any]], sections: Mapping[str, Mapping[str, Any]], methods: Sequence[str]
) -> list[str]:
    """Options of the command line that do not reach methods, as these have values of their own in the file."""
    notes = []
    for section, table in words.items():
        for option, value in table.items():
            own = {label: sections.get(section, {}).get(label) for label in methods}
            kept = [f"{label} {t[option]}" for label, t in own.items() if isinstance(t, Mapping) and option in t]
            if kept:
                notes.append(
                    f"note: {option} is {value} but for those with a value in a table of their own, [{section}.NAME] "
                    f"of the configuration: {', '.join(kept)}"
                )
    return notes


def _varied(settings: Sequence[str]) -> dict[str, list[str]]:
    """The options and values that --vary names."""
    found = {}
    for setting in settings:
        name, equals, values = setting.partition("=")
        if not equals:
            raise UsageError(f"--vary {setting}: SECTION.OPTION=A,B,... is accepted, such as method.rho=0.05,0.1")
        found[name] = [value.strip() for value in values.split(",")]
    return found
