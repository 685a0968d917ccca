r"""Ways to share a dataset among clients, each from the paper that uses it.

Every partitioner is a function of a dataset, a number of clients and options, and draws from one generator: the same
generator state gives the same partition. Each ends for every input, or raises ValueError saying why it cannot.

``test`` says where local test sets come from:

* ``"proportional"``: the clients share the training part, and the official test part is cut by the same proportions:
  a client with 5 % of the training samples of a class gets 5 % of its test samples. The global test is the whole
  official test part.
* ``"split"``: the clients share all samples, and every client sets ``test_fraction`` of its own aside. The global test
  is the union of the local ones.
* ``"auto"``: proportional where the dataset has a test part, else split.

``validation`` and ``test_fraction`` are fractions of what a client holds; what remains is its training set.

What is written here of a partitioner is its own: a function from dataset, clients, generator and its options to
:class:`~pfl_ext.data.allocation.Shares`. ``@_partitioner()`` adds the options that all have, which
:func:`~pfl_ext.data.allocation.allocate` declares, and makes it return a partition. Options carry their explanation as
``typing.Annotated``; :data:`PARTITIONERS` lists the functions by name.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch import Tensor

from .allocation import Shares, allocate, apportion, deal_labels, dirichlet_weights, raise_to_minimum
from .dataset import Dataset
from .partition import Partition

__all__ = [
    "PARTITIONERS",
    "by_domain",
    "dirichlet",
    "dirichlet_meta",
    "ds1",
    "ds2",
    "ds3",
    "iid",
    "labels_per_client",
]

Alpha = Annotated[float, "concentration of the Dirichlet distribution; the smaller, the more heterogeneous"]
Minimum = Annotated[int, "the least samples a client may have; if need be, some are moved from the largest clients"]
Server = Annotated[float, "fraction of all samples held out for the server"]
Balance = Annotated[bool, "a client that holds its equal share n/M already gets none of the next class (PerAda)"]
PerClass = Annotated[int, "samples of every class that each client gets before the rest is drawn (PerAda: 2)"]

PARTITIONERS: dict[str, Callable[..., Partition]] = {}
"""The partitioners by name."""


def _partitioner(**defaults: Any) -> Callable[[Callable[..., Shares]], Callable[..., Partition]]:
    """Make a partitioner of the function that says its own part; ``defaults`` of the common options where they differ.

    Its signature has the function's parameters and the common options, so that whoever reads options off signatures,
    as the command line does, finds all of them with type, default and explanation.
    """
    common = [
        parameter.replace(default=defaults.get(name, parameter.default))
        for name, parameter in inspect.signature(allocate, eval_str=True).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]

    def decorate(shares_of: Callable[..., Shares]) -> Callable[..., Partition]:
        own = inspect.signature(shares_of, eval_str=True).parameters
        signature = inspect.Signature([*own.values(), *common], return_annotation=Partition)
        options = [p.name for p in own.values() if p.kind is p.KEYWORD_ONLY and p.name != "generator"]

        @functools.wraps(shares_of)
        def partition(*args: Any, **keywords: Any) -> Partition:
            bound = signature.bind(*args, **keywords)
            bound.apply_defaults()
            given = {name: bound.arguments[name] for name in own}
            description = {"partitioner": shares_of.__name__, **{name: given[name] for name in options}}
            cut = {parameter.name: bound.arguments[parameter.name] for parameter in common}
            shares = shares_of(**given)
            return allocate(given["dataset"], shares, given["generator"], description | dict(shares.chosen), **cut)

        partition.__signature__ = signature  # type: ignore[attr-defined]
        partition.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        PARTITIONERS[shares_of.__name__] = partition
        return partition

    return decorate


@_partitioner()
def iid(dataset: Dataset, clients: int, *, generator: torch.Generator, server: Server = 0.0) -> Shares:
    """Equally many samples for every client, to within one, drawn uniformly; all are used."""

    def draw(available: Tensor) -> Tensor:
        return apportion(torch.ones(clients), int(available.sum()), generator)[:, None]

    return Shares(clients, torch.zeros(len(dataset), dtype=torch.int64), 1, draw, server=server)


@_partitioner()
def dirichlet(
    dataset: Dataset,
    clients: int,
    *,
    generator: torch.Generator,
    alpha: Alpha = 0.1,
    balance: Balance = False,
    minimum: Minimum = 10,
    per_class: PerClass = 0,
    test_per_class: Annotated[
        int, "the same of every local test, where they are cut from the test part (PerAda: 2)"
    ] = 0,
    server: Server = 0.0,
) -> Shares:
    r"""Client m gets :math:`d_{cm} n_c` samples of class c, :math:`d_c \sim \mathrm{Dir}_M(\alpha)` for each class.

    As in spectral co-distillation; all samples are used. PerAda's CIFAR-10 is ``alpha=0.1, balance=True, per_class=2,
    server=0.1``, in its official code with ``test_per_class=2``: first ``per_class`` of every class for every client,
    then the server's share, then class by class Dirichlet weights, with weight zero for clients that already hold
    :math:`n / M`.
    """
    categories = _classes_of(dataset, "dirichlet"), len(dataset.classes)
    if test_per_class < 0:
        raise ValueError(f"test_per_class is {test_per_class}; 0 or more is accepted")
    shares = _dirichlet(clients, *categories, generator, alpha, minimum, balance, per_class, server)
    return dataclasses.replace(shares, test_per_category=test_per_class)


@_partitioner()
def labels_per_client(
    dataset: Dataset,
    clients: int,
    *,
    generator: torch.Generator,
    k: Annotated[
        int | None,
        "classes of each client (PLGU: 3 on CIFAR-10, 10 on CIFAR-100, 30 on TinyImageNet; default: 3 or all)",
    ] = None,
) -> Shares:
    """K classes for every client and equally many samples of each: the same number for all clients (PLGU).

    Classes are dealt so that all have equally many clients, to within one. The number of samples is the largest that
    every class can give to each of its clients; what the larger classes have beyond that is not used.
    """
    classes, k = _classes_of(dataset, "labels_per_client"), _or_all(k, 3, dataset)
    has = deal_labels(_positive(clients), len(dataset.classes), k, generator)

    def draw(available: Tensor) -> Tensor:
        places = has.sum(0)
        share = available[places > 0] // places[places > 0]
        each = int(share.min())
        if each == 0:
            scarce = int((places > 0).nonzero().flatten()[share.argmin()])
            raise ValueError(
                f"class {dataset.classes[scarce]!r} has {int(available[scarce])} samples for {int(places[scarce])} "
                "clients; use fewer clients or fewer labels per client"
            )
        return has.to(torch.int64) * each

    return Shares(clients, classes, len(dataset.classes), draw, chosen={"k": k})


@_partitioner(validation=0.2, test="split")  # 60 : 20 : 20 of all samples
def ds1(
    dataset: Dataset,
    clients: int,
    *,
    generator: torch.Generator,
    k: Annotated[int | None, "classes of each client; all make the clients alike (default: 4, or all if fewer)"] = None,
) -> Shares:
    """PersFL's DS-1: the same total for every client, k classes each, different numbers of samples of each class.

    A client's shares of its classes start uniform on the simplex and are fitted to equal totals and to what the
    classes have, by scaling rows and columns in turn; a few samples that do not fit remain unused.
    """
    classes, k = _classes_of(dataset, "ds1"), _or_all(k, 4, dataset)
    has = deal_labels(_positive(clients), len(dataset.classes), k, generator)

    def draw(available: Tensor) -> Tensor:
        # One sample of each class is certain, and rounding may add one more than the fitted number: so two are set
        # aside for every place.
        capacity = (available - 2 * has.sum(0)).double()
        if bool((capacity < 0).any()):
            scarce = int(capacity.argmin())
            raise ValueError(
                f"class {dataset.classes[scarce]!r} has {int(available[scarce])} samples for "
                f"{int(has[:, scarce].sum())} clients; use fewer clients or a lower k"
            )
        share = has * -torch.log1p(-torch.rand(has.shape, dtype=torch.float64, generator=generator))
        share = share + has * 1e-9
        goal = float(capacity.sum()) / clients
        for _ in range(200):
            share = share * (goal / share.sum(1, keepdim=True).clamp(min=1e-300))
            share = share * (capacity / share.sum(0).clamp(min=1e-300)).clamp(max=1.0)
        total = math.floor(float(share.sum(1).min()) + 1e-9)
        rows = [
            apportion(row, total, generator) if total else torch.zeros_like(row, dtype=torch.int64) for row in share
        ]
        return torch.stack(rows) + has

    return Shares(clients, classes, len(dataset.classes), draw, chosen={"k": k})


@_partitioner(validation=0.2, test="split")  # 60 : 20 : 20 of all samples
def ds2(
    dataset: Dataset,
    clients: int,
    *,
    generator: torch.Generator,
    alpha: Alpha = 0.9,
    per_class: PerClass = 5,
) -> Shares:
    r"""PersFL's DS-2: :func:`dirichlet` with :math:`\alpha = 0.9`; all clients have samples of all classes.

    The distribution alone does not promise the latter. Five of each class are enough to leave one of them in the
    training set after the cut of 60 : 20 : 20.
    """
    categories = _classes_of(dataset, "ds2"), len(dataset.classes)
    return _dirichlet(clients, *categories, generator, alpha, minimum=1, per_class=per_class)


@_partitioner(validation=0.2, test="split")  # 60 : 20 : 20 of all samples
def ds3(
    dataset: Dataset,
    clients: int,
    *,
    generator: torch.Generator,
    k: Annotated[int | None, "classes of each client (default: 2, or all if fewer)"] = None,
    sigma: Annotated[float, "standard deviation of the logarithm of the shares"] = 2.0,
    minimum: Annotated[int, "samples of each of its classes that a client has at least"] = 10,
) -> Shares:
    r"""PersFL's DS-3: two classes for every client, numbers of samples log-normal.

    Client m has the weight :math:`u_{mc} = e^{\sigma z}`, :math:`z \sim N(0, 1)`, in each of its classes, and a class
    is shared in proportion to these weights, after ``minimum`` for each. The paper's :math:`\mu = 0` is a common factor
    of the weights and without effect. All samples of classes that somebody has are used.
    """
    if not 0 <= sigma < math.inf:
        raise ValueError(f"sigma is {sigma}; a finite number that is not negative is accepted")
    if minimum < 1:
        raise ValueError(f"minimum is {minimum}; at least one sample of each of a client's classes is accepted")
    classes, k = _classes_of(dataset, "ds3"), _or_all(k, 2, dataset)
    has = deal_labels(_positive(clients), len(dataset.classes), k, generator)

    def draw(available: Tensor) -> Tensor:
        logarithm = sigma * torch.randn(has.shape, dtype=torch.float64, generator=generator)
        counts = has.to(torch.int64) * minimum
        left = available - counts.sum(0)
        if bool((left < 0).any()):
            scarce = int(left.argmin())
            raise ValueError(
                f"class {dataset.classes[scarce]!r} has {int(available[scarce])} samples for "
                f"{int(has[:, scarce].sum())} clients of {minimum} at least; use fewer clients or a lower minimum"
            )
        for c in has.any(0).nonzero().flatten().tolist():
            holders = has[:, c].nonzero().flatten()
            counts[holders, c] += apportion(logarithm[holders, c].softmax(0), int(left[c]), generator)
        return counts

    return Shares(clients, classes, len(dataset.classes), draw, chosen={"k": k})


@_partitioner()
def by_domain(
    dataset: Dataset,
    clients: Annotated[int | None, "a multiple of the number of domains; None: one for each"] = None,
    *,
    generator: torch.Generator,
) -> Shares:
    """One domain for every client (PerAda's Office-Home); with more clients, equal shares of a domain for each.

    Clients 0, 1, ... have the domains in their order; with twice as many clients, 0 and 1 have the first. Data that
    come with clients of their own, LEAF's users and PFLlib's clients, have them as domains: without ``clients`` this is
    their partition. Domains without a training sample are left out then.
    """
    if dataset.domain is None:
        others = "dirichlet or iid" if dataset.one_class else "iid"
        raise ValueError(f"{dataset.name!r} has no domains; use another partitioner, such as {others}")
    domains = len(dataset.domains)
    if clients is None:
        holders = dataset.domain[~dataset.is_test].unique().tolist()
    elif _positive(clients) % domains:
        raise ValueError(f"{clients} clients for {domains} domains; a multiple of {domains} is accepted")
    else:
        holders = [client * domains // clients for client in range(clients)]
    each = torch.bincount(torch.tensor(holders), minlength=domains).tolist()

    def draw(available: Tensor) -> Tensor:
        counts = torch.zeros(len(holders), domains, dtype=torch.int64)
        first = 0
        for d in range(domains):
            if int(available[d]) < each[d]:
                raise ValueError(f"{each[d]} clients for the {int(available[d])} samples of {dataset.domains[d]!r}")
            if each[d]:
                counts[first : first + each[d], d] = apportion(torch.ones(each[d]), int(available[d]), generator)
            first += each[d]
        return counts

    return Shares(len(holders), dataset.domain, domains, draw)


@_partitioner()
def dirichlet_meta(
    dataset: Dataset,
    clients: int,
    *,
    generator: torch.Generator,
    alpha: Alpha = 0.3,
    group_below: Annotated[int, "combinations of labels with fewer training samples form one category"] = 2000,
    minimum: Minimum = 10,
    server: Server = 0.0,
) -> Shares:
    """:func:`dirichlet` over the meta-categories of multi-label data (PerAda's CheXpert).

    Each combination of labels is a category; those with fewer than ``group_below`` training samples are one together.
    """
    if not dataset.multilabel:
        has, other = (
            ("one label for each sample", "dirichlet") if dataset.one_class else ("no labels", "iid or by_domain")
        )
        raise ValueError(f"dirichlet_meta is for samples of several labels, {dataset.name!r} has {has}; use {other}")
    combination = (dataset.targets.cpu() > 0).to(torch.uint8).unique(dim=0, return_inverse=True)[1]
    frequency = torch.bincount(combination[~dataset.is_test.cpu()], minlength=int(combination.max()) + 1)
    rare = frequency < group_below
    number = torch.where(rare, (~rare).sum(), (~rare).cumsum(0) - 1)
    return _dirichlet(clients, number[combination], int(number.max()) + 1, generator, alpha, minimum, server=server)


def _or_all(k: int | None, default: int, dataset: Dataset) -> int:
    """The number of classes a client has, where none is given: never more than there are."""
    return min(default, len(dataset.classes)) if k is None else k


def _positive(clients: int) -> int:
    if clients < 1:
        raise ValueError(f"{clients} clients; at least one is accepted")
    return clients


def _classes_of(dataset: Dataset, partitioner: str) -> Tensor:
    if dataset.one_class:
        return dataset.targets
    others = ["iid"] if dataset.domain is None else ["by_domain", "iid"]
    if dataset.multilabel:
        have, others = "have several labels", ["dirichlet_meta", *others]
    elif dataset.classes:
        have = f"have a class for each of {list(dataset.targets.shape[1:])}"
    else:
        have = "have numbers to predict"
    raise ValueError(
        f"{partitioner} shares classes, and the samples of {dataset.name!r} {have}; use {' or '.join(others)}"
        + ("" if dataset.domain is not None else ", or give the samples domains and use by_domain")
    )


def _dirichlet(
    clients: int,
    category: Tensor,
    categories: int,
    generator: torch.Generator,
    alpha: float,
    minimum: int,
    balance: bool = False,
    per_class: int = 0,
    server: float = 0.0,
) -> Shares:
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha is {alpha}; a positive, finite number is accepted")
    if minimum < 1 or per_class < 0:
        raise ValueError(f"minimum is {minimum}, per_class {per_class}; from 1 and from 0 on are accepted")

    def draw(available: Tensor) -> Tensor:
        counts = torch.zeros(clients, len(available), dtype=torch.int64)
        first = per_class * len(available)  # what each client holds before this
        equal = first + int(available.sum()) / clients
        # In random order: under the balance rule the last classes go to whoever has room.
        for c in torch.randperm(len(available), generator=generator).tolist():
            weights = dirichlet_weights(alpha, clients, generator)
            if balance:
                room = first + counts.sum(1) < equal
                # Where all the weight was on full clients, those with room share the class equally.
                weights = torch.where(room, weights, 0.0)
                weights = weights if float(weights.sum()) > 0 else room.double()
            if int(available[c]):
                counts[:, c] = apportion(weights, int(available[c]), generator)
        return raise_to_minimum(counts, max(minimum - first, 0), generator)

    return Shares(clients, category, categories, draw, server, per_class)
