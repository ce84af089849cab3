"""The sum is that of the plain numbers, bit for bit, and whoever drops out, there is either that sum or none."""

from __future__ import annotations

import random
from itertools import combinations_with_replacement, product

import numpy as np
import pytest

from fl_common.secure_aggregation.errors import TooFew
from fl_common.secure_aggregation.masks import WORDS
from fl_common.secure_aggregation.terms import Settings
from tests.fl_common.secure_aggregation.federation import (
    STAGES,
    Federation,
    Values,
    names,
    plain_sum,
    terms_of,
    values_of,
)
from tests.marks import slow_except


@pytest.mark.parametrize("clients", slow_except([3, 4, 5, 9, 20, 21, 30], 3, 9, 21))
def test_the_sum_is_that_of_the_plain_numbers(clients: int) -> None:
    """Modulo 2^16, with a full graph up to 20 clients and a circle above."""
    terms = terms_of(clients)
    values = values_of(terms)
    federation = Federation(terms)
    assert federation.until("end", {}, values) == plain_sum(values, terms.cohort)
    assert federation.collector.group.plan.full == (clients <= 20)


@pytest.mark.slow
@pytest.mark.parametrize("clients", slow_except(range(3, 61), *range(3, 61, 6)))
def test_the_sum_of_any_number_of_clients(clients: int) -> None:
    """The same for each number from 3 to 60, with a client that drops out where that is allowed."""
    terms = terms_of(clients)
    values = values_of(terms, seed=clients)
    gone = {names(clients)[clients // 2]: "masked"} if clients > 3 else {}
    survivors = [client for client in terms.cohort if client not in gone]
    assert Federation(terms).until("end", gone, values) == plain_sum(values, survivors)


@pytest.mark.parametrize("suite", ["aes-256-ctr", "chacha20"])
@pytest.mark.parametrize("bits", [8, 16, 24, 32, 40, 64])
def test_every_suite_and_modulus(suite: str, bits: int) -> None:
    """Numbers of every width are summed over several chunks, negative ones and the extremes too."""
    terms = terms_of(3, values=2 * WORDS + 3, settings=Settings(suite=suite), value_bits=bits)
    most = 2 ** (bits - 1) // 3
    numbers = np.random.default_rng(0).integers(-most, most, (3, terms.values), np.int64)
    numbers[:, 0], numbers[:, 1] = -most, most
    values: dict[str, Values] = dict(zip(terms.cohort, numbers, strict=True))
    assert Federation(terms).until("end", {}, values) == plain_sum(values, terms.cohort)


def outcome(gone: dict[str, str], clients: int = 5) -> bool:
    """Whether a federation with these drop-outs has a sum. It must be right then."""
    terms = terms_of(clients)
    values = values_of(terms)
    federation = Federation(terms)
    try:
        total = federation.until("end", gone, values)
    except TooFew:
        return False
    stages = [*STAGES, "end"]
    survivors = [client for client in terms.cohort if stages.index(gone.get(client, "end")) > stages.index("masked")]
    assert total == plain_sum(values, survivors)
    return True


def enough(when: tuple[str, ...]) -> bool:
    """Whether four of those whose keys arrived are there to the end, or all three that there are."""
    members = sum(stage != "keys" for stage in when)
    return when.count("end") >= {5: 4, 4: 3, 3: 3}.get(members, 6)


_FIVE = ("keys", "shares", "masked", "signatures", "openings", "end")


@pytest.mark.parametrize(
    "when",
    [
        when if number % 6 == 0 else pytest.param(when, marks=pytest.mark.slow)
        for number, when in enumerate(combinations_with_replacement(_FIVE, 5))
    ],
    ids="-".join,
)
def test_drop_outs_of_five(when: tuple[str, ...]) -> None:
    """Five clients, each of which drops out in some stage or never: a sum if enough are left, and it is right."""
    assert outcome(dict(zip(names(5), when, strict=True))) == enough(when)


@pytest.mark.slow
@pytest.mark.parametrize("first", _FIVE)
def test_every_order_of_drop_outs_of_five(first: str) -> None:
    """All 6^5 patterns, so that every client drops out in every stage beside every other one."""
    for rest in product(_FIVE, repeat=4):
        when = (first, *rest)
        assert outcome(dict(zip(names(5), when, strict=True))) == enough(when), when


@pytest.mark.parametrize("seed", slow_except(range(6), 0))
def test_drop_outs_around_a_circle(seed: int) -> None:
    """Random drop-outs of 21 to 40 clients: a tenth in any stages lets the sum be made."""
    draw = random.Random(seed)
    clients = draw.randint(21, 40)
    gone = draw.sample(names(clients), clients // 10)
    stages = [stage for stage in STAGES if stage != "coins"]  # one that drops out there ends the attempt
    assert outcome({client: draw.choice(stages) for client in gone}, clients)


@pytest.mark.parametrize("seed", slow_except(range(150), 0, 1, 2))
def test_any_drop_outs_of_any_cohort(seed: int) -> None:
    """6 to 60 clients, of which any number drops out in any stages: the right sum, or none."""
    draw = random.Random(f"any {seed}")
    clients = draw.randint(6, 60 if seed > 7 else 24)
    gone = {client: draw.choice(STAGES) for client in draw.sample(names(clients), draw.randint(0, clients // 2))}
    members = clients - [*gone.values()].count("keys")
    if outcome(gone, clients):
        assert clients - len(gone) > 2 * members / 3


def test_no_order_of_the_circle_without_all_coins() -> None:
    """A coordinator that could leave coins out would choose among many orders."""
    terms = terms_of(21)
    with pytest.raises(TooFew, match="coins of at least 21 clients, got 20"):
        Federation(terms).until("end", {"c003": "coins"}, values_of(terms))
