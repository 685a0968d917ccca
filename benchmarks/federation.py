"""Whole rounds, raced: PFLlib's MNIST quick start here, and those of :mod:`.small_clients` and :mod:`.ditto`.

The quick start: 20 clients, Dirichlet 0.1 by class, a quarter of each client's samples for its test, batches of 10,
one local epoch, step size 0.005, the CNN of 582,026 parameters; after the round, training loss, test accuracy and AUC
of all clients.
The profile says where our round's time goes in one process, the empty turn what a turn costs beside its steps.

All contestants begin with the same weights and see the same batches, and end with the same model but for rounding:
that is checked. What is timed is a round: not reading the data, making clients or starting processes. The columns of
the CSV file are those of the other families; ``limit_ms`` is the time of the passes alone, by as many processes as
there are cores, and ``share_of_bandwidth`` the share of a contestant's time that this is.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pfl_ext import nn
from pfl_ext.algorithms import FedAvg
from pfl_ext.commands.parser import HelpFormatter
from pfl_ext.data import PARTITIONERS, Dataset, Partition, load
from pfl_ext.engines import EngineOptions, make_engine
from pfl_ext.federation import Engine, Federation, Settings, WorkingModel, stream

from . import ditto, empty_turn, machine, many_clients, ranks, report, round_profile, round_race, small_clients
from .case import WrongResult
from .measure import threads
from .opponents import fluke
from .opponents.federation import ClientData, PFLlib, Reported, pfllib_network, tensor_round
from .round_race import Outcome, Racer, cores_text

__all__ = ["NAME", "SUMMARY", "Setting", "contestants", "main", "on_engine", "setting", "setting_of"]

NAME = "federation"
SUMMARY = "whole rounds: a quick start, many small clients, Ditto; an empty turn; --memory: many clients"

_METHOD = FedAvg(lr=0.005, batch_size=10, local_epochs=1)
_ALPHA, _TEST_FRACTION, _SEED = 0.1, 0.25, 0
_EVALUATION_BATCH = 128
_LIMIT = "forward and backward alone"
_RACES = ("quick-start", "small-clients", "ditto", "empty-turn")
_EMPTY_ROUNDS = 20  # of empty turns: each takes a tenth of a second


@dataclass(frozen=True)
class Setting:
    """The data of the race, cut into clients, and the network."""

    dataset: Dataset
    partition: Partition
    network: torch.nn.Sequential

    @property
    def train_samples(self) -> int:
        """Training samples of all clients together."""
        return sum(map(len, self.partition.train))

    def clients(self) -> list[ClientData]:
        """The clients as the opponents have them, each with the batch order that ours has in the first round."""
        made = []
        for k, (train, test) in enumerate(zip(self.partition.train, self.partition.test, strict=True)):
            order = torch.randperm(len(train), generator=stream(_SEED, "batches", 1, k))
            made.append(ClientData(*self.dataset.batch(train), *self.dataset.batch(test), order))
        return made


def setting(dataset: Dataset, clients: int, fraction: float = 1.0) -> Setting:
    """The quick start on a data set of 28 x 28 pixels, on that fraction of each client's samples, in whole batches."""
    shared = PARTITIONERS["dirichlet"](
        dataset,
        clients,
        generator=stream(_SEED, "partition"),
        alpha=_ALPHA,
        minimum=40,
        test="split",
        test_fraction=_TEST_FRACTION,
    )

    def some(indices: Tensor, whole: int) -> Tensor:
        chosen = torch.randperm(len(indices), generator=stream(_SEED, "fraction", len(indices)))
        return indices[chosen[: max(1, int(fraction * len(indices) / whole)) * whole].sort().values]

    partition = dataclasses.replace(
        shared,
        train=tuple(some(train, _METHOD.batch_size) for train in shared.train),
        test=tuple(some(test, 1) for test in shared.test),
        global_test=shared.global_test[:0],  # PFLlib evaluates on the clients' own tests only
    )
    network: Any = nn.build("cnn", dataset.input_shape, len(dataset.classes), stream(_SEED, "network"))
    return Setting(dataset, partition, network)


