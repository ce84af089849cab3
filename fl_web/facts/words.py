"""Words for states, phases, marks and events, and how urgent each is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple, cast, get_args

from google.protobuf.timestamp_pb2 import Timestamp

from fl_common import units
from protos.fl.v1 import admin_pb2 as pb

Part = str | Timestamp


class Fact(NamedTuple):
    """A name and what is told under it: texts and times, one after the other."""

    name: str
    parts: tuple[Part, ...]

    @property
    def known(self) -> bool:
        """Whether there is something to tell."""
        return any(part if isinstance(part, str) else part.seconds for part in self.parts)


def fact(name: str, *parts: Part) -> Fact:
    """A fact of these parts."""
    return Fact(name, parts)


def known(facts: Iterable[Fact]) -> list[Fact]:
    """The facts that have something to tell."""
    return [fact_ for fact_ in facts if fact_.known]


RUN_STATES = ("running", "waiting", "paused", "completed", "stopped", "failed")
NOT_LOADED = "not loaded"
ClientStateWord = Literal["present", "suspect", "lost"]
CLIENT_STATES: tuple[ClientStateWord, ...] = get_args(ClientStateWord)
CLIENT_MARKS = ("banned", "draining", "quarantined", "attention")
"""Marks by which clients are counted and listed."""


def mark_words(mark: str, clients: int) -> str:
    """A mark behind a number of clients: 1 needs attention, 2 banned."""
    return mark if mark != "attention" else f"need{'s' if clients == 1 else ''} attention"


PHASES = ("training", "uploading", "checking", "downloading", "assigned", "delivered",
          "refused", "failed", "lost", "out", "cancelled")  # fmt: skip
"""Phases of a client in a round, in the order in which they are counted."""
NOT_AWAITED = frozenset(PHASES[PHASES.index("refused") :])
"""Phases of a client that is not expected to deliver."""


def enum_word(enum: Any, number: int) -> str:
    """The name of an enum's value: "time window" for UNAVAILABLE_REASON_TIME_WINDOW; an unknown one is its number."""
    described = enum.DESCRIPTOR.values_by_number.get(number)
    prefix = enum.DESCRIPTOR.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return described.name.removeprefix(prefix).lower().replace("_", " ") if described else str(number)


def run_state(state: int) -> str:
    """A run's state. It is "not loaded" if the coordinator could not load the run."""
    return NOT_LOADED if state == pb.RUN_STATE_UNSPECIFIED else enum_word(pb.RunState, state)


def client_state(state: int) -> str:
    """A client's presence."""
    return "unknown" if state == pb.CLIENT_STATE_UNSPECIFIED else enum_word(pb.ClientState, state)


def run_number(word: str) -> pb.RunState | None:
    """The state of runs with this word; None for another word."""
    number = pb.RunState.Value(f"RUN_STATE_{word.upper()}") if word in RUN_STATES else None
    return cast(pb.RunState | None, number)


def client_number(word: str) -> pb.ClientState:
    """The presence with this word; 0 (all) for another word."""
    number = pb.ClientState.Value(f"CLIENT_STATE_{word.upper()}") if word in CLIENT_STATES else 0
    return cast(pb.ClientState, number)


_TONES: Mapping[str, str] = {
    "running": "good", "waiting": "warn", "paused": "warn", "completed": "calm", "stopped": "calm", "failed": "bad",
    NOT_LOADED: "bad", "present": "good", "suspect": "warn", "lost": "calm", "banned": "bad", "quarantined": "bad",
    "draining": "warn", "may not train": "warn", "attention": "warn", "need attention": "warn",
    # phases of a client in a round
    "delivered": "good", "assigned": "calm", "downloading": "busy", "training": "busy", "uploading": "busy",
    "checking": "busy", "refused": "bad", "out": "warn", "cancelled": "calm",
}  # fmt: skip
_URGENCY = ("calm", "good", "busy", "warn", "bad")


def tone(word: str) -> str:
    """How urgent a state, mark or phase is: good, busy, warn, bad or calm."""
    return _TONES.get(word, "calm")


def worst_tone(words: Iterable[str]) -> str:
    """The most urgent tone of several words."""
    return max(map(tone, words), key=_URGENCY.index, default="calm")


