"""Which clients a run may draw: those that are present, willing, not quarantined, and work for no other run."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Literal

import structlog

from fl_common.rate_limits import TokenBuckets
from fl_common.units import duration
from fl_server.clients.attendance import Attendance, Roster
from fl_server.clients.client_records import ClientRecords, Workers
from fl_server.clients.draw_rules import Candidate, Requirements, Selection, able, offer_for
from fl_server.clients.quarantine import Quarantine
from fl_server.store.records import ClientRecord
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()

_MAY_TRAIN = pb.Availability(may_train=True)
Pairs = Mapping[str, str]
Work = Literal["training", "evaluation"]
_Key = tuple[tuple[tuple[str, str], ...], ...]
"""Requirements that can be hashed."""
MOST_KINDS = 64
"""Different tasks and labels whose clients are kept. Those that were asked for longest ago are found again."""


class Eligibility:
    """Decides who may be drawn. Lives on the event loop."""

    def __init__(
        self, records: ClientRecords, attendance: Attendance, quarantine: Quarantine, returns: TokenBuckets
    ) -> None:
        """returns: how often a client may report that it may train again."""
        self._records = records.in_memory()
        self._attendance = attendance
        self._quarantine = quarantine
        self.workers = Workers(records.changes)
        """The run that each client works for."""
        self._changes = records.changes
        self._returns = returns
        self._delayed: dict[str, asyncio.TimerHandle] = {}
        """Timers of reports "may train again" that came too soon after earlier ones."""
        self._quarantine_ends: dict[str, asyncio.TimerHandle] = {}
        self._availability: dict[str, pb.Availability] = {}
        self.policy = PolicyRefusals()
        self._able = AbleClients(attendance.roster, self)
        records.watch(self._able.changed)
        attendance.roster.watch(self._able.changed)

    def selection(
        self, run_id: str, requires: Requirements, own: Mapping[str, Mapping[str, str]] = MappingProxyType({})
    ) -> Selection:
        """What a run asks of clients now. own: the clients that the run itself keeps out, by reason, with details."""
        quarantined = {
            client: f"for {duration(round(self._quarantine.seconds_left(client)))} more"
            for client in self._quarantine.clients()
        }
        at_work = {client: f"run {of}" for client, of in self.workers.of_others(run_id)}
        kept_out = {"quarantined": quarantined, "policy": self.policy.of(run_id), "at_work": at_work, **own}
        return Selection(requires, run_id, {reason: clients for reason, clients in kept_out.items() if clients})

    def eligible(self, selection: Selection) -> tuple[str, ...]:
        """Clients that a run may draw now, in the order of id bytes: no rule of client or run keeps them out."""
        able_now, kept_out = self._able.of(selection.requires), selection.kept_out.values()
        if not kept_out:
            return able_now
        return tuple(client for client in able_now if not any(client in clients for clients in kept_out))

    def evaluators(self, task: Pairs, labels: Pairs) -> tuple[str, ...]:
        """Clients with held-out examples of the task, whichever run they work for, in the order of id bytes."""
        requires = Requirements(task, labels)

        def examples(client_id: str) -> int:
            offer = offer_for(requires, self._records[client_id])
            return 0 if offer is None else int(offer["eval_examples"])

        return tuple(client_id for client_id in self.able_clients(requires) if examples(client_id))

    def able_clients(self, requires: Requirements) -> tuple[str, ...]:
        """Clients that could be drawn if they worked for no other run, in the order of id bytes."""
        clients, quarantined = self._able.of(requires), set(self._quarantine.clients())
        return tuple(client_id for client_id in clients if client_id not in quarantined) if quarantined else clients

    def candidate(self, client_id: str) -> Candidate | None:
        """A client as the rules of drawing see it; None if it never registered, or was forgotten."""
        record = self._records.get(client_id)
        return None if record is None else self._candidate(record, self._attendance.last_seen(record))

    def _candidate(self, record: ClientRecord, last_seen: float = 0.0) -> Candidate:
        client_id = record.client_id
        return Candidate(record, client_id in self._attendance.roster, self.availability(client_id), last_seen)

    def is_able(self, client_id: str, requires: Requirements) -> bool:
        """Whether the client is able by all rules about the client alone."""
        record = self._records.get(client_id)
        return record is not None and able(Selection(requires), self._candidate(record))

    def registered(self, request: pb.RegisterRequest) -> None:
        """Take the availability from a registration. A client that reports none may train."""
        self._cancel_delayed(request.client_id)
        self._clear_policy(request.client_id)
        reported = request.availability if request.HasField("availability") else _MAY_TRAIN
        self._report(request.client_id, reported)

    def set_availability(self, client_id: str, availability: pb.Availability) -> None:
        """Take a client's report.

        "May not train" takes effect at once. "May train again" makes all runs check all clients, and may push work: a
        report that exceeds the rate limit takes effect later.
        """
        self._cancel_delayed(client_id)
        before = self.availability(client_id)
        if before.may_train == availability.may_train:
            self._report(client_id, availability)  # only the detail changed
            return
        if availability.may_train:
            loop = asyncio.get_running_loop()
            if wait_s := self._returns.of(client_id).take(1.0, loop.time()):
                again = partial(self.set_availability, client_id, availability)
                self._delayed[client_id] = loop.call_later(wait_s + 0.001, again)
                return
        if availability.may_train:
            self._clear_policy(client_id)
        self._report(client_id, availability)
        log.info("client_availability", client=client_id, may_train=availability.may_train, why=availability.detail)
        self._changes.changed()
        if availability.may_train:
            self._changes.listener.client_available(client_id)

    def refused_by_policy(self, client_id: str, run_id: str, kind: Work, why: str) -> None:
        """A client refuses a run's work by the policy of its site. It is not drawn for it again."""
        self.policy.add(client_id, run_id, kind, why)
        self._changes.changed()

    def _clear_policy(self, client_id: str) -> None:
        """What the client refused it may accept now: its daemon has started again, or its policy has changed."""
        if self.policy.clear(client_id):
            self._changes.changed()

    def _report(self, client_id: str, availability: pb.Availability) -> None:
        self._availability[client_id] = availability
        self._able.changed(client_id)

    def _cancel_delayed(self, client_id: str) -> None:
        """A newer report replaces a delayed one."""
        if timer := self._delayed.pop(client_id, None):
            timer.cancel()

    def availability(self, client_id: str) -> pb.Availability:
        """The client's last report."""
        return self._availability.get(client_id, _MAY_TRAIN)

    def quarantine_changed(self, client_id: str) -> None:
        """Report the change, and the one at the end of the client's quarantine."""
        if timer := self._quarantine_ends.pop(client_id, None):
            timer.cancel()
        if left := self._quarantine.seconds_left(client_id):
            # A little after the end; the wall clock may also have been set back, and then this is repeated.
            loop = asyncio.get_running_loop()
            self._quarantine_ends[client_id] = loop.call_later(left + 0.02, self.quarantine_changed, client_id)
        self._changes.changed()

    def release(self, client_id: str) -> None:
        """Drop the client's refusals and its quarantine."""
        self._quarantine.drop(client_id)
        self.quarantine_changed(client_id)

    def forget(self, client_id: str) -> None:
        """Drop all that is known of the client."""
        self._cancel_delayed(client_id)
        self._returns.forget(client_id)
        self._availability.pop(client_id, None)
        self.policy.clear(client_id)
        self._able.changed(client_id)
        self.release(client_id)


