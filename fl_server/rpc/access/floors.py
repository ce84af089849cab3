"""The fewest updates that a model may be made of, for the caller of the current call.

A model that was made of one update is that update; of two, each of the two clients can compute the other's. An operator
who is no admin gets no such model: not by the run's settings, and not by an export.
"""

from __future__ import annotations

from fl_server.config import RoundsConfig
from fl_server.errors import InvalidInput, TooFewUpdates
from fl_server.identity import ANYBODY, caller
from fl_server.run_config import RunConfig
from fl_server.run_spec import from_values
from fl_server.store.records import CommitRecord


def least_accepted(rules: RoundsConfig) -> int:
    """The fewest updates for the caller. An admin, and a caller where nobody has an identity, has no floor."""
    who = caller.get()
    return 1 if who is ANYBODY or "admin" in who.roles else rules.min_accepted


def with_floor(config: RunConfig, rules: RoundsConfig) -> RunConfig:
    """The configuration of a new run with the caller's floor. Raises InvalidInput if it contradicts the settings."""
    least, own = least_accepted(rules), config.round.min_accepted
    if least == 1 or (own is not None and own >= least):
        return config
    if own is not None:
        expected = f"at least {least} for a run of an operator who is no admin (rounds.min_accepted of the coordinator)"
        raise InvalidInput("round.min_accepted", expected, own)
    values = config.model_dump(exclude_none=True)
    return from_values({**values, "round": {**values["round"], "min_accepted": least}})


def check_export(run_id: str, commit: CommitRecord | None, rules: RoundsConfig) -> None:
    """Raises TooFewUpdates if the caller may not have the model of a round. commit: None for the first model."""
    least = least_accepted(rules)
    if commit is not None and commit.accepted < least:
        raise TooFewUpdates(run_id, commit.round, commit.accepted, least)
