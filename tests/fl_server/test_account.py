"""A round's account goes into the ledger as text and comes back the same."""

from __future__ import annotations

from collections import Counter

from fl_server.account import Account


def an_account() -> Account:
    """With something in every field."""
    return Account(
        norms={"update": 0.5, "direction": 0.0},
        cosine=0.0,
        assignments=Counter(admitted=3, lost=1),
        refused=Counter(norm=1),
        staleness=Counter({0: 3, 17: 1}),
        seconds={"collecting": 1.25},
        quorum_missed=2,
    )


def test_it_comes_back_as_it_was():
    """All fields, also a cosine of 0, which is not none."""
    assert Account.of(an_account().to_text()) == an_account()


def test_a_line_of_an_older_version_has_an_empty_one():
    """The ledger's default is the empty text."""
    assert Account.of("") == Account()


def test_rounds_add_up():
    """Counts and times of two equal rounds are twice theirs; norms and cosine are a round's own."""
    sums = Account()
    sums.add(an_account())
    sums.add(an_account())
    assert (sums.assignments, sums.refused) == ({"admitted": 6, "lost": 2}, {"norm": 2})
    assert (sums.staleness, sums.seconds, sums.quorum_missed) == ({0: 6, 17: 2}, {"collecting": 2.5}, 4)
    assert (sums.norms, sums.cosine) == ({}, None)
