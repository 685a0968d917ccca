"""Datasets: what batch() returns, what is refused, and the fingerprint."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from pfl_ext.data import Dataset
from pfl_ext.data.statistics import channel_statistics


def images(n: int = 12, channels: int = 3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, 4, 5), dtype=torch.uint8, generator=generator)


@pytest.fixture
def dataset() -> Dataset:
    return Dataset.from_tensors(images(), torch.arange(12) % 3, images(6, seed=1), torch.arange(6) % 3)


def test_training_and_test_samples_share_one_index_space(dataset):
    assert len(dataset) == 18
    assert dataset.is_test.tolist() == [False] * 12 + [True] * 6
    assert torch.equal(dataset.inputs[12:], images(6, seed=1))
    assert dataset.input_shape == (3, 4, 5)
    assert dataset.classes == ("0", "1", "2")


def test_a_batch_has_the_asked_samples_in_the_asked_order_normalised(dataset):
    indices = torch.tensor([7, 0, 13, 7])
    x, y = dataset.batch(indices)
    mean, std = dataset.mean.double(), dataset.std.double()
    expected = (dataset.inputs[indices].double() - mean[:, None, None]) / std[:, None, None]
    assert x.dtype == torch.float32
    # x * (1 / std) - mean / std rounds the two terms, each at most 256 / std, and their difference: 2^-24 each.
    torch.testing.assert_close(x.double(), expected, rtol=0, atol=4 * 256 / float(std.min()) * 2**-24)
    assert torch.equal(y, dataset.targets[indices])


def test_a_batch_is_a_copy(dataset):
    before = dataset.inputs.clone()
    plain = Dataset.from_tensors(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))
    for data in (dataset, plain):
        data.batch([0, 1])[0].fill_(-1)
    assert torch.equal(dataset.inputs, before)
    assert torch.equal(plain.inputs, torch.ones(4, 2))


def test_indices_may_be_a_list(dataset):
    assert torch.equal(dataset.batch([3, 1])[0], dataset.batch(torch.tensor([3, 1]))[0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.uint8, torch.float32, torch.float64])
def test_batches_come_in_the_chosen_dtype(dtype, stored):
    raw = images().to(stored)
    data = Dataset.from_tensors(raw, torch.arange(12) % 3, mean=[100.0] * 3, std=[50.0] * 3).to("cpu", dtype)
    x, _ = data.batch(torch.arange(12))
    assert x.dtype == dtype
    expected = (raw.double() - 100) / 50
    # The arithmetic is at least float32: after that one rounding to dtype.
    torch.testing.assert_close(x.double(), expected, rtol=torch.finfo(dtype).eps, atol=2**-20)


def test_floating_inputs_are_left_alone_unless_statistics_are_given():
    raw = torch.randn(5, 2)
    data = Dataset.from_tensors(raw, torch.zeros(5, dtype=torch.int64))
    assert data.mean is None
    assert torch.equal(data.batch(torch.arange(5))[0], raw)


def test_statistics_are_those_of_the_training_part():
    train, test = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.full((4, 1, 2, 2), 9, dtype=torch.uint8)
    train[:2] = 2
    data = Dataset.from_tensors(train, torch.arange(4), test, torch.arange(4))
    assert data.mean.tolist() == [1.0]
    assert data.std.tolist() == [1.0]


def test_channel_statistics_of_bytes_equal_those_of_floats():
    raw = images(50)
    for exact, floating in zip(channel_statistics(raw), channel_statistics(raw.double()), strict=True):
        torch.testing.assert_close(exact, floating)


def test_a_constant_channel_does_not_divide_by_zero():
    data = Dataset.from_tensors(torch.full((4, 1, 2, 2), 7, dtype=torch.uint8), torch.arange(4))
    assert torch.equal(data.batch([0])[0], torch.zeros(1, 1, 2, 2))


def test_multi_label_targets_come_as_floats():
    targets = torch.tensor([[1, 0], [1, 1], [0, 0]], dtype=torch.uint8)
    data = Dataset.from_tensors(torch.randn(3, 4), targets, classes=["edema", "effusion"])
    assert data.multilabel
    y = data.batch([1, 2])[1]
    assert y.dtype == torch.float32
    assert y.tolist() == [[1, 1], [0, 0]]


def test_the_fingerprint_follows_the_content_and_nothing_else(dataset):
    same = Dataset.from_tensors(images(), torch.arange(12) % 3, images(6, seed=1), torch.arange(6) % 3, name="other")
    assert dataset.fingerprint == same.fingerprint
    assert dataset.fingerprint == dataset.to("cpu", torch.float64).fingerprint
    assert dataset.fingerprint == dataclasses.replace(dataset, mean=None, std=None).fingerprint
    changed = dataset.inputs.clone()
    changed[17, 2, 3, 4] ^= 1
    flipped = dataset.targets.roll(1)
    parts = ~dataset.is_test
    variants = [
        dataclasses.replace(dataset, inputs=changed),
        dataclasses.replace(dataset, targets=flipped),
        dataclasses.replace(dataset, is_test=parts),
        dataclasses.replace(dataset, classes=("a", "b", "c")),
        dataclasses.replace(dataset, domain=torch.zeros(18, dtype=torch.int64), domains=("a",)),
    ]
    assert len({dataset.fingerprint, *(variant.fingerprint for variant in variants)}) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.zeros(17, dtype=torch.int64)}, "17 entries for 18 samples"),
        ({"targets": torch.full((18,), 3)}, "from 3 to 3 for 3 classes"),
        ({"targets": torch.zeros(18, dtype=torch.int32)}, "int32"),
        ({"targets": torch.zeros(18, 2)}, "for 3 labels or classes"),
        ({"inputs": torch.zeros(18, 2, dtype=torch.complex64)}, "uint8, floating or integer"),
        ({"inputs": torch.zeros(18, 2, dtype=torch.int64)}, "are not normalised"),
        ({"is_test": torch.zeros(18)}, "bool"),
        ({"domain": torch.ones(18, dtype=torch.int64), "domains": ("a",)}, "for 1 domains"),
        ({"mean": None}, "come together"),
        ({"std": torch.zeros(3)}, "positive std"),
        ({"mean": torch.zeros(2)}, r"\[3\] each"),
        ({"dtype": torch.int64}, "a floating one"),
    ],
)
def test_what_does_not_fit_together_is_refused(dataset, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(dataset, **change)


def test_parts_of_different_shape_are_refused():
    with pytest.raises(ValueError, match="test samples"):
        Dataset.from_tensors(images(), torch.arange(12), images(channels=1), torch.arange(12))
    with pytest.raises(ValueError, match="come together"):
        Dataset.from_tensors(images(), torch.arange(12), images())


def test_floating_targets_are_numbers_to_predict_unless_all_are_0_or_1():
    numbers = Dataset.from_tensors(images(), torch.rand(12))
    assert numbers.classes == () and not numbers.multilabel and not numbers.one_class
    assert Dataset.from_tensors(images(), torch.rand(12, 2)).classes == ()
    labels = Dataset.from_tensors(images(), torch.eye(3).repeat(4, 1))
    assert labels.classes == ("0", "1", "2") and labels.multilabel


def test_a_column_of_zeros_and_ones_is_a_label_or_a_number_and_the_user_says_which():
    column = torch.tensor([0.0, 1.0]).repeat(6)[:, None]
    with pytest.raises(ValueError, match=r"a label or a number to predict\? Say classes="):
        Dataset.from_tensors(images(), column)
    assert Dataset.from_tensors(images(), column, classes=("ill",)).multilabel
    assert not Dataset.from_tensors(images(), column, classes=()).multilabel
    assert Dataset.from_tensors(images(), column, classes=()).batch([1])[1].tolist() == [[1.0]]


def test_classes_of_pixels_keep_their_type_and_may_be_missing():
    masks = torch.arange(12)[:, None, None].expand(12, 4, 4) % 3
    masks = torch.where(torch.arange(4) == 0, -100, masks)
    found = Dataset.from_tensors(images(), masks)
    assert found.classes == ("0", "1", "2") and not found.one_class
    assert found.batch([4])[1].dtype == torch.int64
    with pytest.raises(ValueError, match="from -1 to 2 for 3 classes"):
        Dataset.from_tensors(images(), torch.where(masks == -100, -1, masks))


class Pictures(torch.utils.data.Dataset):
    """PIL images, as torchvision's datasets give them."""

    classes = ("cat", "dog")

    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays)

    def __getitem__(self, i):
        return pytest.importorskip("PIL.Image").fromarray(self.arrays[i]), i % 2


