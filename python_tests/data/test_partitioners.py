"""Partitioners: disjoint, complete, deterministic, ending for every input; and each paper's rule."""

from __future__ import annotations

import inspect
import typing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_ext.data import PARTITIONERS, Dataset, Partition
from pfl_ext.data.allocation import apportion, deal_labels, dirichlet_weights, raise_to_minimum


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(sizes: list[int], test_sizes: list[int] | None = None, domains: int = 0) -> Dataset:
    """A dataset with so many samples of each class, in random order; an input is the sample's number."""

    def labels(sizes: list[int], seed: int) -> torch.Tensor:
        y = torch.repeat_interleave(torch.tensor(sizes))
        return y[torch.randperm(len(y), generator=seeded(seed))]

    y = labels(sizes, 1)
    test_y = labels(test_sizes, 2) if test_sizes else None
    total = sum(sizes) + sum(test_sizes or [])
    x = torch.arange(total, dtype=torch.float32)[:, None]
    return Dataset.from_tensors(
        x[: len(y)],
        y,
        None if test_y is None else x[len(y) :],
        test_y,
        classes=[str(c) for c in range(len(sizes))],
        domain=torch.arange(total) % domains if domains else None,
        domains=[f"domain {d}" for d in range(domains)],
    )


def holdings(partition: Partition) -> list[torch.Tensor]:
    """What each client has of the samples that were shared: all but tests cut from the official part."""
    parts = (partition.train, partition.validation)
    if partition.description["test"] == "split":
        parts += (partition.test,)
    return [torch.cat(sets) for sets in zip(*parts, strict=True)]


def held_counts(partition: Partition, dataset: Dataset) -> torch.Tensor:
    classes = len(dataset.classes)
    return torch.stack([torch.bincount(dataset.targets[held], minlength=classes) for held in holdings(partition)])


OPTIONS = {
    "iid": {"server": st.sampled_from([0.0, 0.1])},
    "dirichlet": {
        "alpha": st.sampled_from([1e-300, 1e-3, 0.1, 1.0, 1e300]),
        "balance": st.booleans(),
        "minimum": st.integers(1, 5),
        "per_class": st.integers(0, 2),
        "server": st.sampled_from([0.0, 0.1, 0.9]),
    },
    "labels_per_client": {"k": st.integers(1, 5)},
    "ds1": {"k": st.integers(1, 5)},
    "ds2": {"alpha": st.sampled_from([1e-3, 0.9]), "per_class": st.integers(0, 2)},
    "ds3": {"k": st.integers(1, 3), "sigma": st.sampled_from([0.0, 2.0, 300.0]), "minimum": st.integers(1, 4)},
    "by_domain": {},
}


@st.composite
def cases(draw):
    name = draw(st.sampled_from(sorted(OPTIONS)))
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
    test_sizes = draw(st.none() | st.lists(st.integers(0, 12), min_size=len(sizes), max_size=len(sizes)))
    test_sizes = test_sizes if test_sizes and any(test_sizes) else None
    options = {key: draw(strategy) for key, strategy in OPTIONS[name].items()}
    options |= {
        "validation": draw(st.sampled_from([0.0, 0.2, 0.45])),
        "test": draw(st.sampled_from(["auto", "split"] + (["proportional"] if test_sizes else []))),
        "test_fraction": draw(st.sampled_from([0.0, 0.2, 0.5])),
    }
    return name, make(sizes, test_sizes, domains=3), draw(st.integers(1, 30)), options, draw(st.integers(0, 2**32))


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_partition_is_disjoint_complete_and_repeatable_or_refused_with_a_reason(case):
    name, dataset, clients, options, seed = case
    try:
        partition = PARTITIONERS[name](dataset, clients, generator=seeded(seed), **options)
    except ValueError as error:
        assert len(str(error)) > 20
        return
    assert partition.clients == clients
    again = PARTITIONERS[name](dataset, clients, generator=seeded(seed), **options)
    assert again.fingerprint == partition.fingerprint

    split = partition.description["test"] == "split"
    shared = torch.cat([*holdings(partition), partition.server])
    pool = torch.arange(len(dataset)) if split else (~dataset.is_test).nonzero().flatten()
    assert len(shared.unique()) == len(shared)
    assert bool(torch.isin(shared, pool).all())
    assert len(shared) + partition.description["unused"] == len(pool)
    if name in ("iid", "dirichlet", "ds2", "by_domain"):
        assert partition.description["unused"] == 0

    tests = torch.cat(partition.test)
    assert len(tests.unique()) == len(tests)
    if split:
        assert torch.equal(partition.global_test, tests.sort().values)
    else:
        assert torch.equal(partition.global_test, dataset.is_test.nonzero().flatten())
        assert bool(dataset.is_test[tests].all())
        if name not in ("iid", "by_domain"):  # of every class that somebody has, all test samples are somebody's
            somebody = held_counts(partition, dataset).sum(0) > 0
            assert len(tests) == int((somebody[dataset.targets] & dataset.is_test).sum())
    for client, held in enumerate(holdings(partition)):
        assert len(partition.train[client]) >= 1
        fractions = {"validation": options["validation"], "test": options["test_fraction"] if split else None}
        for part, fraction in fractions.items():
            if fraction is not None:
                assert abs(len(getattr(partition, part)[client]) - fraction * len(held)) <= 1
    _check_rule(name, options, dataset, partition)


