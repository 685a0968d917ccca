"""``pfl-ext flower new FOLDER METHOD``: a complete Flower app of a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pfl_ext.algorithms import METHODS
from pfl_ext.experiment import Experiment
from pfl_ext.flower_app import write_app
from pfl_ext.options import nearest, title
from pfl_ext.sections import method_options

from .flags import add_option, known_flags
from .parser import Parser, UsageError
from .parsing import Basis, add_data, add_settings, explained, listed, words_of

__all__ = ["Request", "execute", "flags", "parse"]

flags = known_flags


@dataclass(frozen=True)
class Request:
    """The Flower app to write."""

    folder: Path
    experiment: Experiment
    given: Mapping[str, Mapping[str, Any]]


def parse(arguments: Sequence[str]) -> Request:
    """The app of a command line: ``new FOLDER METHOD [options]``."""
    words = [word for word in arguments[:3] if not word.startswith("-")]
    if not words and any(word in ("-h", "--help") for word in arguments):
        _parser("METHOD").parse_args(["--help"])
    if not words or words[0] != "new":
        raise UsageError(
            f"{words[0] if words else 'nothing'} is not known here; pfl-ext flower new FOLDER METHOD is accepted"
        )
    method = words[2] if len(words) == 3 else None
    if method is None:
        if any(word in ("-h", "--help") for word in arguments):
            _parser("METHOD").parse_args(["--help"])
        raise UsageError(
            f"FOLDER and METHOD are needed: pfl-ext flower new FOLDER METHOD; known are {', '.join(METHODS)}"
        )
    if method not in METHODS:
        of_file = (
            "; a method of yours goes into server_app(method) and client_app(method) of an app" if ":" in method else ""
        )
        raise UsageError(
            f"unknown method {method!r}{nearest(method, METHODS)}; known are {', '.join(METHODS)}{of_file}"
        )
    rest = arguments[3:]
    basis = Basis.of("flower new", rest)
    parser = _parser(method)
    group = parser.add_argument_group(f"method {method}", title(METHODS[method]))
    for option in method_options(method).values():
        add_option(group, option, "method")
    add_data(parser, basis.partition)
    add_settings(parser, engine=False)
    found = words_of(parser, rest, {"partition": basis.partition, "method": method})
    with explained(found.tables):
        experiment = Experiment.from_sections(found.over({"method": {"name": method}}))
    return Request(Path(words[1]), experiment, found.tables)


def _parser(method: str) -> Parser:
    return Parser(
        "flower new",
        f" FOLDER {method}",
        description="Write a Flower app that runs a method: in simulation, and on SuperNodes with data of their own.",
        epilog=listed(),
    )


def execute(request: Request) -> int:
    """Write it, and say how it is run."""
    for path in write_app(request.folder, request.experiment, request.given):
        print(path)
    clients = request.experiment.clients or 2
    print(f'run it: flwr run {request.folder} --stream --federation-config "num-supernodes={clients}"')
    return 0
