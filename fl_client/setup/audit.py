"""`fl-client audit`: list and verify the device's own audit log. A running daemon is not disturbed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from fl_client.audit.file import rows_in
from fl_client.errors import ConfigError, UsageError
from fl_client.settings.config import load_config
from fl_client.setup.settings_file import ConfigFile
from fl_client.setup.units import CONFIG
from fl_common.audit import AuditRow, ChainCheck, Head
from fl_common.command_help import Group, examples
from fl_common.logs import escaped
from fl_common.units import counted

BROKEN = 1
app = typer.Typer(cls=Group, no_args_is_help=True, help="List and verify what this device was asked to do and did.")
StateDirectory = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The daemon's state directory, instead of its settings.")
]


@app.command("list", **examples("fl-client audit list --config client.toml --limit 20"))
def list_rows(
    config: ConfigFile = Path(CONFIG),
    state_dir: StateDirectory = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of rows, the newest.")] = 100,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, with the hashes.")] = False,
) -> None:
    """List the newest rows, the oldest first."""
    for row in deque(_rows(config, state_dir), maxlen=limit):
        print(row.to_json() if as_json else _line(row))


@app.command(**examples("fl-client audit verify --config client.toml"))
def verify(
    config: ConfigFile = Path(CONFIG),
    state_dir: StateDirectory = None,
    head: Annotated[
        list[str] | None,
        typer.Option(metavar="NUMBER:HASH", help="A row that was printed before, which must still be there; repeat."),
    ] = None,
) -> None:
    """Check that no row was changed, removed, inserted or moved. The exit code is 1 if one was.

    The files have a limited size: the first row that is left is taken as it is.
    """
    try:
        check = ChainCheck([Head.parse(text) for text in head or ()], None)
    except ValueError as error:
        raise UsageError(f"--head: {error}") from None
    for row in _rows(config, state_dir):
        check.add(row)
    problems = check.end()
    for problem in problems:
        print(problem.what)
    print(f"head {check.head}" if problems else f"intact: {counted(check.rows, 'row')}\nhead {check.head}")
    if problems:
        raise typer.Exit(BROKEN)


def _rows(config: Path, state_dir: Path | None) -> Iterator[AuditRow]:
    """The rows on disk. A line that is none ends the command."""
    try:
        folder = load_config(config).state_dir if state_dir is None else state_dir
    except ConfigError as error:
        raise UsageError(str(error)) from None
    if not folder.is_dir():
        raise UsageError(f"{folder} is no directory: expected a daemon's state_dir")
    try:
        yield from rows_in(folder)
    except ValueError as error:
        print(str(error))
        raise typer.Exit(BROKEN) from None
    except OSError as error:
        raise UsageError(f"the audit log cannot be read: {error}") from None


def _line(row: AuditRow) -> str:
    when = datetime.fromtimestamp(row.time_us / 1e6, UTC).astimezone()
    words = (row.actor, row.method, row.subject or "-", row.result, row.detail)
    return escaped("  ".join((str(row.number), f"{when:%Y-%m-%d %H:%M:%S}", *words)))
