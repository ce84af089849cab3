"""The clients that a run may draw, those reserved for it because they work for it, and why it draws no others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import structlog

from fl_common.units import utc
from fl_server.clients.draw_rules import (
    ANY,
    RULES,
    Candidate,
    Pairs,
    Requirements,
    Rule,
    Selection,
    offer_for,
    rule_for,
)
from fl_server.rounds import events as ev
from fl_server.rounds.state import RoundState
from fl_server.run.context import RunContext
from fl_server.run_settings.config import RunConfig
from fl_server.store.records import ClientRecord
from protos.fl.v1 import coordinator_pb2 as pb

log = structlog.get_logger()


class EligibleClients:
    """Keeps the state machine's eligible clients and the fleet's reserved clients current. Lives on the event loop."""

    def __init__(self, context: RunContext, config: RunConfig, state: RoundState) -> None:
        """config: its labels and its task stay the same for the life of the run."""
        self._context, self._config = context, config
        self._offers: dict[str, tuple[ClientRecord | None, Mapping[str, Any] | None]] = {}
        """Each client's record, and its offer that the run uses, as they were last asked for."""
        self._version = -1
        """The fleet's version that `state.eligible` was computed from; -1: compute it again."""
        self._reserved = state
        """The state whose working clients are reserved."""
        self._began = time.time()
        """No client was lost for longer: before, the coordinator or the run was not here to be found."""
        self.without = ""
        """The clients without which the run goes on, as a sentence; empty if it has all that it needs."""
        self.not_drawn_by_reason: Mapping[str, int] = {}
        """While too few clients can be drawn: the others that are registered, by reason. Replaced, never changed."""

    def invalidate(self) -> None:
        """Compute the eligible clients again before the next event."""
        self._version = -1

    def changed(self, state: RoundState, *, draining: bool) -> ev.RosterChanged | None:
        """The event for the state machine if other clients can be drawn since the last call; None if not.

        draining: the coordinator is about to stop, and no client gets new work.
        """
        fleet = self._context.fleet
        if self._version == fleet.changes.version:
            return None
        self._version = fleet.changes.version
        eligible, settled = self.now(), fleet.attendance.roster.settled and not draining
        missing = self._shut_out(state, sum(client not in state.lost for client in eligible))
        if (eligible, settled, missing) == (state.eligible, state.settled, state.shut_out):
            return None
        return ev.RosterChanged(eligible, settled, missing)

    def _shut_out(self, state: RoundState, here: int) -> int:
        """The number of clients that the run lacks and does not wait for; 0 if it lacks none.

        A client that is lost counts from the second round on: to begin, a run waits for those that are not here yet.
        """
        after = self._context.services.config.limits.lost_after_s
        if here >= state.policy.min_clients:
            self.without, self.not_drawn_by_reason = "", {}
            return 0
        long_ago = time.time() - after
        since = long_ago if state.round and long_ago >= self._began else None
        fleet, selection = self._context.fleet, self.selection()
        rules = self.not_drawn(fleet.records.in_memory(), selection)
        self.not_drawn_by_reason = {rule.reason: len(candidates) for rule, candidates in rules.items()}
        clients = [
            (rule, client)
            for rule, candidates in rules.items()
            for client in candidates
            if rule.shuts_out or (rule.reason == "lost" and since is not None and client.last_seen <= since)
        ]
        self.without = _without(clients)
        return len(clients)

    @property
    def requires(self) -> Requirements:
        """What the run asks of every client."""
        context, config, oldest = self._context, self._config, self._config.min_client_version
        return Requirements(context.task, config.labels, context.method, {"version": oldest} if oldest else ANY)

    def offer_of(self, client: str) -> Mapping[str, Any] | None:
        """The client's offer that the run uses; None if it has none. It is found once for each record of a client."""
        record = self._context.fleet.records.find(client)
        if (known := self._offers.get(client)) is None or known[0] is not record:
            known = self._offers[client] = record, offer_for(self.requires, record)
        return known[1]

    def data_of(self, client: str) -> str:
        """Name of the client's data that the run uses; empty for data without one."""
        offer = self.offer_of(client)
        return "" if offer is None else offer.get("data", "")

    def package_of(self, client: str) -> str:
        """Digest of the package that the client works with; empty for none, and where cohorts are hidden."""
        if self._context.hides_cohorts:
            return ""
        offer = self.offer_of(client)
        return "" if offer is None else offer.get("package", "")

    def selection(self) -> Selection:
        """What the run asks of clients now, with those that it leaves out."""
        context = self._context
        own = {"left_out": dict.fromkeys(context.client_states.left_out, "")}
        return context.fleet.eligibility.selection(context.run_id, self.requires, own)

    def now(self) -> tuple[str, ...]:
        """Clients that are here for the run. Which of them it draws is decided by the round state machine."""
        return self._context.fleet.eligibility.eligible(self.selection())

    def in_round(self, state: RoundState) -> Selection:
        """`selection`, with the clients that the round under way does not draw again."""
        selection = self.selection()
        outs = self._context.rounds.transfers.outs.items()
        failed = {client: why for client, (how, why) in outs if how == "failed" and client in state.drawn}
        refused = {client: refusal.why for client, refusal in state.refused.items()}
        own: dict[str, Iterable[str]] = {
            "state_lost": state.lost,
            "drawn": state.drawn,
            "population": set(state.eligible).difference(state.candidates),
        }
        of_round = {reason: dict.fromkeys(clients, "") for reason, clients in own.items()}
        kept_out = {**selection.kept_out, **of_round, "refused": refused, "failed": failed}
        return replace(selection, kept_out=kept_out)

    def not_drawn(self, clients: Iterable[str], selection: Selection) -> dict[Rule, list[Candidate]]:
        """Those of some clients that are not drawn, in the order of id bytes; by reason, in the order of the table."""
        fleet, by_rule = self._context.fleet, dict[Rule, list[Candidate]]()
        for client in sorted(set(clients).difference(fleet.eligibility.eligible(selection)), key=str.encode):
            candidate = fleet.eligibility.candidate(client)
            if candidate is not None and (rule := rule_for(selection, candidate)) is not None:
                by_rule.setdefault(rule, []).append(candidate)
        return {rule: by_rule[rule] for rule in RULES if rule in by_rule}

    def why_not(self, state: RoundState, client: str) -> NotDrawn | None:
        """Why the run does not draw this client now; None if it may."""
        selection, candidate = self.in_round(state), self._context.fleet.eligibility.candidate(client)
        rule = None if candidate is None else rule_for(selection, candidate)
        return None if candidate is None or rule is None else explained(rule, selection, candidate)

    def notify(self, client: str) -> None:
        """Tell a client that connected if it cannot be drawn for what its owner alone can change."""
        selection, candidate = self.selection(), self._context.fleet.eligibility.candidate(client)
        if candidate is None or (rule := rule_for(selection, candidate)) is None or not rule.notifies:
            return
        _, why, remedy = explained(rule, selection, candidate)
        text = f"run {self._context.run_id!r} does not draw this client, {why}: {remedy}"
        log.warning("client_differs", run=self._context.run_id, client=client, why=text)
        self._context.fleet.streams.push(client, pb.AttendResponse(notice=pb.Notice(text=text)))

    def reserve(self, state: RoundState) -> None:
        """Reserve the cohort before anything is awaited: no other run may draw clients that work for this one."""
        fleet = self._context.fleet
        up_to_date = self._version == fleet.changes.version
        begun, done = state.workers_since(self._reserved)
        fleet.workers.change(self._context.run_id, begun, done)
        self._reserved = state
        if up_to_date:
            self._version = fleet.changes.version


