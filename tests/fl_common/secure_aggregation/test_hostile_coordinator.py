"""A coordinator that lies gets refusals, and no more than the sum over one survivor list."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fl_common.secure_aggregation import messages
from fl_common.secure_aggregation.errors import Refused
from fl_common.secure_aggregation.fields import packed, unpacked
from fl_common.secure_aggregation.group import KeyMessage
from fl_common.secure_aggregation.keys import public_key
from fl_common.secure_aggregation.masks import Mask, Unmasked
from fl_common.secure_aggregation.member import KEPT_WORKS, Member
from fl_common.secure_aggregation.shamir import recovered, weights_at_zero
from fl_common.secure_aggregation.signatures import Trust, key_of
from fl_common.secure_aggregation.terms import Settings, SiteFloors, Terms
from fl_ops.certificates import ca
from tests.fl_common.secure_aggregation.federation import (
    NOW,
    RUN,
    Federation,
    authority,
    names,
    plain_sum,
    reader,
    scalars_of,
    signer,
    terms_of,
    trust,
    values_of,
)

VICTIM = "c000"


def until(stage: str, clients: int = 5, terms: Terms | None = None) -> Federation:
    """A federation in which the stages before this one were honest."""
    federation = Federation(terms or terms_of(clients))
    federation.until(stage, {}, values_of(federation.terms))
    return federation


def refused(federation: Federation, reason: str, ask: Callable[..., object], client: str, *message: object) -> None:
    """Assert that a client refuses a message, and that its state is the one before."""
    before = federation.states.get(client)
    with pytest.raises(Refused) as refusal:
        ask(client, *message)
    assert (refusal.value.reason, federation.states.get(client)) == (reason, before)


def with_member(federation: Federation, client: str, message: bytes) -> bytes:
    """The key list with another message for a client."""
    digest, *members = unpacked(federation.key_list)
    place = federation.collector.group.number_of(client)
    return packed(digest, *members[:place], message, *members[place + 1 :])


# Keys


@pytest.mark.parametrize("part", ["mask_key", "share_key", "self_mask", "coin"])
def test_swapped_keys(part: str) -> None:
    """Everything in a key message is signed: the coordinator cannot put itself between two clients."""
    federation = until("coins")
    other = federation.collector.group.members[1]
    swapped = replace(other, **{part: public_key(bytes(range(32)))})  # type: ignore[arg-type]
    data = with_member(federation, other.client, swapped.to_bytes())
    refused(federation, "trust", federation.answer, VICTIM, "key_list", data)


def test_keys_of_another_attempt() -> None:
    """A signature is for one attempt and one cohort: old keys, whose secrets were opened, do not come again."""
    first, second = until("coins"), until("coins", terms=terms_of(5, attempt=1))
    old = first.collector.group.members[1].to_bytes()
    data = with_member(second, "c001", old)
    refused(second, "trust", second.answer, VICTIM, "key_list", data)


def test_terms_that_differ_between_clients() -> None:
    """Clients that were told another clip or another cohort have signed other terms, so their keys do not fit."""
    federation = until("coins")
    other = Federation(replace(federation.terms, quantizer="no clip at all"))
    data = with_member(federation, "c001", other.begin("c001"))
    refused(federation, "trust", federation.answer, VICTIM, "key_list", data)


def test_a_key_list_without_the_own_keys() -> None:
    """A client whose own keys were left out or made anew by another process does not send shares."""
    federation = until("coins")
    digest, _, *others = unpacked(federation.key_list)
    refused(federation, "signature", federation.answer, VICTIM, "key_list", packed(digest, *others))


@pytest.mark.parametrize("floor", [3, 5])
def test_few_members(floor: int) -> None:
    """The floor of the run, or of the client's site, holds for the members."""
    federation = Federation(terms_of(5))
    for client in federation.terms.cohort[: floor - 1]:
        federation.collector.add_keys(client, federation.begin(client, floors=SiteFloors(floor)), NOW)
    data = messages.message(federation.terms, *federation.collector._keys.values())
    refused(federation, "floor", federation.answer, VICTIM, "key_list", data)


