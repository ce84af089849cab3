"""A client that is killed at any write gives the same answers, and one whose state is an old copy gives none."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from fl_common.secure_aggregation import messages
from fl_common.secure_aggregation.errors import Refused
from fl_common.secure_aggregation.member import Member
from tests.fl_common.secure_aggregation.federation import (
    NOW,
    RUN,
    Federation,
    plain_sum,
    signer,
    terms_of,
    trust,
    values_of,
)

CLIENT = "c001"


class Killed(Federation):
    """Every client dies before or after each of its writes, as a seed decides, and is asked again."""

    def __post_init__(self) -> None:
        """See `Federation`."""
        super().__post_init__()
        self.draw = random.Random(len(self.terms.cohort))
        self.writes = True
        """Whether a client lives until its state is durable."""

    def _kept(self, member: Member, client: str, answer: bytes) -> bytes:
        if self.writes:
            self.states[client] = member.to_bytes()
        return answer

    def begin(self, client: str, *arguments: object) -> bytes:
        """See `Federation`."""
        return self._twice(lambda: super(Killed, self).begin(client, *arguments))  # type: ignore[arg-type]

    def answer(self, client: str, stage: str, data: bytes) -> bytes:
        """See `Federation`."""
        return self._twice(lambda: super(Killed, self).answer(client, stage, data))

    def mask(self, client: str, *arguments: object) -> bytes:
        """See `Federation`."""
        return self._twice(lambda: super(Killed, self).mask(client, *arguments))  # type: ignore[arg-type]

    def _twice(self, ask: Callable[[], bytes]) -> bytes:
        """The answer after a kill: before the write, so that nobody has seen the first one, or after it."""
        self.writes = self.draw.random() < 0.5
        written, first = self.writes, ask()
        self.writes = True
        again = ask()
        assert again == first or not written
        return again


@pytest.mark.parametrize("clients", [3, 5, 21])
def test_kills_at_every_write(clients: int) -> None:
    """The sum is right, and no client gave two answers to one message."""
    terms = terms_of(clients)
    values = values_of(terms)
    assert Killed(terms).until("end", {}, values) == plain_sum(values, terms.cohort)


# Old copies of the state directory


def backups() -> tuple[Federation, list[bytes | None]]:
    """A federation at its end, and the client's states after each of its answers; None: before the first."""
    federation = Federation(terms_of(5))
    kept: list[bytes | None] = [None]
    for stage in ("coins", "masked", "signatures", "openings", "end"):
        federation = Federation(terms_of(5))
        federation.until(stage, {}, values_of(federation.terms))
        kept.append(federation.states[CLIENT])
    return federation, kept


def member_of(state: bytes | None) -> Member:
    """The client whose state directory was restored from a copy."""
    return Member(CLIENT, RUN, restored=True) if state is None else Member.from_bytes(state, restored=True)


@pytest.mark.parametrize("number", range(6))
def test_an_old_copy_of_the_state_refuses_the_round(number: int) -> None:
    """Whatever it had answered when the copy was made; also the same attempt, and after another restart."""
    federation, kept = backups()
    for terms in (terms_of(["c000", "c001", "c003", "c004"], attempt=1), federation.terms):
        member = member_of(kept[number])
        for _ in range(2):
            with pytest.raises(Refused) as refusal:
                member.begin(terms, b"work", signer(CLIENT))
            assert refusal.value.reason == "restored"
            member = Member.from_bytes(member.to_bytes())


@pytest.mark.parametrize("number", range(6))
def test_an_old_copy_of_the_state_answers_no_message_of_the_round(number: int) -> None:
    """It may have signed another list and opened other shares since."""
    federation, kept = backups()
    member = member_of(kept[number])
    asks: list[Callable[[], object]] = [
        lambda: member.answer_key_list(federation.key_list, trust(), NOW),
        lambda: member.mask(federation.deliveries[CLIENT], federation.values[CLIENT], [2, 7]),
        lambda: member.answer_survivors(federation.survivors, signer(CLIENT)),
        lambda: member.answer_signatures(federation.signatures),
    ]
    for ask in asks:
        with pytest.raises(Refused, match="terms"):
            ask()


def test_the_next_round_goes_on() -> None:
    """A restored client sits out one round of a run."""
    federation, kept = backups()
    member = member_of(kept[3])
    with pytest.raises(Refused):
        member.begin(terms_of(5, round_=7), b"work", signer(CLIENT))
    for round_ in (0, 6, 7):
        with pytest.raises(Refused, match="restored from a copy"):
            member.begin(terms_of(5, round_=round_, draw=9), b"work", signer(CLIENT))
    later = Federation(terms_of(5, round_=8), states={**federation.states, CLIENT: member.to_bytes()}, work=b"8")
    values = values_of(later.terms)
    assert later.until("end", {}, values) == plain_sum(values, later.terms.cohort)


@pytest.mark.parametrize("seed", range(12))
def test_no_order_of_messages_kills_and_old_copies_opens_both_kinds_of_shares(seed: int) -> None:
    """All other clients help the coordinator and sign two lists; one of these says that c004 dropped out.

    The client is killed before and after its writes, and its directory is replaced by old copies of it.
    """
    draw, federation = random.Random(seed), Federation(terms_of(5))
    federation.until("signatures", {}, values_of(federation.terms))
    group, others = federation.collector.group, federation.terms.cohort
    lists = [messages.message(federation.terms, *range(count)) for count in (5, 4)]
    signed = [
        messages.by_number(
            federation.terms,
            {at: signer(other).sign(group.signed(range(5), range(count))) for at, other in enumerate(others)},
        )
        for count in (5, 4)
    ]
    copies, opened, refusals = [federation.states[CLIENT]], dict[int, set[bytes]](), set[str]()
    for _ in range(40):
        before, which = federation.states[CLIENT], draw.randrange(2)
        try:
            match draw.choice(("begin", "survivors", "signatures", "signatures", "copy", "restore")):
                case "begin":
                    federation.begin(CLIENT, draw.choice((federation.terms, terms_of(5, attempt=1))))
                case "survivors":
                    federation.answer(CLIENT, "survivors", lists[which])
                case "signatures":
                    answer = federation.answer(CLIENT, "signatures", signed[which])
                    for peer, share in messages.parse_by_number(federation.terms, answer, 5, (1, 100)).items():
                        opened.setdefault(peer, set()).add(share)
                    continue  # the answer has left, so the state is on the disk
                case "copy":
                    copies.append(before)
                case "restore" if draw.random() < 0.2:
                    federation.states[CLIENT] = Member.from_bytes(draw.choice(copies), restored=True).to_bytes()
                    continue
        except Refused as refused:
            refusals.add(refused.reason)
        if draw.random() < 0.3:
            federation.states[CLIENT] = before  # killed before the write: nobody has seen the answer
    assert all(len(shares) == 1 for shares in opened.values())
    assert {"place", "conflict"} & refusals


def test_a_state_of_another_version() -> None:
    """It is not read as if it were this one."""
    state = Member(CLIENT, RUN).to_bytes()
    with pytest.raises(ValueError, match="version 1"):
        Member.from_bytes(state.replace(b'"version": 1', b'"version": 2'))
