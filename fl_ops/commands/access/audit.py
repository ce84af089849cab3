"""`fl audit`: list, export and verify the audit log."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from fl_common.audit import START, AuditRow, ChainCheck, Head
from fl_common.command_help import Group, examples
from fl_common.units import counted
from fl_ops.admin import audit
from fl_ops.commands.options import Context, admin_command
from fl_ops.errors import Exit, UsageError
from fl_ops.files import PRIVATE, Target, check_free, written_whole
from fl_ops.render import tables
from protos.fl.v1 import admin_pb2

app = typer.Typer(cls=Group, no_args_is_help=True, help="List, export and verify the audit log.")
_AGO = re.compile(r"(\d+)(s|min|h|d)")
_UNITS_S = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


@app.command("list", **examples("fl audit list", "fl audit list --actor operator:alice --method BanClient --since 7d"))
@admin_command
def list_rows(
    context: Context,
    actor: Annotated[str, typer.Option(metavar="NAME", help="Only rows of this caller: operator:alice.")] = "",
    method: Annotated[str, typer.Option(help="Only rows with this method: BanClient.")] = "",
    subject: Annotated[str, typer.Option(help="Only rows about this run, client, token or certificate.")] = "",
    result: Annotated[str, typer.Option(help="Only rows with this result: ok, permission_denied.")] = "",
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Only later rows: 2h, 7d, 2026-11-22, 2026-11-22T10:00.")
    ] = "",
    limit: Annotated[int, typer.Option(min=0, max=10_000, help="Number of rows, the newest. 0: all.")] = 100,
) -> None:
    """List rows of the audit log, the oldest first."""
    request = admin_pb2.ListAuditRequest(actor=actor, method=method, subject=subject, result=result, limit=limit)
    if since:
        request.since.FromMicroseconds(since_us(since, time.time()))
    with context.connect() as client:
        entries = [entry for page in client.history.list_audit(request) for entry in page.entries]
    context.show(entries, lambda: tables.audit_table(entries))


@app.command(**examples("fl audit export --out audit.jsonl"))
@admin_command
def export(
    context: Context,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Path of the file, one JSON object a line.")],
    first: Annotated[int, typer.Option(min=1, help="Number of the first row.")] = 1,
    force: Annotated[bool, typer.Option("--force", help="Replace an older file.")] = False,
) -> None:
    """Write the audit log to a file, with its hashes. The file appears complete, or not at all."""
    target, last, count = Target(out, PRIVATE, force), START, 0
    check_free(target, "choose another --out, or use --force")
    with context.connect() as client, written_whole(target) as file:
        for row in audit.CoordinatorLog(client, admin_pb2.ListAuditRequest(first=first)):
            file.write(row.to_json().encode() + b"\n")
            last, count = row.head, count + 1
    facts = {"path": str(out), "rows": count, "head": str(last)}
    context.show(facts, f"{out}: {counted(count, 'row')}, the newest is {last}")


@app.command(
    **examples(
        "fl audit verify",
        f"fl audit verify --head 17:{'ab' * 32}",
        "fl audit verify --file audit.jsonl",
        "fl audit verify --state-dir /var/lib/impetus-server",
    )
)
@admin_command
def verify(
    context: Context,
    file: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Check this export instead; may be repeated, in the order of rows."),
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Check the ledger in a coordinator's state directory instead; only read."),
    ] = None,
    ledger: Annotated[
        str | None, typer.Option(metavar="URL", help="Check a ledger in PostgreSQL instead; only read.")
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NUMBER:HASH",
            help="A row that was printed before, which must still be there; may be repeated. An export that begins "
            "later needs the row before its first.",
        ),
    ] = None,
) -> None:
    """Check that no row of the audit log was changed, removed, inserted or moved. The exit code is 1 if one was.

    Rows that were removed from the end are found with audit.head, which is beside the ledger in --state-dir, and with
    the --head of an earlier check or export.
    """
    if sum(map(bool, (file, state_dir, ledger))) > 1:
        raise UsageError("expected one of --file, --state-dir and --ledger, got several")
    known = _heads(head or [])
    if file:
        _verify(context, audit.rows_in_files(file), known)
    elif state_dir or ledger:
        # Before the rows: a coordinator that runs may add some.
        beside = audit.heads_beside(state_dir, needed=not known) if state_dir else []
        _verify(context, audit.rows_in_ledger(state_dir or ledger or ""), [*known, *beside])
    else:
        with context.connect() as client:
            _verify(context, audit.CoordinatorLog(client, admin_pb2.ListAuditRequest()), known)


def _verify(context: Context, rows: Iterable[AuditRow], known: list[Head]) -> None:
    """Check rows and print the result. Raises typer.Exit for a broken chain."""
    check: ChainCheck | None = None
    for row in rows:
        check = check or ChainCheck(known, next((head for head in known if head.number == row.number - 1), START))
        check.add(row)
    check = check or ChainCheck(known)
    problems = check.end(getattr(rows, "newest", None))
    broken = [{"number": problem.number, "problem": problem.what} for problem in problems]
    facts: dict[str, Any] = {"rows": check.rows, "head": str(check.head), "intact": not problems, "broken": broken}
    lines = [problem.what for problem in problems] or [f"intact: {counted(check.rows, 'row')}"]
    context.show(facts, "\n".join([*lines, f"head {check.head}"]))
    if problems:
        raise typer.Exit(Exit.REFUSED)


def _heads(texts: list[str]) -> list[Head]:
    try:
        return [Head.parse(text) for text in texts]
    except ValueError as error:
        raise UsageError(f"--head: {error}") from error


def since_us(text: str, now: float) -> int:
    """A time as Unix microseconds: so long before `now`, or a date with or without a time. Raises UsageError."""
    if ago := _AGO.fullmatch(text):
        return max(0, int((now - int(ago[1]) * _UNITS_S[ago[2]]) * 1e6))
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1e6)
    except (ValueError, OverflowError):
        expected = "90min, 2h, 7d, 2026-11-22 or 2026-11-22T10:00"
        raise UsageError(f"--since: expected {expected}, got {text!r}") from None