def enlarged_digits() -> Dataset:
    """The digits at MNIST's size, for a race without a download."""
    digits = load("digits")
    large = F.interpolate(digits.inputs.float(), size=(28, 28)).to(torch.uint8)
    return Dataset.from_tensors(large, digits.targets, name="digits, enlarged", classes=digits.classes)


# ---- the contestants -----------------------------------------------------------------------------------------------


def contestants(
    s: Setting, cores: Sequence[int], on_ranks: Sequence[int] = (), source: Sequence[str] = ()
) -> list[Racer]:
    """Everyone who races, for each number of cores; ours first. Ranks make the setting anew from ``source``."""
    clients, classes = s.clients(), len(s.dataset.classes)
    racers = []
    for n in cores:
        racers += [
            Racer("pfl_ext", "ours", n, partial(_ours, s, n)),
            Racer("PFLlib", "naive", n, partial(_pfllib, s, clients, classes, n)),
            Racer("fluke", "naive", n, partial(_fluke, s, clients, n)),
            Racer("loop over tensors", "skilled", n, partial(_tensors, s, clients, classes, n)),
        ]
    racers += [Racer("pfl_ext, torchrun", "ours", n, partial(_on_ranks, s, n, source)) for n in on_ranks]
    return [
        *racers,
        Racer(_LIMIT, "limit", 1, partial(_passes, s, clients, s.network)),
        Racer(
            f"{_LIMIT}, torch's layers", "yardstick", 1, partial(_passes, s, clients, torch.nn.Sequential(*s.network))
        ),
    ]


def _ours(s: Setting, workers: int) -> Outcome:
    run = _federation(s, workers)
    record = run.run()[-1]
    return Outcome(record["seconds"], run.server["model"], _reported(record))


def _reported(record: Mapping[str, Any]) -> Reported:
    results = record["models"]["global"]
    return Reported(
        results["test"]["accuracy"]["weighted_mean"],
        results["test"]["auc"]["weighted_mean"],
        results["train"]["loss"]["weighted_mean"],
    )


def _pfllib(s: Setting, clients: Sequence[ClientData], classes: int, cores: int) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="pfllib-") as folder, threads(cores):
        run = PFLlib(
            pfllib_network(s.network), clients, Path(folder), _METHOD.batch_size, lr=_METHOD.lr, classes=classes
        )
        begin = time.perf_counter()
        reported = run.round()
        return Outcome(time.perf_counter() - begin, WorkingModel(run.server).state(), reported)


def _fluke(s: Setting, clients: Sequence[ClientData], cores: int) -> Outcome:
    size = _METHOD.batch_size
    train = [fluke.Loader(client.x, client.y, size, [client.order]) for client in clients]
    test = [fluke.Loader(client.test_x, client.test_y, size) for client in clients]
    run = fluke.FedAvg(pfllib_network(s.network), train, test, lr=_METHOD.lr)
    with threads(cores):
        begin = time.perf_counter()
        run.round(range(len(clients)))
        accuracy, loss = run.evaluate()
        seconds = time.perf_counter() - begin
    return Outcome(seconds, WorkingModel(run.model).state(), Reported(accuracy, float("nan"), loss))


def _federation(s: Setting, workers: int) -> Federation:
    return on_engine(s, make_engine(EngineOptions(workers=workers)))


def on_engine(s: Setting, engine: Engine) -> Federation:
    """Our federation of this setting, whose clients train on the given engine."""
    settings = Settings(rounds=1, seed=_SEED, evaluate_train=True, threads=1)
    return Federation(_METHOD, s.network, s.dataset, s.partition, settings, engine=engine)


def _on_ranks(s: Setting, count: int, source: Sequence[str]) -> Outcome:
    found = ranks.round_on(count, source)
    print(ranks.bytes_table(found, s.partition.clients), file=sys.stderr)
    return Outcome(found.record["seconds"], found.model, _reported(found.record))


