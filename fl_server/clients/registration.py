"""Registration: checks the request, limits the rate, settles contested identities, and opens the session.

The client's record is made from the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import structlog

from fl_common.names import ID_PATTERN, check_id
from fl_common.rate_limits import TokenBucket
from fl_common.units import counted
from fl_server.audit.log import RowLimit
from fl_server.clients.attendance import Attendance
from fl_server.clients.client_records import ClientRecords
from fl_server.clients.contested_identities import ContestedIdentities
from fl_server.clients.sessions import Origin, Session, check_questions, origin_of_call
from fl_server.errors import Contested, InvalidInput, NoCommonProtocol, NotNow, one_line
from fl_server.identity import caller, require_name
from fl_server.settings.config import ServerConfig
from fl_server.store.records import ClientRecord, HistoryRecord
from protos.digests import digest_bytes, digest_text
from protos.encodings import ENCODINGS
from protos.fl.v1 import coordinator_pb2 as pb
from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN

log = structlog.get_logger()
MOST_ENTRIES = 64
"""Most entries of the other lists of a request."""
MAX_MODELS = 64
"""Released models of one device."""
MAX_DETAIL = 1000
"""Characters of a reason; what is longer is cut."""
MAX_CHARS = 256
"""Longest label, task name, device name and other text in a request."""
_END_OF_TIME = 253_402_300_800 - 86_400
"""A day before the end of the year 9999, so that the time can be shown in any zone."""
BURST_S = 2.0
"""Registrations of this many seconds may come at once."""
KEPT_S = 60.0
"""A reserved slot expires after this many seconds; the client then gets a new one."""
LONGEST_WAIT_S = 10.0
"""A client whose slot is this close waits in its call. Daemons wait 20 s; a second call would cost more."""
_EVENTS = ("client_registered", "client_back", "client_fenced", "client_contested")
"""History events that a registration can cause."""


def checked_id(client_id: str) -> str:
    """A valid client id. Raises InvalidInput."""
    try:
        return check_id("client_id", client_id)
    except ValueError as error:
        raise InvalidInput("client_id", "1 to 64 of A-Z a-z 0-9 . _ -", client_id) from error


def check_sizes(request: pb.RegisterRequest) -> None:
    """Raises InvalidInput for a request that is too large: ledger and memory keep what it has."""
    check_questions(request)
    for field in ("labels", "tasks", "methods", "encodings", "held", "packages", "package_refusals"):
        if (count := len(getattr(request, field))) > MOST_ENTRIES:
            raise InvalidInput(field, f"{MOST_ENTRIES} at most", f"{count}")
    for field, text in _texts(request):
        if len(text) > MAX_CHARS:
            raise InvalidInput(field, f"{MAX_CHARS} characters at most", f"{len(text)}")
    for offer in request.tasks:
        _check_frozen(offer)
        if len(offer.labels) > MOST_ENTRIES:
            raise InvalidInput("tasks.labels", f"{MOST_ENTRIES} at most", f"{len(offer.labels)}")
        if offer.train_batches > offer.train_examples:
            raise InvalidInput(
                "tasks.train_batches",
                f"{counted(offer.train_examples, 'batch', 'batches')} at most, as the task {offer.name!r} has "
                "so many examples to train on",
                f"{offer.train_batches}",
            )
    titles = [(offer.name, offer.data) for offer in request.tasks]
    if twice := next((title for title in titles if titles.count(title) > 1), None):
        raise InvalidInput("tasks", "each task and data once", f"task {twice[0]!r} with data {twice[1]!r} twice")
    check_availability(request.availability)


def held_resources(request: pb.RegisterRequest) -> list[bytes]:
    """Digests of the resources that the client holds. Raises InvalidInput for one that is no digest."""
    try:
        return [digest_bytes(digest) for digest in request.held]
    except ValueError as error:
        raise InvalidInput("held", "digests", str(error)) from error


def held_releases(request: pb.RegisterRequest) -> dict[str, int]:
    """The versions of released models on the client's device. Raises InvalidInput."""
    held = {release.model: release.version for release in request.releases.held}
    if len(request.releases.held) > MAX_MODELS or not all(map(ID_PATTERN.fullmatch, held)):
        came = f"{len(request.releases.held)} with the names {', '.join(sorted(held)[:5])}"
        raise InvalidInput("releases.held", f"at most {MAX_MODELS} models with names of A-Z a-z 0-9 . _ -", came)
    return held


