"""What a client is, what keeps it from work, and which daemons use its identity."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from fl_common import units
from fl_common.units import counted
from fl_web.facts.client_work import facts as work_facts
from fl_web.facts.client_work import needs
from fl_web.facts.words import Fact, Part, client_state, enum_word, fact
from protos.fl.v1 import admin_pb2 as pb
from protos.fl.v1 import coordinator_pb2


class Mark(NamedTuple):
    """What keeps a client from work: a word, and more to be said after it."""

    word: str
    more: tuple[Part, ...] = ()


def marks(client: pb.ClientStatus) -> list[Mark]:
    """All that apply: banned, quarantined, draining, may not train, needs attention for something else."""
    marked = [Mark("banned")] if client.banned else []
    if client.HasField("quarantine"):
        marked.append(Mark("quarantined", (" until ", client.quarantine.until)))
    if client.draining:
        marked.append(Mark("draining"))
    if _may_not_train(client):
        marked.append(Mark("may not train", _unavailable(client.availability)))
    if any(need.reason != "quarantined" for need in client.attention) and not client.HasField("quarantine"):
        marked.append(Mark("attention"))
    return marked


def state(client: pb.ClientStatus) -> tuple[Part, ...]:
    """Its presence and what keeps it from work: present, quarantined until a time, draining."""
    told: list[Part] = [client_state(client.state)]
    for mark in marks(client):
        told += [f", {mark.word}", *mark.more]
    return tuple(told)


def words(client: pb.ClientStatus) -> list[str]:
    """The words of its state."""
    return [client_state(client.state), *(mark.word for mark in marks(client))]


def _may_not_train(client: pb.ClientStatus) -> bool:
    return client.HasField("availability") and not client.availability.may_train


def _unavailable(availability: coordinator_pb2.Availability) -> tuple[Part, ...]:
    """For example: until 2026-03-01 06:00:00 (time window)."""
    until: tuple[Part, ...] = (" until ", availability.until) if availability.HasField("until") else ()
    why = enum_word(coordinator_pb2.UnavailableReason, availability.reason) if availability.reason else ""
    return (*until, f" ({why})") if why else until


def note(client: pb.ClientStatus) -> str:
    """The most important remark: why it needs attention or is quarantined, why it may not train, or its note."""
    return (
        needs(client)
        or client.quarantine.reason
        or (client.availability.detail if _may_not_train(client) else "")
        or client.note
    )


def label_texts(client: pb.ClientStatus) -> list[tuple[str, str, bool]]:
    """Its labels: (name, value, whether its enrollment set it; all others are claims of the client)."""
    enrolled = set(client.enrolled_labels)
    return [(name, client.labels[name], name in enrolled) for name in sorted(client.labels)]


def device(client: pb.ClientStatus) -> str:
    """Kind, name and memory."""
    names = " ".join(filter(None, (client.device.kind, client.device.name)))
    return ", ".join(filter(None, (names, units.size(memory) if (memory := client.device.memory_bytes) else "")))


def facts(details: pb.GetClientResponse) -> list[Fact]:
    """What is known of a client beside its state, its labels and its counted updates."""
    client, refusals = details.client, details.client.policy_refusals
    return [
        *work_facts(client),
        fact("why", client.availability.detail if _may_not_train(client) else ""),
        fact("note", client.note),
        fact("works on", details.work),
        fact("refuses", "; ".join(f"{run_id}, by policy: {why}" for run_id, why in sorted(refusals.items()))),
        *(fact(f"not drawn by {verdict.run_id}", f"{verdict.why}; {verdict.remedy}") for verdict in details.not_drawn),
        *_daemons(details),
        fact("standing", details.standing.reason if details.HasField("standing") else ""),
        fact("tasks", "; ".join(f"{offer_title(offer)}: {_offer(offer)}" for offer in client.tasks)),
        fact("methods", ", ".join(offer.name for offer in client.methods)),
        fact("device", device(client)),
        fact("software", client.software),
    ]


def offer_title(offer: coordinator_pb2.TaskOffer) -> str:
    """A task of a client, with the name of its data if it has one: digits@north."""
    return f"{offer.name}@{offer.data}" if offer.data else offer.name


def _offer(offer: coordinator_pb2.TaskOffer) -> str:
    batches = f" in {counted(offer.train_batches, 'batch', 'batches')}" if offer.train_batches else ""
    held_out = f", {offer.eval_examples:,} held out" if offer.eval_examples else ""
    version = f"version {offer.fingerprint.version}, " if offer.fingerprint.version else ""
    labels = "".join(f", {name}={value}" for name, value in sorted(offer.labels.items()))
    return f"{version}{counted(offer.train_examples, 'example')} to train{batches}{held_out}{labels}"


def _daemons(details: pb.GetClientResponse) -> list[Fact]:
    """The daemon that has the session, and others that used the same identity."""
    daemons = [fact("session", "none")]
    if details.HasField("session"):
        daemons = [fact("session", _origin(details.session), ", since ", details.session.registered)]
        daemons.append(fact("certificate", *_certificate(details.session)))
    if details.HasField("refused"):
        daemons.append(fact("refused daemon", _origin(details.refused), ", last on ", details.refused.registered))
        daemons.append(fact("its certificate", *_certificate(details.refused)))
    if details.HasField("fenced"):
        daemons.append(fact("replaced daemon", _origin(details.fenced), ", since ", details.fenced.registered))
    if details.conflicts or details.contested:
        still = " and still do: stop one of them" if details.contested else ""
        daemons.append(fact("two daemons", f"used this identity {counted(details.conflicts, 'time')}{still}"))
    return daemons


def _origin(origin: pb.ClientOrigin) -> str:
    return f"{origin.address or 'an unknown address'}, process {origin.instance_id or 'unknown'}"


def _certificate(origin: pb.ClientOrigin) -> tuple[Part, ...]:
    if not origin.certificate_serial:
        return ()
    expired = datetime.fromtimestamp(origin.certificate_end.seconds, UTC) <= datetime.now(UTC)
    verb = "expired" if expired else "expires"
    return f"serial {origin.certificate_serial}, {verb} on ", origin.certificate_end
