"""``pfl-ext run``, ``compare``, ``sweep`` and ``data``: from the command line to results in a folder."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from .algorithms import METHODS
from .comparison import Comparison, folder_name, method_of, points, variant
from .data import PARTITIONERS, Dataset, Partition
from .experiment import (
    DATA_OPTIONS,
    Experiment,
    Option,
    method_options,
    nearest,
    network_options,
    partition_options,
    settings_options,
)
from .federation import DamagedCheckpoint, Diverged, ForeignCheckpoint, Interrupted, Method, stream
from .nn import NETWORKS
from .reports import (
    Progress,
    ResultsFolder,
    Runs,
    Surface,
    accuracy_curves,
    client_density,
    client_distribution,
    comparison,
    draw_landscapes,
    loss_surface,
    option_curves,
    per_user,
    table,
    tails,
    tensorboard,
    transpose,
    versions,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["compare", "data", "landscape", "run", "sweep"]

_STATISTICS = ("mean", "weighted_mean")
_FAILURES = (ValueError, OSError, Diverged, DamagedCheckpoint, ForeignCheckpoint, ImportError)


class _Usage(Exception):
    """The command line is wrong; the message says how."""


# ---- options ---------------------------------------------------------------------------------------------------------


def _add(group: Any, option: Option, section: str, key: str | None = None) -> None:
    """A flag for an option, ``key`` of its section.

    Defaults stay out of the parsed result, so that a configuration file can set them.
    """
    flag = "--" + option.name.replace("_", "-")
    destination = f"{section}.{key or option.name}"
    default = option.default
    if isinstance(default, tuple):
        default = ",".join(f"{x:g}" if isinstance(x, float) else str(x) for x in default)
    text = option.help.replace("%", "%%")
    if isinstance(default, (str, int, float)):
        text += f" (default: {str(default).lower() if isinstance(default, bool) else default})"
    common: dict[str, Any] = {"dest": destination, "default": argparse.SUPPRESS, "help": text}
    if option.type is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    else:
        metavar = "{" + ",".join(map(str, option.choices)) + "}" if option.choices else None
        group.add_argument(flag, metavar=metavar or option.name.upper(), **common)


_DATA_OPTIONS = {
    **{f"data.{key}": option for key, option in DATA_OPTIONS.items()},
    "partition.name": Option("partition", str, "ds1", f"how clients get their data: {', '.join(PARTITIONERS)}"),
    "partition.clients": Option("clients", int, None, "number of clients (default: 10; by_domain: one for each)"),
    "partition.file": Option("partition_file", Path, None, "a saved partition in place of a drawn one"),
    "network.name": Option("network", str, "auto", f"auto, {', '.join(NETWORKS)}"),
}


def _add_data(parser: argparse.ArgumentParser, partition: str) -> None:
    group = parser.add_argument_group("data and network")
    for destination, option in _DATA_OPTIONS.items():
        _add(group, option, *destination.split("."))
    group = parser.add_argument_group(
        f"partition {partition}", (PARTITIONERS[partition].__doc__ or "").strip().splitlines()[0]
    )
    for option in partition_options(partition).values():
        _add(group, option, "partition")
    group = parser.add_argument_group("network", "The options of every network; stem and the like where it has them.")
    for key, (option, networks) in _network_options().items():
        of = "" if len(networks) == len(NETWORKS) else f"; {', '.join(networks)}"
        named = dataclasses.replace(option, name=f"network_{key}", help=option.help + of)
        _add(group, named, "network", key)


def _network_options() -> dict[str, tuple[Option, list[str]]]:
    """The options of all networks, and which have each. A network named later in a file may have any of them."""
    found: dict[str, tuple[Option, list[str]]] = {}
    for network in NETWORKS:
        for key, option in network_options(network).items():
            first, networks = found.setdefault(key, (option, []))
            networks.append(network)
            if first.default != option.default:
                found[key] = (dataclasses.replace(first, default=None), networks)
    return found


def _parser(command: str, operands: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"pfl-ext {command}",
        usage=f"pfl-ext {command}{operands} [options]",
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _sections(parsed: argparse.Namespace, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tables of the configuration file, overridden by what the command line names."""
    sections = {name: dict(table) for name, table in config.items() if isinstance(table, Mapping)}
    for destination, value in vars(parsed).items():
        section, dot, name = destination.partition(".")
        if dot:
            sections.setdefault(section, {})[name] = value
    return sections