@pytest.mark.parametrize("shape", [(6, 4, 5, 3), (6, 4, 5)], ids=["colour", "grey"])
def test_a_torch_dataset_of_pictures_is_read_once_with_channels_first(shape):
    arrays = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    data = Dataset.from_torch(Pictures(arrays), Pictures(arrays[:2]))
    assert data.classes == ("cat", "dog")
    assert data.is_test.tolist() == [False] * 6 + [True] * 2
    expected = arrays.transpose(0, 3, 1, 2) if arrays.ndim == 4 else arrays[:, None]
    assert torch.equal(data.inputs[:6], torch.from_numpy(expected.copy()))


def test_a_torch_dataset_of_tensors_is_taken_as_it_is():
    x, y = torch.randn(5, 7), torch.arange(5) % 2
    data = Dataset.from_torch(torch.utils.data.TensorDataset(x, y), name="mine")
    assert data.name == "mine"
    assert torch.equal(data.inputs, x)
    assert torch.equal(data.targets, y)


def test_a_torch_dataset_of_different_shapes_is_refused():
    with pytest.raises(ValueError, match="sample 1 is"):
        Dataset.from_torch([(torch.zeros(2), 0), (torch.zeros(3), 1)])


# ---- parts, other statistics, unlabelled -----------------------------------------------------------------------------


