"""The rule for an error that is in the task's code and not on one device: the run fails in place of asking for ever."""

from __future__ import annotations

from collections import Counter

from fl_server.rounds.state import RoundState

SAME_FAILURE = 3
"""Different clients that must have failed with the same cause in one round."""
LAST_SAME_FAILURE = 2
"""The same where no other client is left to draw."""


def same_failure(state: RoundState) -> str:
    """Why a run fails whose attempt ended below the quorum; empty if it goes on.

    It fails if enough different clients failed with one cause in this round, and more than those that delivered. One
    client never fails a run: the cause may be its own data.
    """
    if not state.failed:
        return ""
    counts = Counter(failed.cause for failed in state.failed)
    cause = min(counts, key=lambda each: (-counts[each], each))
    left = not state.settled or set(state.candidates) - state.drawn
    if counts[cause] < (SAME_FAILURE if left else LAST_SAME_FAILURE) or counts[cause] <= len(state.admitted):
        return ""
    first = min((failed for failed in state.failed if failed.cause == cause), key=lambda each: each.client.encode())
    return (
        f"{counts[cause]} clients failed in round {state.round} with the same error in the task's code, and"
        f" {len(state.admitted)} delivered; first {first.client}: {first.why}. Correct the code and its fingerprint on"
        " both sides, or the devices' data, and resume the run"
    )