def _configuration(arguments: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The configuration file the command line names, and the partitioner, which decides what options there are."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--partition")
    known, _ = first.parse_known_args(arguments)
    config: dict[str, Any] = {}
    if known.config is not None:
        try:
            config = tomllib.loads(known.config.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise _Usage(f"{known.config} is not TOML: {error}") from None
        except OSError as error:
            raise _Usage(f"{known.config} cannot be read: {error.strerror}") from None
    name = known.partition or config.get("partition", {}).get("name", "ds1")
    if name not in PARTITIONERS:
        raise _Usage(f"unknown partition {name!r}{nearest(name, PARTITIONERS)}; known are {', '.join(PARTITIONERS)}")
    return config, name


def _check_method(name: str) -> None:
    """Refuse an unknown method; make that of a file, ``path/to/file.py:Class``, known."""
    path, colon, cls = name.rpartition(":")
    if colon and name not in METHODS:
        file = Path(path)
        if not file.is_file():
            raise _Usage(f"{path} of the method {name} is not a file; path/to/file.py:Class is accepted")
        sys.path.insert(0, str(file.resolve().parent))  # by its name: worker processes import it the same way
        found = getattr(importlib.import_module(file.stem), cls, None)
        if not (isinstance(found, type) and issubclass(found, Method)):
            raise _Usage(f"{path} has no method {cls}; a class derived from pfl_ext.federation.Method is accepted")
        METHODS[name] = found
    if name not in METHODS:
        raise _Usage(f"unknown method {name!r}{nearest(name, METHODS)}; known are {', '.join(METHODS)}")


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        name = unknown[0].partition("=")[0]
        raise _Usage(f"unknown option {name}{nearest(name, flags)}; see {parser.prog} --help")


@contextlib.contextmanager
def _reported(command: str) -> Iterator[list[int]]:
    """What users can cause ends in one line and a status, not in a traceback."""
    status = [0]
    try:
        yield status
    except _Usage as error:
        print(f"pfl-ext {command}: {error}", file=sys.stderr)
        status[0] = 2
    except Interrupted as error:
        print(f"pfl-ext {command}: {error}; --resume goes on from there", file=sys.stderr)
        status[0] = 130
    except KeyboardInterrupt:
        print(f"pfl-ext {command}: aborted; --resume goes on from the last checkpoint", file=sys.stderr)
        status[0] = 130
    except _FAILURES as error:
        print(f"pfl-ext {command}: {error}", file=sys.stderr)
        status[0] = 1


# ---- run -------------------------------------------------------------------------------------------------------------

_METHODS_HELP = "methods:\n" + "\n".join(
    f"  {name:12} {(method.__doc__ or '').strip().splitlines()[0]}" for name, method in METHODS.items()
)


def _output(parser: argparse.ArgumentParser, default: str) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--config", type=Path, help="a TOML file with the tables data, partition, network, federation, method"
    )
    group.add_argument("--output", type=Path, help=f"folder for results and checkpoints (default: {default})")
    group.add_argument("--resume", action="store_true", help="go on from the folder's last good checkpoint")
    group.add_argument("--quiet", action="store_true", help="no progress display")
    group.add_argument("--tensorboard", action="store_true", help="write TensorBoard files into the folder too")
    group.add_argument("--no-plots", action="store_true", help="draw nothing")


