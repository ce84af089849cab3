"""Two daemons under one identity: who of them is served, and how that is seen.

A newer session fences the older one, as after a restart of the daemon. But where the older one is at work on a live
stream, the newer one is sent away for a while: a copied key, or in plain text any process, must not end the daemon that
works. Dead is told from alive by the transport: something is sent on the older stream, and a connection whose other end
is gone ends by that within seconds, at the latest by its keepalive. The newcomer waits in its call meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import structlog

from fl_server.errors import Contested
from fl_server.metrics import Metrics
from fl_server.sessions import Origin, Session, Sessions
from fl_server.store.base import ClientRecord
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()

HOLD_S = 5.0
"""So long a newcomer waits in its call for the end of the older stream."""
FIRST_WAIT_S = 2.0
PATIENT_S = 60.0
"""For so long a newcomer is asked to wait FIRST_WAIT_S only, then twice as long each time. By then the older stream of
a machine that was reset has ended: an unanswered keepalive ends it within 45 s."""
LONGEST_WAIT_S = 300.0
NOTICE_S = 15.0
"""Between two messages on the older stream that ask for a sign of life."""
QUIET_S = 900.0
"""A conflict is over when nothing was heard of it for so long: longer than either daemon waits between two tries."""
FLAPPING_S = 120.0
"""A conflict that goes on for so long is no restart of a daemon: somebody has to end one of the two."""
_RIVALS = 4
"""Newcomers of one identity whose waits are known."""


@dataclass(slots=True)
class Rival:
    """A daemon that was refused."""

    origin: Origin
    since: float
    """Of the clock that does not jump."""
    tries: int = 0
    """Behind PATIENT_S."""


@dataclass(slots=True)
class Contest:
    """A conflict over one identity, in seconds of the clock that does not jump where nothing else is said."""

    since: float
    last: float
    conflicts: int = 0
    refused: Origin | None = None
    """The last one that was sent away."""
    fenced: Origin | None = None
    """The last one that a newer session took the place of."""
    noticed: float = float("-inf")
    held: bool = False
    rivals: OrderedDict[str, Rival] = field(default_factory=OrderedDict)

    @property
    def flapping(self) -> bool:
        """Whether it has gone on for longer than a restart takes."""
        return self.last - self.since >= FLAPPING_S

    def wait_s(self, newcomer: Origin, now: float) -> float:
        """How long this newcomer is asked to wait."""
        rival = self.rivals.setdefault(newcomer.instance_id, Rival(newcomer, now))
        self.rivals.move_to_end(newcomer.instance_id)
        while len(self.rivals) > _RIVALS:
            self.rivals.popitem(last=False)
        if now - rival.since < PATIENT_S:
            return FIRST_WAIT_S
        rival.tries = min(rival.tries + 1, 16)
        return min(FIRST_WAIT_S * 2.0**rival.tries, LONGEST_WAIT_S)


class Duels:
    """Decides between a session and a newcomer of the same identity. Lives on the event loop."""

    def __init__(self, sessions: Sessions, works: Callable[[str], bool], metrics: Metrics) -> None:
        """works: whether the client has an assignment that it has not answered."""
        self._sessions, self._works, self._metrics = sessions, works, metrics
        self._proven: dict[str, str] = {}
        """By client: the instance that worked last."""
        self._contests: dict[str, Contest] = {}
        metrics.contested.set_function(lambda: float(self.flapping()))

    def read_back(self, records: Iterable[ClientRecord]) -> None:
        """After a restart: whoever was here and had worked before is known again."""
        for record in records:
            if record.present and record.updates_counted and record.instance_id:
                self._proven[record.client_id] = record.instance_id

    def proved(self, session: Session) -> None:
        """An update of this session was admitted."""
        self._proven[session.client_id] = session.instance_id

    async def settle(self, client_id: str, newcomer: Origin) -> bool:
        """Wait until the newcomer may open a session; True if that took time. Raises Contested if it has to go."""
        if not self._defended(client_id, newcomer):
            return False
        contest = self._contest(client_id)
        self._ask_for_a_sign(client_id, contest)
        if not contest.held:
            contest.held = True
            try:
                await self._end_of_the_older(client_id, newcomer)
            finally:
                contest.held = False
            if not self._defended(client_id, newcomer):
                return True
        raise self._refused(client_id, contest, newcomer)

    def fenced(self, older: Session, newer: Session) -> None:
        """A session was opened in place of one of another daemon that was attached."""
        contest = self._contest(older.client_id)
        contest.fenced = older.origin
        self._conflict(contest, "fenced")
        log.warning(
            "client_fenced", client=older.client_id, older=older.instance_id, newer=newer.instance_id,
            older_address=older.origin.address, newer_address=newer.origin.address, flapping=contest.flapping,
            todo="if that was no restart of the daemon, two daemons use one identity: `fl clients show` names both",
        )  # fmt: skip

    def contest_of(self, client_id: str) -> Contest | None:
        """What is known of conflicts over the identity since the coordinator's start."""
        return self._contests.get(client_id)

    def flapping(self) -> int:
        """Identities over which two daemons go on fighting. Any thread may ask."""
        now = time.monotonic()
        return sum(each.flapping and now - each.last < QUIET_S for each in list(self._contests.values()))

    def forget(self, client_id: str) -> None:
        """Nothing is known of the client any more."""
        self._proven.pop(client_id, None)
        self._contests.pop(client_id, None)

    def _defended(self, client_id: str, newcomer: Origin) -> bool:
        """Whether the open session is not given up for this newcomer."""
        older = self._sessions.of(client_id)
        if older is None or older.stream is None or older.instance_id == newcomer.instance_id:
            return False
        proven = self._proven.get(client_id)
        if proven == newcomer.instance_id:
            return False  # it worked here last, and was away: whoever took its place meanwhile goes
        return proven == older.instance_id or self._works(client_id)

    async def _end_of_the_older(self, client_id: str, newcomer: Origin) -> None:
        """Return when the session is not defended any more, at the latest after HOLD_S."""
        ends = time.monotonic() + HOLD_S
        while self._defended(client_id, newcomer) and (left := ends - time.monotonic()) > 0:
            older = self._sessions.of(client_id)
            if older is None or older.stream is None:
                return
            try:
                await asyncio.wait_for(older.stream.closed.wait(), left)
            except TimeoutError:
                return

    def _ask_for_a_sign(self, client_id: str, contest: Contest) -> None:
        """Send something on the older stream: where nobody is at its other end any more, that ends it."""
        now = time.monotonic()
        if now - contest.noticed < NOTICE_S:
            return
        contest.noticed = now
        text = (
            f"another daemon wants to be {client_id!r} and was told to wait, since this one is at work: if this is not "
            "a restart, the device or its key was copied; end one of the two"
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
        """The conflict that is going on, or a new one."""
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