def test_a_sample_has_so_many_training_or_test_samples_and_all_others(dataset):
    def stream() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    some = dataset.sample(5, generator=stream())
    assert int((~some.is_test).sum()) == 5 and int(some.is_test.sum()) == 6
    assert torch.equal(some.inputs, dataset.sample(5, generator=stream()).inputs)
    fewer = some.sample(2, test=True, generator=stream())
    assert int((~fewer.is_test).sum()) == 5 and int(fewer.is_test.sum()) == 2
    assert torch.equal(fewer.mean, dataset.mean) and fewer.fingerprint != dataset.fingerprint
    with pytest.raises(ValueError, match="13 of the 12 training samples"):
        dataset.sample(13, generator=stream())


def test_other_statistics_of_the_channels_can_be_set(dataset):
    other = dataset.normalised([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    x, _ = other.batch([3])
    expected = (dataset.inputs[3:4].float() - torch.tensor([1.0, 2, 3])[:, None, None]) / torch.tensor(
        [4.0, 5, 6]
    ).reshape(3, 1, 1)
    torch.testing.assert_close(x, expected)
    assert dataset.normalised(None, None) is dataset
    with pytest.raises(ValueError, match="come together"):
        dataset.normalised([1.0], None)
    with pytest.raises(ValueError, match=r"\[3\] each"):
        dataset.normalised([1.0], [1.0])


def test_unlabelled_samples_get_the_shape_and_statistics_of_others_and_no_labels(dataset):
    grey = Dataset.from_tensors(images(5, channels=1, seed=3).repeat(1, 1, 2, 2), torch.arange(5))
    made = grey.unlabelled(like=dataset)
    assert made.input_shape == dataset.input_shape and made.inputs.dtype == torch.uint8 and len(made) == 5
    assert made.targets.tolist() == [0] * 5 and torch.equal(made.mean, dataset.mean)
    assert torch.equal(made.inputs[:, 0], made.inputs[:, 2])
    same = dataset.unlabelled(like=dataset)
    assert torch.equal(same.inputs, dataset.inputs) and not same.targets.any()
    assert dataset.unlabelled(like=grey).input_shape == (1, 8, 10)
    points = Dataset.from_tensors(torch.rand(4, 7), torch.arange(4))
    with pytest.raises(ValueError, match=r"shape \[7\] cannot be made images \[3, 4, 5\]"):
        points.unlabelled(like=dataset)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused_with_their_count_and_the_first_sample(dtype, value):
    x = torch.zeros(5000, 3, 2, dtype=dtype)
    x[[17, 4999], 2, 1] = value
    with pytest.raises(ValueError, match=r"'t' has NaN or infinity in the inputs of 2 of 5000 samples, .* sample 17"):
        Dataset.from_tensors(x, torch.arange(5000) % 3, name="t")
    y = torch.zeros(4, 2, dtype=dtype)
    y[3, 1] = value
    with pytest.raises(ValueError, match="in the targets of 1 of 4 samples, the first is sample 3"):
        Dataset.from_tensors(torch.zeros(4, 1), y)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_mean_or_deviation_that_is_no_number_is_refused(dataset, value):
    for changes in ({"mean": [0, value, 0], "std": [1, 1, 1]}, {"mean": [0, 0, 0], "std": [1, value, 1]}):
        with pytest.raises(ValueError, match="finite"):
            dataset.normalised(**changes)


def test_a_dataset_says_what_it_is_in_five_lines(dataset):
    x = dataset.inputs.clone()
    x[0, 0, 0, :2] = torch.tensor([0, 255])
    printed = str(dataclasses.replace(dataset, inputs=x, name="pets", mean=torch.ones(3), std=torch.full((3,), 2.5)))
    assert printed.splitlines() == [
        "pets: 18 samples, 12 for training and 6 for testing",
        "inputs: uint8 [3, 4, 5] from 0 to 255, 0.0 MB on cpu",
        "normalised: by (mean, standard deviation) of each channel: (1, 2.5), (1, 2.5), (1, 2.5)",
        "targets: 3 classes: 0, 1, 2; 4 training samples of each",
        "domains: none",
    ]
    assert repr(dataset) == "<Dataset 'tensors': 18 samples uint8 [3, 4, 5], 3 classes>"


def test_the_five_lines_stay_five_for_many_labels_domains_and_line_ends():
    several = Dataset.from_tensors(
        torch.tensor([[-1.0, 2.5], [0.0, 0.0]]),
        torch.tensor([[1.0] + [0.0] * 9, [1.0] + [1.0] * 9]),
        classes=["\n", *"abcdefghi"],
        domain=torch.tensor([0, 0]),
        domains=["here", "there"],
    )
    assert str(several).splitlines() == [
        "tensors: 2 samples, no test part",
        "inputs: float32 [2] from -1 to 2.5, 0.0 MB on cpu",
        "normalised: as they are",
        "targets: 10 labels, of which a sample may have several: \\n, a, b, c, ..., i; 1 to 2 training samples of each",
        "domains: 2: here, there; 0 to 2 samples of each",
    ]


def test_targets_that_are_no_class_numbers_are_refused_at_once():
    with pytest.raises(ValueError, match="largest target is 1099511627776; class numbers below 100,000 are accepted"):
        Dataset.from_tensors(torch.zeros(2, 1), torch.tensor([0, 2**40]))
    assert len(Dataset.from_tensors(torch.zeros(2, 1), torch.tensor([0, 99_999])).classes) == 100_000