def run(arguments: Sequence[str]) -> int:
    """``pfl-ext run METHOD``: one method, its results in a folder."""
    with _reported("run") as status:
        config, partition = _configuration(arguments)
        # The method decides what options there are, so it is looked for before they are parsed.
        first = [a for a in arguments[:1] if not a.startswith("-")]
        named = next((a for a in (*first, *arguments) if a in first or a in METHODS or ".py:" in a), None)
        named = named or config.get("method", {}).get("name")
        label = named
        named = None if named is None else method_of(named, config)
        parser = _parser(
            "run", " METHOD", "Run a method. `pfl-ext run METHOD --help` lists the method's own options too."
        )
        parser.epilog = _METHODS_HELP
        parser.add_argument(
            "method", nargs="?", metavar="METHOD", help="the method; may stand in the configuration file"
        )
        if named is not None:
            _check_method(named)
            group = parser.add_argument_group(f"method {named}", (METHODS[named].__doc__ or "").strip().splitlines()[0])
            for option in method_options(named).values():
                _add(group, option, "method")
        _add_data(parser, partition)
        group = parser.add_argument_group("federation")
        for option in settings_options().values():
            _add(group, option, "federation")
        _output(parser, "results/METHOD-DATA-PARTITION-seedN")
        parsed, unknown = parser.parse_known_args(list(arguments))
        if parsed.method is not None and parsed.method != label:
            _check_method(parsed.method)
        _refuse_unknown(parser, unknown)
        tables = {name: table for name, table in config.items() if isinstance(table, Mapping) and name != "sweep"}
        # The method's own tables first: the command line overrides these too.
        sections = _sections(parsed, tables if label is None else variant(tables, label))
        experiment = Experiment.from_sections(sections)
        folder = parsed.output or Path("results") / _name(experiment)
        dataset, cut = experiment.make_data()
        last = _one(experiment, dataset, cut, folder, parsed)
        _print_last(experiment, last, folder)
    return status[0]


def _name(experiment: Experiment) -> str:
    data = experiment.data.replace(":", "-").replace("/", "-")
    method = type(experiment.make_method()).__name__.lower() if ":" in experiment.method else experiment.method
    return f"{method}-{data}-{experiment.partition}-seed{experiment.settings.seed}"


def _one(
    experiment: Experiment,
    dataset: Dataset,
    partition: Partition,
    folder: Path,
    parsed: argparse.Namespace,
    label: str = "",
) -> Mapping[str, Any]:
    """One run of one method into one folder, with everything a results folder has."""
    observers: list[Any] = []
    federation = experiment.make(
        dataset,
        partition,
        folder=folder,
        resume=parsed.resume,
        notify=lambda record: [observe(record) for observe in observers],
    )
    results = federation.results
    assert results is not None
    results.write_json("config.json", experiment.sections())
    results.write_json("versions.json", versions())
    partition.save(folder / "partition.safetensors")
    rounds = experiment.settings.rounds
    with (
        Progress(rounds, label or experiment.method, start=federation.round, quiet=parsed.quiet) as progress,
        contextlib.ExitStack() as stack,
    ):
        observers.append(lambda record: progress.update(min(record["round"], rounds), **_shown(record)))
        if parsed.tensorboard:
            board = tensorboard(results)
            stack.callback(board.close)
            observers.append(board.append)
        stack.callback(results.write_csv)
        last = federation.run()
    if not parsed.no_plots:
        _draw({experiment.method: results}, folder, dataset, partition)
    return last


def _shown(record: Mapping[str, Any]) -> dict[str, float]:
    """What the progress display shows of a round: the accuracy of each model, else the training loss."""
    models = record.get("models", {})
    if not models:
        return {"loss": record["training"]["loss"]} if "loss" in record["training"] else {}
    return {
        f"{name} accuracy": splits["test"]["accuracy"]["mean"] for name, splits in models.items() if "test" in splits
    }


def _draw(runs: Runs, folder: Path, dataset: Dataset, partition: Partition) -> None:
    try:
        accuracy_curves(runs, folder / "accuracy.png")
        client_distribution(runs, folder / "clients.png")
        client_density(runs, folder / "density.png")
        partition.draw(dataset, folder / "partition.png")
    except ImportError as error:
        print(f"no pictures: {error}", file=sys.stderr)


