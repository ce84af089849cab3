"""Why a run waits for clients, and which clients it awaits, as operators see it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from fl_server.clients.eligibility import fits, has_method, lacking_encodings, offers_task
from fl_server.rounds.state import Phase
from fl_server.run.context import RunContext
from fl_server.run.control import RunControl
from fl_server.run.deadline import Deadline
from fl_server.run.evaluation.clients import ClientEvaluations
from fl_server.store.records import ClientRecord
from protos.fl.v1 import coordinator_pb2 as pb
from protos.wire import PROTOCOL_MAX

_FROZEN_SHOWN = len("blake3:") + 12
_SHOWN = len("sha256:") + 12
"""Characters of a source's digest that are enough to tell two apart."""


def why_waiting(context: RunContext, control: RunControl) -> str:
    """The waiting reason, and which present clients cannot be drawn.

    They are in quarantine, left out for lost states, failed in this round, closed by their owners' gates, refuse the
    run by the policy of their site, do not know its encodings, or have another version of the task's code or of the
    method's, or no such method.
    """
    waiting, fleet = control.run_status.waiting_reason, context.fleet
    if quarantined := _quarantined(context, control):
        client, left = quarantined[0], fleet.quarantine.seconds_left(quarantined[0])
        waiting += (
            f"; {len(quarantined)} in quarantine, first {client}, for {left:.0f} s more: `fl clients list` shows why, "
            f"`fl clients release {client}` ends it"
        )
    if left_out := sorted(context.client_states.left_out & set(fleet.present())):
        waiting += (
            f"; {len(left_out)} left out for lost client states, first {left_out[0]}: `fl clients release "
            f"{left_out[0]}` lets it take part again"
        )
    if failed := _failed(context):
        client, why = list(failed.items())[-1]
        waiting += f"; {len(failed)} failed in this round, the latest {client}: {why}"
    if refusing := policy_refusals(context):
        counts = ", ".join(f"{count} {rule}" for rule, count in sorted(refusing.items()))
        client, why = next(iter(context.fleet.eligibility.policy.of(context.run_id).items()))
        waiting += (
            f"; {sum(refusing.values())} refuse this run by the policy of their site ({counts}), first {client}: {why}"
        )
    if unavailable := _unavailable(context, control):
        waiting += _describe_unavailable(unavailable)
    if differing := _differing(context):
        client, version, source = differing[0]
        expected_version, expected_source = context.fingerprint
        waiting += (
            f"; {len(differing)} with another version of the task's code, first {client}: expected version "
            f"{expected_version!r} {expected_source[:_SHOWN]}, got {version!r} {source[:_SHOWN]}; install the same on "
            "both sides"
        )
    others = (_describe_older, _describe_encodings, _describe_other_frozen, _describe_methods)
    return waiting + "".join(describe(context) for describe in others)


def _failed(context: RunContext) -> dict[str, str]:
    """The clients whose work failed in the exchange under way, with the reason; the latest comes last."""
    return {client: why for client, (state, why) in context.log.transfers.outs.items() if state == "failed"}


def _describe_older(context: RunContext) -> str:
    """The present clients with the task whose daemons do not know the run's local work."""
    records = (context.fleet.record(client) for client in context.fleet.present())
    if "protocol" not in context.task or not (older := [each for each in records if _is_older(context, each)]):
        return ""
    return (
        f"; {len(older)} with an older version of the daemon, first {older[0].client_id} ({older[0].software}), which "
        "does not know local optimizers, schedules, personal and own frozen parameters, and training loops: update it"
    )


def _is_older(context: RunContext, record: ClientRecord) -> bool:
    """Whether only the protocol keeps the client from the run's task."""
    task = _task_in_any_encoding(context)
    newer = ({**offer, "protocol": PROTOCOL_MAX} for offer in record.tasks)
    has_task = any(offers_task(offer, task) for offer in newer)
    return has_task and not any(offers_task(offer, task) for offer in record.tasks)


def _describe_encodings(context: RunContext) -> str:
    """The present clients with the task that do not know all encodings of the run."""
    records = [context.fleet.record(client) for client in context.fleet.present()] if context.encodings else []
    lacking = [(each, missing) for each in records if (missing := _missing_encodings(context, each))]
    if not lacking:
        return ""
    first, missing = lacking[0]
    return (
        f"; {len(lacking)} without an encoding of this run, first {first.client_id} ({first.software}), which lacks "
        f"{', '.join(missing)}: update its daemon, or create a run with other `encodings`"
    )


def _task_in_any_encoding(context: RunContext) -> dict[str, str]:
    """What clients must offer, without the run's encodings."""
    return {key: value for key, value in context.task.items() if key != "encodings"}


