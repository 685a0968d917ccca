r"""From numbers to samples: the steps that all partitioners share.

A partitioner only decides *how many* samples of each category :math:`c` (class, domain, meta-category) client
:math:`m` gets: a matrix of counts :math:`N_{mc}` with :math:`\sum_m N_{mc} \le n_c`. Which samples these are is drawn
here, uniformly, so that the parts are disjoint by construction, and test sets are cut by the same matrix. The options
that all partitioners have are the keyword-only parameters of :func:`allocate`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from .dataset import Dataset
from .partition import Partition

__all__ = ["Shares", "allocate", "apportion", "deal_labels", "dirichlet_weights", "raise_to_minimum"]

TESTS = ("auto", "proportional", "split")


def apportion(weights: Tensor, total: int, generator: torch.Generator) -> Tensor:
    """Whole numbers that sum to ``total``, in proportion to ``weights`` to within one (largest remainders).

    Ties go to randomly chosen entries, lest the first clients always get more.
    """
    quota = weights.double() / float(weights.sum()) * total
    counts = quota.floor().to(torch.int64)
    order = torch.randperm(len(weights), generator=generator)
    # Entries without a weight come last: they get nothing.
    remainder = torch.where(weights > 0, quota - counts, -1.0)[order]
    ranked = order[remainder.sort(descending=True, stable=True).indices]
    counts[ranked[: total - int(counts.sum())]] += 1
    return counts


def dirichlet_weights(alpha: float, clients: int, generator: torch.Generator) -> Tensor:
    r"""One draw of the symmetric Dirichlet distribution, for any :math:`\alpha > 0`.

    :math:`\Gamma(\alpha)` is drawn as :math:`\Gamma(\alpha + 1)\, U^{1/\alpha}` and normalised in logarithms: for
    small :math:`\alpha` all the gammas themselves are zero in floating point.
    """
    alpha = min(alpha, 1e12)  # equal shares beyond; keeps the products finite
    gamma = torch._standard_gamma(torch.full((clients,), alpha + 1.0, dtype=torch.float64), generator=generator)
    uniform = 1.0 - torch.rand(clients, dtype=torch.float64, generator=generator)  # in (0, 1]
    scaled = alpha * gamma.log() + uniform.log()
    return ((scaled - scaled.max()) / alpha).softmax(0)


def raise_to_minimum(counts: Tensor, minimum: int, generator: torch.Generator) -> Tensor:
    """Give clients with fewer than ``minimum`` samples what they lack, from the others.

    Each of the others gives in proportion to what it holds beyond the minimum, drawn at random from its samples. This
    always ends, where drawing the whole partition again until every client has enough need not.
    """
    sizes = counts.sum(1)
    if int(sizes.sum()) < minimum * len(counts):
        raise ValueError(
            f"{len(counts)} clients with a minimum of {minimum} samples each need {minimum * len(counts)}; "
            f"there are {int(sizes.sum())}: use fewer clients or a lower minimum"
        )
    lacking = (minimum - sizes).clamp(min=0)
    if not bool(lacking.any()):
        return counts
    giving = apportion((sizes - minimum).clamp(min=0), int(lacking.sum()), generator)
    # Every sample that is held, in random order within its client: the first ones are given away.
    held = torch.repeat_interleave(counts.flatten())
    held = held[torch.randperm(len(held), generator=generator)]
    client, order = (held // counts.shape[1]).sort(stable=True)
    place = torch.arange(len(held)) - (sizes.cumsum(0) - sizes)[client]
    given = held[order[place < giving[client]]]
    given = given[torch.randperm(len(given), generator=generator)]
    taken = torch.repeat_interleave(lacking) * counts.shape[1] + given % counts.shape[1]
    counts = counts.flatten().index_add(0, given, given.new_full((len(given),), -1))
    return counts.index_add(0, taken, taken.new_ones(len(taken))).view(len(sizes), -1)


def deal_labels(clients: int, classes: int, k: int, generator: torch.Generator) -> Tensor:
    """Which classes each client has: bool [clients, classes], k in each row, as equally many in each column as can be.

    Each client takes the k classes with the most places left, ties drawn at random; with places that differ by at most
    one between classes this never runs into a client that would need the same class twice.
    """
    if not 1 <= k <= classes:
        raise ValueError(f"{k} labels per client; the dataset has {classes} classes: use 1 to {classes}")
    places = apportion(torch.ones(classes), clients * k, generator)
    has = torch.zeros(clients, classes, dtype=torch.bool)
    for client in torch.randperm(clients, generator=generator).tolist():
        order = torch.randperm(classes, generator=generator)
        chosen = order[places[order].sort(descending=True, stable=True).indices[:k]]
        has[client, chosen] = True
        places[chosen] -= 1
    return has


@dataclass(frozen=True)
class Shares:
    """What is a partitioner's own: how many samples of each category every client gets.

    Args:
        clients: how many there are.
        category: ``[n]`` int64, of every sample.
        categories: how many there are; some may have no sample.
        draw: from the available number of samples of each category ``[categories]`` to counts
            ``[clients, categories]``; given what is left after ``per_category`` and ``server``.
        server: fraction of all samples held out for the server.
        per_category: samples of every category that each client gets before anything else.
        test_per_category: the same of the official test part, where local tests are cut from it.
        chosen: options whose default depends on the data, as they were chosen.
    """

    clients: int
    category: Tensor
    categories: int
    draw: Callable[[Tensor], Tensor]
    server: float = 0.0
    per_category: int = 0
    test_per_category: int = 0
    chosen: Mapping[str, Any] = field(default_factory=dict)


def allocate(
    dataset: Dataset,
    shares: Shares,
    generator: torch.Generator,
    description: dict[str, Any],
    *,
    validation: Annotated[float, "fraction of a client's samples kept for validation"] = 0.0,
    test: Annotated[
        str,
        "local tests: 'proportional' cuts the official test part as the training part is shared, 'split' pools all "
        "samples and takes test_fraction of each client's, 'auto' is the first where there is a test part",
    ] = "auto",
    test_fraction: Annotated[float, "fraction of a client's samples kept for its test, with test='split'"] = 0.2,
) -> Partition:
    """Draw counts, give every client its samples, and cut validation and test sets.

    Args:
        dataset: what is partitioned.
        shares: who gets how many samples of what.
        generator: of everything that is random.
        description: what the partition shall say of itself.
        validation, test, test_fraction: what their annotations say; more in :mod:`pfl_ext.data.partitioners`.
    """
    clients, server, per_category = shares.clients, shares.server, shares.per_category
    _check(dataset, clients, generator, validation, test, test_fraction, server)
    category, is_test = shares.category.cpu(), dataset.is_test.cpu()
    if test == "auto":
        test = "proportional" if bool(is_test.any()) else "split"
    if test == "proportional" and not bool(is_test.any()):
        raise ValueError(f"{dataset.name!r} has no official test part to cut; use test='split'")
    pool = torch.arange(len(dataset)) if test == "split" else (~is_test).nonzero().flatten()
    if len(pool) < clients:
        raise ValueError(f"{clients} clients for {len(pool)} samples; every client needs one: use fewer clients")
    available = torch.bincount(category[pool], minlength=shares.categories)

    left = available - clients * per_category
    if bool((left < 0).any()):
        scarce = int(left.argmin())
        raise ValueError(
            f"{per_category} samples of each class for each of {clients} clients are {clients * per_category}; "
            f"class {scarce} has {int(available[scarce])}: use fewer clients or a lower per_class"
        )
    held_out = min(round(server * len(pool)), int(left.sum()))
    server_counts = apportion(left, held_out, generator) if held_out else torch.zeros_like(left)
    counts = shares.draw(left - server_counts) + per_category
    empty = (counts.sum(1) == 0).nonzero().flatten()
    if len(empty):
        raise ValueError(f"{len(empty)} of {clients} clients got no sample; use fewer clients or more data")

    *holdings, server_samples = _deal(torch.cat([counts, server_counts[None]]), category, pool, generator)
    strata = dataset.targets.cpu() if dataset.one_class else category
    cuts = [_cut(held, strata, validation, test_fraction if test == "split" else 0.0, generator) for held in holdings]
    train, validation_sets, tests = (tuple(part) for part in zip(*cuts, strict=True))
    if test == "split":
        global_test = torch.cat(tests).sort().values
    else:
        global_test = is_test.nonzero().flatten()
        of_tests = _test_counts(counts, category[global_test], shares.test_per_category, generator)
        tests = tuple(_deal(of_tests, category, global_test, generator))
    return Partition(
        train,
        validation_sets,
        tests,
        server=server_samples,
        global_test=global_test,
        description={
            **description,
            "clients": clients,
            "validation": validation,
            "test": test,
            **({"test_fraction": test_fraction} if test == "split" else {}),
            "seed": generator.initial_seed(),
            "dataset": dataset.name,
            "dataset_fingerprint": dataset.fingerprint,
            "unused": len(pool) - int(counts.sum()) - held_out,
        },
    )


def _check(
    dataset: Dataset,
    clients: int,
    generator: torch.Generator,
    validation: float,
    test: str,
    test_fraction: float,
    server: float,
) -> None:
    if clients < 1:
        raise ValueError(f"{clients} clients; at least one is accepted")
    if generator.device.type != "cpu":
        raise ValueError(f"the generator is on {generator.device}; partitions are drawn on the CPU")
    if test not in TESTS:
        raise ValueError(f"test is {test!r}; {', '.join(TESTS)} are accepted")
    for name, fraction in (("validation", validation), ("test_fraction", test_fraction), ("server", server)):
        if not 0 <= fraction < 1:
            raise ValueError(f"{name} is {fraction}; a fraction from 0 to below 1 is accepted")
    if validation + test_fraction >= 1:
        raise ValueError(f"validation {validation} and test_fraction {test_fraction} leave nothing to train on")


def _deal(counts: Tensor, category: Tensor, pool: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Sorted indices for each row of counts, drawn without replacement from the pool's samples of each category."""
    shuffled = pool[torch.randperm(len(pool), generator=generator)]
    by_category = shuffled[category[shuffled].sort(stable=True).indices]
    sizes = torch.bincount(category[pool], minlength=counts.shape[1])
    # Within a category the rows take consecutive pieces of the shuffled samples; what is left over has the row -1.
    rows = torch.arange(counts.shape[0])
    owner = torch.cat(
        [
            torch.cat([torch.repeat_interleave(rows, column), rows.new_full((int(size) - int(column.sum()),), -1)])
            for column, size in zip(counts.T, sizes, strict=True)
        ]
    )
    ordered = by_category.sort()
    owner = owner[ordered.indices]
    rank = owner.sort(stable=True)
    pieces = torch.bincount(rank.values + 1, minlength=counts.shape[0] + 1).tolist()
    return [piece.clone() for piece in ordered.values[rank.indices].split(pieces)[1:]]


