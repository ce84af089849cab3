"""A masked update looks like random bytes, whatever is in it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from fl_common.secure_aggregation.terms import Settings, Terms
from tests.fl_common.secure_aggregation.federation import Federation, Values, scalars_of, terms_of

VALUES = 100_000
BYTES = npt.NDArray[np.uint8]


def masked(terms: Terms, value: int) -> dict[str, BYTES]:
    """The masked update of each client, all of whose numbers are this one."""
    federation = Federation(terms)
    values: dict[str, Values] = {client: np.full(VALUES, value, np.int32) for client in terms.cohort}
    federation.until("signatures", {}, values)
    return {client: np.frombuffer(update, np.uint8) for client, update in federation.updates.items()}


def assert_uniform(sample: BYTES) -> None:
    """Pearson's test of bytes, at eight standard deviations: it fails by chance less often than once in 10^9."""
    counts = np.bincount(sample, minlength=256)
    expected = len(sample) / 256
    statistic = float(((counts - expected) ** 2).sum() / expected)
    assert abs(statistic - 255) < 8 * (2 * 255) ** 0.5


@pytest.mark.parametrize("suite", ["aes-256-ctr", "chacha20"])
@pytest.mark.parametrize("value", [0, 1, -127])
def test_a_masked_update_is_uniform(suite: str, value: int) -> None:
    """Its bytes, its pairs of neighbouring bytes, and its difference from another client's of the same numbers."""
    updates = masked(terms_of(3, values=VALUES, settings=Settings(suite=suite)), value)
    first, second = updates["c000"], updates["c001"]
    assert_uniform(first)
    assert_uniform(first[1:] ^ first[:-1])
    assert_uniform(first - second)


def test_masks_of_two_rounds_have_nothing_in_common() -> None:
    """The same numbers in two rounds: the difference is uniform, so no key is used twice."""
    terms = [terms_of(3, values=VALUES, round_=round_) for round_ in (0, 1)]
    first, second = (masked(one, 5)["c000"] for one in terms)
    assert_uniform(first - second)


def test_scalars_are_masked() -> None:
    """They are the last bytes, and differ from what they hide in every client."""
    terms = terms_of(3, values=VALUES)
    for client, update in masked(terms, 0).items():
        assert len(update) == terms.size_bytes
        assert [*update[-16:].view("<u8")] != scalars_of(client)
