"""Flips and crops of a batch."""

import torch
from torch.nn import functional

from tasks.augment import flip_and_crop


def ways(image):
    """Every picture that the augmentation may make of one image [c, h, w]."""
    for mirrored in (image, image.flip(2)):
        padded = functional.pad(mirrored, (4, 4, 4, 4))
        for top in range(9):
            for left in range(9):
                yield mirrored is image, (top, left), padded[:, top : top + 6, left : left + 5]


def test_every_image_is_one_of_the_allowed_ways():
    """Each result is the image or its mirror, cut at an offset of 0 to 8 from its padding by 4 zeros."""
    images = torch.randn(20, 2, 6, 5)
    for image, result in zip(images, flip_and_crop(images), strict=True):
        assert any(torch.equal(result, way) for *_, way in ways(image))


def test_half_are_mirrored_and_half_are_cropped():
    """Of 4,000 images half are mirrored, and 1/2 + 1/2 * 1/81 stay in place; six deviations are 190."""
    torch.manual_seed(0)
    image = torch.randn(1, 6, 5)
    table = {way.numpy().tobytes(): (plain, offset) for plain, offset, way in ways(image)}
    found = [table[result.numpy().tobytes()] for result in flip_and_crop(image.expand(4000, 1, 6, 5))]
    assert abs(sum(plain for plain, _ in found) - 2000) < 190
    assert abs(sum(offset == (4, 4) for _, offset in found) - 4000 * (1 / 2 + 1 / 162)) < 190
    assert len({offset for _, offset in found}) == 81


def test_the_default_generator_decides():
    """Equal seeds give equal batches, and the input is left as it was."""
    images = torch.randn(8, 3, 32, 32)
    before = images.clone()
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(flip_and_crop(images))
    assert torch.equal(*results)
    assert torch.equal(before, images)
