"""Two daemons under one identity: which of them is served, and how operators see the conflict.

A newer session fences the older one, as after a restart of the daemon. But while the older one works on a live stream,
the newer one is refused for a while: a copied key, or in plain text any process, must not end the daemon that works.
The transport shows whether the older daemon is alive: a message is sent on its stream, and a dead connection then ends
within seconds, at the latest by its keepalive. The newcomer waits in its call until then.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog

from fl_server.clients.client_records import Workers
from fl_server.clients.sessions import Origin, Session, Sessions
from fl_server.errors import Contested
from fl_server.metrics import Metrics
from fl_server.store.records import ClientRecord
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()

HOLD_S = 5.0
"""A newcomer waits in its call for the end of the older stream for this long."""
FIRST_WAIT_S = 2.0
SHORT_WAITS_S = 60.0
"""A newcomer is asked during this time to wait FIRST_WAIT_S; after it, twice as long each time. The older stream of a
machine that was reset has ended by then: an unanswered keepalive ends it within 45 s."""
LONGEST_WAIT_S = 300.0
NOTICE_S = 15.0
"""Least time between two probe messages on the older stream."""
QUIET_S = 900.0
"""A conflict is over after this time without a new attempt; either daemon waits less between two attempts."""
FLAPPING_S = 120.0
"""A conflict that lasts this long is no restart of a daemon: an operator has to end one of the two."""
_RIVALS = 4
"""Newcomers that are remembered for one identity."""


@dataclass(slots=True)
class Rival:
    """A daemon that was refused."""

    origin: Origin
    since: float
    """Monotonic seconds."""
    tries: int = 0
    """Attempts after SHORT_WAITS_S."""


@dataclass(slots=True)
class Contest:
    """A conflict over one identity. Times are monotonic seconds."""

    since: float
    last: float
    conflicts: int = 0
    refused: Origin | None = None
    """The newcomer that was refused last."""
    fenced: Origin | None = None
    """The daemon that was last replaced by a newer session."""
    probed: float = float("-inf")
    held: bool = False
    rivals: OrderedDict[str, Rival] = field(default_factory=OrderedDict)

    @property
    def flapping(self) -> bool:
        """Whether the conflict lasts longer than a restart takes."""
        return self.last - self.since >= FLAPPING_S

    def wait_s(self, newcomer: Origin, now: float) -> float:
        """Seconds that this newcomer is asked to wait."""
        rival = self.rivals.setdefault(newcomer.instance_id, Rival(newcomer, now))
        self.rivals.move_to_end(newcomer.instance_id)
        while len(self.rivals) > _RIVALS:
            self.rivals.popitem(last=False)
        if now - rival.since < SHORT_WAITS_S:
            return FIRST_WAIT_S
        rival.tries = min(rival.tries + 1, 16)
        return min(FIRST_WAIT_S * 2.0**rival.tries, LONGEST_WAIT_S)


class ContestedIdentities:
    """Decides between an open session and a newcomer of the same identity. Lives on the event loop."""

    def __init__(self, sessions: Sessions, workers: Workers, metrics: Metrics) -> None:
        self._sessions, self._workers, self._metrics = sessions, workers, metrics
        self._contests: dict[str, Contest] = {}
        metrics.contested.set_function(lambda: float(self.flapping()))

    def restore(self, records: Iterable[ClientRecord]) -> None:
        """Take over, after a restart, the instances that were present and had updates counted."""
        for record in records:
            if record.present and record.updates_counted and record.instance_id:
                self._sessions.proven[record.client_id] = record.instance_id

    async def settle(self, client_id: str, newcomer: Origin) -> bool:
        """Wait until the newcomer may open a session; True if that took time. Raises Contested if it may not."""
        if not self._defended(client_id, newcomer):
            return False
        contest = self._contest(client_id)
        self._probe(client_id, contest)
        if not contest.held:
            contest.held = True
            try:
                await self._wait_for_end(client_id, newcomer)
            finally:
                contest.held = False
            if not self._defended(client_id, newcomer):
                return True
        raise self._refused(client_id, contest, newcomer)

    def fenced(self, older: Session, newer: Session) -> None:
        """Record that a session replaced one of another daemon that was attached."""
        contest = self._contest(older.client_id)
        contest.fenced = older.origin
        self._conflict(contest, "fenced")
        log.warning(
            "client_fenced", client=older.client_id, older=older.instance_id, newer=newer.instance_id,
            older_address=older.origin.address, newer_address=newer.origin.address, flapping=contest.flapping,
            todo="if the daemon was not restarted, two daemons use one identity: `fl clients show` names both",
        )  # fmt: skip

    def contest_of(self, client_id: str) -> Contest | None:
        """The latest conflict over the identity since the coordinator's start."""
        return self._contests.get(client_id)

    def flapping(self) -> int:
        """Number of identities with a lasting conflict. Any thread may call this."""
        now = time.monotonic()
        return sum(contest.flapping and now - contest.last < QUIET_S for contest in list(self._contests.values()))

    def forget(self, client_id: str) -> None:
        """Drop all that is known of the client."""
        self._contests.pop(client_id, None)

    def _defended(self, client_id: str, newcomer: Origin) -> bool:
        """Whether the open session is kept against this newcomer."""
        older = self._sessions.of(client_id)
        if older is None or older.stream is None or older.instance_id == newcomer.instance_id:
            return False
        proven = self._sessions.proven.get(client_id)
        if proven == newcomer.instance_id:
            return False  # the newcomer is the daemon that worked last; the other took its place while it was away
        return proven == older.instance_id or bool(self._workers.run_of(client_id))

    async def _wait_for_end(self, client_id: str, newcomer: Origin) -> None:
        """Return when the session is no longer defended, at the latest after HOLD_S."""
        ends = time.monotonic() + HOLD_S
        while self._defended(client_id, newcomer) and (left := ends - time.monotonic()) > 0:
            older = self._sessions.of(client_id)
            if older is None or older.stream is None:
                return
            try:
                async with asyncio.timeout(left):
                    await older.stream.closed.wait()
            except TimeoutError:
                return

    def _probe(self, client_id: str, contest: Contest) -> None:
        """Send a message on the older stream: this ends the stream of a dead daemon."""
        now = time.monotonic()
        if now - contest.probed < NOTICE_S:
            return
        contest.probed = now
        text = (
            f"another daemon tried to register as {client_id!r} and was asked to wait, because this one is at work: "
            "if this is not a restart, the device or its key was copied; end one of the two"
        )
        self._sessions.push(client_id, pb.AttendResponse(notice=pb.Notice(text=text)))

    def _refused(self, client_id: str, contest: Contest, newcomer: Origin) -> Contested:
        contest.refused = newcomer
        self._conflict(contest, "refused")
        wait_s = contest.wait_s(newcomer, contest.last)
        older = self._sessions.of(client_id)
        log.warning(
            "client_contested", client=client_id, at_work=older.instance_id if older else "",
            refused=newcomer.instance_id, address_at_work=older.origin.address if older else "",
            address_refused=newcomer.address, flapping=contest.flapping, wait_s=wait_s,
            todo="two daemons use one identity: end one of them; `fl clients show` names both",
        )  # fmt: skip
        return Contested(client_id, wait_s)

    def _contest(self, client_id: str) -> Contest:
        """The current conflict over the identity, or a new one."""
        now, known = time.monotonic(), self._contests.get(client_id)
        if known is None or (now - known.last >= QUIET_S and not known.held):
            before = known
            known = self._contests[client_id] = Contest(now, now)
            if before is not None:
                known.refused, known.fenced = before.refused, before.fenced
        return known

    def _conflict(self, contest: Contest, outcome: str) -> None:
        contest.last = time.monotonic()
        contest.conflicts += 1
        self._metrics.identity_conflicts.labels(outcome).inc()
