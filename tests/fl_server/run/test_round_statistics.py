"""The statistics of a round, as text in the ledger and read from it."""

from __future__ import annotations

from collections import Counter

from fl_server.run.round_statistics import RoundStatistics


def some_statistics() -> RoundStatistics:
    """Statistics with a value in every field."""
    return RoundStatistics(
        norms={"update": 0.5, "direction": 0.0},
        cosine=0.0,
        assignments=Counter(admitted=3, lost=1),
        refused=Counter(norm=1),
        staleness=Counter({0: 3, 17: 1}),
        seconds={"collecting": 1.25},
        quorum_missed=2,
    )


def test_the_text_is_read_as_it_was_written() -> None:
    """All fields, also a cosine of 0, which differs from None."""
    assert RoundStatistics.from_text(some_statistics().to_text()) == some_statistics()


def test_a_commit_without_statistics_is_read() -> None:
    """The ledger's default is the empty text."""
    assert RoundStatistics.from_text("") == RoundStatistics()


def test_rounds_add_up() -> None:
    """Counts and times of two equal rounds double; norms and cosine belong to one round."""
    sums = RoundStatistics()
    sums.add(some_statistics())
    sums.add(some_statistics())
    assert (sums.assignments, sums.refused) == ({"admitted": 6, "lost": 2}, {"norm": 2})
    assert (sums.staleness, sums.seconds, sums.quorum_missed) == ({0: 6, 17: 2}, {"collecting": 2.5}, 4)
    assert (sums.norms, sums.cosine) == ({}, None)
