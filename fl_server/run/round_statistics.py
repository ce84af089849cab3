"""What is counted in a run: what became of the clients of a round, their transfers, and the run's bytes."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from fl_common.units import counted
from fl_server.rounds.state import RoundState

SECURE_STAGES = ("members", "sharers", "survivors", "signers", "dropped", "threshold")
"""What is counted of a round with secure aggregation: clients by the stage that they completed; those of the cohort
that are no survivors; shares for a secret."""
MOST_STALE = 17
"""Updates staler than 16 rounds are counted together."""


@dataclass(slots=True)
class RoundStatistics:
    """Counts and norms from one commit to the next, since the coordinator's start; or a run's totals, without norms."""

    norms: dict[str, float] = field(default_factory=dict)
    """L2: "update", "update_smallest", "update_largest", "aggregate", "direction"."""
    cosine: float | None = None
    """Between the model's movement and minus the direction; None without a direction."""
    assignments: Counter[str] = field(default_factory=Counter)
    """The number of assignments by final state."""
    refused: Counter[str] = field(default_factory=Counter)
    """Refused updates by reason."""
    staleness: Counter[int] = field(default_factory=Counter)
    """Updates by the number of rounds since their model, up to MOST_STALE."""
    seconds: dict[str, float] = field(default_factory=dict)
    """The seconds by phase."""
    secure: dict[str, int] = field(default_factory=dict)
    """With secure aggregation: see SECURE_STAGES."""
    quorum_missed: int = 0
    """Attempts that closed with fewer updates than the quorum."""
    short: int = 0
    """Rounds that were committed with fewer updates than they wanted."""
    why_short: str = ""
    """The latest such round, with what its failures have in common."""

    def add(self, other: RoundStatistics) -> None:
        """Add the counts of another round."""
        self.assignments.update(other.assignments)
        self.refused.update(other.refused)
        self.staleness.update(other.staleness)
        for phase, seconds in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self.quorum_missed += other.quorum_missed
        self.short += other.short
        self.why_short = other.why_short or self.why_short

    def to_text(self) -> str:
        """The statistics as JSON, without empty fields: a run may have 100,000 rounds."""
        values = {field_.name: getattr(self, field_.name) for field_ in fields(self)}
        kept = {name: value for name, value in values.items() if value not in ({}, None, "")}
        return json.dumps(kept, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Self:
        """The statistics that `to_text` wrote."""
        values = json.loads(text) if text else {}
        staleness = {int(rounds): count for rounds, count in values.get("staleness", {}).items()}
        counts: dict[str, Any] = {name: Counter(values.get(name)) for name in ("assignments", "refused")}
        return cls(**{**values, **counts, "staleness": Counter(staleness)})


_LONGEST = 500
"""Characters of a reason."""


def wanted_updates(state: RoundState) -> int:
    """The updates that a round wants, whatever the size of its cohort or of its last exchange is."""
    policy = state.policy
    if policy.buffered:
        return state.goal
    if policy.private:
        return len(state.drawn)
    return max(state.goal, policy.clients_per_round) if policy.sampling == "fixed" else state.goal


def why_short(state: RoundState, outs: Mapping[str, tuple[str, str]], without: str) -> str:
    """Why the closed round has fewer updates than it wants, with what the failures have in common; empty if it has all.

    Args:
        state: of the round.
        outs: (final state, reason) of the clients that did not deliver, by client.
        without: the clients without which the run goes on, as a sentence.
    """
    accepted, wanted = len(state.accepted), wanted_updates(state)
    if accepted >= wanted:
        return ""
    delivered = {client for client, _ in state.accepted}
    missing = [out for client, out in outs.items() if client not in delivered]
    kinds = Counter(kind for kind, _ in missing)
    text = f"round {state.round} has {accepted} of {counted(wanted, 'update')}"
    if kinds:
        text += ": " + ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))
        why, count = Counter(why for _, why in missing).most_common(1)[0]
        text += f"; {count} of them: {why}" if count > 1 or len(missing) == 1 else f"; one of them: {why}"
    return "; ".join(filter(None, (text, without)))[:_LONGEST]


@dataclass(slots=True)
class ClientTransfer:
    """The newest transfer of a client to or from this process."""

    direction: Literal["down", "up"]
    size: int
    """Bytes of the whole."""
    done: int
    """Bytes of it that the receiver has."""
    open: bool = True
    changed: float = field(default_factory=time.monotonic)
    """When it began or ended, by the monotonic clock."""