def _check_frozen(offer: pb.TaskOffer) -> None:
    """Raises InvalidInput for frozen parameters without a digest."""
    if not offer.HasField("frozen"):
        return
    try:
        digest_bytes(offer.frozen.digest)
    except ValueError as error:
        raise InvalidInput("tasks", "frozen parameters with a digest", error) from error


def check_availability(availability: pb.Availability) -> None:
    """Raises InvalidInput for a detail that is too long, or a time after the year 9999."""
    if len(availability.detail) > MAX_CHARS:
        raise InvalidInput("availability", f"{MAX_CHARS} characters at most", f"{len(availability.detail)}")
    if not 0 <= availability.until.seconds < _END_OF_TIME:
        raise InvalidInput("availability.until", "a time up to the year 9999", f"{availability.until.seconds}")


def _texts(request: pb.RegisterRequest) -> Iterator[tuple[str, str]]:
    yield from (("packages", name) for name in request.packages)
    for refusal in request.package_refusals:
        yield from (("package_refusals", text) for text in (refusal.name, refusal.digest, refusal.rule))
    yield from (("instance_id", request.instance_id), ("software", request.software))
    yield from (("device", request.device.kind), ("device", request.device.name))
    for name, value in request.labels.items():
        yield from (("labels", name), ("labels", value))
    for offer in request.tasks:
        yield from (("tasks.data", offer.data), ("tasks.package", offer.package))
        for text in (*offer.labels.keys(), *offer.labels.values()):
            yield "tasks.labels", text
    for field in ("tasks", "methods"):
        for offer in getattr(request, field):
            for text in (offer.name, offer.fingerprint.version, offer.fingerprint.source):
                yield field, text


def unregistered(client_id: str) -> ClientRecord:
    """The record of a client that an operator names before it registers. Raises InvalidInput."""
    now = time.time()
    return ClientRecord(checked_id(client_id), registered_at=now, last_seen=now)


def common_protocol(client: pb.ProtocolRange) -> int:
    """The highest version that both sides support. Raises NoCommonProtocol."""
    highest = min(client.max, PROTOCOL_MAX)
    if highest < max(client.min, PROTOCOL_MIN) or client.min > client.max:
        raise NoCommonProtocol((client.min, client.max), (PROTOCOL_MIN, PROTOCOL_MAX))
    return highest


def record_of(
    request: pb.RegisterRequest, known: ClientRecord | None, enrolled: Mapping[str, str] | None, *, claims: bool = True
) -> ClientRecord:
    """The client's record after this registration. What operators set before stays.

    enrolled: labels of the caller's enrollment, which win over those that it claims; None: it has none. claims: whether
    claimed labels count.
    """
    now = time.time()
    base = known or ClientRecord(request.client_id, registered_at=now, last_seen=now)
    encodings = " ".join(name for name, number in ENCODINGS.items() if number in request.encodings and name != "plain")
    return replace(
        base,
        last_seen=now,
        instance_id=request.instance_id,
        software=request.software,
        labels={**(request.labels if claims else {}), **(enrolled or {})},
        enrolled=None if enrolled is None else dict(enrolled),
        device={
            "kind": request.device.kind, "name": request.device.name, "memory_bytes": request.device.memory_bytes,
        },
        tasks=[_offer(offer, encodings, _labels_of(offer, enrolled or {}, claims=claims)) for offer in request.tasks],
        methods=[
            {"name": offer.name, "version": offer.fingerprint.version, "source": offer.fingerprint.source}
            for offer in request.methods
        ],
        releases=request.HasField("releases"),
        packages=tuple(request.packages),
    )  # fmt: skip