def test_a_cohort_under_the_floor_of_a_site() -> None:
    """The client does not even make keys: for a small cohort, or one that is said to have hardly any corrupt client."""
    federation = Federation(terms_of(5))
    for floors in (SiteFloors(min_clients=6), SiteFloors(max_corrupt=0.2)):
        refused(federation, "floor", federation.begin, VICTIM, None, None, floors)


def test_a_key_of_low_order() -> None:
    """The key that others agree on with it is known to everybody, so it is no key."""
    federation = until("coins")
    low = KeyMessage("c001", bytes(32), public_key(bytes(range(32))), bytes(32), bytes(32))
    data = with_member(federation, "c001", low.sign(federation.terms, signer("c001")).to_bytes())
    refused(federation, "trust", federation.answer, VICTIM, "key_list", data)


# Invented clients


def both_authorities() -> Trust:
    """Trust in the coordinator's authority beside another one."""
    pems = [ca.certificate_pem(authority(name).certificate) for name in ("Clients", "Coordinator")]
    return Trust.of_authorities(b"".join(pems), "coordinator")


def with_invented_clients(trusted: Trust) -> Federation:
    """One real client, after the keys; the coordinator has made up all others."""
    federation = Federation(terms_of(5), trusted=trusted, taken=both_authorities(), invented=names(5)[1:])
    values = values_of(federation.terms)
    zeros = {client: np.zeros_like(numbers) for client, numbers in values.items()}
    federation.until("coins", {}, {**zeros, VICTIM: values[VICTIM]})
    return federation


def test_invented_clients_with_an_outside_authority() -> None:
    """Their certificates are of another authority, so the one real client sends nothing."""
    federation = with_invented_clients(trust())
    refused(federation, "trust", federation.answer, VICTIM, "key_list", federation.key_list)
    assert trust().protects


def pinned(client: str) -> str:
    """SHA-256 of the public key of a client, as a site lists it."""
    key = key_of(signer(client).chain[0])
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def test_invented_clients_with_pinned_keys() -> None:
    """A site that has listed its peers' keys takes no others, whoever certifies them."""
    pins = Trust.of_pins({client: pinned(client) for client in names(5)})
    federation = with_invented_clients(pins)
    refused(federation, "trust", federation.answer, VICTIM, "key_list", federation.key_list)
    fewer = Federation(terms_of(5), trusted=Trust.of_pins({VICTIM: pins.pins[VICTIM]}), taken=trust())
    fewer.until("coins", {}, {})
    refused(fewer, "trust", fewer.answer, VICTIM, "key_list", fewer.key_list)
    honest = Federation(terms_of(5), trusted=pins)
    values = values_of(honest.terms)
    assert honest.until("end", {}, values) == plain_sum(values, honest.terms.cohort)


def test_invented_clients_with_the_coordinators_own_authority() -> None:
    """What the page says: a coordinator that holds the authority learns the update of the one real client."""
    trusted = both_authorities()
    assert not trusted.protects
    assert "could invent clients" in trusted.statement
    federation = with_invented_clients(trusted)
    for stage in ("shares", "masked", "signatures", "openings"):
        getattr(federation, f"_{stage}")(federation.expected(stage))
    assert federation.sum().values == list(federation.values[VICTIM])


# Survivors


def survivor_list(federation: Federation, survivors: Sequence[int]) -> bytes:
    """A survivor list of the coordinator's choice."""
    return messages.message(federation.terms, *survivors)


def test_two_survivor_lists_for_one_client() -> None:
    """The second one is refused, also after the client was killed."""
    federation = until("signatures")
    federation.answer(VICTIM, "survivors", survivor_list(federation, range(5)))
    refused(federation, "conflict", federation.answer, VICTIM, "survivors", survivor_list(federation, range(4)))


