"""States of runs and clients in words, and how urgent they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protos.fl.v1 import admin_pb2 as pb

RUN_STATES = ("running", "waiting", "paused", "completed", "stopped", "failed")
CLIENT_STATES = ("present", "suspect", "lost")
CLIENT_MARKS = ("banned", "draining", "quarantined")
NOT_LOADED = "not loaded"

_TONES: Mapping[str, str] = {
    "running": "good", "waiting": "warn", "paused": "warn", "completed": "calm", "stopped": "calm", "failed": "bad",
    NOT_LOADED: "bad", "present": "good", "suspect": "warn", "lost": "calm", "banned": "bad", "quarantined": "bad",
    "draining": "warn", "may not train": "warn",
    # phases of a client in a round
    "delivered": "good", "assigned": "calm", "downloading": "busy", "training": "busy", "uploading": "busy",
    "checking": "busy", "refused": "bad", "failed in it": "bad", "out": "warn", "cancelled": "calm",
}  # fmt: skip


def run_word(state: int) -> str:
    """The state of a run: running."""
    return pb.RunState.Name(state).removeprefix("RUN_STATE_").lower() if state in _ENDS_OR_GOES else NOT_LOADED


_ENDS_OR_GOES = frozenset(pb.RunState.values()) - {pb.RUN_STATE_UNSPECIFIED}


def run_number(word: str) -> int | None:
    """The state with this word; None for another word."""
    return pb.RunState.Value(f"RUN_STATE_{word.upper()}") if word in RUN_STATES else None


def client_word(state: int) -> str:
    """The presence of a client: present."""
    known = state in pb.ClientState.values()
    return pb.ClientState.Name(state).removeprefix("CLIENT_STATE_").lower() if known else "unknown"


def client_number(word: str) -> int:
    """The presence with this word; 0 (all) for another word."""
    return pb.ClientState.Value(f"CLIENT_STATE_{word.upper()}") if word in CLIENT_STATES else 0


def client_marks(client: pb.ClientStatus) -> list[str]:
    """What keeps a client from work: banned, quarantined, draining, may not train."""
    availability = client.HasField("availability") and not client.availability.may_train
    marks = {
        "banned": client.banned,
        "quarantined": client.HasField("quarantine"),
        "draining": client.draining,
        "may not train": availability,
    }
    return [name for name, applies in marks.items() if applies]


def tone(word: str) -> str:
    """The class of a state: good, busy, warn, bad or calm."""
    return _TONES.get(word, "calm")


def event_tone(event: str) -> str:
    """The class of an event of the history."""
    if any(part in event for part in _BAD):
        return "bad"
    if any(part in event for part in _WARN):
        return "warn"
    return "good" if event in _GOOD else "calm"


_BAD: Sequence[str] = ("failed", "banned", "quarantined", "refused", "revoked", "dropped", "given_up", "left_out")
_WARN: Sequence[str] = ("lost", "missing", "restarted", "recovered", "paused", "fenced", "stopped", "waits", "drain",
                        "forgotten", "deleted", "removed", "gone")  # fmt: skip
_GOOD = frozenset({"round_committed", "run_completed", "client_registered", "client_back"})

RESTARTS: Mapping[str, str] = {
    "run_recovered": "restart",
    "round_restarted": "restart",
    "update_dropped": "refused",
    "culprit_dropped": "refused",
    "client_states_reset": "restart",
    "run_paused": "pause",
    "run_resumed": "pause",
}
"""Events of a run that are marked on its time axis -> the kind of the mark."""