def _offer(offer: pb.TaskOffer, encodings: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """An offer as the ledger has it.

    "frozen" is the digest of the client's own frozen parameters, if it has some; "encodings" has the names of those
    that the client knows besides plain, with spaces between; "data" and "labels" are those of one of several offers.
    """
    frozen = {"frozen": digest_text(digest_bytes(offer.frozen.digest))} if offer.HasField("frozen") else {}
    return {
        "name": offer.name, "version": offer.fingerprint.version, "source": offer.fingerprint.source,
        "train_examples": offer.train_examples, "eval_examples": offer.eval_examples,
        **({"train_batches": offer.train_batches} if offer.train_batches else {}),
        **frozen,
        **({"encodings": encodings} if encodings else {}),
        **({"data": offer.data} if offer.data else {}),
        **({"package": offer.package} if offer.package else {}),
        **({"labels": dict(labels)} if labels else {}),
    }  # fmt: skip


def _labels_of(offer: pb.TaskOffer, enrolled: Mapping[str, str], *, claims: bool) -> dict[str, str]:
    """An offer's own labels that count: they are claimed, and those of the enrollment win."""
    return {name: value for name, value in offer.labels.items() if claims and name not in enrolled}


class RegistrationLimiter:
    """Limits the rate of registrations by reserved time slots.

    A client that comes when too many have come gets a slot, and is let in at that time. A fleet that fits into
    `BURST_S` is never delayed.
    """

    def __init__(self, per_s: float) -> None:
        """per_s: registrations a second."""
        self._bucket = TokenBucket(BURST_S * per_s, per_s)
        self._slots: dict[str, float] = {}
        """Reserved slots by client, in the order of time."""

    def wait(self, client_id: str, now: float) -> float:
        """Seconds until the client's slot; 0: it may register now."""
        slot = self._slots.get(client_id)
        if slot is not None and slot > now:
            return slot - now
        if slot is not None:
            del self._slots[client_id]
            if now < slot + KEPT_S:
                return 0.0
        return self._reserve(client_id, now)

    def _reserve(self, client_id: str, now: float) -> float:
        self._expire(now - KEPT_S)
        if wait := self._bucket.spend(1.0, now):
            self._slots[client_id] = now + wait
        return wait

    def _expire(self, before: float) -> None:
        """Drop slots that were not used in time."""
        while self._slots and (first := next(iter(self._slots.items())))[1] < before:
            del self._slots[first[0]]


class Registration:
    """Registers the clients of one coordinator. Lives on the event loop."""

    def __init__(
        self, config: ServerConfig, records: ClientRecords, attendance: Attendance, contested: ContestedIdentities
    ) -> None:
        self._claims = config.enrollment is None or config.enrollment.claimed_labels
        """Whether labels that a client claims count."""
        self._limits = limits = config.limits
        self._records = records
        self._attendance, self._sessions = attendance, attendance.sessions
        self._contested = contested
        self._limiter = RegistrationLimiter(limits.registrations_per_s)
        self._history = RowLimit(limits.history_per_minute, records.write_history_later, keys=1 << 20)
        """Rows that are still being counted when the process ends are not written."""

    async def register(self, request: pb.RegisterRequest) -> tuple[Session, int]:
        """Open a session, which is closed after the grace if the client never attends. Returns it and the protocol.

        Raises InvalidInput, Forbidden, NoCommonProtocol, NotNow, Contested, StoreError.
        """
        client_id = checked_id(request.client_id)
        require_name(client_id)
        self._refuse_unwanted(client_id)
        protocol = common_protocol(request.protocol)
        check_sizes(request)
        held, releases = held_resources(request), held_releases(request)
        if not request.tasks and not request.packages:
            raise InvalidInput("tasks", "at least one task that the client can train", "none")
        await self._wait_for_slot(client_id)
        await self._settle(client_id, origin := origin_of_call(request.instance_id))
        enrolled = await self._records.enrolled_labels(caller.get().serial)
        _warn_of_claims(client_id, request.labels, enrolled or {})
        known = self._records.find(client_id)
        session, older = self._sessions.open(client_id, origin)
        session.packages = frozenset(request.packages)
        session.package_refusals = {
            refusal.digest: (refusal.rule, one_line(refusal.detail, MAX_DETAIL)) for refusal in request.package_refusals
        }
        session.releases = releases if request.HasField("releases") else None
        for digest in held:
            session.resource_sent(digest)
        try:
            await self._records.write(
                record_of(request, known, enrolled, claims=self._claims), self._history_row(session, older)
            )
        finally:  # the grace begins with the answer, also if that is an error: a slow ledger is no client's fault
            asyncio.get_running_loop().call_later(
                self._limits.reattach_grace_s, self._attendance.close_unattended, session
            )
        return session, protocol

    def forget(self, client_id: str) -> None:
        """Drop what was counted for a client."""
        for event in _EVENTS:
            self._history.forget((client_id, event))

    async def _wait_for_slot(self, client_id: str) -> None:
        """Wait until the rate limit lets the client in. Raises NotNow when that takes too long for one call."""
        while wait_s := self._limiter.wait(client_id, time.monotonic()):
            if wait_s > LONGEST_WAIT_S:
                raise NotNow("many clients register at once", wait_s, routine=True)
            await asyncio.sleep(wait_s)
            self._refuse_unwanted(client_id)

    async def _settle(self, client_id: str, newcomer: Origin) -> None:
        """Wait until no other daemon works under the identity. Raises Contested, Forbidden, NotNow."""
        while True:
            try:
                waited = await self._contested.settle(client_id, newcomer)
            except Contested:
                working = self._sessions.of(client_id)
                at_work = f"{working.instance_id} at {_place(working.origin)}" if working else ""
                detail = f"{newcomer.instance_id} at {_place(newcomer)}: {at_work} is at work"
                if row := self._passed(client_id, "client_contested", detail):
                    self._records.write_history_later(row)
                raise
            if not waited:
                return
            self._refuse_unwanted(client_id)

    def _refuse_unwanted(self, client_id: str) -> None:
        """Raises Forbidden, NotNow."""
        self._records.refuse_banned(client_id)
        if len(self._sessions) >= self._limits.max_clients and self._sessions.of(client_id) is None:
            raise NotNow(f"{counted(self._limits.max_clients, 'connected client')}, which is the limit here", 60.0)

    def _history_row(self, session: Session, older: Session | None) -> HistoryRecord | None:
        """The history row of a registration; None for a routine one."""
        client_id = session.client_id
        if older is not None and older.instance_id != session.instance_id and older.stream is not None:
            self._contested.fenced(older, session)
            new, old = session.origin.address, older.origin.address
            addresses = f" ({old} by {new})" if new or old else ""
            fenced = f"{older.instance_id} by {session.instance_id}{addresses}"
            return self._passed(client_id, "client_fenced", fenced)
        known = self._records.find(client_id)
        if known is None:
            log.info("client_registered", client=client_id)
            return _history(client_id, "client_registered", session.instance_id)
        if known.present:
            return None
        return self._passed(client_id, "client_back", session.instance_id)

    def _passed(self, client_id: str, event: str, detail: str) -> HistoryRecord | None:
        """A row of history; None if it is only counted."""
        row = _history(client_id, event, detail)
        return row if self._history.passes((client_id, event), row) else None


def _warn_of_claims(client_id: str, claimed: Mapping[str, str], enrolled: Mapping[str, str]) -> None:
    """Log labels that the client claims in place of those of its enrollment."""
    if other := sorted(name for name, value in enrolled.items() if claimed.get(name, value) != value):
        log.warning(
            "labels_overruled",
            client=client_id,
            claimed={name: claimed[name] for name in other},
            enrolled={name: enrolled[name] for name in other},
        )


def _place(origin: Origin) -> str:
    return origin.address or "an unknown address"


def _history(client_id: str, event: str, detail: str) -> HistoryRecord:
    return HistoryRecord(time.time(), f"client:{client_id}", event, client_id, detail)