def _missing_encodings(context: RunContext, record: ClientRecord) -> list[str]:
    """What only keeps the client from the run's task: the encodings that it does not know."""
    task = _task_in_any_encoding(context)
    offers = [offer for offer in record.tasks if offers_task(offer, task)]
    return lacking_encodings(offers[0], context.task) if offers else []


def _describe_other_frozen(context: RunContext) -> str:
    """The present clients with the task's code and other frozen parameters than the run, which are not sent."""
    expected = context.task.get("frozen")
    if expected is None or not (others := list(_with_other_frozen(context, expected))):
        return ""
    client, got = others[0]
    return (
        f'; {len(others)} with other frozen parameters (task.frozen = "local"), first {client}: expected '
        f"{expected[:_FROZEN_SHOWN]}, got {got[:_FROZEN_SHOWN] or 'none'}; put the files of the frozen parameters "
        "that the coordinator has on the device"
    )


def _with_other_frozen(context: RunContext, expected: str) -> Iterator[tuple[str, str]]:
    """(client, digest of its frozen parameters) of such clients; an empty digest for a model without any."""
    for client in context.fleet.present():
        offers = [offer for offer in context.fleet.record(client).tasks if offers_task(offer, context.code)]
        if offers and all(offer.get("frozen") != expected for offer in offers):
            yield client, offers[0].get("frozen", "")


def policy_refusals(context: RunContext) -> Counter[str]:
    """How many clients refuse to train for the run by the policy of their site, by rule."""
    return Counter(_rule_of(why) for why in context.fleet.eligibility.policy.of(context.run_id).values())


def _rule_of(why: str) -> str:
    """The rule of a reason, which a client wrote; "other" if it is no word."""
    rule = why.partition(":")[0]
    return rule if re.fullmatch(r"[a-z_]{1,32}", rule) else "other"


@dataclass(frozen=True, slots=True)
class Awaited:
    """The clients that the current phase of a run waits for."""

    clients: frozenset[str] = frozenset()
    """Those that have not delivered and may still do so."""
    seconds_left: float | None = None
    """Until their deadline; None if none is running."""


def awaited(control: RunControl, deadline: Deadline, evaluations: ClientEvaluations) -> Awaited:
    """The clients that the run waits for: of the cohort while it collects, else those that evaluate its model."""
    state = control.state
    if state.phase is Phase.COLLECTING:
        return Awaited(state.outstanding, deadline.seconds_left if deadline.started else None)
    if state.phase is Phase.EVALUATING and "clients" in state.awaited:
        return Awaited(*evaluations.outstanding(state.round - 1))
    return Awaited()


def lacking(context: RunContext, control: RunControl) -> str:
    """What a run that waits for clients lacks, as a noun phrase with its reason; empty if it lacks none.

    The first of these that holds: clients, clients with the task, clients with the labels, more clients.
    """
    if control.ended or control.run_status.write_failure or not control.run_status.waiting_reason:
        return ""
    here, task, labels = context.fleet.present(), context.task["name"], control.config.labels
    if not here:
        return f"clients: none is here{_away(context, control)}"
    records = [context.fleet.record(client) for client in here]
    offering = [record for record in records if any(offer["name"] == task for offer in record.tasks)]
    if not offering:
        offers = sorted({str(offer["name"]) for record in records for offer in record.tasks})
        more = ", ..." if len(offers) > _OFFERS_SHOWN else ""
        offered = f"; offered: {', '.join(map(repr, offers[:_OFFERS_SHOWN]))}{more}" if offers else ""
        return f"clients with the task {task!r}: 0 of {len(here)} here offer it{offered}"
    if not any(labels.items() <= record.labels.items() for record in offering):
        return f"clients with {_labels(labels)}: 0 of {len(offering)} here with the task {task!r} have them"
    state = control.state
    wanted = state.goal - len(state.admitted) if state.goal else state.policy.min_clients
    reasons = Counter(_why_not_drawn(context, control, record) for record in offering)
    able = reasons.pop("", 0)
    others = "".join(f"; {reasons[reason]} {reason}" for reason in sorted(reasons))
    return f"clients that could be drawn: {able} of {wanted} here{others}"


_OFFERS_SHOWN = 5


def _labels(labels: Mapping[str, str]) -> str:
    return "the labels " + ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def _away(context: RunContext, control: RunControl) -> str:
    """The registered clients that the run could draw if they were here."""
    records = context.fleet.records.in_memory().values()
    away = sorted(each.client_id for each in records if fits(each, context.task, control.config.labels, context.method))
    return f"; {len(away)} with the task and labels away, first {away[0]}" if away else ""