def test_two_survivor_lists_for_two_halves() -> None:
    """Neither list gets the signatures of over two thirds, so nobody opens anything."""
    federation = until("signatures", clients=9)
    one, other = survivor_list(federation, range(9)), survivor_list(federation, [0, 1, 2, 3, 5, 6, 7, 8])
    signed = {number: federation.answer(f"c{number:03}", "survivors", one) for number in (0, 1, 2, 4)}
    signed |= {number: federation.answer(f"c{number:03}", "survivors", other) for number in (3, 5, 6, 7, 8)}
    everything = messages.by_number(federation.terms, {at: unpacked(data)[1] for at, data in signed.items()})
    for client in federation.terms.cohort:
        refused(federation, "quorum", federation.answer, client, "signatures", everything)


def test_a_survivor_list_without_the_client_or_with_too_few() -> None:
    """A client signs lists with itself, with enough others, and of clients that sent shares."""
    federation = Federation(terms_of(5))
    federation.until("signatures", {"c004": "shares"}, values_of(federation.terms))
    for survivors in ([1, 2, 3], [0, 1, 2], [0, 1, 2, 4], [0, 1, 2, 3, 4]):
        data = survivor_list(federation, survivors)
        refused(federation, "floor", federation.answer, VICTIM, "survivors", data)


@pytest.mark.parametrize("sharers", [4, 5])
def test_the_floor_of_a_site_binds_sharers_and_survivors(sharers: int) -> None:
    """Four of five are enough for the plan, and not for a site that wants five: its client goes no further."""
    federation = Federation(terms_of(5))
    federation.values = values_of(federation.terms)
    for client in federation.terms.cohort:
        federation.collector.add_keys(client, federation.begin(client, floors=SiteFloors(5)), NOW)
    federation.key_list = federation.collector.close_keys()
    federation._shares(federation.terms.cohort[:sharers])
    if sharers == 4:
        update = federation.deliveries[VICTIM], federation.values[VICTIM], scalars_of(VICTIM)
        refused(federation, "floor", federation.mask, VICTIM, *update)
    else:
        federation._masked(federation.terms.cohort)
        refused(federation, "floor", federation.answer, VICTIM, "survivors", survivor_list(federation, range(4)))


def test_a_false_drop_out() -> None:
    """The coordinator has a client's masked update and says that it dropped out: what is opened does not unmask it."""
    terms = terms_of(5)
    federation, values = Federation(terms), values_of(terms)
    federation.until("masked", {}, values)
    federation._masked(terms.cohort)
    kept = federation.updates.pop(VICTIM)
    collector = federation.collector
    federation.survivors = collector.close_masked(federation.updates)
    federation._signatures(collector.survivors)
    federation._openings(collector.survivors)
    assert federation.sum() == plain_sum(values, terms.cohort[1:])
    # The key of the victim is open. Its shares of the other kind are not, so its own mask stays.
    opened = collector._opened[0]
    holders = sorted(opened)
    key = recovered(weights_at_zero([holder + 1 for holder in holders]), [opened[holder] for holder in holders])
    assert key is not None
    assert public_key(key) == collector.group.members[0].mask_key
    masks = [Mask(mask.key, not mask.negative) for mask in collector._masks_with(0, key)]
    stripped = Unmasked(terms, [reader(kept)], masks)
    assert [int(value) for chunk in stripped.values() for value in chunk] != list(values[VICTIM])
    refused(federation, "floor", federation.answer, VICTIM, "survivors", federation.survivors)


def test_shares_that_only_some_are_told_of() -> None:
    """A client that is told of few sharers, or of a neighbour without its shares, makes no masked update."""
    federation = until("masked")
    whole = messages.Delivery.from_bytes(federation.terms, federation.deliveries[VICTIM], 5)
    few = messages.Delivery((0, 1, 2), {number: whole.shares[number] for number in (1, 2)})
    lacking = replace(whole, shares={number: whole.shares[number] for number in (1, 2, 3)})
    for delivery, reason in ((few, "floor"), (lacking, "signature")):
        data = delivery.to_bytes(federation.terms)
        refused(federation, reason, federation.mask, VICTIM, data, federation.values[VICTIM], [1, 7])


