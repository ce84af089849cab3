"""Why a run does not draw a client: one table of rows, each with a reason, a predicate and a remedy.

Drawing reads it, and so do the reason of a run that waits, the clients that a run goes on without, the notices to
devices, and what `fl clients show` and the page say of a client.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from fl_common.names import version_of
from fl_common.units import duration
from fl_server.store.records import ClientRecord
from protos.fl.v1 import coordinator_pb2 as pb

Pairs = Mapping[str, str]
BUILT_IN: Pairs = MappingProxyType({})
"""A built-in method, which every client has. One from outside is its name, version and source."""
ANY: Pairs = MappingProxyType({})
"""No requirement."""
_SHOWN = len("sha256:") + 12
"""Characters of a digest that are enough to tell two apart."""
_NAME = ("name",)
_CODE = (*_NAME, "version", "source", "package")
_FROZEN = (*_CODE, "frozen")
_ENCODINGS = (*_FROZEN, "encodings")
"""What an offer of a client must have, in the order in which a client is told what it lacks."""


class Requirements(NamedTuple):
    """What a run requires of every client, for its whole life."""

    task: Pairs
    """Name, version and source; the digest of frozen parameters that are not sent, and encodings."""
    labels: Pairs
    method: Pairs = BUILT_IN
    """Name, version and source of a method from outside."""
    software: Pairs = ANY
    """The oldest version of the client's software, as "version"; empty: any."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What a run requires of clients, and the clients that cannot be drawn for it now whatever they have."""

    requires: Requirements
    run_id: str = ""
    kept_out: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """The clients by the reason of a rule, each with details in words."""


class Candidate(NamedTuple):
    """A registered client, as far as it decides whether a run draws it."""

    record: ClientRecord
    present: bool
    availability: pb.Availability
    last_seen: float = 0.0
    """Unix seconds; for the text about an absent client."""


class Scope(Enum):
    """Who decides that a rule applies."""

    CLIENT = "client"
    """The client's record, presence and reports, whatever other clients and runs do."""
    RUN = "run"
    """The coordinator or the run: `Selection.kept_out` lists the clients."""
    ROUND = "round"
    """The round under way. The state machine applies these itself; here they only explain."""


Predicate = Callable[[Selection, Candidate], bool]
Text = Callable[[Selection, Candidate], str]


@dataclass(frozen=True, slots=True)
class Rule:
    """One reason not to draw a client.

    Texts have the names {client}, {task}, {labels}, {algorithm}, {version}, and {again}: when unavailable clients may
    train again.
    """

    reason: str
    many: str
    """Follows a number of clients: "2 in quarantine"."""
    remedy: str
    """What to do about it."""
    holds: Predicate
    scope: Scope = Scope.CLIENT
    one: str = ""
    """Follows the name of one client; empty: the same as `many`."""
    detail: Text = lambda _, __: ""
    kind: Text = lambda _, __: ""
    """A word by which clients with this reason are counted."""
    operable: bool = True
    """Whether a waiting run names such clients: without it they could be drawn, and somebody can do something."""
    shuts_out: bool = False
    """Whether a run goes on without such clients: they cannot be drawn, or will not soon."""
    notifies: bool = False
    """Whether the device is told when it connects: its owner alone can do something."""


def _has(offer: Mapping[str, Any], task: Pairs, keys: Iterable[str]) -> bool:
    """Whether an offer of a client has these of the task's keys."""
    for key in keys:
        if key not in task:
            continue
        if key == "encodings":
            if _lacking_encodings(offer, task):
                return False
        elif offer.get(key) != task[key]:
            return False
    return True


def offers_task(offer: Mapping[str, Any], task: Pairs) -> bool:
    """Whether an offer of a client is of this task or method: name, version and source, and encodings."""
    return _has(offer, task, _ENCODINGS)


def _lacking_encodings(offer: Mapping[str, Any], task: Pairs) -> list[str]:
    return sorted(set(task.get("encodings", "").split()) - set(offer.get("encodings", "").split()))


def labelled_offers(requires: Requirements, record: ClientRecord) -> Iterator[Mapping[str, Any]]:
    """The client's offers of the task whose labels, with the client's own beside them, are those of the run."""
    for offer in record.tasks:
        own = offer.get("labels")
        labels = {**record.labels, **own} if own else record.labels
        if offer["name"] == requires.task["name"] and requires.labels.items() <= labels.items():
            yield offer