@dataclass(slots=True)
class ClientTransfers:
    """The clients of the round under way. Lives on the event loop."""

    newest: dict[str, ClientTransfer] = field(default_factory=dict)
    """Each client's newest transfer."""
    outs: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Client -> the state in which its assignment ended without an admitted update, and why."""
    ready: dict[str, float] = field(default_factory=dict)
    """When each client had its assignment and what it fetches for it, by the monotonic clock."""
    worked: dict[str, float] = field(default_factory=dict)
    """Client -> seconds until the begin of its first upload."""
    moved: dict[str, float] = field(default_factory=dict)
    """Client -> seconds of its transfers that have ended."""
    unknown: frozenset[str] = frozenset()
    """Clients that worked for this exchange when the coordinator started: what they fetched before is not known."""
    _exchange: tuple[int, int] | None = None
    """Round and exchange of all this."""

    @contextmanager
    def transfer(self, client: str, direction: Literal["down", "up"], size: int, done: int) -> Iterator[ClientTransfer]:
        """A transfer for the exchange under way, for as long as the block lasts; the caller adds to `done`."""
        transfer = self.newest[client] = ClientTransfer(direction, size, done)
        began = transfer.changed
        if direction == "up" and client in self.ready:
            self.worked.setdefault(client, began - self.ready[client])
        try:
            yield transfer
        finally:
            transfer.open, transfer.changed = False, time.monotonic()
            self.moved[client] = self.moved.get(client, 0.0) + transfer.changed - began
            if direction == "down":
                self.ready[client] = transfer.changed

    def assigned(self, client: str) -> None:
        """The client's assignment is sent. It is ready unless it fetches something first."""
        if client not in self.unknown:
            self.ready.setdefault(client, time.monotonic())

    def seconds(self, client: str) -> tuple[float | None, float | None]:
        """Seconds of the client's work and of its transfers in this exchange; None for one that is not known."""
        return self.worked.get(client), None if client in self.unknown else self.moved.get(client)

    def forget(self, clients: Iterable[str]) -> None:
        """These clients begin other work."""
        for client in clients:
            for values in (self.newest, self.outs, self.ready, self.worked, self.moved):
                values.pop(client, None)
        self.unknown = self.unknown.difference(clients)

    def begin(self, round_: int, exchange: int) -> None:
        """An attempt begins: the first one of an exchange, or another one, in which the clients go on."""
        if (round_, exchange) != self._exchange:
            self.clear()
            self._exchange = round_, exchange

    def resume(self, round_: int, exchange: int, working: Iterable[str]) -> None:
        """The coordinator started while these clients worked for an exchange."""
        self._exchange, self.unknown = (round_, exchange), frozenset(working)

    def clear(self) -> None:
        """The round is over, or begins again."""
        for values in (self.newest, self.outs, self.ready, self.worked, self.moved):
            values.clear()
        self.unknown, self._exchange = frozenset(), None


@dataclass(slots=True)
class RunBytes:
    """Tensor bytes down and up, which never fall. Lives on the event loop."""

    total_down: int = 0
    """Since the run was created."""
    total_up: int = 0
    _committed_down: int = 0
    """The bytes of the committed rounds."""
    _committed_up: int = 0
    _recorded_down: int = 0
    """Bytes of the exchange under way that the last stop recorded and that no client's progress accounts for yet."""
    _recorded_up: int = 0
    _per_client: int = 0
    """Bytes down to a client for the exchange under way, if that exchange began before the last start; else 0."""
    _downloading: set[str] = field(default_factory=set)
    """Clients that fetch the model of the round under way from this process."""
    _uploading: set[str] = field(default_factory=set)
    """Clients that send their update of it to this process."""

    def commit(self, down: int, up: int) -> None:
        """A round was committed, and all committed rounds have so many bytes. The clients begin anew."""
        self.restore(down, up)
        self._per_client = self._recorded_down = self._recorded_up = 0
        self._downloading.clear()
        self._uploading.clear()

    def restore(self, down: int, up: int) -> None:
        """The committed rounds have so many bytes. What came after a round's record was made belongs to the next."""
        self._committed_down, self._committed_up = down, up
        self.total_down, self.total_up = max(self.total_down, down), max(self.total_up, up)

    def resume_exchange(self, per_client: int, delivered: Iterable[tuple[str, int]]) -> None:
        """Count an exchange that was under way when the coordinator stopped.

        Each client of `delivered`, (client, bytes of its update), had also fetched `per_client` bytes before.
        """
        self._per_client = per_client
        for client, size in delivered:
            self._count_up(size)
            self.upload_completed(client)

    def resume(self, down: int, up: int) -> None:
        """Count at least the bytes that the run's record has, after those that the ledger's updates account for.

        A record is written at a stop and every few seconds. Bytes that a client's progress shows are a part of them.
        """
        self._recorded_down, self._recorded_up = max(0, down - self.total_down), max(0, up - self.total_up)
        self.total_down += self._recorded_down
        self.total_up += self._recorded_up

    def download_started(self, client: str, offset: int) -> None:
        """A client fetches the model from an offset on. What it fetched before a restart is counted here."""
        self._count_down(offset if self._per_client and client not in self._downloading else 0)
        self._downloading.add(client)

    def upload_started(self, client: str, offset: int) -> None:
        """A client sends its update from an offset on. What it sent before a restart is counted here."""
        self._count_up(offset if self._per_client and client not in self._uploading else 0)
        self._uploading.add(client)

    def upload_completed(self, client: str) -> None:
        """A client has sent its whole update. If it fetched nothing since a restart, it fetched before it."""
        self._count_down(self._per_client if client not in self._downloading else 0)
        self._downloading.add(client)

    def _count_down(self, before: int) -> None:
        """Count bytes from before a restart, unless they are among the recorded ones."""
        known = min(before, self._recorded_down)
        self._recorded_down -= known
        self.total_down += before - known

    def _count_up(self, before: int) -> None:
        known = min(before, self._recorded_up)
        self._recorded_up -= known
        self.total_up += before - known

    @property
    def total(self) -> tuple[int, int]:
        """Bytes down and up since the run was created, including the round under way."""
        return self.total_down, self.total_up

    @property
    def down(self) -> int:
        """Bytes down since the last commit."""
        return self.total_down - self._committed_down

    @property
    def up(self) -> int:
        """Bytes up since the last commit."""
        return self.total_up - self._committed_up