def _print_last(experiment: Experiment, last: Mapping[str, Any], folder: Path) -> None:
    rows = []
    for model, splits in last["models"].items():
        for split, metrics in splits.items():
            if isinstance(metrics.get("accuracy"), Mapping):
                summary = metrics["accuracy"]
                rows.append(
                    {
                        "model": model,
                        "data": split,
                        "accuracy": f"{100 * summary['mean']:.2f}",
                        "std over clients": f"{100 * summary['std']:.2f}",
                        "lowest 5 %": f"{100 * summary['lowest5']:.2f}",
                        "top 5 %": f"{100 * summary['top5']:.2f}",
                    }
                )
            elif "accuracy" in metrics:
                rows.append({"model": model, "data": split, "accuracy": f"{100 * metrics['accuracy']:.2f}"})
    print(table(rows))
    print(f"{experiment.method} on {experiment.data}: results in {folder}")


# ---- compare and sweep -----------------------------------------------------------------------------------------------


def compare(arguments: Sequence[str]) -> int:
    """``pfl-ext compare A B ...``: several methods on the same partitions, clients and batches."""
    with _reported("compare") as status:
        parsed, comparison_, sweep = _comparison(
            "compare",
            arguments,
            "Run several methods on identical partitions and random streams, and print one table.",
        )
        if sweep:
            raise _Usage(f"the configuration sweeps over {', '.join(sweep)}: run it with pfl-ext sweep")
        experiments = comparison_.experiments()
        folder = parsed.output or Path("results") / _folder("compare", experiments[0][1])
        runs, dataset, partition = _run_all(experiments, folder, parsed)
        rows = comparison(runs, parsed.metric, parsed.statistic)
        _write_tables(rows, folder, "comparison")
        _write_tables(tails(runs, parsed.metric), folder, "tails")
        _write(folder / "users.md", _users(runs))
        print(table(rows, style=parsed.style))
        if not parsed.no_plots:
            _draw(runs, folder, dataset, partition)
        print(f"compared on {experiments[0][1].data}: results in {folder}")
    return status[0]


def sweep(arguments: Sequence[str]) -> int:
    """``pfl-ext sweep A B ... --vary OPTION=VALUES``: a comparison for each combination of options."""
    with _reported("sweep") as status:
        parsed, comparison_, vary = _comparison(
            "sweep",
            arguments,
            "Run a comparison for each combination of some options' values, and print one table.\n"
            "  pfl-ext sweep plgu-lf plgu-grep --vary method.rho=0.05,0.1,0.5\n"
            "  pfl-ext sweep fedavg ditto --vary partition.alpha=1,0.1 --partition dirichlet",
        )
        if not vary:
            raise _Usage("name what to vary: --vary method.rho=0.05,0.1, or a table [sweep] in the configuration")
        every = points(comparison_, vary)
        for point in every:  # all are checked before the first one runs
            experiments = point.comparison.experiments()
        folder = parsed.output or Path("results") / _folder("sweep", experiments[0][1])
        rows: list[dict[str, Any]] = []
        tail_rows: list[dict[str, Any]] = []
        done: set[str] = set()
        curves: list[tuple[Mapping[str, Any], Runs]] = []
        for point in every:
            # A method that has none of the options that differ is run once.
            fresh = [label for label in point.comparison.labels if point.comparison.identity(label) not in done]
            some = [(label, made) for label, made in point.comparison.experiments() if label in fresh]
            if not some:
                continue
            runs, dataset, partition = _run_all(some, folder / point.folder, parsed)
            if not parsed.no_plots:
                _draw(runs, folder / point.folder, dataset, partition)
            both = (comparison(runs, parsed.metric, parsed.statistic), tails(runs, parsed.metric))
            for row, of_tails in zip(*both, strict=True):
                label = str(row["method"])
                own = {name: value if name in point.applies[label] else None for name, value in point.values.items()}
                rows.append({**_short(own), **row})
                tail_rows.append({**_short(own), **of_tails})
                done.add(point.comparison.identity(label))
            curves.append((point.values, runs))
            _write_tables(rows, folder, "sweep")
            _write_tables(tail_rows, folder, "tails")
        print(table(rows, style=parsed.style))
        if not parsed.no_plots:
            _draw_sweep(curves, folder, any(made.settings.new_clients for _, made in experiments))
        print(f"{len(every)} points on {experiments[0][1].data}: results in {folder}")
    return status[0]


