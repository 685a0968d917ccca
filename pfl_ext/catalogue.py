"""What each method is: read off its class, and measured in a round of a small federation."""

from __future__ import annotations

import dataclasses
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pfl_ext import nn as networks
from pfl_ext.algorithms import METHODS
from pfl_ext.data import Dataset, Partition
from pfl_ext.federation import Federation, InProcess, Method, Reply, Request, Settings
from pfl_ext.options import title

__all__ = ["Entry", "catalogue", "described", "entry", "methods_table", "options_table", "put_into", "told"]

_CLIENTS = 6
_SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Entry:
    """A method, and what a client keeps, receives, sends and trains of it, in multiples of the network's parameters."""

    name: str
    kind: type[Method]
    kept: Mapping[str, float]
    received: Mapping[str, float]
    sent: Mapping[str, float]
    trained: float
    evaluated: Sequence[str]

    @property
    def paper(self) -> str:
        """Authors and year, from the first line of the class that is in brackets."""
        found = re.search(r"\(([^()]*\d{4}[^()]*)\)", self.kind.__doc__ or "")
        return found[1].replace(", Algorithm", "; Algorithm").partition(";")[0] if found else ""

    @property
    def options(self) -> dict[str, object]:
        """Options that not all methods have, and defaults that others do not."""
        common = {f.name: f.default for f in dataclasses.fields(Method)}
        own = {f.name: f.default for f in dataclasses.fields(self.kind)}
        return {name: value for name, value in own.items() if name not in common or common[name] != value}


@dataclass
class _Watching(InProcess):
    """An engine that notes how many numbers are sent each way."""

    received: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def run(self, requests: Sequence[Request], costs: Sequence[int] | None = None) -> Iterator[Reply]:
        """The replies; those of the last client that trained are noted."""
        for reply in super().run(requests, costs):
            if requests[0].stage == "train":
                self.received = dict(reply.received)
                self.sent = {name: vector.numel() for name, vector in reply.sent.items()}
            yield reply


def _data() -> tuple[Dataset, Partition]:
    """Made-up images of ten classes, for each client one of each to train with and some to choose by and to test."""
    each, count = 16, 16 * _CLIENTS
    images = torch.randint(256, (count, *_SHAPE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    labels = torch.arange(count) % each % 10
    dataset = Dataset.from_tensors(images.float() / 255, labels, classes=[str(c) for c in range(10)])

    def cut(begin: int, end: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.arange(each * k + begin, each * k + end) for k in range(_CLIENTS))

    test = cut(13, 16)
    return dataset, Partition(cut(0, 10), cut(10, 13), test, torch.empty(0, dtype=torch.int64), torch.cat(test))


def entry(name: str) -> Entry:
    """A method in the second of two rounds: LeNet for CIFAR-10, six clients, each with one batch.

    FedBN, which takes batch normalisation, has a small ResNet.
    """
    dataset, partition = _data()
    own: dict[str, Any] = {"name": "wide-resnet", "depth": 10, "width": 1} if name == "fedbn" else {"name": "lenet"}
    network = networks.build(own.pop("name"), _SHAPE, 10, torch.Generator().manual_seed(0), **own)
    size = sum(p.numel() for p in network.parameters())
    known = {f.name for f in dataclasses.fields(METHODS[name])}
    # What would take long and changes nothing that is told here.
    short = {"kd_steps": 1, "generator_steps": 1, "distill_epochs": 0, "most_passes": 1, "width": 10}
    defaults: dict[str, Any] = {"lr": 1e-3, **{option: value for option, value in short.items() if option in known}}
    engine = _Watching()
    auxiliary = dataset.subset(torch.arange(4)).unlabelled(dataset)
    settings = Settings(rounds=2, evaluate_every=2)
    run = Federation(
        METHODS[name](**defaults), network, dataset, partition, settings, engine=engine, auxiliary=auxiliary
    )
    records = run.run()

    def in_models(numbers: Mapping[str, int]) -> dict[str, float]:
        found: dict[str, float] = {}
        for label, count in numbers.items():
            stem = re.sub(r"/\d+$", "/*", label)
            found[stem] = found.get(stem, 0.0) + count / size
        return found

    kept = {label: vector.numel() for label, vector in engine.store.initial.items()}
    trained = records[1]["training"]["trained_parameters"] / size
    evaluated = sorted({model for record in records for model in record.get("models", {})})
    return Entry(
        name, METHODS[name], in_models(kept), in_models(engine.received), in_models(engine.sent), trained, evaluated
    )


def catalogue(names: Sequence[str] = ()) -> list[Entry]:
    """All methods, or those named."""
    return [entry(name) for name in names or METHODS]


def _shown(vectors: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_number(size)}" for name, size in vectors.items()) or "nothing"


def _number(size: float) -> str:
    """Two decimals; what is a few numbers is called so."""
    return f"{size:.2f}" if size >= 0.005 else "~0"


def described(entries: Sequence[Entry], width: int) -> str:
    """A paragraph for each method, in lines of at most ``width`` letters."""
    lines = []
    for e in entries:
        options = ", ".join(f"{name} {_default(value)}" for name, value in e.options.items()) or "those of every method"
        told = {
            "a client keeps": _shown(e.kept),
            "is sent": _shown(e.received),
            "sends": _shown(e.sent),
            "trains": _number(e.trained),
            "evaluated": ", ".join(e.evaluated),
            "options": options,
        }
        lines += textwrap.wrap(f"{e.name}: {title(e.kind)}", width, subsequent_indent="  ")
        for name, text in told.items():
            lines += textwrap.wrap(f"  {name:15}{text}", width, subsequent_indent=" " * 17)
        lines.append("")
    return "\n".join(lines[:-1])


def methods_table(entries: Sequence[Entry]) -> str:
    """Class, name, paper; what is kept, sent and evaluated; Markdown."""
    head = ("method", "name", "paper", "a client keeps", "is sent", "sends", "trains", "evaluated")
    rows = [
        (
            f"`{e.kind.__name__}`", f"`{e.name}`", e.paper, _shown(e.kept), _shown(e.received), _shown(e.sent),
            f"{e.trained:.2f}", ", ".join(e.evaluated),
        )
        for e in entries
    ]  # fmt: skip
    return _markdown(head, rows)


def options_table(entries: Sequence[Entry]) -> str:
    """The options of each method beside those of all, with their defaults; Markdown."""
    rows = [
        (f"`{e.name}`", title(e.kind), ", ".join(f"`{name}` {_default(value)}" for name, value in e.options.items()))
        for e in entries
    ]
    return _markdown(("name", "what it is", "options and their defaults"), rows)


_BEGIN, _END = (f"<!-- what pfl-ext methods prints: {where} -->" for where in ("begin", "end"))


def told(entries: Sequence[Entry]) -> str:
    """Both tables, as ``pfl-ext methods`` prints them."""
    between = "Options that all methods have are left out; `pfl-ext run METHOD --help` explains them and these:"
    return f"{methods_table(entries)}\n\n{between}\n\n{options_table(entries)}"


def put_into(page: Path, entries: Sequence[Entry]) -> None:
    """Replace the tables of a page, which has two comments around them.

    Raises:
        ValueError: it does not have both, once each and in order.
    """
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end) or _BEGIN in rest or _END in before + after:
        raise ValueError(f"{page}: the lines {_BEGIN} and {_END} are needed, once each and in this order")
    new = page.with_name(f"{page.name}.new")
    new.write_text(f"{before}{_BEGIN}\n{told(entries)}\n{_END}{after}", encoding="utf-8")
    os.replace(new, page)


def _default(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return '""' if value == "" else str(value)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
