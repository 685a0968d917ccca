"""``pfl-ext run METHOD``: one method, its results in a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pfl_ext.algorithms import METHODS
from pfl_ext.comparison import check_own_tables, method_of, variant
from pfl_ext.configuration import Configuration
from pfl_ext.experiment import Experiment
from pfl_ext.options import nearest
from pfl_ext.reports import Look
from pfl_ext.running import Output, run_name, run_one

from .flags import known_flags
from .parser import Parser, UsageError
from .parsing import (
    Basis,
    add_data,
    add_method,
    add_output,
    add_settings,
    explained,
    hide_rare,
    listed,
    look_of,
    output_of,
    words_of,
)
from .trust import load_code

__all__ = ["Request", "execute", "flags", "parse"]

flags = known_flags


@dataclass(frozen=True)
class Request:
    """A run to be made."""

    experiment: Experiment
    output: Output
    look: Look


def parse(arguments: Sequence[str]) -> Request:
    """The run of a command line: ``METHOD [options]``, or options alone where a configuration file names the method."""
    basis = Basis.of("run", arguments)
    sections = basis.configuration.sections
    first = arguments[0] if arguments and not arguments[0].startswith("-") else None
    label = first or sections.get("method", {}).get("name")
    method = None if label is None else method_of(label, sections)
    if method is not None:
        others = [
            name for name in sections.get("method", {}) if name not in METHODS and method_of(name, sections) != name
        ]
        load_code("method", method, trusted=method == first or basis.trust_code)
        if method not in METHODS:
            known = [*METHODS, *others]
            raise UsageError(f"unknown method {method!r}{nearest(method, known)}; known are {', '.join(known)}")
    parser = Parser(
        "run",
        " METHOD",
        description="Run a method. `pfl-ext run METHOD --help` lists the method's own options too.\n"
        "With --config FILE the file may name the method, and METHOD may be one of its variants.",
        epilog=listed(),
    )
    if first is not None:  # only the parser that is needed
        every = parser.add_subparsers(metavar="METHOD", parser_class=Parser)
        own = every.add_parser(first, command=f"run {first}", prog=f"pfl-ext run {first}")
        _add_options(own, method, basis)
    else:
        own = parser
        _add_options(own, method, basis)
        _refuse_late_method(own, arguments, sections)
    chosen = {"partition": basis.partition, **({} if method is None else {"method": method})}
    words = words_of(parser, arguments, chosen, own)
    if label is None:
        raise UsageError(_no_method(basis.configuration))
    check_own_tables(sections, [label])
    with explained(words.tables):
        # The method's own tables first: the command line overrides these too.
        experiment = Experiment.from_sections(words.over(variant(sections, label)))
    return Request(experiment, output_of(words, run_name(experiment)), look_of(words, basis.configuration))


def _add_options(parser: Parser, method: str | None, basis: Basis) -> None:
    if method is not None:
        add_method(parser, method, f"method {method}")
    add_data(parser, basis.partition)
    add_settings(parser)
    add_output(parser, "results/METHOD-DATA-PARTITION-seedN")
    hide_rare(parser, basis, method)


def _refuse_late_method(parser: Parser, arguments: Sequence[str], sections: Mapping[str, Any]) -> None:
    """Refuse a method that stands after options."""
    _, unknown = parser.parse_known_args(list(arguments))
    known = {*METHODS, *sections.get("method", {})}
    late = next((word for word in unknown if word in known or ".py:" in word), None)
    if late is not None:
        raise UsageError(f"METHOD comes first: pfl-ext run {late} [options]")


def _no_method(configuration: Configuration) -> str:
    if configuration.methods:
        named = ", ".join(configuration.methods)
        return f"no method is named: METHOD, which comes first, is one of {named}; pfl-ext compare runs them all"
    return f"no method is named: METHOD comes first, pfl-ext run METHOD [options]; known are {', '.join(METHODS)}"


def execute(request: Request) -> int:
    """Run it, draw it, print the last evaluation."""
    experiment, output = request.experiment, request.output
    print(run_one(experiment, output, request.look))
    print(f"{experiment.method} on {experiment.data}: results in {output.folder}")
    return 0