def _tensors(s: Setting, clients: Sequence[ClientData], classes: int, cores: int) -> Outcome:
    server = pfllib_network(s.network)
    with threads(cores):
        begin = time.perf_counter()
        model, reported = tensor_round(server, clients, _METHOD.batch_size, _METHOD.lr, classes)
        return Outcome(time.perf_counter() - begin, WorkingModel(model).state(), reported)


def _passes(s: Setting, clients: Sequence[ClientData], network: torch.nn.Module) -> Outcome:
    """As many passes as a round has, each on the first batch of a client; no step, no metrics, nothing fetched."""
    model = WorkingModel(copy.deepcopy(network))
    batch = _METHOD.batch_size
    seconds = 0.0
    with threads(1):
        for client in clients:
            x, y = client.x[:batch].contiguous(memory_format=torch.channels_last), client.y[:batch]
            every = torch.cat([client.x, client.test_x])[:_EVALUATION_BATCH]
            # Their sizes are those of a round: full batches, and for each split the rest.
            sizes = [
                min(_EVALUATION_BATCH, n - done)
                for n in (len(client.x), len(client.test_x))
                for done in range(0, n, _EVALUATION_BATCH)
            ]
            begin = time.perf_counter()
            model.module.train()
            for _ in range(len(client.x) // batch):
                torch.autograd.grad(F.cross_entropy(model(x), y), model.trained)
            model.module.eval()
            with torch.no_grad():
                for size in sizes:
                    model(every[:size])
            seconds += time.perf_counter() - begin
    return Outcome(seconds)


# ---- what is written -----------------------------------------------------------------------------------------------


def profile_rows(s: Setting, what: str, repeats: int) -> list[report.Row]:
    """Lines of the CSV file for the parts of our round in one process; ``share_of_bandwidth`` is a part's share."""
    found = [round_profile.profile(_federation(s, 1)) for _ in range(repeats)]
    whole = median(sum(spent.values()) for spent in found)
    made = []
    for part in round_profile.PARTS:
        times = [spent[part] for spent in found]
        share = median(times) / whole
        made.append(round_race.row("profile", what, s.partition.clients, 1, part, "part", times, share=share))
    return made


def _profile_table(lines: Sequence[report.Row]) -> str:
    table = [["where our processor time goes, in one process", "seconds", "share"], ["---", "--:", "--:"]]
    spent = [row for row in lines if row.median_ms > 0]  # steps are taken in one of two ways
    table += [[row.contestant, f"{row.median_ms / 1e3:.2f}", f"{row.share_of_bandwidth:.1%}"] for row in spent]
    passes = sum(row.share_of_bandwidth for row in lines if row.contestant in round_profile.PASSES)
    table.append(["**not forward and backward passes**", "", f"**{1 - passes:.1%}**"])
    return "\n".join("| " + " | ".join(line) + " |" for line in table)


def markdown(every: Sequence[report.Row]) -> str:
    """The tables, and what a reader needs to judge them."""
    text = _quick_start([row for row in every if row.op == "round"], [row for row in every if row.op == "profile"])
    text += small_clients.markdown(every) + ditto.markdown(every)
    text += empty_turn.markdown([row for row in every if row.op == empty_turn.OP])
    measured: dict[tuple[str, ...], list[str]] = {}
    for row in every:
        told = measured.setdefault((row.date, row.machine, row.isa, row.pfl_ext, row.commit, row.torch, row.python), [])
        told += [] if row.op in told else [row.op]
    for (date, where, isa, version, commit, torch_, python), ops in measured.items():
        source = f"pfl_ext {version}" + (f" at commit {commit}" if commit else "")
        what = "Measured" if len(measured) == 1 else f"Measured ({', '.join(ops)})"
        text += f"{what} on {date}: {where}, {isa} kernels, {source}, torch {torch_}, Python {python}. "
    return text + f"Reproduce: `pfl-ext bench {NAME}`.\n"


def _quick_start(lines: Sequence[report.Row], parts: Sequence[report.Row]) -> str:
    if not lines:
        return ""
    first = lines[0]
    header = ["", "cores", "seconds a round", "pfl_ext is faster by", "of it forward and backward"]
    table = [header, ["---", "--:", "--:", "--:", "--:"]]
    for row in lines:
        limit = row.kind in ("limit", "yardstick")
        table.append(
            [
                row.contestant,
                str(row.threads),
                f"{row.median_ms / 1e3:.2f}",
                "-" if limit or row.kind == "ours" else report.ratio_text(row.ratio_to_ours),
                f"{row.share_of_bandwidth:.0%}" if row.kind == "ours" else "-",
            ]
        )
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in table)
        + f"\n\nOne round of FedAvg as in PFLlib's MNIST quick start, run on {first.shapes}: {first.clients} clients, "
        "Dirichlet 0.1, batches of 10, one local epoch, the CNN of 582,026 parameters, then training loss, test "
        f"accuracy and AUC of every client. Median of {first.rounds}, in turns; all end with the same model.\n\n"
        "* On n cores pfl_ext runs n processes of one thread, the others one process of n threads.\n"
        "* PFLlib: re-typed, with its clients' files in the system's cache. Its AUC is over all pairs of sample and "
        "class, ours over the classes.\n"
        "* fluke: re-typed, without its other metrics.\n"
        "* Forward and backward alone: as many passes by autograd on our network in our memory format, or on the same "
        "layers run one by one, nothing else; pfl_ext takes its steps without autograd, and may take less.\n\n"
        + (_profile_table(parts) + "\n\n" if parts else "")
    )


