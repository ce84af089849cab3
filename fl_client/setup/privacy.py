"""`fl-client privacy`: what this device's data has spent of its privacy. A running daemon is not disturbed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fl_client.errors import StartError, UsageError
from fl_client.policy.config import NO_POLICY, read_policy
from fl_client.privacy.account import FILE, read_account
from fl_client.settings.config import load_config
from fl_client.setup.units import CONFIG


def show(
    config: Annotated[Path, typer.Option(metavar="FILE", help="The daemon's settings.")] = Path(CONFIG),
    delta: Annotated[
        float | None, typer.Option(metavar="D", help="Of epsilon; default: the smallest that a run had.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")] = False,
) -> None:
    """Show what the data of this device has spent over all runs with differential privacy, and the site's limit."""
    if delta is not None and not 0.0 < delta < 1.0:
        raise UsageError(f"--delta: expected a number over 0 and below 1, got {delta:g}")
    try:
        settings = load_config(config)
        policy = NO_POLICY if settings.policy is None else read_policy(settings.policy)
        account = read_account(settings.state_dir / FILE)
    except StartError as error:
        raise UsageError(str(error)) from None
    spent = {} if account is None else account.spent
    wanted = delta or (None if account is None or not spent else account.delta)
    epsilon = 0.0 if account is None else account.epsilon(wanted)
    limit = policy.privacy.max_epsilon
    if as_json:
        steps = [
            {"noise_multiplier": mechanism.noise_multiplier, "rate": mechanism.rate, "steps": count}
            for mechanism, count in sorted(spent.items())
        ]
        print(json.dumps({"epsilon": epsilon, "delta": wanted, "max_epsilon": limit, "spent": steps}))
        return
    for mechanism, count in sorted(spent.items()):
        print(f"{count} steps with noise_multiplier {mechanism.noise_multiplier:g} at rate {mechanism.rate:g}")
    of = "without a limit of the site" if limit is None else f"of {limit:g} that the site allows (privacy.max_epsilon)"
    print(f"epsilon {epsilon:.4g}{'' if wanted is None else f' at delta {wanted:g}'}, {of}")