def _check_rule(name, options, dataset, partition):
    counts = held_counts(partition, dataset)
    sizes = counts.sum(1)
    if name == "iid":
        assert int(sizes.max() - sizes.min()) <= 1
    if name == "dirichlet":
        assert int(sizes.min()) >= options["minimum"]
    if name in ("dirichlet", "ds2"):
        assert int(counts.min()) >= options["per_class"]
    if name in ("labels_per_client", "ds1"):
        assert len(sizes.unique()) == 1
    if name in ("labels_per_client", "ds1", "ds3"):
        assert ((counts > 0).sum(1) == options["k"]).all()
    if name == "labels_per_client":
        assert len(counts[counts > 0].unique()) == 1
    if name == "ds3":
        assert int(counts[counts > 0].min()) >= options["minimum"]
    if name == "by_domain":
        for held in holdings(partition):
            assert len(dataset.domain[held].unique()) == 1


# ---- the papers' settings -------------------------------------------------------------------------------------------


def test_ds1_of_ten_users_loses_next_to_nothing():
    dataset = make([690, 788, 699, 714, 682, 631, 688, 729, 683, 696])  # MNIST's proportions
    partition = PARTITIONERS["ds1"](dataset, 10, generator=seeded())
    counts = held_counts(partition, dataset)
    assert len(counts.sum(1).unique()) == 1
    # Two samples of every place are set aside, and one is used again; totals are rounded down.
    assert partition.description["unused"] <= 10 * 4 + 10
    # The numbers differ between a client's classes.
    assert bool(((counts.max(1).values - counts.masked_fill(counts == 0, 10**6).min(1).values) > 20).any())
    for part, size in (("train", 0.6), ("validation", 0.2), ("test", 0.2)):
        for client, total in enumerate(counts.sum(1).tolist()):
            assert abs(len(getattr(partition, part)[client]) - size * total) <= 1


def test_ds2_leaves_every_class_in_every_training_set():
    dataset = make([200] * 10)
    for seed in range(5):
        partition = PARTITIONERS["ds2"](dataset, 10, generator=seeded(seed), alpha=0.05)
        assert int(partition.counts(dataset).min()) >= 1


def test_ds3_sizes_are_log_normal():
    # One class, 500 clients: log shares have the standard deviation sigma.
    dataset = make([200_000])
    partition = PARTITIONERS["ds3"](dataset, 500, generator=seeded(), k=1, sigma=0.5, minimum=1)
    logarithms = held_counts(partition, dataset)[:, 0].double().log()
    # The standard error of a standard deviation from 500 values is sigma / sqrt(1000); four of them.
    assert abs(float(logarithms.std()) - 0.5) < 4 * 0.5 / 1000**0.5


def test_perada_gives_two_of_each_class_and_holds_a_tenth_out():
    dataset = make([500] * 10, [100] * 10)
    partition = PARTITIONERS["dirichlet"](
        dataset, 20, generator=seeded(), alpha=0.1, balance=True, per_class=2, server=0.1
    )
    assert len(partition.server) == 500
    assert torch.bincount(dataset.targets[partition.server]).tolist() == [50] * 10
    assert int(held_counts(partition, dataset).min()) >= 2
    assert len(torch.cat(partition.test)) == 1000