def offer_for(requires: Requirements, record: ClientRecord | None) -> Mapping[str, Any] | None:
    """The offer of a client that a run uses, the first one that has all; None if the client has none."""
    offers = () if record is None else labelled_offers(requires, record)
    return next((offer for offer in offers if offers_task(offer, requires.task)), None)


def _lacks(keys: tuple[str, ...]) -> Predicate:
    """No offer of the client with the run's labels has these keys of the task."""

    def lacks(selection: Selection, client: Candidate) -> bool:
        requires = selection.requires
        return not any(_has(offer, requires.task, keys) for offer in labelled_offers(requires, client.record))

    return lacks


def _listed(reason: str) -> dict[str, Any]:
    """Predicate and detail of a rule whose clients are in `Selection.kept_out`."""
    return {
        "holds": lambda selection, client: client.record.client_id in selection.kept_out.get(reason, ()),
        "detail": lambda selection, client: selection.kept_out[reason][client.record.client_id],
    }


def _lacks_method(selection: Selection, client: Candidate) -> bool:
    method = selection.requires.method
    return bool(method) and not any(offer["name"] == method["name"] for offer in client.record.methods)


def _has_other_method(selection: Selection, client: Candidate) -> bool:
    method = selection.requires.method
    return bool(method) and not any(offers_task(offer, method) for offer in client.record.methods)


def _too_old(selection: Selection, client: Candidate) -> bool:
    oldest = selection.requires.software.get("version", "")
    return bool(oldest) and version_of(client.record.software) < version_of(f"impetus {oldest}")


def _versions(expected: Pairs, got: Mapping[str, Any] | None) -> str:
    named = "none" if got is None else _version(got)
    return f"expected {_version(expected)}, got {named}"


def _version(code: Mapping[str, Any]) -> str:
    package = f" of the package {code['package'][:_SHOWN]}" if code.get("package") else ""
    return f"version {code['version']!r} {code['source'][:_SHOWN]}{package}"