# ---- the command ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run ``pfl-ext bench federation`` with these arguments; returns the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    suffix = "memory" if arguments.memory else ""
    path = report.results_folder(arguments.output) / (
        ".".join(filter(None, (NAME, suffix, "quick" if arguments.quick else ""))) + ".csv"
    )
    make = many_clients.markdown if arguments.memory else markdown
    try:
        if not (arguments.table or arguments.readme):
            measured = (
                many_clients.measure(arguments.clients or ((20, 200) if arguments.quick else many_clients.CLIENTS))
                if arguments.memory
                else _race(arguments, path)
            )
            report.write_csv(path, measured)
            print(f"wrote {path}", file=sys.stderr)
        if not path.exists():
            raise FileNotFoundError(f"{path} does not exist; `pfl-ext bench {NAME}` writes it")
        text = make(report.read_csv(path))
        if arguments.readme is None:
            print(text, end="")
        else:
            report.put_into(arguments.readme, f"{NAME}{'-memory' if arguments.memory else ''}", text)
    except (OSError, ValueError, ImportError, WrongResult) as error:
        print(f"pfl-ext bench: error: {error}", file=sys.stderr)
        return 1
    return 0


def setting_of(arguments: Sequence[str]) -> tuple[Setting, Dataset]:
    """The setting that ``--quick``, ``--data`` and ``--fraction`` name, and its data."""
    given = _parser().parse_args(arguments)
    dataset = enlarged_digits() if given.quick else load("mnist", given.data)
    clients, fraction = (5, 0.5) if given.quick else (20, given.fraction)
    return setting(dataset, clients, fraction), dataset