def _comparison(
    command: str, arguments: Sequence[str], description: str
) -> tuple[argparse.Namespace, Comparison, dict[str, Sequence[Any]]]:
    """What a command line and its configuration file compare, and what they sweep over."""
    config, partition = _configuration(arguments)
    parser = _parser(
        command,
        " METHOD METHOD ...",
        f"{description}\n"
        "A method's own options: --set ditto.lam=0.1, or a table [method.ditto] in the configuration file, which may\n"
        "also list the methods, seeds, the statistic, and variants of a method under names of their own\n"
        "(docs/methods.md).",
    )
    parser.epilog = _METHODS_HELP
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="methods, or variants that the file names")
    group = parser.add_argument_group("options of all methods")
    for option in method_options("fedavg").values():
        _add(group, option, "method")
    _add_data(parser, partition)
    group = parser.add_argument_group("federation")
    for option in settings_options().values():
        _add(group, option, "federation")
    _output(parser, f"results/{command}-DATA-PARTITION")
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--set", action="append", default=[], metavar="METHOD.OPTION=VALUE", help="an option of one method"
    )
    if command == "sweep":
        group.add_argument(
            "--vary", action="append", default=[], metavar="SECTION.OPTION=A,B,...", help="an option and its values"
        )
    group.add_argument("--seeds", help="several seeds, such as 0,1,2: mean and standard deviation over them")
    group.add_argument(
        "--metric", choices=("accuracy", "auc", "loss"), default="accuracy", help="of the tables (default: accuracy)"
    )
    group.add_argument("--style", choices=("markdown", "csv", "latex"), default="markdown", help="of the printed table")
    group.add_argument(
        "--statistic",
        choices=_STATISTICS,
        help="of the clients' results in the table: their mean, or weighted by their test sets' sizes (default: mean)",
    )
    parsed, unknown = parser.parse_known_args(list(arguments))
    _refuse_unknown(parser, unknown)
    parsed.statistic = parsed.statistic or config.get("statistic", "mean")
    if parsed.statistic not in _STATISTICS:
        raise _Usage(f"statistic = {parsed.statistic!r} in the configuration; {' and '.join(_STATISTICS)} are accepted")
    methods = parsed.methods or list(config.get("methods", []))
    if not methods:
        raise _Usage(f"name the methods to compare; known are {', '.join(METHODS)}")
    sections = _sections(parsed, config)
    vary = {
        name: list(values) if isinstance(values, list) else values for name, values in sections.pop("sweep", {}).items()
    }
    for setting in getattr(parsed, "vary", []):
        name, equals, values = setting.partition("=")
        if not equals:
            raise _Usage(f"--vary {setting}: SECTION.OPTION=A,B,... is accepted, such as method.rho=0.05,0.1")
        vary[name] = [value.strip() for value in values.split(",")]
    _set_own(sections, parsed.set, methods)
    for method in methods:
        if ":" in method_of(method, sections):
            _check_method(method_of(method, sections))  # makes that of a file known
    seeds = config.get("seeds") if parsed.seeds is None else parsed.seeds.split(",")
    chosen = None if seeds is None else tuple(Option("seeds", int, 0, "").parse(seed) for seed in seeds)
    return parsed, Comparison(sections, tuple(methods), chosen), vary


def _set_own(sections: dict[str, dict[str, Any]], settings: Sequence[str], methods: Sequence[str]) -> None:
    """Set the options of one method that --set names."""
    for setting in settings:
        target, equals, value = setting.partition("=")
        method, dot, name = target.rpartition(".")
        if not (equals and dot):
            raise _Usage(f"--set {setting}: METHOD.OPTION=VALUE is accepted, such as ditto.lam=0.1")
        if method not in methods:
            raise _Usage(f"--set {setting}: {method} is not compared{nearest(method, methods)}")
        own = sections.setdefault("method", {})
        own[method] = {**own.get(method, {}), name: value}


def _folder(command: str, experiment: Experiment) -> str:
    data_name = experiment.data.replace(":", "-").replace("/", "-")
    return f"{command}-{data_name}-{experiment.partition}"


