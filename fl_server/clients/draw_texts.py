"""The rules of drawing in words: about one client, and about the clients to whom a rule applies."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from fl_server.clients.draw_rules import Candidate, Pairs, Rule, Selection


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
    return f"{len(clients)} {rule.many.format(**_names(selection, clients))}{f' ({counts})' if counts else ''}"


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
    return f"the first may train again at {datetime.fromtimestamp(min(until), UTC):%Y-%m-%d %H:%M:%S} UTC"
