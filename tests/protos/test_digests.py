"""Digests: known values, and nothing but BLAKE3-256."""

from __future__ import annotations

from typing import cast

import pytest

from protos.codec import digest_bytes, digest_message, digest_of, digest_text
from protos.fl.v1.tensor_pb2 import DIGEST_ALGORITHM_BLAKE3_256, Digest, DigestAlgorithm

# Digest of no bytes: the first published test vector of the reference.
EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_the_digest_is_blake3() -> None:
    """The published vector of the empty input."""
    assert digest_of().hex() == EMPTY


def test_buffers_count_as_one() -> None:
    """How a bundle is cut does not change its name."""
    assert digest_of(b"ab", bytearray(b"c"), memoryview(b"d")) == digest_of(b"abcd")


def test_a_digest_comes_back_from_a_message() -> None:
    """The message holds the same 32 bytes."""
    raw = digest_of(b"model")
    assert digest_bytes(digest_message(raw)) == raw


def test_the_text_names_the_algorithm() -> None:
    """A digest in a table or a file name includes its algorithm."""
    assert digest_text(digest_of()) == f"blake3:{EMPTY}"


@pytest.mark.parametrize(
    ("digest", "words"),
    [
        (Digest(value=bytes(32)), "expected digest algorithm BLAKE3_256, got number 0"),
        (Digest(algorithm=cast(DigestAlgorithm, 9), value=bytes(32)), "got number 9"),
        (Digest(algorithm=DIGEST_ALGORITHM_BLAKE3_256, value=bytes(31)), "expected a digest of 32 bytes, got 31"),
        (Digest(algorithm=DIGEST_ALGORITHM_BLAKE3_256), "got 0"),
    ],
    ids=["no algorithm", "another algorithm", "short", "empty"],
)
def test_other_digests_are_refused(digest: Digest, words: str) -> None:
    """A digest we cannot compute must not be taken for a name."""
    with pytest.raises(ValueError, match=words):
        digest_bytes(digest)
