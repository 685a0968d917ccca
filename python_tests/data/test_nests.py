"""Inputs of any form: tokens, tuples, dictionaries, in a dataset and through a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from nested_networks import Both, Pair
from torch import Tensor, nn

from pfl_ext.algorithms import Ditto, FedAvg
from pfl_ext.data import PARTITIONERS, Dataset, Partition
from pfl_ext.data.nests import leaves, mapped, named, split
from pfl_ext.engines import Workers
from pfl_ext.federation import Federation, InProcess, Settings
from pfl_ext.tasks import Pixels

N = 24


def _draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _image() -> Tensor:
    return torch.randint(0, 256, (N, 3, 2, 2), dtype=torch.uint8, generator=_draw())


def _nest() -> dict[str, Any]:
    tokens = torch.randint(0, 7, (N, 5), generator=_draw(1))
    return {"image": _image(), "text": (tokens, tokens > 2), "age": torch.rand(N, generator=_draw(2))}


def _targets() -> Tensor:
    return torch.arange(N) % 3


# ---- nests -----------------------------------------------------------------------------------------------------------


def test_tensors_of_a_nest_have_names_and_an_order() -> None:
    nest = _nest()
    assert [name for name, _ in named(nest)] == ["image", "text.0", "text.1", "age"]
    assert [name for name, _ in named(nest["image"])] == [""]
    assert leaves(nest)[1] is nest["text"][0]


def test_a_split_nest_has_the_parts_of_every_tensor() -> None:
    parts = split(_nest(), 10)
    assert [len(leaves(part)[0]) for part in parts] == [10, 10, 4]
    for name, whole in named(_nest()):
        assert torch.equal(torch.cat([dict(named(part))[name] for part in parts]), whole)


# ---- a dataset -------------------------------------------------------------------------------------------------------


def test_a_batch_of_a_nest_has_its_form_and_each_tensor_what_it_is() -> None:
    data = Dataset.from_tensors(_nest(), _targets())
    rows = torch.tensor([7, 0, 7])
    x, y = data.batch(rows)
    alone = Dataset.from_tensors(_image(), _targets()).batch(rows)[0]
    assert torch.equal(x["image"], alone) and x["image"].dtype == torch.float32  # normalised as it is by itself
    assert torch.equal(x["text"][0], _nest()["text"][0][rows]) and x["text"][0].dtype == torch.int64
    assert torch.equal(x["text"][1], _nest()["text"][1][rows]) and x["text"][1].dtype == torch.bool
    assert torch.equal(x["age"], _nest()["age"][rows])
    assert torch.equal(y, _targets()[rows])
    assert data.input_shape == {"image": (3, 2, 2), "text": ((5,), (5,)), "age": ()}


def test_tokens_stay_whole_numbers_in_any_dtype() -> None:
    data = Dataset.from_tensors(torch.arange(12, dtype=torch.int32).view(4, 3), torch.zeros(4, dtype=torch.int64))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = data.to("cpu", dtype).batch([3])[0]
        assert x.dtype == torch.int64 and x.tolist() == [[9, 10, 11]]


def test_a_subset_and_a_copy_have_all_of_a_nest() -> None:
    data = Dataset.from_tensors(_nest(), _targets())
    some = data.subset(torch.tensor([5, 2])).to("cpu")
    assert len(some) == 2
    for (name, part), (_, whole) in zip(named(some.inputs), named(data.inputs), strict=True):
        assert torch.equal(part, whole[[5, 2]]), name


def test_the_fingerprint_sees_every_tensor_and_its_name() -> None:
    data = Dataset.from_tensors(_nest(), _targets())
    changed = _nest()
    changed["age"][3] += 1
    renamed = _nest()
    renamed["years"] = renamed.pop("age")
    prints = [Dataset.from_tensors(nest, _targets()).fingerprint for nest in (_nest(), changed, renamed)]
    assert prints[0] == data.fingerprint and len(set(prints)) == 3


def test_training_and_test_parts_of_a_nest_are_joined() -> None:
    data = Dataset.from_tensors(_nest(), _targets(), mapped(lambda x: x[:6], _nest()), _targets()[:6])
    assert len(data) == 30 and data.is_test.sum() == 6
    assert torch.equal(data.inputs["text"][0][24:], data.inputs["text"][0][:6])
    with pytest.raises(ValueError, match=r"age torch.float32 .*test samples image"):
        Dataset.from_tensors(_nest(), _targets(), {"image": _image()}, _targets())


def test_normalisation_is_of_the_tensors_that_are_named() -> None:
    nest = {"a": torch.full((N, 2), 3.0), "b": torch.full((N, 2), 3.0)}
    data = Dataset.from_tensors(nest, _targets(), mean={"a": [1.0, 2.0]}, std={"a": [2.0, 1.0]})
    x, _ = data.batch([0])
    assert x["a"].tolist() == [[1.0, 1.0]] and x["b"].tolist() == [[3.0, 3.0]]
    with pytest.raises(ValueError, match="mean is of 'c', std of 'c'; both of the same of the inputs 'a', 'b'"):
        dataclasses.replace(data, mean={"c": torch.zeros(2)}, std={"c": torch.ones(2)})
    with pytest.raises(ValueError, match="several inputs"):
        data.normalised([0.0], [1.0])


@pytest.mark.parametrize(
    ("nest", "message"),
    [
        ((), "hold no tensor"),
        ((torch.zeros(N, 2), torch.zeros(N - 1)), r"inputs 1 have 23 entries .*, inputs 0 24"),
        ({"a": torch.zeros(N, 2), "b": torch.full((N,), float("nan"))}, "NaN or infinity in the inputs b of 24"),
        ({"a": torch.zeros(N, 2), "b": torch.tensor(1.0)}, r"inputs b are torch.float32 \(\)"),
    ],
)
def test_a_nest_that_is_none_is_refused(nest: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Dataset.from_tensors(nest, _targets())


class Items:
    """A torch dataset of anything."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


