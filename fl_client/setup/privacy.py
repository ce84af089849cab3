"""`fl-client privacy`: what this device's data has spent, which does not disturb a daemon; `reset` begins anew."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from fl_client.audit.file import AuditFile, Entry
from fl_client.errors import StartError, UsageError
from fl_client.privacy.files import AccountFiles
from fl_client.settings.config import ClientConfig, load_config
from fl_client.setup.settings_file import ConfigFile, read
from fl_client.setup.units import CONFIG
from fl_client.storage.state import StateDir
from fl_common.command_help import Group, examples
from fl_common.privacy.loss_distributions import FIRST_NAME, NAME, tight_epsilon_of
from fl_common.units import counted

app = typer.Typer()
RESET = "privacy_account_reset"
"""Method of the audit log's row."""
_Data = Annotated[str, typer.Option(metavar="NAME", help="The data of this name; without it, all other data.")]


@app.callback(invoke_without_command=True, **{**examples("fl-client privacy --config client.toml"), "cls": Group})
def show(
    context: typer.Context,
    config: ConfigFile = Path(CONFIG),
    data: _Data = "",
    delta: Annotated[
        float | None, typer.Option(metavar="D", help="Of epsilon; default: the smallest that a run had.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")] = False,
) -> None:
    """Show what the data of this device has spent over all runs with differential privacy, and the site's limit."""
    if context.invoked_subcommand is not None:
        return
    if delta is not None and not 0.0 < delta < 1.0:
        raise UsageError(f"--delta: expected a number over 0 and below 1, got {delta:g}")
    settings, policy = read(config)
    files = _files(settings, data)
    try:
        account, witness = files.read(), files.witness()
    except StartError as error:
        raise UsageError(str(error)) from None
    spent = {} if account is None else account.spent
    wanted = delta or (None if account is None or not spent else account.delta)
    epsilon = 0.0 if account is None else account.epsilon(wanted)
    tight = None if wanted is None else tight_epsilon_of(spent, wanted)
    resets = 0 if witness is None else witness.resets
    facts = {"epsilon": epsilon, "tight_epsilon": tight, "delta": wanted, "max_epsilon": policy.privacy.max_epsilon}
    steps = [
        {"noise_multiplier": mechanism.noise_multiplier, "rate": mechanism.rate, "steps": count}
        for mechanism, count in sorted(spent.items())
    ]
    values = {**facts, "spent": steps, "resets": resets}
    print(json.dumps(values) if as_json else "\n".join(_lines(values)))


def _lines(values: Mapping[str, Any]) -> Iterator[str]:
    """The values of `show` for people."""
    for steps in values["spent"]:
        yield (
            f"{counted(steps['steps'], 'step')} with noise_multiplier {steps['noise_multiplier']:g} at rate "
            f"{steps['rate']:g}"
        )
    limit, delta = values["max_epsilon"], values["delta"]
    of = "without a limit of the site" if limit is None else f"of {limit:g} that the site allows (privacy.max_epsilon)"
    at = "" if delta is None else f" at delta {delta:g} by {FIRST_NAME}"
    yield f"epsilon {values['epsilon']:.4g}{at}, {of}"
    if values["tight_epsilon"] is not None:
        yield f"epsilon {values['tight_epsilon']:.4g} by {NAME}"
    if values["resets"]:
        yield f"the account was reset {counted(values['resets'], 'time')}: what was spent before is not in it"


@app.command(**examples("fl-client privacy reset --config client.toml --keep"))
def reset(
    config: ConfigFile = Path(CONFIG),
    data: _Data = "",
    keep: Annotated[
        bool, typer.Option("--keep", help="Go on with the privacy.json that is there, although it is an older copy.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Begin a new account, after the old one is lost, or for data that no run has used.

    What the data has spent is forgotten, so the limit of the site holds no longer for data that was used before.
    """
    question = "go on with an account that may be older" if keep else "begin a new account, in which nothing is spent"
    if not yes and not typer.confirm(f"Forget what this device's data has spent, and {question}?", default=False):
        raise typer.Exit(1)
    try:
        settings = load_config(config)
        files = _files(settings, data)
        with StateDir(settings.state_dir) as state:
            _note(state.path, files, data, keep=keep)  # before: no reset is without its row
            account = files.reset(keep=keep)
    except (StartError, OSError) as error:
        raise UsageError(str(error)) from None
    print(f"the account has {counted(account.charges, 'charge')}, epsilon {account.epsilon():.4g}")


def _files(settings: ClientConfig, data: str) -> AccountFiles:
    """The account's files of data with this name. Raises UsageError where no task has it."""
    names = sorted({served.data for served in settings.served} - {""})
    if data and data not in names:
        raise UsageError(f"--data: expected {' or '.join(names) or 'no name'}, as in [[tasks]], got {data!r}")
    return AccountFiles.of(settings.state_dir, data)


def _note(folder: Path, files: AccountFiles, data: str, *, keep: bool) -> None:
    """Add the owner's decision to the device's audit log. Raises OSError."""
    lost = "what was spent before is not known"
    with suppress(StartError):
        if (witness := files.witness()) is not None:
            lost = f"{counted(witness.charges, 'charge')} counted before"
    result = "an older copy goes on" if keep else "a new account begins"
    detail = f"{f'data {data}: ' if data else ''}{result}; {lost}"
    fields = {"actor": "owner", "method": RESET, "result": "ok", "detail": detail}
    AuditFile(folder).append([Entry(int(time.time() * 1e6), fields)])
