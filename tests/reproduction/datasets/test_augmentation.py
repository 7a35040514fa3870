"""Flips and shifts of training images."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from reproduction.datasets import Part
from reproduction.datasets.augmentation import AugmentedImages, flip_and_shift

IMAGES = torch.arange(1.0, 1 + 200 * 2 * 4 * 4).view(200, 2, 4, 4)


def variants(image, shift):
    """Return all flipped and shifted versions of an image, one after another."""
    padded = F.pad(image, (shift,) * 4)
    size = image.shape[-1]
    for top in range(2 * shift + 1):
        for left in range(2 * shift + 1):
            window = padded[:, top : top + size, left : left + size]
            yield from (window, window.flip(-1))


def test_every_image_is_one_of_its_flipped_and_shifted_versions():
    torch.manual_seed(0)
    changed = flip_and_shift(IMAGES, 1)
    for image, version in zip(IMAGES, changed, strict=True):
        assert any(torch.equal(version, variant) for variant in variants(image, 1))


def test_all_versions_occur():
    torch.manual_seed(0)
    image = IMAGES[:1].expand(1000, -1, -1, -1)
    versions = {tuple(version.flatten().tolist()) for version in flip_and_shift(image, 1)}
    assert len(versions) == 18


def test_without_a_shift_images_are_flipped_only():
    torch.manual_seed(0)
    changed = flip_and_shift(IMAGES, 0)
    is_same = (changed == IMAGES).flatten(1).all(1)
    is_flipped = (changed == IMAGES.flip(-1)).flatten(1).all(1)

    assert (is_same ^ is_flipped).all()
    assert 60 < is_same.sum() < 140


def test_samples_keep_their_classes_and_follow_the_global_generator():
    images = AugmentedImages(Part(IMAGES, torch.arange(200)), shift=1)
    assert len(images) == 200
    torch.manual_seed(3)
    first = images.__getitems__([5, 7])
    torch.manual_seed(3)
    second = images.__getitems__([5, 7])
    assert [int(target) for _, target in first] == [5, 7]
    assert all(torch.equal(one[0], other[0]) for one, other in zip(first, second, strict=True))
    image, target = images[9]
    assert image.shape == (2, 4, 4)
    assert int(target) == 9