# Signatures


def test_nothing_is_opened_without_a_quorum() -> None:
    """Missing signatures, those of another list, foreign ones, and one client's in the place of others."""
    federation = until("openings")
    good = messages.parse_by_number(federation.terms, federation.signatures, 5, (1, 1024))
    message = federation.collector.group.signed((0, 1, 2, 3, 4), (0, 1, 2, 3))
    cases = [
        {number: good[number] for number in (0, 1, 2)},
        {**good, 2: good[0], 3: good[0]},
        {**good, 3: signer("c003", "Coordinator").sign(message), 4: b"no signature"},
        {number: signer(f"c{number:03}").sign(message) for number in range(5)},
    ]
    for signatures in cases:
        data = messages.by_number(federation.terms, signatures)
        refused(federation, "quorum", federation.answer, VICTIM, "signatures", data)


def test_nothing_is_opened_before_the_client_signed() -> None:
    """Signatures of others do not replace its own check of the survivor list."""
    federation = until("signatures")
    for client in federation.terms.cohort[1:]:
        federation.collector.add_signature(client, federation.answer(client, "survivors", federation.survivors))
    signatures = federation.collector.close_signatures()
    refused(federation, "place", federation.answer, VICTIM, "signatures", signatures)


# Repeats


def test_repeated_messages_get_the_same_answers() -> None:
    """Every exchange may come again, in any order, and after the client was killed."""
    federation = until("end")
    first = Federation(federation.terms, states=dict(federation.states))
    again = [
        first.begin(VICTIM),
        first.answer(VICTIM, "key_list", federation.key_list),
        first.mask(VICTIM, federation.deliveries[VICTIM], federation.values[VICTIM], scalars_of(VICTIM)),
        first.answer(VICTIM, "survivors", federation.survivors),
        first.answer(VICTIM, "signatures", federation.signatures),
    ]
    assert first.states[VICTIM] == federation.states[VICTIM]
    collector = federation.collector
    assert again[0] == collector._keys[VICTIM]
    assert again[1] == collector._shares[0]
    assert again[2] == federation.updates[VICTIM]
    assert unpacked(again[3])[1] == collector._signatures[0]
    assert again[4] == collector._openings[0]


def test_other_numbers_than_those_released() -> None:
    """Two updates under the same masks differ by what they hide."""
    federation = until("signatures")
    other = values_of(federation.terms, seed=1)[VICTIM]
    refused(federation, "conflict", federation.mask, VICTIM, federation.deliveries[VICTIM], other, [1, 7])


def test_messages_of_another_attempt() -> None:
    """A message names its terms, so one of another attempt is none of this."""
    first, second = until("end", terms=terms_of(5)), until("coins", terms=terms_of(5, attempt=1))
    for stage in ("key_list", "survivors", "signatures"):
        data = getattr(first, stage) or first.key_list
        refused(second, "signature", second.answer, VICTIM, stage, data)


def test_another_cohort_before_anything_was_released() -> None:
    """An attempt may be abandoned for another one with fresh keys; the old one is then over."""
    federation = until("masked")
    later = terms_of(["c000", "c001", "c002", "c007"], attempt=1)
    assert federation.begin(VICTIM, later) != federation.collector._keys[VICTIM]
    refused(federation, "cohort", federation.begin, VICTIM)  # its own first attempt again


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        (terms_of(["c000", "c002", "c003", "c004"], attempt=1), "cohort"),
        (terms_of(5, attempt=1), "cohort"),
        (terms_of(5, attempt=1, settings=Settings(suite="chacha20")), "cohort"),
    ],
    ids=["another cohort", "the same cohort in another attempt", "other settings"],
)
def test_a_second_sum_of_one_round(terms: Terms, reason: str) -> None:
    """A sum over another cohort would reveal one client by subtraction, since its work is deterministic."""
    federation = until("signatures")
    refused(federation, reason, federation.begin, VICTIM, terms, b"other work")
    killed = Federation(federation.terms, states=federation.states)
    refused(killed, reason, killed.begin, VICTIM, terms, b"other work")


