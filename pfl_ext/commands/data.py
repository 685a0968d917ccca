"""``pfl-ext data``: cut a data set into clients and show who has what."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pfl_ext.comparison import check_common, check_own_tables, variant
from pfl_ext.experiment import Experiment

from .flags import known_flags
from .parser import Parser
from .parsing import Basis, add_data, explained, words_of
from .trust import add_trust

__all__ = ["Request", "execute", "flags", "parse"]

flags = known_flags


@dataclass(frozen=True)
class Request:
    """A partition to be made, and where it goes."""

    experiment: Experiment
    save: Path | None
    picture: Path | None


def parse(arguments: Sequence[str]) -> Request:
    """The partition of a command line and a configuration file, which may be one of a comparison or a sweep."""
    basis = Basis.of("data", arguments)
    parser = Parser(
        "data", description="Divide a data set among clients without training: print who has what; save and draw it."
    )
    add_data(parser, basis.partition)
    group = parser.add_argument_group("output")
    group.add_argument("--config", type=Path, help="a TOML file with the tables data and partition")
    add_trust(group)
    group.add_argument(
        "--seed", dest="federation.seed", metavar="N", default=argparse.SUPPRESS, help="the seed (default: 0)"
    )
    group.add_argument("--save", type=Path, help="write the partition to this file (safetensors)")
    group.add_argument("--picture", type=Path, help="draw the partition into this file (PNG)")
    words = words_of(parser, arguments, {"partition": basis.partition})
    configuration = basis.configuration
    check_own_tables(configuration.sections, configuration.methods)
    check_common(configuration.sections, configuration.methods)
    sections = words.over({**configuration.sections, "method": {}})
    with explained(words.tables):
        experiment = Experiment.from_sections(variant(sections, "fedavg"))  # any: it trains nothing
    return Request(experiment, words.rest["save"], words.rest["picture"])


def execute(request: Request) -> int:
    """Print the partition, save it, draw it."""
    dataset, partition = request.experiment.make_data()
    print(partition.table(dataset))
    print(f"{partition.clients} clients, fingerprint {partition.fingerprint[:16]}")
    if request.save is not None:
        partition.save(request.save)
    if request.picture is not None:
        partition.draw(dataset, request.picture)
    return 0