def _race(arguments: argparse.Namespace, path: Path) -> list[report.Row]:
    """The lines of the CSV file; of races that are not run those that it has."""
    cores = tuple(dict.fromkeys((machine.cores(), 1)))
    repeats, patience, root = arguments.repeats or 1, arguments.patience, arguments.data
    chosen = arguments.only or _RACES
    made: list[report.Row] = []
    if "quick-start" in chosen:
        made += _race_quick_start(arguments, cores, repeats)
    if "small-clients" in chosen:
        small = _quick_small_clients() if arguments.quick else small_clients.official(root)
        made += small_clients.measure(small, cores, repeats, patience)
    if "ditto" in chosen:
        made += ditto.measure(_quick_ditto() if arguments.quick else ditto.official(root), cores, repeats, patience)
    if "empty-turn" in chosen:
        made += empty_turn.measure(_EMPTY_ROUNDS)
    if set(chosen) < set(_RACES) and path.exists():
        measured = {row.op for row in made}
        made += [row for row in report.read_csv(path) if row.op not in measured]
    return made


def _quick_small_clients() -> small_clients.Setting:
    return small_clients.setting(_with_a_test_part(load("digits")), clients=10, samples=20, participation=0.2)


def _quick_ditto() -> ditto.Setting:
    return ditto.setting(_with_a_test_part(enlarged_digits()), clients=4, samples=64, participation=0.5)


def _with_a_test_part(dataset: Dataset) -> Dataset:
    """The same with every fourth sample for tests."""
    return dataclasses.replace(dataset, is_test=torch.arange(len(dataset.targets)) % 4 == 0)


def _race_quick_start(arguments: argparse.Namespace, cores: Sequence[int], repeats: int) -> list[report.Row]:
    source = ["--quick"] if arguments.quick else ["--fraction", str(arguments.fraction)]
    source += [] if arguments.data is None else ["--data", str(arguments.data.resolve())]
    s, dataset = setting_of(source)
    what = f"{s.train_samples:,}".replace(",", "\u202f") + f" training samples of {dataset.name}"
    on_ranks = () if arguments.ranks is None else tuple(dict.fromkeys((arguments.ranks, 1)))
    begin = WorkingModel(copy.deepcopy(s.network)).state()
    results = round_race.compare(begin, contestants(s, cores, on_ranks, source), repeats, arguments.patience)
    for result in results:
        racer, reported = result.racer, result.outcomes[-1].reported
        if reported is not None:
            print(
                f"{racer.name}, {cores_text(racer.cores)}: accuracy {reported.accuracy:.4f}, AUC {reported.auc:.4f}, "
                f"training loss {reported.train_loss:.4f}",
                file=sys.stderr,
            )
    return round_race.rows("round", what, s.partition.clients, results) + profile_rows(s, what, repeats)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"pfl-ext bench {NAME}", description=SUMMARY, formatter_class=HelpFormatter)
    parser.add_argument("--quick", action="store_true", help="on the digits, written to a file of its own")
    parser.add_argument(
        "--data",
        metavar="DIR",
        type=Path,
        help="folder with MNIST, Fashion-MNIST and CIFAR-10 (default: $PFL_EXT_DATA, else data)",
    )
    parser.add_argument("--fraction", type=_fraction, default=1.0, help="of each client's samples (default: all)")
    parser.add_argument("--repeats", metavar="N", type=_count, help="rounds of each contestant (default: 1)")
    parser.add_argument(
        "--patience",
        metavar="MINUTES",
        type=float,
        default=0.0,
        help="repeat runs that other programs disturb, so long",
    )
    parser.add_argument(
        "--only",
        metavar="RACE",
        action="append",
        choices=_RACES,
        help=f"of {', '.join(_RACES)}; may be given more than once; the file keeps what it has of the others",
    )
    parser.add_argument("--ranks", metavar="N", type=_count, help="race N ranks of torchrun, and one, beside the rest")
    parser.add_argument("--memory", action="store_true", help="measure time and memory of many clients instead")
    parser.add_argument("--clients", metavar="LIST", type=_counts, help="with --memory: numbers of clients")
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder of the CSV file")
    parser.add_argument("--table", action="store_true", help="print the table of an existing CSV file; measure nothing")
    parser.add_argument("--readme", metavar="FILE", type=Path, help="put that table into a Markdown file")
    return parser


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; a number above 0, up to 1, is")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; a positive whole number is")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part.strip()) for part in text.split(","))
