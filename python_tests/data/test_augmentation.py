"""Augmentation: what may change and what may not, and from which random stream."""

from __future__ import annotations

import pytest
import torch

from pfl_ext.data import AUGMENTATIONS
from pfl_ext.data.augmentation import random_crop, random_flip


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(64, 3, 9, 7, generator=seeded(9))


def test_every_image_is_mirrored_or_as_it_was_and_both_occur(x):
    y = random_flip(x, seeded())
    same = (y == x).flatten(1).all(1)
    mirrored = (y == x.flip(-1)).flatten(1).all(1)
    assert bool((same ^ mirrored).all())
    assert 12 < int(same.sum()) < 52  # binomial(64, 1/2) is outside with probability below 1e-6


@pytest.mark.parametrize("padding", [0, 1, 4])
def test_every_crop_is_a_window_of_its_padded_image(x, padding):
    y = random_crop(x, seeded(), padding)
    padded = torch.nn.functional.pad(x, (padding,) * 4)
    windows = padded.unfold(2, 9, 1).unfold(3, 7, 1)  # [n, channels, rows, columns, 9, 7]
    matches = (windows == y[:, :, None, None]).all(-1).all(-1).all(1)
    # Every image has a window, one and the same for all its channels.
    assert bool(matches.flatten(1).any(1).all())
    if padding:
        places = matches.flatten(1).double().argmax(1)
        assert len(places.unique()) > 5


def test_all_places_of_the_window_occur():
    image = torch.zeros(2000, 1, 3, 3)
    image[:, :, 1, 1] = 1
    y = random_crop(image, seeded(), 1)
    seen = y.sum(0)[0]  # the bright pixel is moved to each of the nine places
    # Binomial(2000, 1/9): 222, standard deviation 14; five of them.
    assert float((seen - 2000 / 9).abs().max()) < 70


@pytest.mark.parametrize("name", sorted(AUGMENTATIONS))
def test_the_stream_decides_and_the_input_is_untouched(x, name):
    augment = AUGMENTATIONS[name]
    before = x.clone()
    first = augment(x, seeded(1))
    assert torch.equal(first, augment(x, seeded(1)))
    assert torch.equal(x, before)
    assert first.shape == x.shape
    assert first.dtype == x.dtype
    assert torch.equal(first, augment(x, seeded(2))) == (name == "none")


def test_bytes_and_empty_batches_are_accepted(x):
    for augment in AUGMENTATIONS.values():
        assert augment((x * 50).to(torch.uint8), seeded()).dtype == torch.uint8
        assert augment(x[:0], seeded()).shape == x[:0].shape


def test_what_is_no_image_is_refused():
    for name in ("flip", "flip-crop"):
        with pytest.raises(ValueError, match="channels, height, width"):
            AUGMENTATIONS[name](torch.zeros(3, 4), seeded())