def _test_counts(counts: Tensor, test_category: Tensor, least: int, generator: torch.Generator) -> Tensor:
    """``least`` of each category for every client, the rest as the clients share its training samples.

    A category that no client has is in nobody's local test but for that.
    """
    available = torch.bincount(test_category, minlength=counts.shape[1]) - least * len(counts)
    if bool((available < 0).any()):
        raise ValueError(
            f"{least} test samples of each class for each of {len(counts)} clients are {least * len(counts)}; class "
            f"{int(available.argmin())} has {int(available.min()) + least * len(counts)}: use a lower test_per_class"
        )
    columns = [
        apportion(column, int(total), generator) if int(column.sum()) else torch.zeros_like(column)
        for column, total in zip(counts.T, available, strict=True)
    ]
    return torch.stack(columns, dim=1) + least


def _cut(
    held: Tensor, strata: Tensor, validation: float, test: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut one client's samples into training, validation and test.

    Systematic sampling in random order within each class (stratum): the sizes are exact, every sample is equally likely
    to be in each part, and the parts have the classes in the same proportions. The training part is never empty.
    """
    n = len(held)
    if validation == test == 0:
        return held, held[:0], held[:0]
    sizes = apportion(torch.tensor([1 - validation - test, validation, test]), n, generator)
    if sizes[0] == 0:
        sizes[sizes.argmax()] -= 1
        sizes[0] = 1
    held = held[torch.randperm(n, generator=generator)]
    left = held[strata[held].sort(stable=True).indices]
    parts = []
    for size in (int(sizes[1]), int(sizes[2])):
        start = torch.rand((), dtype=torch.float64, generator=generator)
        chosen = ((torch.arange(size) + start) * (len(left) / max(size, 1))).to(torch.int64).clamp_(max=len(left) - 1)
        mask = torch.zeros(len(left), dtype=torch.bool)
        mask[chosen] = True
        parts.append(left[mask].sort().values)
        left = left[~mask]
    return left.sort().values, parts[0], parts[1]
