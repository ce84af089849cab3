"""`fl privacy`: what the rounds of a run's file cost, and which noise keeps them within its budget."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fl_common.privacy.loss_distributions import FIRST_NAME, NAME, tight_epsilon_of
from fl_ops.commands.options import Context, command
from fl_ops.errors import UsageError
from fl_ops.render import output

if TYPE_CHECKING:
    from fl_server.privacy_accounts import Account

_PRECISION = 1.005
"""The least noise is known to half a percent, from above."""
_LEAST = 0.01
"""Less noise protects nothing, and its epsilon is beyond the accountant's numbers."""


@command
def privacy(
    context: Context,
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help=r"A run's file with the section \[privacy].")],
) -> None:
    """State what a run's rounds cost its privacy account, and the least noise for its budget.

    Nothing is read but the file: what other runs have spent of the account is not counted.
    """
    # Imported here because they load torch, which takes seconds and which most other commands do not need.
    from fl_ops.simulate.settings import read_simulation
    from fl_server.privacy_accounts import Account

    config = read_simulation(run).run
    if config.client_privacy is None:
        raise UsageError(
            f'{run}: expected the section [privacy] with unit = "client" (docs/security/privacy.md); what records of a'
            " device cost depends on their number, and `fl-client privacy` shows what they have spent"
        )
    account, rounds = Account.of("", config, ()), config.stop.rounds
    facts = {
        "rounds": rounds,
        "rate": account.rate,
        "noise_multiplier": account.privacy.noise_multiplier,
        "delta": account.privacy.delta,
        "max_epsilon": account.privacy.limit,
        "epsilon": account.epsilon(rounds),
        "epsilon_of_seen_cohorts": account.epsilon(rounds, seen=True),
        "tight_epsilon": tight_epsilon_of(account.spent(rounds), account.privacy.delta),
        "tight_epsilon_of_seen_cohorts": tight_epsilon_of(account.spent(rounds, seen=True), account.privacy.delta),
        "most_rounds": account.most,
        "least_noise_multiplier": _least_noise(account, rounds),
    }
    output.show(facts, lambda: _text(facts), context.as_json)


def _text(facts: dict[str, Any]) -> str:
    tight = ""
    if facts["tight_epsilon"] is not None:
        tight = f"By {NAME} it is {facts['tight_epsilon']:.3g}.\n"
    return (
        "{rounds} rounds at rate {rate:g} with noise {noise_multiplier:g}: epsilon {epsilon:.3g} at delta {delta:g}"
        " ({epsilon_of_seen_cohorts:.3g} for who sees the cohorts), by {first}.\n"
        "{tight}"
        "The budget of {max_epsilon:g} lasts for {most_rounds:,} rounds. The least noise for {rounds} rounds within it"
        " is {least_noise_multiplier:.3g}."
    ).format(**facts, tight=tight, first=FIRST_NAME)


def _least_noise(account: Account, rounds: int) -> float:
    """The smallest noise multiplier with which so many rounds stay within the budget."""
    low, high = _LEAST, max(2 * _LEAST, account.privacy.noise_multiplier)
    while account.with_noise(high).epsilon(rounds) > account.privacy.limit:
        low, high = high, 2 * high
    while low * _PRECISION < high:
        middle = math.sqrt(low * high)
        if account.with_noise(middle).epsilon(rounds) > account.privacy.limit:
            low = middle
        else:
            high = middle
    return high
