"""Updates as whole numbers: the rotation, the bounds of the error, and sums that no order changes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from algorithms.base import Tensors
from algorithms.hadamard import Values, power_below, rotate, rotate_back
from algorithms.privacy.random_bits import RandomBytes
from algorithms.quantization import Quantizer
from fl_common.privacy.secret_stream import SecretStream, derived


def stream(*place: str | int) -> RandomBytes:
    """A stream of random bytes."""
    return SecretStream(derived(bytes(32), *place))


ROTATION = stream("rotation")


@given(st.integers(1, 300), st.integers(0, 100))
def test_the_rotation_is_one(count: int, seed: int) -> None:
    """It keeps lengths and is undone, for every number of values."""
    values = np.random.default_rng(seed).standard_normal(count)
    rotated = values.copy()
    rotate(rotated, ROTATION)
    assert np.linalg.norm(rotated) == pytest.approx(np.linalg.norm(values))
    rotate_back(rotated, ROTATION)
    np.testing.assert_allclose(rotated, values, atol=1e-12)


@pytest.mark.parametrize("count", [1, 3, 64, 100, 4096, 5000, 70_000, 300_000])
def test_the_rotation_is_that_of_its_definition(count: int) -> None:
    """H D / sqrt(P) for the first P values, then for the last P, here by sums and differences of pairs."""
    values = np.random.default_rng(count).standard_normal(count)
    power, expected = power_below(count), values.copy()
    for step, start in enumerate((0, count - power)):
        bits = np.unpackbits(np.frombuffer(ROTATION("signs", step, -(-power // 8)), np.uint8), bitorder="little")
        window = expected[start : start + power] * (1.0 - 2.0 * bits[:power])
        expected[start : start + power] = by_pairs(window) / math.sqrt(power)
    rotate(values, ROTATION)
    np.testing.assert_allclose(values, expected, atol=1e-11)


def by_pairs(values: Values) -> Values:
    """H x, one bit of the places after the other."""
    width = 1
    while width < len(values):
        left, right = np.moveaxis(values.reshape(-1, 2, width), 1, 0)
        values = np.stack([left + right, left - right], axis=1).reshape(-1)
        width *= 2
    return values


def test_the_matrix_by_pairs_is_that_of_hadamard() -> None:
    """H_ij is -1 to the number of bits that i and j share."""
    rows = [[1.0 - 2.0 * ((row & column).bit_count() % 2) for column in range(8)] for row in range(8)]
    np.testing.assert_array_equal(np.array([by_pairs(unit) for unit in np.eye(8)]), rows)


SHAPES = {"w": (30, 20), "b": (33,)}


def update(seed: int, norm: float, dtype: torch.dtype = torch.float32) -> Tensors:
    """Normal numbers of this L2 norm."""
    generator = torch.Generator().manual_seed(seed)
    made = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}
    length = torch.cat([tensor.flatten() for tensor in made.values()]).norm()
    return {name: tensor * (norm / length) for name, tensor in made.items()}


def flat(tensors: Tensors) -> torch.Tensor:
    """All values as one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


@pytest.mark.parametrize("bits", [4, 8, 16, 24])
def test_the_mean_is_that_of_the_updates(bits: int) -> None:
    """Within the error that the docstring states, for updates within the clip."""
    updates = [update(seed, 0.9) for seed in range(7)]
    quantizer = Quantizer.like(updates[0], clip=1.0, bits=bits)
    sums = sum(
        (quantizer.quantize(one, 1.0, ROTATION, stream(seed)).astype(np.int64) for seed, one in enumerate(updates)),
        np.zeros(quantizer.values, np.int64),
    )
    error = flat(quantizer.mean(sums, len(updates), ROTATION)) - flat(
        {name: torch.stack([one[name] for one in updates]).mean(0) for name in SHAPES}
    )
    most = quantizer.step / 2 * math.sqrt(quantizer.values / len(updates))
    assert float(error.norm()) <= 1.3 * most + 1e-6


