"""The client's side: a state machine without I/O, one for each run.

The caller writes `to_bytes` durably after each method and before its answer leaves the device. So a client that is
killed anywhere gives the same answers again, and whatever a coordinator asks:

- A place gets one masked update. After it, every other attempt, cohort and earlier place is refused, and so is the same
  work in another place.
- One survivor list is signed. Of each neighbour one kind of share is opened, as that list says: the self mask of a
  survivor, the key of one that dropped out.
- Shares are opened when more than two thirds of the members have signed that list.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy.typing as npt

from fl_common.secure_aggregation import messages
from fl_common.secure_aggregation.attempt import Attempt, digest_of_numbers
from fl_common.secure_aggregation.errors import BadSignature, PlanError, Refused
from fl_common.secure_aggregation.fields import digest_of, packed, unpacked
from fl_common.secure_aggregation.masks import masked
from fl_common.secure_aggregation.signatures import Signer, Trust
from fl_common.secure_aggregation.terms import Place, SiteFloors, Terms

KEPT_WORKS, _WORK_DIGITS = 4096, 32
"""Updates of a run whose work is remembered, and the hexadecimal digits of each: 150 kB in the state."""
_VERSION = 1
_LEAST = SiteFloors()


class Member:
    """One client in the secure aggregations of one run."""

    def __init__(self, client: str, run: str, *, restored: bool = False) -> None:
        """restored: the state directory was restored from a copy, so what was answered since is unknown."""
        self._client, self._run, self._restored = client, run, restored
        self._last: tuple[int, ...] = ()
        """The round, draw and exchange of the latest place that was answered."""
        self._barred = -1
        """No round up to this one is answered."""
        self._works: list[str] = []
        """The works whose masked updates were released, the latest ones."""
        self._attempt: Attempt | None = None

    def to_bytes(self) -> bytes:
        """The whole state. Whoever reads it can compute the client's masks of the attempt under way."""
        head = {
            "version": _VERSION, "client": self._client, "run": self._run, "restored": self._restored,
            "last": self._last, "barred": self._barred, "works": self._works,
        }  # fmt: skip
        return packed(json.dumps(head), b"" if self._attempt is None else self._attempt.to_bytes())

    @staticmethod
    def from_bytes(state: bytes, *, restored: bool = False) -> Member:
        """The member of `to_bytes`. Raises ValueError for anything else.

        restored: as in the constructor. The member then refuses the first round that it is asked for, and all before.
        """
        try:
            raw, attempt = unpacked(state, 2)
            head = json.loads(raw)
            if head["version"] != _VERSION:
                raise ValueError(f"expected version {_VERSION}, got {head['version']}")
            member = Member(head["client"], head["run"], restored=restored or head["restored"])
            member._last, member._barred = tuple(head["last"]), head["barred"]
            member._works = [work[:_WORK_DIGITS] for work in head["works"]]
            member._attempt = Attempt.from_bytes(attempt) if attempt and not restored else None
        except (KeyError, TypeError) as error:
            raise ValueError(f"expected the state of a member: {error}") from None
        return member

    @property
    def tosses_coins(self) -> bool:
        """After the key list: whether this attempt has coins, answered or not."""
        return self._attempt is not None and bool(self._attempt.key_list) and not self._attempt.group.plan.full

    def begin(self, terms: Terms, work: bytes, signer: Signer, floors: SiteFloors = _LEAST) -> bytes:
        """The key message for a new attempt, or that which was given before.

        Args:
            terms: of the attempt.
            work: digest of everything that decides the client's update, its seed included.
            signer: the client's certificate.
            floors: what the client's site asks of the terms.

        Raises:
            Refused: floor, restored, place, cohort or work. With restored the state has changed: the round is barred.
        """
        if (attempt := self._attempt) is not None and attempt.terms == terms:
            if attempt.work != work:
                self._check_work(work, attempt.released)
                self._attempt = attempt = replace(attempt, work=work)
            return attempt.keys
        self._check_place(terms)
        self._check_work(work)
        if terms.settings.max_corrupt < floors.max_corrupt:
            raise Refused(
                "floor", f"expected a max_corrupt of at least {floors.max_corrupt}, got {terms.settings.max_corrupt}"
            )
        least = max(terms.settings.min_clients, floors.min_clients)
        if len(terms.cohort) < least:
            raise Refused("floor", f"expected a cohort of at least {least} clients, got {len(terms.cohort)}")
        if self._client not in terms.cohort:
            raise Refused("cohort", f"expected a cohort with {self._client}, got one of others")
        self._attempt = replace(Attempt.begun(terms, self._client, signer), work=work, floor=least)
        self._last = _order(terms.place)
        return self._attempt.keys

    def _check_work(self, work: bytes, released: bytes = b"") -> None:
        """Raises Refused for the work of another masked update. released: in this attempt, of other work."""
        if released:
            raise Refused("work", "expected the work of the masked update that was released, got other work")
        if _name_of(work) in self._works:
            raise Refused("work", "expected new work, got that of an update which was released in another round")

    def _check_place(self, terms: Terms) -> None:
        place, attempt = terms.place, self._attempt
        if place.run != self._run:
            raise Refused("place", f"expected run {self._run}, got {place.run}")
        if self._restored:
            self._restored, self._barred = False, max(self._barred, place.round)
        if place.round <= self._barred:
            raise Refused(
                "restored",
                f"expected a round after {self._barred}, got {place.round}: the state directory was restored from a"
                " copy, so an update of this round may have been released before",
            )
        if _order(place) < self._last:
            raise Refused("place", f"expected round, draw and exchange {self._last} or later, got {_order(place)}")
        if attempt is not None and _order(place) == self._last:
            if attempt.released:
                raise Refused(
                    "cohort", f"expected attempt {attempt.terms.attempt} as before: a masked update was released in it"
                )
            if terms.attempt <= attempt.terms.attempt:
                raise Refused("cohort", f"expected an attempt after {attempt.terms.attempt}, got {terms.attempt}")

    def answer_key_list(self, data: bytes, trust: Trust, now: datetime) -> bytes:
        """The coin if coins come next, else the shares.

        Raises Refused: trust, floor, signature, conflict, place.
        """
        attempt = self._on("key_list", data)
        if not attempt.key_list:
            attempt = replace(attempt, key_list=data)
            with _refusing():
                attempt.group.check(trust, now)
            attempt.check_members()
            self._attempt = attempt
        return attempt.coin() if attempt.group.needs_coins or attempt.coins else attempt.shares()

    def answer_coins(self, data: bytes) -> bytes:
        """The shares. Raises Refused: signature, conflict, place."""
        attempt = self._on("coins", data)
        if not attempt.coins:
            if not attempt.group.needs_coins:
                raise Refused("place", "expected no coins: all members are neighbours")
            attempt = replace(attempt, coins=data)
            with _refusing():
                attempt.group.neighbours(attempt.number)
            self._attempt = attempt
        return attempt.shares()

    def mask(self, delivery: bytes, values: npt.NDArray[Any], scalars: Sequence[int] = ()) -> Iterator[bytes]:
        """The masked update, in pieces; `terms.size_bytes` together. Making them again gives the same bytes.

        Args:
            delivery: who sent shares, and the shares for this client.
            values: whole numbers [terms.values].
            scalars: whole numbers, `terms.scalars` of them.

        Raises:
            Refused: floor, signature, place; conflict, too for other numbers than those that were released.
            ValueError: another number of values or scalars.
        """
        attempt = self._on("delivery", delivery)
        terms = attempt.terms
        if values.shape != (terms.values,) or len(scalars) != terms.scalars:
            raise ValueError(
                f"expected {terms.values} values and {terms.scalars} scalars, got {values.shape} and {len(scalars)}"
            )
        numbers = digest_of_numbers(values, scalars)
        if not attempt.released:
            attempt = replace(attempt, delivery=delivery, released=numbers)
            self._check_delivery(attempt)
            self._attempt, self._works = attempt, [*self._works[1 - KEPT_WORKS :], _name_of(attempt.work)]
        elif attempt.released != numbers:
            raise Refused("conflict", "expected the numbers of the masked update that was released, got others")
        return masked(terms, values, scalars, attempt.masks())

    @staticmethod
    def _check_delivery(attempt: Attempt) -> None:
        if attempt.group.needs_coins:
            raise Refused("place", "expected the coins before the shares")
        with _refusing():
            sharers, shares = set(attempt.received.sharers), set(attempt.received.shares)
        attempt.check_left(sharers)
        if shares != sharers.intersection(attempt.group.neighbours(attempt.number)):
            raise Refused("signature", "expected the shares of each neighbour that sent some, and no others")

    def answer_survivors(self, data: bytes, signer: Signer) -> bytes:
        """The signature of the survivor list. Raises Refused: place, floor, signature, conflict."""
        attempt = self._on("survivors", data)
        if not attempt.released:
            raise Refused("place", "expected the survivor list after the masked update, which was not made")
        if not attempt.survivors:
            attempt = replace(attempt, survivors=data)
            with _refusing():
                survivors = attempt.survived
            if not set(survivors) <= set(attempt.received.sharers):
                raise Refused("floor", "expected survivors among those that sent shares, got others")
            attempt.check_left(survivors)
            self._attempt = attempt = replace(attempt, signature=signer.sign(attempt.to_sign))
        return messages.message(attempt.terms, attempt.signature)

    def answer_signatures(self, data: bytes) -> bytes:
        """The opened shares. They follow from the survivor list, whichever signatures prove it.

        Raises Refused: place, quorum, signature.
        """
        attempt = self._on("opened", data)
        if not attempt.survivors:
            raise Refused("place", "expected the survivor list before the signatures")
        if not attempt.opened:
            with _refusing():
                attempt.check_quorum(data)
            self._attempt = attempt = replace(attempt, opened=digest_of("signatures", data))
        return attempt.opening()

    def _on(self, stage: str, data: bytes) -> Attempt:
        """The attempt that a message belongs to. Raises Refused if another message of its stage was answered."""
        attempt = self._attempt
        if attempt is None:
            raise Refused("place", "expected the terms of a secure aggregation first")
        with _refusing():
            messages.fields_of(attempt.terms, data)
        known = getattr(attempt, stage)
        if known and known != data and stage != "opened":
            raise Refused("conflict", f"expected the message that was answered before as {stage}, got another one")
        return attempt


@contextmanager
def _refusing() -> Iterator[None]:
    """Refuse a message of the coordinator that is malformed, belongs to other terms, or proves nothing."""
    try:
        yield
    except BadSignature as error:
        raise Refused("trust", str(error)) from None
    except PlanError as error:
        raise Refused("floor", str(error)) from None
    except ValueError as error:
        raise Refused("signature", str(error)) from None


def _name_of(work: bytes) -> str:
    return work.hex()[:_WORK_DIGITS]


def _order(place: Place) -> tuple[int, ...]:
    return (place.round, place.draw, place.exchange)