def _run_all(
    experiments: Sequence[tuple[str, Experiment]], folder: Path, parsed: argparse.Namespace
) -> tuple[dict[str, list[ResultsFolder]], Dataset, Partition]:
    """Run them one after the other, each in a folder of its own; returns these by label, and the data of the last."""
    runs: dict[str, list[ResultsFolder]] = {label: [] for label, _ in experiments}
    made: dict[int, tuple[Dataset, Partition]] = {}
    for label, experiment in experiments:
        seed = experiment.settings.seed
        if seed not in made:
            made = {seed: experiment.make_data()}  # one at a time: they are large
        own = folder / f"{folder_name(label)}-seed{seed}"
        _one(experiment, *made[seed], own, argparse.Namespace(**{**vars(parsed), "no_plots": True}), label)
        runs[label].append(ResultsFolder.open(own))
    return runs, *made[seed]


def _write_tables(rows: Sequence[Mapping[str, Any]], folder: Path, name: str) -> None:
    styles: tuple[tuple[Literal["markdown", "csv", "latex"], str], ...]
    styles = (("markdown", "md"), ("csv", "csv"), ("latex", "tex"))
    for style, suffix in styles:
        _write(folder / f"{name}.{suffix}", table(rows, style=style))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _short(values: Mapping[str, Any]) -> dict[str, Any]:
    """Swept options by the last part of their names, where that is enough to tell them apart."""
    last = [name.rpartition(".")[2] for name in values]
    return {
        short if last.count(short) == 1 else name: value
        for (name, value), short in zip(values.items(), last, strict=True)
    }


def _draw_sweep(points: Sequence[tuple[Mapping[str, Any], Runs]], folder: Path, new_clients: bool) -> None:
    """A picture of the results over the option that has several values, if only one has; one more of new clients."""
    varied = [name for name in points[0][0] if len({str(values[name]) for values, _ in points}) > 1]
    if len(varied) != 1:
        return
    drawn = [(values[varied[0]], runs) for values, runs in points]
    try:
        option_curves(drawn, folder / "sweep.png", varied[0])
        if new_clients:
            option_curves(drawn, folder / "new-clients.png", varied[0], new_clients=True)
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)


def _users(runs: Mapping[str, Sequence[ResultsFolder]]) -> str:
    """PersFL's Tables 2 to 6: a row a user, for the accuracy and for what clients chose where they chose something."""
    text = "Accuracy of each user's personal model (global where a method has none), per cent\n\n"
    text += table(transpose(per_user(runs), "user"))
    for metric, title in (
        ("temperature", "Temperature T that each user chose"),
        ("lambda", "Imitation lambda that each user chose"),
        ("teacher_round", "Round of each user's optimal teacher"),
    ):
        chosen = {name: folders for name, folders in runs.items() if metric in folders[0].clients()[0]}
        if chosen:
            text += f"\n{title}\n\n" + table(transpose(per_user(chosen, metric), "user"))
    return text


# ---- data ------------------------------------------------------------------------------------------------------------


def data(arguments: Sequence[str]) -> int:
    """``pfl-ext data``: cut a data set into clients and show who has what."""
    with _reported("data") as status:
        config, partition = _configuration(arguments)
        parser = _parser("data", "", "Cut a data set into clients: print who has what, save the partition, draw it.")
        _add_data(parser, partition)
        group = parser.add_argument_group("output")
        group.add_argument("--config", type=Path, help="a TOML file with the tables data and partition")
        group.add_argument("--seed", dest="federation.seed", default=argparse.SUPPRESS, help="the seed (default: 0)")
        group.add_argument("--save", type=Path, help="write the partition to this file (safetensors)")
        group.add_argument("--picture", type=Path, help="draw the partition into this file (PNG)")
        parsed, unknown = parser.parse_known_args(list(arguments))
        _refuse_unknown(parser, unknown)
        sections = _sections(parsed, {name: table for name, table in config.items() if name != "sweep"})
        experiment = Experiment.from_sections(variant({**sections, "method": {}}, "fedavg"))  # any: it trains nothing
        dataset, cut = experiment.make_data()
        print(cut.table(dataset))
        print(f"{cut.clients} clients, fingerprint {cut.fingerprint[:16]}")
        if parsed.save is not None:
            cut.save(parsed.save)
        if parsed.picture is not None:
            cut.draw(dataset, parsed.picture)
    return status[0]