class PolicyRefusals:
    """The work that clients refuse by the policies of their sites, by run. In memory: a new session ends them."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, Work], dict[str, str]] = {}

    def add(self, client_id: str, run_id: str, kind: Work, why: str) -> None:
        """Keep a refusal with its reason, "rule: text"."""
        self._reasons.setdefault((run_id, kind), {})[client_id] = why

    def of(self, run_id: str, kind: Work = "training") -> Mapping[str, str]:
        """The clients that refuse a run's work, with their reasons."""
        return self._reasons.get((run_id, kind), {})

    def by(self, client_id: str) -> dict[str, str]:
        """The runs of which a client refuses work, with its reasons."""
        return {run_id: whys[client_id] for (run_id, _), whys in self._reasons.items() if client_id in whys}

    def clear(self, client_id: str) -> bool:
        """Drop the refusals of a client. Returns whether there were any."""
        kept = [key for key, whys in self._reasons.items() if whys.pop(client_id, None) is not None]
        for key in kept:
            if not self._reasons[key]:
                del self._reasons[key]
        return bool(kept)


class AbleClients:
    """The clients that are able to work for a task, in the order of id bytes, kept up to date client by client.

    Every run asks for them whenever some client changes. With ten thousand clients it takes a tenth of a second to
    check them all, and a microsecond to check the one that changed.
    """

    def __init__(self, roster: Roster, eligibility: Eligibility) -> None:
        """roster: who may be able; eligibility: whether one of them is."""
        self._roster, self._eligibility = roster, eligibility
        self._kinds: OrderedDict[_Key, _Kind] = OrderedDict()

    def changed(self, client_id: str) -> None:
        """Something about a client changed: its presence, its record, or what it reports."""
        for kind in self._kinds.values():
            kind.changed.add(client_id)

    def of(self, requires: Requirements) -> tuple[str, ...]:
        """The clients that are able now, in the order of id bytes."""
        key = tuple(tuple(sorted(pairs.items())) for pairs in requires)
        kind = self._kinds.get(key)
        if kind is None:
            is_able, present = self._eligibility.is_able, self._roster.present()
            kind = self._kinds[key] = _Kind([client for client in present if is_able(client, requires)])
            if len(self._kinds) > MOST_KINDS:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(key)
        for client in kind.changed:
            kind.put(client, self._eligibility.is_able(client, requires))
        kind.changed.clear()
        return kind.current()


class _Kind:
    """The able clients of one task and labels."""

    def __init__(self, able: list[str]) -> None:
        self.changed: set[str] = set()
        """Clients to be checked again."""
        self._able = able
        self._result: tuple[str, ...] | None = None

    def current(self) -> tuple[str, ...]:
        """The able clients, once the changed ones have been checked."""
        if self._result is None:
            self._result = tuple(self._able)
        return self._result

    def put(self, client: str, able: bool) -> None:
        """Keep whether a client is able."""
        place = bisect_left(self._able, client.encode(), key=str.encode)
        here = place < len(self._able) and self._able[place] == client
        if here == able:
            return
        self._result = None
        if able:
            self._able.insert(place, client)
        else:
            del self._able[place]