def test_an_earlier_round() -> None:
    """After an answer in round 3, round 2 is over, and so is an earlier draw."""
    federation = until("coins", terms=terms_of(5, round_=3, draw=1))
    for terms in (terms_of(5, round_=2, draw=5), terms_of(5, round_=3)):
        refused(federation, "place", federation.begin, VICTIM, terms)
    other_run = replace(federation.terms, place=replace(federation.terms.place, run="another"))
    refused(federation, "place", federation.begin, VICTIM, other_run)


def test_the_same_work_in_another_round() -> None:
    """A redrawn round has new batches. The same model with the same seed again is the same update."""
    federation = until("signatures")
    for terms in (terms_of(5, draw=1), terms_of(5, round_=1)):
        refused(federation, "work", federation.begin, VICTIM, terms)
    federation.begin(VICTIM, terms_of(5, draw=1), b"another seed")


def test_the_work_of_a_round_long_ago() -> None:
    """Thousands of updates later a device knows it still; its state stays small."""
    federation = until("masked")
    member = federation.member(VICTIM)
    member._works = [bytes([7] * 32).hex(), *(f"{number:032x}" for number in range(KEPT_WORKS - 2))]
    federation.states[VICTIM] = member.to_bytes()
    federation._masked(federation.terms.cohort)
    refused(federation, "work", federation.begin, VICTIM, terms_of(5, round_=1), bytes([7] * 32))
    assert len(federation.member(VICTIM)._works) == KEPT_WORKS
    assert len(federation.states[VICTIM]) < 170_000


def test_other_work_under_the_same_terms() -> None:
    """The work that counts is the last one before the masked update: it is not released again in another draw.

    After the update the terms stand for its work alone, so a second one is not even trained.
    """
    federation = until("masked")
    keys = federation.begin(VICTIM)
    assert federation.begin(VICTIM, None, b"another seed") == keys
    federation._masked(federation.terms.cohort)
    refused(federation, "work", federation.begin, VICTIM, terms_of(5, draw=1), b"another seed")
    refused(federation, "work", federation.begin, VICTIM, None, b"a third seed")
    assert federation.begin(VICTIM, None, b"another seed") == keys


# The circle


def test_other_coins() -> None:
    """The order of the circle comes from coins that were committed to before anybody knew another's."""
    federation = until("shares", clients=21)
    digest, first, *others = unpacked(federation.coins)
    data = packed(digest, first, bytes(32), *others[1:])
    refused(federation, "signature", federation.answer, VICTIM, "coins", data)


# Messages that are none


@pytest.mark.parametrize("stage", ["key_list", "coins", "survivors", "signatures"])
@pytest.mark.parametrize("data", [b"", b"\0", b"\xff" * 40, packed(b"x", b"y")], ids=repr)
def test_malformed_messages(stage: str, data: bytes) -> None:
    """They are refused, whatever was answered before."""
    for federation in (until("coins"), until("openings")):
        refused(federation, "signature", federation.answer, VICTIM, stage, data)


def test_messages_before_their_stage() -> None:
    """A client without an attempt, without shares, without a masked update."""
    federation = until("masked")
    ready = messages.message(federation.terms, *range(5))
    refused(federation, "place", federation.answer, VICTIM, "survivors", ready)
    refused(federation, "place", federation.answer, VICTIM, "signatures", ready)
    with pytest.raises(Refused, match="terms"):
        Member(VICTIM, RUN).answer_coins(ready)