# ---- landscape -------------------------------------------------------------------------------------------------------


def landscape(arguments: Sequence[str]) -> int:
    """``pfl-ext landscape FOLDER ...``: the loss around the models that runs have saved."""
    with _reported("landscape") as status:
        parser = _parser(
            "landscape",
            " FOLDER ...",
            "Draw the loss around the models of finished runs, along two random directions whose filters are as long\n"
            "as the model's own (Li et al., 2018): the same directions and one scale for all, so that runs of one\n"
            "network and one partition compare. The folders are those that pfl-ext run and compare write.",
        )
        parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="results folders of runs")
        parser.add_argument("--client", type=int, default=0, help="whose models and data (default: 0)")
        parser.add_argument("--models", help="such as global,personal (default: all that the runs evaluate)")
        splits = ("train", "validation", "test", "global_test")
        parser.add_argument("--split", choices=splits, default="train", help="the data (default: the client's train)")
        parser.add_argument("--samples", type=int, default=1000, help="at most so many of them (default: 1000)")
        parser.add_argument("--points", type=int, default=21, help="of the grid in each direction (default: 21)")
        parser.add_argument("--radius", type=float, default=1.0, help="1: as far as the filters are long (default: 1)")
        parser.add_argument("--seed", type=int, default=0, help="decides the directions (default: 0)")
        parser.add_argument("--data-root", type=Path, help="the folder with the data's files, if not that of the run")
        parser.add_argument("--output", type=Path, default=Path("landscape.png"), help="the picture to write")
        parsed, unknown = parser.parse_known_args(list(arguments))
        _refuse_unknown(parser, unknown)
        surfaces, rows = {}, []
        for folder in parsed.folders:
            title = folder.resolve().name
            for name, surface in _surfaces(folder, parsed).items():
                surfaces[f"{title}, {name}"] = surface
                within = [share * parsed.radius for share in (0.2, 0.5, 1)]
                rises = {f"rise within {radius:g}": surface.rise(radius) for radius in within}
                rows.append({"run": title, "model": name, "loss": surface.centre, **rises})
        draw_landscapes(surfaces, parsed.output)
        print(table(rows, digits=3))
        print(f"drawn into {parsed.output}")
    return status[0]


def _surfaces(folder: Path, parsed: argparse.Namespace) -> dict[str, Surface]:
    """The loss around each model of a run."""
    sections = ResultsFolder.open(folder).read_json("config.json")
    if parsed.data_root is not None:
        sections["data"]["root"] = str(parsed.data_root)
    experiment = Experiment.from_sections(sections)
    experiment = dataclasses.replace(
        experiment,
        settings=dataclasses.replace(experiment.settings, workers=1, store="memory"),
        partition_file=folder / "partition.safetensors",
    )
    federation = experiment.make(*experiment.make_data(), extra_tests={})  # none of them is needed
    federation.read(folder)
    if not 0 <= parsed.client < federation.partition.clients:
        raise _Usage(f"--client {parsed.client}: the run has clients 0 to {federation.partition.clients - 1}")
    turns = federation.turns()
    client, models = turns.models(parsed.client, federation.round)
    chosen = list(models) if parsed.models is None else parsed.models.split(",")
    for name in chosen:
        if name not in models:
            raise _Usage(f"--models {name}: {folder} has {', '.join(models)}{nearest(name, models)}")
    indices = federation.partition.global_test if parsed.split == "global_test" else getattr(client, parsed.split)
    if len(indices) == 0:
        raise _Usage(f"--split {parsed.split}: client {parsed.client} has no such data")
    # The same samples for all runs: any order will do, if it is not one class after the other.
    order = torch.randperm(len(indices), generator=stream(parsed.seed, "landscape/samples"))
    indices = indices[order[: parsed.samples]]
    return {
        name: loss_surface(
            turns.model,
            models[name],
            lambda: client.loss(indices),
            stream(parsed.seed, "landscape"),
            points=parsed.points,
            radius=parsed.radius,
        )
        for name in chosen
    }
