"""Differences of bundles: exact, smaller, and refused if anything about them is wrong."""

from __future__ import annotations

import random
import tracemalloc
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.differences import BLOCK_BYTES, WORD_BYTES, DifferenceError, apply_difference, make_difference
from tests.marks import slow_except
from tests.protos.second_difference import bundle_of

DTYPES = {1: np.int8, 2: np.float16, 4: np.float32, 8: np.float64}


def near(size: int, word: int, apart: float = 1e-3) -> tuple[bytes, bytes]:
    """Two bundles of a size with numbers of a width that are near to each other."""
    draw = np.random.default_rng(size + word)
    old = draw.normal(size=size // word + 1)
    new = old + apart * draw.normal(size=len(old))
    scale = 40 if word == 1 else 1
    first, second = ((scale * values).astype(DTYPES[word]).tobytes()[:size] for values in (old, new))
    return first, second


def applied(base: bytes, difference: bytes, word: int, size: int | None = None) -> bytes:
    """What a difference makes of a base. The memory has other content before."""
    into = bytearray(b"\xaa" * (len(base) if size is None else size))
    apply_difference(base, difference, word, memoryview(into))
    return bytes(into)


@pytest.mark.parametrize("word", WORD_BYTES)
@pytest.mark.parametrize("size", [400, 4003, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 777])
def test_a_difference_makes_the_bundle(word: int, size: int) -> None:
    """Of every width, for whole and broken words and blocks; it is smaller than the bundle."""
    base, bundle = near(size, word)
    difference = make_difference(base, bundle, word)
    assert difference is not None
    assert len(difference) < size
    assert applied(base, difference, word) == bundle


@pytest.mark.parametrize("word", slow_except(WORD_BYTES, 4))
def test_a_reader_from_the_contract_makes_the_same_bytes(word: int) -> None:
    """The comments of the contract are enough to write one. Two blocks and a broken word."""
    base, bundle = near(BLOCK_BYTES + 4003, word)
    difference = make_difference(base, bundle, word)
    assert difference is not None
    assert bundle_of(base, difference, word) == bundle


@given(
    word=st.sampled_from(WORD_BYTES),
    base=st.binary(max_size=300),
    changes=st.lists(st.tuples(st.integers(0, 299), st.integers(0, 255)), max_size=8),
    copies=st.integers(1, 40),
)
def test_any_bundle_is_made_again(word: int, base: bytes, changes: list[tuple[int, int]], copies: int) -> None:
    """A few changed bytes anywhere, by both readers, or there is no difference."""
    bundle = bytearray(base)
    for at, value in changes:
        if at < len(bundle):
            bundle[at] = value
    old, new = base * copies, bytes(bundle) * copies
    difference = make_difference(old, new, word)
    if difference is not None:
        assert 0 < len(difference) < len(new)
        assert applied(old, difference, word) == bundle_of(old, difference, word) == new


@given(st.sampled_from(WORD_BYTES), st.binary(min_size=8, max_size=64), st.binary(min_size=8, max_size=64))
def test_any_two_words_are_far_enough(word: int, old: bytes, new: bytes) -> None:
    """Words that differ in the highest bits too, among many that are equal."""
    size = min(len(old), len(new))
    base, bundle = old[:size] + bytes(4000), new[:size] + bytes(4000)
    difference = make_difference(base, bundle, word)
    assert difference is not None
    assert applied(base, difference, word) == bundle


def test_equal_bundles_have_a_small_difference() -> None:
    """Three MiB of zeros in less than 4 KiB."""
    base, _ = near(3 << 20, 4)
    difference = make_difference(base, base, 4)
    assert difference is not None
    assert len(difference) < 4096
    assert applied(base, difference, 4) == base


@pytest.mark.parametrize("size", [0, 1, 2 << 20])
def test_there_is_no_difference_that_would_not_be_smaller(size: int) -> None:
    """Of random bytes, of a single one and of none."""
    draw = random.Random(1)
    assert make_difference(draw.randbytes(size), draw.randbytes(size), 1) is None


def test_the_bundles_are_not_changed() -> None:
    """Both may be the memory of a model."""
    base, bundle = near(5000, 4)
    old, new = bytearray(base), bytearray(bundle)
    difference = make_difference(old, new, 4)
    assert difference is not None
    assert (bytes(old), bytes(new)) == (base, bundle)
    apply_difference(memoryview(old).toreadonly(), difference, 4, memoryview(new))
    assert (bytes(old), bytes(new)) == (base, bundle)


def stream(data: bytes) -> bytes:
    """A block of a difference that inflates to these bytes."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = packer.compress(data) + packer.flush()
    return len(packed).to_bytes(4, "little") + packed


BASE, BUNDLE = near(BLOCK_BYTES + 500, 4)
GOOD = make_difference(BASE, BUNDLE, 4) or b""
FIRST = 4 + int.from_bytes(GOOD[:4], "little")
"""Bytes of its first block."""


def _first_with(packed: bytes) -> bytes:
    """The difference with another stream in its first block."""
    return len(packed).to_bytes(4, "little") + packed + GOOD[FIRST:]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        pytest.param(b"", "block 0: expected bytes up to 4, got 0", id="empty"),
        pytest.param(GOOD[:3], "block 0: expected bytes up to 4, got 3", id="no-length"),
        pytest.param(GOOD[:-1], "block 1: expected bytes up to", id="cut"),
        pytest.param(GOOD[:FIRST], "block 1: expected bytes up to", id="block-missing"),
        pytest.param(GOOD[:FIRST] + GOOD, "block 1: .* stream of 500 bytes", id="block-twice"),
        pytest.param(GOOD + b"\0", rf"expected {len(GOOD)} bytes for a bundle", id="byte-too-much"),
        pytest.param(GOOD + GOOD[FIRST:], "bytes for a bundle", id="block-too-much"),
        pytest.param(stream(bytes(BLOCK_BYTES - 1)) + GOOD[FIRST:], "block 0: .* of 1048576 bytes", id="too-short"),
        pytest.param(stream(bytes(BLOCK_BYTES + 1)) + GOOD[FIRST:], "block 0: .* of 1048576 bytes", id="too-long"),
        pytest.param(b"\x00\x00\x00\x00" + GOOD[FIRST:], "block 0: .* of 1048576 bytes", id="empty-stream"),
        pytest.param(b"\x01\x00\x00\x00\x07" + GOOD[FIRST:], "block 0: .* one that fails", id="no-deflate"),
        pytest.param(b"\xff\xff\xff\xff" + GOOD[4:], "block 0: expected bytes up to 4294967299", id="huge-length"),
        pytest.param(_first_with(GOOD[4:FIRST] + b"\0"), "ends with the block", id="bytes-after-the-stream"),
        pytest.param(_first_with(GOOD[4 : FIRST - 1]), "ends with the block", id="stream-without-end"),
    ],
)
def test_other_bytes_are_refused(bad: bytes, words: str) -> None:
    """Cut, longer, of other sizes, or no DEFLATE at all."""
    with pytest.raises(DifferenceError, match=words):
        applied(BASE, bad, 4)


@pytest.mark.slow
def test_a_large_stream_takes_no_memory() -> None:
    """A block of 1 MiB that would inflate to 1 GiB is refused after 1 MiB."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = b"".join(packer.compress(bytes(1 << 20)) for _ in range(1024)) + packer.flush()
    bomb, base, into = len(packed).to_bytes(4, "little") + packed, bytes(BLOCK_BYTES), bytearray(BLOCK_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(DifferenceError, match="block 0"):
            apply_difference(base, bomb, 1, memoryview(into))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("word", [0, 3, 16])
def test_an_unknown_word_is_an_error(word: int) -> None:
    """Of the caller, on both sides."""
    with pytest.raises(ValueError, match=f"words of 1, 2, 4 or 8 bytes, got {word}"):
        make_difference(b"ab", b"cd", word)
    with pytest.raises(ValueError, match=f"words of 1, 2, 4 or 8 bytes, got {word}"):
        applied(b"ab", b"", word)


def test_bundles_of_two_sizes_are_an_error() -> None:
    """Of the caller, on both sides."""
    with pytest.raises(ValueError, match="a base of 3 bytes as the bundle has, got 2"):
        make_difference(b"ab", b"abc", 1)
    with pytest.raises(ValueError, match="a base of 5 bytes as the bundle has, got 2"):
        applied(b"ab", b"", 1, size=5)