def test_a_torch_dataset_of_pairs_and_dictionaries_keeps_their_form() -> None:
    a, b = torch.rand(4, 3), torch.rand(4, 2)
    pairs = Dataset.from_torch(Items([((a[i], b[i]), i % 2) for i in range(4)]))
    assert isinstance(pairs.inputs, tuple) and torch.equal(pairs.inputs[0], a) and torch.equal(pairs.inputs[1], b)
    named_items = [({"ids": np.arange(i, i + 3), "length": 3}, i % 2) for i in range(4)]
    found = Dataset.from_torch(Items(named_items))
    assert isinstance(found.inputs, Mapping) and found.inputs["ids"].shape == (4, 3)
    assert found.inputs["length"].tolist() == [3] * 4
    numbers = Dataset.from_torch(Items([([0.5, float(i)], i % 2) for i in range(4)]))
    assert numbers.inputs.shape == (4, 2)  # numbers in a list are a vector


def test_numbers_to_predict_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="NaN or infinity in the targets of 1 of 24 samples, the first is sample 3"):
        Dataset.from_tensors(torch.zeros(N, 2), torch.where(torch.arange(N) == 3, float("nan"), 1.0))


def test_a_torch_dataset_of_mixed_forms_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sample 1 is torch.float32 \(3,\), sample 0 0 torch.float32 \(3,\), 1"):
        Dataset.from_torch(Items([((torch.zeros(3), torch.zeros(2)), 0), (torch.zeros(3), 1)]))
    with pytest.raises(ValueError, match=r"item 0 of the torch dataset is a dict of 2; \(sample, target\)"):
        Dataset.from_torch(Items([{"input_ids": torch.zeros(3), "labels": 1}]))


@pytest.mark.parametrize(
    ("inputs", "targets", "said"),
    [
        (_nest(), _targets(), ["image uint8 [3, 2, 2] from", "text.0 int64 [5] from 0 to 6", "text.1 bool [5]"]),
        (torch.zeros(N, 4, dtype=torch.int64), torch.ones(N, 4, dtype=torch.int64), ["2 classes for each of [4]"]),
        (torch.zeros(N, 4), torch.linspace(0, 1, N), ["a number to predict, from 0 to 1"]),
        (torch.zeros(N, 4), torch.rand(N, 3), ["3 numbers to predict"]),
    ],
)
def test_every_kind_of_dataset_says_what_it_is_in_five_lines(inputs: Any, targets: Tensor, said: list[str]) -> None:
    shown = str(Dataset.from_tensors(inputs, targets))
    assert len(shown.splitlines()) == 5
    for part in said:
        assert part in shown


# ---- partitions of what has no classes -------------------------------------------------------------------------------


@pytest.mark.parametrize("partitioner", ["dirichlet", "labels_per_client", "ds1", "ds2", "ds3"])
@pytest.mark.parametrize(
    ("targets", "have"),
    [
        (torch.rand(N), "have numbers to predict"),
        (torch.ones(N, 5, dtype=torch.int64), r"have a class for each of \[5\]"),
        (torch.eye(3).repeat(8, 1), "have several labels; use dirichlet_meta or"),
    ],
)
def test_partitioners_that_share_classes_say_what_to_use_instead(partitioner: str, targets: Tensor, have: str) -> None:
    data = Dataset.from_tensors(torch.zeros(N, 2), targets)
    with pytest.raises(ValueError, match=f"{partitioner} shares classes, .*{have}.*iid"):
        PARTITIONERS[partitioner](data, 2, generator=_draw())