def test_a_longer_update_is_clipped_and_a_weighted_one_is_shorter() -> None:
    """The numbers stand for w min(1, C / |x|) x."""
    long = update(0, 8.0, torch.float64)
    quantizer = Quantizer.like(long, clip=2.0, bits=24)
    made = quantizer.mean(quantizer.quantize(long, 0.5, ROTATION, stream("a")), 1.0, ROTATION)
    torch.testing.assert_close(flat(made), 0.5 * 2.0 / 8.0 * flat(long), rtol=0.0, atol=1e-5)


def test_rounding_is_unbiased() -> None:
    """The mean over many streams of rounding is the update; with 3 bits a single one is far off."""
    given_update = update(1, 0.2)
    quantizer = Quantizer.like(given_update, clip=1.0, bits=3)
    numbers = [quantizer.quantize(given_update, 1.0, ROTATION, stream("rounding", at)) for at in range(400)]
    made = quantizer.mean(np.array(np.sum(numbers, axis=0, dtype=np.int64)), 400.0, ROTATION)
    single = quantizer.mean(numbers[0].astype(np.int64), 1.0, ROTATION)
    rough = float((flat(single) - flat(given_update)).norm())
    assert float((flat(made) - flat(given_update)).norm()) < rough / 15


def test_any_order_gives_the_same_bits() -> None:
    """Numbers are whole, and bounded so that the stated modulus holds their sum."""
    quantizer = Quantizer.like(update(0, 1.0), clip=1e-3, bits=8)
    numbers = [quantizer.quantize(update(seed, 5.0), 1.0, ROTATION, stream(seed)).astype(np.int64) for seed in range(9)]
    assert max(int(np.abs(one).max()) for one in numbers) <= quantizer.largest == 127
    one_way, other = sum(numbers[1:], numbers[0]), sum(numbers[-2::-1], numbers[-1])
    for name, tensor in quantizer.mean(one_way, 9.0, ROTATION).items():
        assert torch.equal(tensor, quantizer.mean(other, 9.0, ROTATION)[name])


def test_a_vector_of_one_value_is_spread() -> None:
    """The worst vector for rounding without a rotation: the error stays that of every other vector."""
    spike = {"w": torch.zeros(30, 20), "b": torch.zeros(33)}
    spike["w"][3, 4] = 1.0
    quantizer = Quantizer.like(spike, clip=1.0, bits=8)
    made = quantizer.mean(quantizer.quantize(spike, 1.0, ROTATION, stream("a")).astype(np.int64), 1.0, ROTATION)
    assert float((flat(made) - flat(spike)).norm()) < quantizer.step * math.sqrt(quantizer.values)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"clip": 0.0}, "clip"),
        ({"bits": 1}, "bits: expected 2 to 24, got 1"),
        ({"bits": 25}, "bits: expected 2 to 24, got 25"),
        ({"shapes": {}}, "at least one value"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense(change: dict[str, object], text: str) -> None:
    """They are refused with what was expected."""
    with pytest.raises(ValueError, match=text):
        Quantizer(**{"clip": 1.0, "bits": 8, "shapes": SHAPES, **change})  # type: ignore[arg-type]


def test_updates_that_cannot_be_quantized() -> None:
    """Values that are not finite, another layout, a weight over 1."""
    quantizer = Quantizer(1.0, 8, SHAPES)
    endless = update(0, 1.0)
    endless["b"][3] = math.inf
    for bad, weight, text in (
        (endless, 1.0, "finite norm"), ({"w": torch.zeros(3)}, 1.0, "of the shapes"), (update(0, 1.0), 1.5, "weight"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            quantizer.quantize(bad, weight, ROTATION, ROTATION)


def test_nothing_learnt_is_nothing_sent() -> None:
    """An update of zeros has the numbers 0, without noise."""
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    assert not Quantizer(1.0, 8, SHAPES).quantize(zeros, 1.0, ROTATION, stream("a")).any()
