"""A client that lies or breaks spoils its own round at most. The next one is none of its business."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_common.secure_aggregation import messages
from fl_common.secure_aggregation.errors import BadMessage, Refused
from fl_common.secure_aggregation.fields import packed, unpacked
from fl_common.secure_aggregation.group import KeyMessage
from fl_common.secure_aggregation.keys import public_key
from fl_common.secure_aggregation.member import Member
from fl_common.secure_aggregation.shamir import SHARE_BYTES
from fl_common.secure_aggregation.terms import Terms
from tests.fl_common.secure_aggregation.federation import (
    NOW,
    RUN,
    Federation,
    plain_sum,
    signer,
    terms_of,
    values_of,
)

LIAR = "c002"


def federation_of(clients: int = 5) -> Federation:
    """A federation before its first message."""
    federation = Federation(terms_of(clients))
    federation.values = values_of(federation.terms)
    return federation


def finished(federation: Federation, stages: str) -> bool:
    """Whether the sum is right after the rest of the stages."""
    for stage in stages.split():
        getattr(federation, f"_{stage}")(federation.expected(stage))
    return federation.sum() == plain_sum(federation.values, federation.collector.survivors)


def test_keys_that_are_not_its_own() -> None:
    """Another client's keys, another's certificate, keys of low order, no signature, a client of no cohort."""
    federation, good = federation_of(), KeyMessage.from_bytes(federation_of().begin(LIAR))
    low = replace(good, mask_key=bytes(32)).sign(federation.terms, signer(LIAR))
    cases = [
        federation.begin("c001"),
        good.sign(federation.terms, signer("c001")).to_bytes(),
        low.to_bytes(),
        replace(good, signature=b"").to_bytes(),
        replace(good, chain=()).to_bytes(),
        replace(good, chain=(b"no certificate",)).to_bytes(),
    ]
    for data in cases:
        with pytest.raises(BadMessage, match=LIAR):
            federation.collector.add_keys(LIAR, data, NOW)
    with pytest.raises(BadMessage, match="c009"):
        federation.collector.add_keys("c009", good.to_bytes(), NOW)
    assert finished(federation, "keys coins shares masked signatures openings")


def test_a_second_message_of_a_stage() -> None:
    """The first one stands, and the same one again changes nothing."""
    federation = federation_of()
    other = federation_of().begin(LIAR)
    federation.collector.add_keys(LIAR, federation.begin(LIAR), NOW)
    with pytest.raises(BadMessage, match="first message"):
        federation.collector.add_keys(LIAR, other, NOW)
    assert finished(federation, "keys coins shares masked signatures openings")


def test_another_coin_than_it_committed_to() -> None:
    """It cannot choose the order of the circle after it has seen the coins of others."""
    federation = federation_of(21)
    federation._keys(federation.terms.cohort)
    with pytest.raises(BadMessage, match="committed"):
        federation.collector.add_coin(LIAR, messages.message(federation.terms, bytes(32)))
    assert finished(federation, "coins shares masked signatures openings")


def test_shares_for_others_than_its_neighbours() -> None:
    """A missing, an additional and a short share."""
    federation = federation_of()
    federation._keys(federation.terms.cohort)
    good = messages.parse_by_number(
        federation.terms, federation.answer(LIAR, "key_list", federation.key_list), 5, (1, 1000)
    )
    for shares in ({0: good[0]}, {**good, 2: good[0]}, {**good, 0: b"short"}):
        with pytest.raises(BadMessage):
            federation.collector.add_shares(LIAR, messages.by_number(federation.terms, shares))
    assert finished(federation, "shares masked signatures openings")


def with_wrong_shares(federation: Federation, wrong: int) -> None:
    """Until the masked updates, with shares of the liar that so many of its neighbours cannot read."""
    federation._keys(federation.terms.cohort)
    for client in federation.collector.members:
        data = federation.answer(client, "key_list", federation.key_list)
        if client == LIAR:
            texts = messages.parse_by_number(federation.terms, data, 5, (1, 1000))
            for holder in list(texts)[:wrong]:
                texts[holder] = bytes(len(texts[holder]))
            data = messages.by_number(federation.terms, texts)
        federation.collector.add_shares(client, data)
    federation.deliveries = federation.collector.close_shares()
    federation._masked(federation.collector.sharers)


def test_one_neighbour_gets_an_unreadable_share() -> None:
    """Four shares of five are left, and four are enough."""
    federation = federation_of()
    with_wrong_shares(federation, 1)
    assert finished(federation, "signatures openings")


def test_more_neighbours_get_unreadable_shares() -> None:
    """The round has no sum, and the liar is named. The next round does not know of it."""
    federation = federation_of()
    with_wrong_shares(federation, 2)
    federation._signatures(federation.collector.survivors)
    federation._openings(federation.collector.survivors)
    assert federation.collector.missing() == (LIAR,)
    after = Federation(terms_of(5, round_=1), states=federation.states, work=b"next")
    assert after.until("end", {}, federation.values) == plain_sum(federation.values, after.terms.cohort)


@pytest.mark.parametrize("liars", [1, 2])
def test_wrong_opened_shares(liars: int) -> None:
    """Commitments tell a wrong secret. With one liar among five there are four right shares; with two, no sum."""
    federation = federation_of()
    federation.until("openings", {}, federation.values)
    for number, client in enumerate(federation.collector.survivors):
        data = federation.answer(client, "signatures", federation.signatures)
        if number < liars:
            opened = messages.parse_by_number(federation.terms, data, 5, (1, 100))
            data = messages.by_number(federation.terms, dict.fromkeys(opened, bytes(SHARE_BYTES)))
        federation.collector.add_opening(client, data)
    assert federation.collector.missing() == ()
    if liars == 1:
        assert federation.sum() == plain_sum(federation.values, federation.terms.cohort)
    else:
        with pytest.raises(BadMessage, match="committed"):
            federation.sum()


def test_opened_shares_that_it_does_not_hold() -> None:
    """A survivor opens shares of its neighbours; a client that is no survivor opens nothing."""
    federation = federation_of(21)
    federation.until("openings", {"c020": "masked"}, federation.values)
    group = federation.collector.group
    stranger = next(number for number in range(20) if number not in group.holders(0))
    data = messages.by_number(federation.terms, {stranger: bytes(SHARE_BYTES)})
    with pytest.raises(BadMessage, match="holds"):
        federation.collector.add_opening("c000", data)
    with pytest.raises(BadMessage, match="survivor"):
        federation.collector.add_opening("c020", data)
    assert finished(federation, "openings")


def test_a_signature_of_another_list() -> None:
    """It is not counted, so it cannot make honest clients refuse."""
    federation = federation_of()
    federation.until("signatures", {}, federation.values)
    other = federation.collector.group.signed(range(5), range(4))
    for signature in (signer(LIAR).sign(other), b"", bytes(5000)):
        with pytest.raises(BadMessage, match=LIAR):
            federation.collector.add_signature(LIAR, messages.message(federation.terms, signature))
    assert finished(federation, "signatures openings")


def test_false_numbers_spoil_the_sum_and_nothing_else() -> None:
    """What the page states: under masks nobody can see that an update is absurd. The other clients stay hidden."""
    federation = federation_of()
    honest = federation.values
    federation.values = {**honest, LIAR: np.full_like(honest[LIAR], 2**30)}
    assert finished(federation, "keys coins shares masked signatures openings") is False
    after = Federation(terms_of(5, round_=1), states=federation.states, work=b"next")
    assert after.until("end", {}, honest) == plain_sum(honest, after.terms.cohort)


# Random bytes


@given(st.sampled_from(["keys", "coin", "shares", "signature", "opening"]), st.data())
def test_the_coordinator_survives_any_bytes(stage: str, data: st.DataObject) -> None:
    """Every message is taken, or refused as a bad one."""
    federation = _at_the_end()
    good = data.draw(st.sampled_from(_messages(federation)))
    raw = data.draw(st.one_of(st.binary(max_size=200), _mutations(good)))
    with suppress(BadMessage):
        if stage == "keys":
            federation_of().collector.add_keys(LIAR, raw, NOW)
        else:
            getattr(federation.collector, f"add_{stage}")(LIAR, raw)


@given(st.sampled_from(["key_list", "coins", "survivors", "signatures"]), st.data())
def test_a_client_survives_any_bytes(stage: str, data: st.DataObject) -> None:
    """Every message is answered or refused."""
    federation = _at_the_end()
    fresh = Federation(federation.terms, states={LIAR: _begun()})
    good = data.draw(st.sampled_from(_messages(federation)))
    raw = data.draw(st.one_of(st.binary(max_size=200), _mutations(good)))
    for one in (federation, fresh):
        with suppress(Refused):
            one.answer(LIAR, stage, raw)


@given(st.data())
def test_states_and_terms_of_any_bytes(data: st.DataObject) -> None:
    """They are read whole, or refused as values."""
    for good, read in ((_at_the_end().states[LIAR], Member.from_bytes), (terms_of(3).to_bytes(), Terms.from_bytes)):
        raw = data.draw(st.one_of(st.binary(max_size=100), _mutations(good)))
        with suppress(ValueError):
            read(raw)


def _mutations(good: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with one changed, some missing, or a field changed."""
    at = st.integers(0, max(0, len(good) - 1))
    changed = at.flatmap(
        lambda place: st.binary(min_size=1, max_size=1).map(lambda b: good[:place] + b + good[place + 1 :])
    )
    fields = unpacked(good) if good[:2] == b"\0\0" else [good]
    of_fields = st.lists(st.one_of(st.sampled_from(fields), st.binary(max_size=40)), max_size=6).map(
        lambda some: packed(*fields[:1], *some)
    )
    return st.one_of(changed, at.map(lambda place: good[:place]), of_fields)


_MADE: dict[str, Federation] = {}


def _at_the_end() -> Federation:
    """A federation after its last stage; made once, because nothing that these tests do should change it."""
    if "end" not in _MADE:
        federation = federation_of()
        federation.until("end", {}, federation.values)
        _MADE["end"] = federation
    return _MADE["end"]


def _begun() -> bytes:
    """The state of the liar after its keys."""
    member = Member(LIAR, RUN)
    member.begin(terms_of(5), b"work", signer(LIAR))
    return member.to_bytes()


def _messages(federation: Federation) -> list[bytes]:
    collector = federation.collector
    return [
        federation.key_list, federation.survivors, federation.signatures, federation.deliveries[LIAR],
        collector._keys[LIAR], collector._shares[2], collector._openings[2],
        messages.message(federation.terms, public_key(bytes(32))),
    ]  # fmt: skip