def test_samples_without_classes_are_counted_by_domain_or_all_together(tmp_path: Any) -> None:
    domain = torch.arange(N) // 12
    numbers = torch.rand(N)
    known = Dataset.from_tensors(torch.zeros(N, 2), numbers, domain=domain, domains=("a", "b"))
    cut = PARTITIONERS["by_domain"](known, generator=_draw(), validation=0.2)
    assert cut.counts(known, "all").tolist() == [[12, 0], [0, 12]]
    assert "| a |" in cut.table(known).replace("  ", " ")
    plain = Dataset.from_tensors(torch.zeros(N, 2), numbers)
    shared = PARTITIONERS["iid"](plain, 3, generator=_draw())
    assert shared.counts(plain, "all").tolist() == [[8], [8], [8]]
    pytest.importorskip("matplotlib")
    assert cut.draw(known, tmp_path / "domains.png").stat().st_size > 0
    assert shared.draw(plain, tmp_path / "all.png").stat().st_size > 0


def test_two_classes_need_no_option() -> None:
    data = Dataset.from_tensors(torch.zeros(60, 2), torch.arange(60) % 2)
    for partitioner in ("labels_per_client", "ds1", "ds3"):
        assert PARTITIONERS[partitioner](data, 2, generator=_draw()).clients == 2


# ---- through a run ---------------------------------------------------------------------------------------------------


def _partition() -> Partition:
    data = Dataset.from_tensors(_nest(), _targets())
    return PARTITIONERS["iid"](data, 2, generator=_draw(), validation=0.2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dictionary_and_a_tuple_train_to_the_same_bits(workers: int) -> None:
    networks = [Both(), Pair()]
    networks[1].load_state_dict(networks[0].state_dict())
    forms = [_nest(), tuple(_nest().values())]
    models = []
    for network, nest in zip(networks, forms, strict=True):
        data = Dataset.from_tensors(nest, _targets())
        cut = dataclasses.replace(_partition(), description={})
        engine = Workers(workers) if workers else InProcess()
        run = Federation(Ditto(lr=0.1, batch_size=4), network, data, cut, Settings(rounds=2), engine=engine)
        records = run.run()
        assert records[-1]["models"]["personal"]["test"]["accuracy"]["mean"] >= 0
        models.append(run.server["model"].clone())
        engine.close()
    assert torch.equal(*models)
    start = torch.cat([p.detach().flatten() for p in networks[0].parameters()])
    assert not torch.equal(models[0], start)


def test_private_gradients_of_a_nest_are_those_of_its_samples() -> None:
    # Without noise and with a wide bound DP-SGD is SGD on the mean gradient, if every sample is in every batch.
    data = Dataset.from_tensors(_nest(), _targets())
    network, models = Both(), []
    for settings in (Settings(rounds=1), Settings(rounds=1, dp_clip=1e6)):
        run = Federation(FedAvg(lr=0.1, batch_size=N), network, data, _partition(), settings)
        run.run()
        models.append(run.server["model"])
    torch.testing.assert_close(*models)


def test_augmentation_is_for_images_without_targets_on_their_pixels() -> None:
    settings = Settings(rounds=1, augmentation="flip")
    with pytest.raises(ValueError, match="augmentation is 'flip', which is for images"):
        Federation(FedAvg(), Both(), Dataset.from_tensors(_nest(), _targets()), _partition(), settings)
    masks = Dataset.from_tensors(_image(), torch.zeros(N, 2, 2, dtype=torch.int64))
    cut = PARTITIONERS["iid"](masks, 2, generator=_draw())
    with pytest.raises(ValueError, match="which would have to move too"):
        Federation(FedAvg(), nn.Conv2d(3, 1, 1), masks, cut, settings, task=Pixels())


def test_a_network_that_takes_other_inputs_is_told_what_came() -> None:
    data = Dataset.from_tensors({"image": _image(), "words": torch.zeros(N, 5, dtype=torch.int64)}, _targets())
    with pytest.raises(
        ValueError, match=r"does not take a batch of .*image float32 \[2, 3, 2, 2\], words int64 \[2, 5"
    ):
        Federation(FedAvg(), Both(), data, dataclasses.replace(_partition(), description={}), Settings(rounds=1))