def _offer_of(name: str, offers: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return next((offer for offer in offers if offer["name"] == name), None)


def _task_versions(selection: Selection, client: Candidate) -> str:
    task = selection.requires.task
    return _versions(task, _offer_of(task["name"], labelled_offers(selection.requires, client.record)))


def _method_versions(selection: Selection, client: Candidate) -> str:
    method = selection.requires.method
    return _versions(method, _offer_of(method["name"], client.record.methods))


def _frozen_digests(selection: Selection, client: Candidate) -> str:
    task = selection.requires.task
    offers = labelled_offers(selection.requires, client.record)
    got = next((offer.get("frozen") for offer in offers if _has(offer, task, _CODE)), None)
    return f"expected {task['frozen'][:_SHOWN]}, got {(got or 'none')[:_SHOWN]}"


def _missing_encodings(selection: Selection, client: Candidate) -> str:
    task, offers = selection.requires.task, labelled_offers(selection.requires, client.record)
    return " and ".join(next((_lacking_encodings(offer, task) for offer in offers if _has(offer, task, _FROZEN)), []))


def _absence(_: Selection, client: Candidate) -> str:
    return f"for {duration(time.time() - client.last_seen)}" if client.last_seen else ""


def _unavailable_word(_: Selection, client: Candidate) -> str:
    """Why a client may not train, in a word or two; an unknown reason of a newer client is "other"."""
    number = client.availability.reason
    name = pb.UnavailableReason.Name(number) if number in pb.UnavailableReason.values() else ""
    return name.removeprefix("UNAVAILABLE_REASON_").replace("_", " ").lower().replace("unspecified", "") or "other"


def policy_rule(why: str) -> str:
    """The rule of a refusal by a site's policy, "rule: text", which a client wrote; "other" if it is no word."""
    rule = why.partition(":")[0]
    return rule if re.fullmatch(r"[a-z_]{1,32}", rule) else "other"


RULES: tuple[Rule, ...] = (
    Rule(
        "task", "without the task {task!r}", "install the task on the device, and list it in its client.toml",
        lambda selection, client: selection.requires.task["name"] not in [it["name"] for it in client.record.tasks],
        operable=False,
    ),
    Rule(
        "labels", "without the labels {labels}", "change `labels` of the run or of the device",
        _lacks(_NAME), operable=False,
    ),
    Rule(
        "version", "with software older than {version}",
        "upgrade it on the device, `pip install --upgrade impetus-fl`, and restart its daemon", _too_old,
        detail=lambda _, client: client.record.software or "an unknown version", notifies=True,
    ),
    Rule(
        "task_code", "with another version of the task's code", "install the coordinator's version of the task",
        _lacks(_CODE), detail=_task_versions, notifies=True,
    ),
    Rule(
        "frozen", "with other frozen parameters",
        "put the files of the frozen parameters that the coordinator has on the device, and restart its daemon",
        _lacks(_FROZEN), detail=_frozen_digests, notifies=True,
    ),
    Rule(
        "encodings", "without encodings of this run", "update its daemon, or create a run with other `encodings`",
        _lacks(_ENCODINGS), detail=lambda _, client: client.record.software, kind=_missing_encodings,
    ),
    Rule(
        "method", "without the algorithm {algorithm}",
        "install it on the device, with an entry point or listed under `algorithms` in its client.toml, and restart"
        " the daemon", _lacks_method, detail=_method_versions,
    ),
    Rule(
        "method_code", "with another version of the algorithm {algorithm}",
        "install the coordinator's version of the algorithm, and restart the daemon",
        _has_other_method, detail=_method_versions, notifies=True,
    ),
    Rule(
        "banned", "banned", "`fl clients unban {client}` ends it", lambda _, client: client.record.banned,
        operable=False, shuts_out=True,
    ),
    Rule(
        "draining", "draining", "`fl clients drain {client} --undo` ends it",
        lambda _, client: client.record.draining, operable=False, shuts_out=True,
    ),
    Rule(
        "quarantined", "in quarantine",
        "`fl clients show {client}` has the cause, `fl clients release {client}` ends it", scope=Scope.RUN,
        shuts_out=True, **_listed("quarantined"),
    ),
    Rule(
        "left_out", "left out for lost client states", "`fl clients release {client}` lets it take part again",
        scope=Scope.RUN, shuts_out=True, **_listed("left_out"),
    ),
    Rule(
        "lost", "lost", "start its daemon, and see its log if it does not connect",
        lambda _, client: not client.present, detail=_absence, operable=False,
    ),
    Rule(
        "unavailable", "report that they may not train", "{again}",
        lambda _, client: not client.availability.may_train, one="reports that it may not train",
        detail=lambda _, client: client.availability.detail, kind=_unavailable_word,
    ),
    Rule(
        "policy", "refuse this run by the policy of their site", "change the run, or the policy of the device's site",
        scope=Scope.RUN, one="refuses this run by the policy of its site", **_listed("policy"),
        kind=lambda selection, client: policy_rule(selection.kept_out["policy"][client.record.client_id]),
    ),
    Rule(
        "state_lost", "with a lost client state", "none is needed: the states restart together",
        scope=Scope.ROUND, operable=False, **_listed("state_lost"),
    ),
    Rule(
        "at_work", "at work for another run", "wait for that run, or pause it", scope=Scope.RUN, operable=False,
        **_listed("at_work"),
    ),
    Rule(
        "refused", "refused in this round", "`fl clients show {client}` has the cause; the next round draws it again,"
        " and so does this one if no other client is left", scope=Scope.ROUND, **_listed("refused"),
    ),
    Rule(
        "failed", "failed in this round", "repair the cause; the next round draws it again", scope=Scope.ROUND,
        **_listed("failed"),
    ),
    Rule(
        "drawn", "drawn before in this round", "none is needed: the next round draws it again", scope=Scope.ROUND,
        operable=False, **_listed("drawn"),
    ),
    Rule(
        "population", "beyond the population of this run", "`fl clients forget` a client that never returns, or create"
        " a run with a larger `population`", scope=Scope.ROUND, operable=False, **_listed("population"),
    ),
)  # fmt: skip
"""The rules in the order in which they are asked: a client is not drawn for the first reason that holds."""

_OF_CLIENTS = tuple(rule for rule in RULES if rule.scope is Scope.CLIENT)


def able(selection: Selection, client: Candidate) -> bool:
    """Whether nothing of the client itself keeps it from the run."""
    return not any(rule.holds(selection, client) for rule in _OF_CLIENTS)


def rule_for(selection: Selection, client: Candidate) -> Rule | None:
    """Why the client is not drawn; None if it can be."""
    return next((rule for rule in RULES if rule.holds(selection, client)), None)