def _why_not_drawn(context: RunContext, control: RunControl, record: ClientRecord) -> str:  # noqa: PLR0911 - a table
    """Why a present client that offers the task cannot be drawn now; empty if it can."""
    fleet, labels, client = context.fleet, control.config.labels, record.client_id
    if not labels.items() <= record.labels.items():
        return f"without {_labels(labels)}"
    if record.banned or record.draining:
        return "banned" if record.banned else "draining"
    if not fits(record, context.task, labels):
        return _other_task(context, record)
    if not has_method(record, context.method):
        return f"without the code of the algorithm {context.method['name']}"
    if fleet.quarantine.seconds_left(client):
        return "in quarantine"
    if not fleet.eligibility.availability(client).may_train:
        return "may not train now"
    if client in fleet.eligibility.policy.of(context.run_id):
        return "refuse this run by the policy of their site"
    if fleet.eligibility.run_of(client) not in {"", context.run_id}:
        return "at work for another run"
    if client in control.state.drawn:
        return "failed in this round" if client in _failed(context) else "drawn before in this round"
    return "" if client in control.state.candidates else "left out of this run"


def _other_task(context: RunContext, record: ClientRecord) -> str:
    if _is_older(context, record):
        return "with an older version of the daemon, which does not know this run's local work"
    if missing := _missing_encodings(context, record):
        return f"without the encodings {' and '.join(missing)}"
    has_code = any(offers_task(offer, context.code) for offer in record.tasks)
    return "with other frozen parameters" if has_code else "with another version of the task"


def _quarantined(context: RunContext, control: RunControl) -> list[str]:
    """Present clients that could be drawn for the run without their quarantine."""
    fleet = context.fleet
    here = (client for client in fleet.quarantine.clients() if client in fleet.present())
    return sorted(client for client in here if _fits(context, control, client))


def _fits(context: RunContext, control: RunControl, client: str) -> bool:
    return fits(context.fleet.record(client), context.task, control.config.labels, context.method)


def _unavailable(context: RunContext, control: RunControl) -> dict[str, pb.Availability]:
    """Present clients that fit the run and report that they may not train now."""
    fleet = context.fleet
    reported = {client: fleet.eligibility.availability(client) for client in fleet.present()}
    return {
        client: availability
        for client, availability in reported.items()
        if not availability.may_train and _fits(context, control, client)
    }


def _describe_unavailable(unavailable: Mapping[str, pb.Availability]) -> str:
    reasons = Counter(reason_of(availability) for availability in unavailable.values())
    counts = ", ".join(f"{reasons[reason]} {reason}" for reason in sorted(reasons))
    client, first = next(iter(unavailable.items()))
    text = f"; {len(unavailable)} report that they may not train ({counts}), first {client}: {first.detail}"
    until = [availability.until.seconds for availability in unavailable.values() if availability.HasField("until")]
    if until:
        text += f"; the first may train again at {datetime.fromtimestamp(min(until), UTC):%Y-%m-%d %H:%M:%S} UTC"
    return text


def reason_of(availability: pb.Availability) -> str:
    """Why a client may not train, in a word or two; an unknown reason of a newer client is "other"."""
    known = pb.UnavailableReason.values()
    name = pb.UnavailableReason.Name(availability.reason) if availability.reason in known else ""
    return name.removeprefix("UNAVAILABLE_REASON_").replace("_", " ").lower().replace("unspecified", "") or "other"


def _differing(context: RunContext) -> list[tuple[str, str, str]]:
    """(client, version, source) of present clients that have the run's task by name, but not its code."""
    fleet, name = context.fleet, context.task["name"]
    offers = ((client, offer) for client in fleet.present() for offer in fleet.record(client).tasks)
    found = [(client, offer["version"], offer["source"]) for client, offer in offers if offer["name"] == name]
    return [each for each in found if each[1:] != context.fingerprint]


def _describe_methods(context: RunContext) -> str:
    """The present clients with the run's task that lack its method from outside, or have other code of it."""
    fleet, wanted = context.fleet, context.method
    records = [fleet.record(client) for client in fleet.present()] if wanted else []
    lacking = [each for each in records if _offers(each, context) and not has_method(each, wanted)]
    if not lacking:
        return ""
    first = lacking[0]
    other = next((offer for offer in first.methods if offer["name"] == wanted["name"]), None)
    got = "none" if other is None else f"version {other['version']!r} {other['source'][:_SHOWN]}"
    return (
        f"; {len(lacking)} without the code of the algorithm {wanted['name']}, first {first.client_id}: expected"
        f" version {wanted['version']!r} {wanted['source'][:_SHOWN]}, got {got}; install it on the device, with an"
        " entry point or listed under `algorithms` in its client.toml, and restart the daemon"
    )


def _offers(record: ClientRecord, context: RunContext) -> bool:
    return any(offer["name"] == context.task["name"] for offer in record.tasks)