def test_the_balance_rule_bounds_a_client_by_its_equal_share_and_one_class():
    dataset = make([100] * 10)
    free = PARTITIONERS["dirichlet"](dataset, 10, generator=seeded(3), alpha=0.05, minimum=1, test="split")
    balanced = PARTITIONERS["dirichlet"](
        dataset, 10, generator=seeded(3), alpha=0.05, minimum=1, balance=True, test="split"
    )
    assert int(held_counts(balanced, dataset).sum(1).max()) < 100 + 100
    assert int(held_counts(free, dataset).sum(1).max()) > 200


def test_local_tests_have_the_proportions_of_the_training_sets():
    dataset = make([1000] * 5, [200] * 5)
    partition = PARTITIONERS["dirichlet"](dataset, 8, generator=seeded(), alpha=0.3)
    train, test = partition.counts(dataset), partition.counts(dataset, "test")
    assert float((test - train / 5).abs().max()) < 1
    assert test.sum(0).tolist() == [200] * 5


def test_a_cut_keeps_the_class_proportions_of_each_client():
    dataset = make([300, 60, 30])
    partition = PARTITIONERS["iid"](dataset, 1, generator=seeded(), validation=0.2, test_fraction=0.1)
    for part, fraction in (("validation", 0.2), ("test", 0.1)):
        expected = fraction * torch.tensor([300.0, 60.0, 30.0])
        assert float((partition.counts(dataset, part) - expected).abs().max()) <= 2


def test_dirichlet_weights_have_the_right_mean_and_variance():
    for alpha in (0.05, 1.0, 20.0):
        draws = torch.stack([dirichlet_weights(alpha, 4, generator) for generator in [seeded()] for _ in range(4000)])
        assert float((draws.sum(1) - 1).abs().max()) < 1e-12
        variance = (1 / 4) * (3 / 4) / (4 * alpha + 1)
        # Four standard errors: of the mean, and of the variance for a kurtosis below 4, as these have.
        assert float((draws.mean(0) - 0.25).abs().max()) < 4 * (variance / 4000) ** 0.5
        assert float((draws.var(0) / variance - 1).abs().max()) < 4 * (3 / 4000) ** 0.5


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-6, 1e12, 1e308])
def test_dirichlet_weights_exist_for_every_alpha(alpha):
    weights = dirichlet_weights(alpha, 100, seeded())
    assert bool(weights.isfinite().all())
    assert float(weights.sum()) == pytest.approx(1)
    if alpha < 1e-5:
        assert float(weights.max()) > 0.99
    if alpha > 1e5:
        assert float(weights.max()) < 0.011


def test_small_alpha_and_many_clients_end_with_the_minimum_for_everybody():
    dataset = make([500, 500])
    partition = PARTITIONERS["dirichlet"](dataset, 100, generator=seeded(), alpha=1e-9, minimum=10, test="split")
    assert [len(held) for held in holdings(partition)] == [10] * 100


def test_those_below_the_minimum_are_filled_by_those_with_much():
    counts = torch.tensor([[0, 0], [1, 0], [50, 50], [1000, 0]])
    filled = raise_to_minimum(counts, 10, seeded())
    assert filled.sum(0).tolist() == counts.sum(0).tolist()
    assert int(filled.min()) >= 0
    assert filled.sum(1)[:2].tolist() == [10, 10]
    # 19 samples from surpluses of 90 and 990.
    assert filled.sum(1)[2:].tolist() in ([98, 983], [99, 982])


def test_filling_up_takes_nobody_below_the_minimum():
    filled = raise_to_minimum(torch.tensor([[0, 0], [5, 5], [10, 0], [0, 12]]), 8, seeded())
    assert filled.sum(1).tolist() == [8, 8, 8, 8]


def test_a_class_that_only_full_clients_would_get_is_shared_by_the_others():
    # With a tiny alpha each class goes to one client, and under the balance rule sooner or later to a full one.
    dataset = make([50] * 20)
    for seed in range(5):
        partition = PARTITIONERS["dirichlet"](
            dataset, 4, generator=seeded(seed), alpha=1e-300, balance=True, minimum=1, test="split"
        )
        sizes = held_counts(partition, dataset).sum(1)
        assert int(sizes.sum()) == 1000
        assert int(sizes.max()) < 250 + 50


