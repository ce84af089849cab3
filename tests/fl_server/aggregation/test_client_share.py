"""The weight of one client is at most the configured share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithms import UpdateInfo, example_weights
from fl_server.aggregation.client_share import capped

COUNTS = st.lists(st.integers(10_000, 2**53), min_size=1, max_size=12)


def weights(counts: list[int], share: float) -> Sequence[float]:
    """Weights of a cohort with these numbers of examples, capped."""
    return example_weights(capped([UpdateInfo(str(at), count, 1) for at, count in enumerate(counts)], share))


@given(COUNTS, st.floats(0.01, 1.0))
def test_no_weight_exceeds_the_share_unless_all_are_equal(counts: list[int], share: float) -> None:
    """For any counts; no client gets more examples than it has."""
    result = weights(counts, share)
    assert max(result) <= share + 1e-3 or len(set(result)) == 1
    after = capped([UpdateInfo(str(at), count, 1) for at, count in enumerate(counts)], share)
    assert all(info.num_examples <= count for info, count in zip(after, counts, strict=True))


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([10, 10, 2**53], 0.5, [10, 10, 20]),
        ([100, 100, 10, 10], 0.25, [10, 10, 10, 10]),
        ([1000, 2000, 50, 50, 100], 0.4, [400, 400, 50, 50, 100]),
        ([1, 2, 3], 0.5, [1, 2, 3]),
        ([5, 500], 0.4, [5, 5]),
        ([7], 0.5, [7]),
    ],
)
def test_the_cap_by_hand(counts: list[int], share: float, expected: list[int]) -> None:
    """c = share * (k c + rest) for the k capped clients: 0.4 (2 * 400 + 200) = 400."""
    after = capped([UpdateInfo(str(at), count, 1) for at, count in enumerate(counts)], share)
    assert [info.num_examples for info in after] == expected
