"""Flips and crops of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fl_tasks.built_in.transforms import FlipAndCrop, FlipAndCut


def ways(image: Tensor) -> Iterator[tuple[bool, tuple[int, int], Tensor]]:
    """Every picture that the augmentation may make of one image [c, h, w]."""
    for mirrored in (image, image.flip(2)):
        padded = functional.pad(mirrored, (4, 4, 4, 4))
        for top in range(9):
            for left in range(9):
                yield mirrored is image, (top, left), padded[:, top : top + 6, left : left + 5]


def test_every_image_is_one_of_the_allowed_ways() -> None:
    """Each result is the image or its mirror, cut at an offset of 0 to 8 from its padding by 4 zeros."""
    images = torch.randn(20, 2, 6, 5)
    for image, result in zip(images, FlipAndCrop()(images), strict=True):
        assert any(torch.equal(result, way) for *_, way in ways(image))


def test_half_are_mirrored_and_half_are_cropped() -> None:
    """Of 4,000 images half are mirrored, and 1/2 + 1/2 * 1/81 stay in place; six deviations are 190."""
    torch.manual_seed(0)
    image = torch.randn(1, 6, 5)
    table = {way.numpy().tobytes(): (plain, offset) for plain, offset, way in ways(image)}
    found = [table[result.numpy().tobytes()] for result in FlipAndCrop()(image.expand(4000, 1, 6, 5))]
    assert abs(sum(plain for plain, _ in found) - 2000) < 190
    assert abs(sum(offset == (4, 4) for _, offset in found) - 4000 * (1 / 2 + 1 / 162)) < 190
    assert len({offset for _, offset in found}) == 81


def test_every_cut_is_a_piece_of_the_image_or_its_mirror() -> None:
    """Of 1,000 cuts of 4x4 out of 6x5 each is one of 2 * 3 * 2 pieces, and all twelve occur."""
    image = torch.randn(2, 6, 5)
    pieces = {
        side[:, top : top + 4, left : left + 4].numpy().tobytes(): (mirrored, top, left)
        for mirrored, side in enumerate((image, image.flip(2)))
        for top in range(3)
        for left in range(2)
    }
    cuts = FlipAndCut(4)(image.expand(1000, 2, 6, 5))
    assert len({pieces[cut.numpy().tobytes()] for cut in cuts}) == 12


def test_an_image_of_the_size_is_only_mirrored() -> None:
    """Where there is nothing to cut, 24x24 stays 24x24."""
    images = torch.randn(20, 3, 24, 24)
    for image, result in zip(images, FlipAndCut()(images), strict=True):
        assert torch.equal(image, result) or torch.equal(image.flip(2), result)


@pytest.mark.parametrize("augment", [FlipAndCrop(), FlipAndCut()])
def test_the_default_generator_decides(augment: Callable[[Tensor], Tensor]) -> None:
    """Equal seeds give equal batches, and the input is left as it was."""
    images = torch.randn(8, 3, 32, 32)
    before = images.clone()
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(augment(images))
    assert torch.equal(*results)
    assert torch.equal(before, images)