def test_a_single_sample_is_for_training_whatever_the_fractions():
    partition = PARTITIONERS["iid"](make([9]), 9, generator=seeded(), validation=0.45, test="split", test_fraction=0.5)
    assert [len(indices) for indices in partition.train] == [1] * 9


def test_meta_categories_are_combinations_and_the_rare_ones_together():
    generator = seeded()
    targets = torch.tensor([[0, 0, 0]] * 300 + [[1, 0, 0]] * 200 + [[1, 1, 0]] * 40 + [[0, 0, 1]] * 30)
    targets = targets[torch.randperm(len(targets), generator=generator)].to(torch.uint8)
    dataset = Dataset.from_tensors(torch.zeros(570, 1), targets)
    # With a tiny alpha each category goes to one client: the two rare combinations to the same one.
    partition = PARTITIONERS["dirichlet_meta"](
        dataset, 4, generator=generator, alpha=1e-9, group_below=100, minimum=1, test_fraction=0.0
    )
    owner = torch.empty(570, dtype=torch.int64)
    for client, indices in enumerate(partition.train):
        owner[indices] = client
    rare = (targets.sum(1) == 2) | (targets[:, 2] == 1)
    largest = torch.bincount(owner[rare], minlength=4).max()
    assert int(largest) >= 70 - 4  # but for a sample for each client that had none
    assert sum(len(indices) for indices in partition.train) == 570
    assert partition.description["group_below"] == 100


def test_domains_go_to_their_clients_in_order():
    dataset = make([60, 60], domains=3)
    one = PARTITIONERS["by_domain"](dataset, generator=seeded(), test_fraction=0.25)
    assert [int(dataset.domain[indices[0]]) for indices in one.train] == [0, 1, 2]
    two = PARTITIONERS["by_domain"](dataset, 6, generator=seeded())
    assert [int(dataset.domain[indices[0]]) for indices in two.train] == [0, 0, 1, 1, 2, 2]


def test_labels_are_dealt_evenly_whatever_the_numbers():
    for clients in (1, 2, 7, 50):
        for classes in (1, 3, 10):
            for k in range(1, classes + 1):
                has = deal_labels(clients, classes, k, seeded(clients))
                assert (has.sum(1) == k).all()
                assert int(has.sum(0).max() - has.sum(0).min()) <= 1


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(0, 1e3) | st.sampled_from([5e-324, 1e-300, 1e300]), min_size=1, max_size=20).filter(any),
    st.integers(0, 10**6),
)
def test_apportioned_numbers_sum_to_the_total_and_are_within_one_of_their_share(weights, total):
    weights = torch.tensor(weights, dtype=torch.float64)
    counts = apportion(weights, total, seeded())
    assert int(counts.sum()) == total
    assert int(counts.min()) >= 0
    assert bool((counts[weights == 0] == 0).all())
    share = weights / weights.sum() * total
    assert float((counts - share).abs().max()) <= 1 + 1e-6


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "clients", "options", "message"),
    [
        ("iid", 101, {}, "101 clients for 100 samples"),
        ("iid", 0, {}, "at least one"),
        ("labels_per_client", 0, {}, "at least one"),
        ("dirichlet", 20, {"minimum": 10}, "need 200; there are 100"),
        ("dirichlet", 5, {"alpha": 0.0}, "positive, finite"),
        ("dirichlet", 5, {"alpha": float("nan")}, "positive, finite"),
        ("dirichlet", 20, {"per_class": 6}, "class 0 has 50"),
        ("labels_per_client", 5, {"k": 3}, "has 2 classes"),
        ("labels_per_client", 90, {"k": 2}, "50 samples for 90 clients"),
        ("ds1", 40, {"k": 2}, "use fewer clients or a lower k"),
        ("ds3", 10, {}, "lower minimum"),
        ("by_domain", 4, {}, "a multiple of 3"),
        ("dirichlet_meta", 4, {}, "use dirichlet"),
        ("iid", 5, {"validation": 0.8, "test_fraction": 0.2}, "nothing to train on"),
        ("iid", 5, {"validation": -0.1}, "validation is -0.1"),
        ("iid", 5, {"test": "proportional"}, "no official test part"),
        ("iid", 5, {"test": "half"}, "test is 'half'"),
    ],
)
def test_what_cannot_be_done_is_said(name, clients, options, message):
    with pytest.raises(ValueError, match=message):
        PARTITIONERS[name](make([50, 50], domains=3), clients, generator=seeded(), **options)