def event_tone(event: str) -> str:
    """How urgent an event of the history is."""
    if any(part in event for part in _BAD):
        return "bad"
    if any(part in event for part in _WARN):
        return "warn"
    return "good" if event in _GOOD else "calm"


_BAD = ("failed", "banned", "quarantined", "refused", "revoked", "dropped", "given_up", "left_out")
_WARN = ("lost", "missing", "restarted", "recovered", "paused", "fenced", "stopped", "waits", "drain", "forgotten",
         "deleted", "removed", "gone", "suspected")  # fmt: skip
_GOOD = frozenset({"round_committed", "run_completed", "client_registered", "client_back"})


def first_of(names: Sequence[str], number: int) -> str:
    """The first of so many names: a, b and 3 more."""
    return ", ".join(names) + (f" and {number - len(names)} more" if number > len(names) else "")


def counts(numbers: Mapping[str, int], order: Iterable[str] | None = None) -> str:
    """Numbers with their names, without those that are 0: 48 admitted, 2 failed. order: names; None: by name."""
    names = sorted(numbers) if order is None else order
    return ", ".join(f"{numbers[name]:,} {name.replace('_', ' ')}" for name in names if numbers.get(name))


_EVENTS = {
    "attempt_opened": "clients drawn", "culprit_dropped": "update refused", "update_dropped": "update refused",
    "member_missing": "client state missing", "client_fenced": "client replaced",
}  # fmt: skip
"""Events whose own names do not tell an operator what happened."""
ROUTINE = frozenset({"attempt_opened", "stage_opened", "round_committed"})
"""Events of every round. They would hide the others."""


def event_words(event: str, detail: str) -> str:
    """An event of the history or of a watch, with its detail: client out: c was lost."""
    name = _EVENTS.get(event) or event.replace("_", " ")
    return f"{name}: {detail}" if detail else name


def event_detail(event: str, detail: str) -> str:
    """The detail of an event for a person: the id of a process is named as such, and long digests are shortened."""
    text = shortened(detail)
    return f"by its process {text}" if event == "client_registered" and text.endswith("…") else text


def shortened(text: str) -> str:
    """A text with the first digits of each digest and id of a process."""
    return _LONG_HEX.sub(lambda found: f"{found[0][:8]}…", text)


def alike(entry: pb.HistoryEntry) -> tuple[str, str, str]:
    """What is the same in entries that differ in numbers alone."""
    return entry.event, entry.subject, _HEX_OR_NUMBER.sub("", entry.detail)


def folded(entries: Sequence[pb.HistoryEntry]) -> list[tuple[pb.HistoryEntry, int]]:
    """The first entry of each group of alike ones that follow each other, with the number of the others."""
    groups = [list(group) for _, group in groupby(entries, alike)]
    return [(group[0], len(group) - 1) for group in groups]


def without_repeats(entries: Sequence[pb.HistoryEntry], most: int) -> list[tuple[pb.HistoryEntry, int]]:
    """The newest events first, each with the number of earlier ones that differ in numbers alone.

    entries: the oldest first. Events of every round are left out.
    """
    newest: dict[tuple[str, str, str], list[pb.HistoryEntry]] = {}
    for entry in reversed(entries):
        if entry.event not in ROUTINE:
            newest.setdefault(alike(entry), []).append(entry)
    return [(same[0], len(same) - 1) for same in newest.values()][:most]


def alike_words(others: int) -> str:
    """Behind an event that stands for others: ; 11 earlier ones alike."""
    return f"; {others:,} earlier {'one' if others == 1 else 'ones'} alike" if others else ""


_HEX_OR_NUMBER = re.compile(r"\b[0-9a-f]{24,}\b|\d+")
_LONG_HEX = re.compile(r"\b[0-9a-f]{24,}\b")


def who(actor: str) -> str:
    """An actor for a person: a coordinator without certificates does not know who calls."""
    return "without login" if actor == "anybody" else actor


def about(seconds: float) -> str:
    """An estimated time. One of some minutes is given in minutes: its seconds mean nothing."""
    return f"{round(seconds / 60)} min" if _COARSE_S <= seconds < _HOUR_S else units.duration(round(seconds))


_COARSE_S, _HOUR_S = 300.0, 3600.0
