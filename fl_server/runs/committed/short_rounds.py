"""Rounds that are committed with fewer updates than they wanted, because work failed or clients were missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fl_server.rounds.state import RoundState

_LONGEST = 500
"""Characters of a reason."""


def wanted_updates(state: RoundState) -> int:
    """The updates that a round wants, whatever the size of its cohort or of its last exchange is."""
    policy = state.policy
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
    text = f"round {state.round} has {accepted} of {wanted} updates"
    if kinds:
        text += ": " + ", ".join(f"{kinds[kind]} {kind}" for kind in sorted(kinds))
        why, count = Counter(why for _, why in missing).most_common(1)[0]
        text += f"; {count} of them: {why}" if count > 1 or len(missing) == 1 else f"; one of them: {why}"
    return "; ".join(filter(None, (text, without)))[:_LONGEST]