def test_classes_of_multi_label_data_are_refused_with_the_alternative():
    dataset = Dataset.from_tensors(torch.zeros(10, 1), torch.ones(10, 3, dtype=torch.uint8))
    for name in ("dirichlet", "labels_per_client", "ds1", "ds2", "ds3"):
        with pytest.raises(ValueError, match="dirichlet_meta"):
            PARTITIONERS[name](dataset, 2, generator=seeded())


def test_every_option_explains_itself():
    for name, partitioner in PARTITIONERS.items():
        hints = typing.get_type_hints(partitioner, include_extras=True)
        assert inspect.getdoc(partitioner)
        for option, parameter in inspect.signature(partitioner).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and option != "generator":
                assert parameter.default is not parameter.empty
                assert len(hints[option].__metadata__[0]) > 10, (name, option)


def test_the_common_options_are_those_of_allocate_with_persfls_defaults_where_they_are_its_splits():
    from pfl_ext.data.allocation import allocate

    common = typing.get_type_hints(allocate, include_extras=True)
    for name, partitioner in PARTITIONERS.items():
        parameters = list(inspect.signature(partitioner).parameters.values())[-3:]
        hints = typing.get_type_hints(partitioner, include_extras=True)
        assert [parameter.name for parameter in parameters] == ["validation", "test", "test_fraction"]
        assert all(hints[parameter.name] == common[parameter.name] for parameter in parameters)
        persfl = name in ("ds1", "ds2", "ds3")
        assert [p.default for p in parameters] == ([0.2, "split", 0.2] if persfl else [0.0, "auto", 0.2])


def test_a_partition_says_which_options_made_it():
    described = PARTITIONERS["ds3"](make([50] * 3), 3, generator=seeded(5), sigma=1.0, validation=0.1).description
    expected = {"partitioner": "ds3", "k": 2, "sigma": 1.0, "minimum": 10, "clients": 3, "seed": 5}
    expected |= {"validation": 0.1, "test": "split", "test_fraction": 0.2}
    assert {name: described[name] for name in expected} == expected
    with pytest.raises(TypeError, match="per_class"):
        PARTITIONERS["ds3"](make([50] * 3), 3, generator=seeded(), per_class=1)


@pytest.mark.parametrize("name", ["ds1", "ds3", "labels_per_client"])
def test_data_of_one_or_two_classes_need_no_number_of_labels(name: str) -> None:
    """The default is a number of labels that such data do not have: nobody asked for it."""
    for classes in (1, 2):
        y = torch.arange(200) % classes
        data = Dataset("few", torch.zeros(200, 2), y, tuple("ab"[:classes]), torch.zeros(200, dtype=torch.bool))
        partition = PARTITIONERS[name](data, 4, generator=torch.Generator().manual_seed(0))
        assert bool((partition.counts(data) > 0).all())
    with pytest.raises(ValueError, match="3 labels per client; the dataset has 2 classes"):
        PARTITIONERS[name](data, 4, generator=torch.Generator(), k=3)


def test_every_local_test_has_some_of_each_class_where_that_is_asked_for() -> None:
    y = torch.arange(10).repeat(120)
    dataset = Dataset("d", torch.zeros(1200, 1), y, tuple("abcdefghij"), torch.arange(1200) >= 1000)
    options = {"alpha": 0.1, "balance": True, "per_class": 2}
    few, all_of = (
        PARTITIONERS["dirichlet"](
            dataset, 5, generator=torch.Generator().manual_seed(0), test_per_class=least, **options
        )
        for least in (0, 2)
    )
    counts = torch.stack([torch.bincount(y[rows], minlength=10) for rows in all_of.test])
    assert int(counts.min()) == 2 and int(counts.sum()) == 200
    assert sorted(torch.cat(all_of.test).tolist()) == list(range(1000, 1200))
    assert min(int((torch.bincount(y[rows], minlength=10) > 0).sum()) for rows in few.test) < 10
    assert all(torch.equal(a, b) for a, b in zip(few.train, all_of.train, strict=True))
    with pytest.raises(ValueError, match="use a lower test_per_class"):
        PARTITIONERS["dirichlet"](dataset, 5, generator=torch.Generator(), test_per_class=5, **options)