def _without(clients: list[tuple[Rule, Candidate]]) -> str:
    """A sentence about the clients without which a run goes on; empty for none."""
    if not clients:
        return ""
    kinds = Counter(rule.many for rule, _ in clients)
    counts = ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))
    rule, first = min(clients, key=lambda pair: pair[1].record.client_id.encode())
    return f"goes on without {len(clients)} of its clients: {counts}; first {first.record.client_id}, {rule.many}"


class NotDrawn(NamedTuple):
    """Why a run does not draw one client."""

    reason: str
    why: str
    remedy: str


def explained(rule: Rule, selection: Selection, client: Candidate) -> NotDrawn:
    """A rule in words about one client."""
    names, detail = _names(selection, [client]), rule.detail(selection, client)
    words = (rule.one or rule.many).format(**names)
    return NotDrawn(rule.reason, f"{words}: {detail}" if detail else words, rule.remedy.format(**names))


def counted(rule: Rule, selection: Selection, clients: Sequence[Candidate]) -> str:
    """A rule in words about some clients, with their kinds: 2 report that they may not train (1 battery, 1 owner)."""
    kinds = sorted(filter(None, (rule.kind(selection, client) for client in clients)))
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    words = (rule.many if len(clients) > 1 else rule.one or rule.many).format(**_names(selection, clients))
    return f"{len(clients)} {words}{f' ({counts})' if counts else ''}"


def described(rule: Rule, selection: Selection, clients: Sequence[Candidate]) -> str:
    """The same with the first client and the remedy."""
    first, detail = clients[0], rule.detail(selection, clients[0])
    remedy = rule.remedy.format(**_names(selection, clients))
    why = f"{detail}; {remedy}" if detail else remedy
    return f"{counted(rule, selection, clients)}, first {first.record.client_id}: {why}"


def _names(selection: Selection, clients: Sequence[Candidate]) -> dict[str, str]:
    requires = selection.requires
    return {
        "client": clients[0].record.client_id,
        "task": requires.task["name"],
        "labels": labels_text(requires.labels),
        "algorithm": requires.method.get("name", ""),
        "version": requires.software.get("version", ""),
        "again": _again(clients),
    }


def labels_text(labels: Pairs) -> str:
    """Labels in words: gpu=yes, site=north."""
    return ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def _again(clients: Sequence[Candidate]) -> str:
    """When the first of some unavailable clients may train again."""
    until = [client.availability.until.seconds for client in clients if client.availability.HasField("until")]
    if not until:
        return "it is drawn again when the device reports that it may train"
    return f"the first may train again at {utc(min(until))}"
