"""`fl audit` against a fake coordinator: tables, filters, files and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fl_common.audit import AuditRow
from fl_ops.commands.access.audit import since_us
from fl_ops.errors import UsageError
from protos.fl.v1 import admin_pb2
from tests.fl_common.audit.chains import a_chain
from tests.fl_ops.conftest import FakeAdmin, Fl


def response(rows: list[AuditRow]) -> admin_pb2.ListAuditResponse:
    """One page with all rows."""
    found = admin_pb2.ListAuditResponse()
    for row in rows:
        entry = found.entries.add(
            number=row.number, actor=row.actor, address=row.address, method=row.method, subject=row.subject,
            result=row.result, detail=row.detail, hash=row.hash,
        )  # fmt: skip
        entry.time.FromMicroseconds(row.time_us)
    found.head_number, found.head_hash = (rows[-1].number, rows[-1].hash) if rows else (0, b"")
    return found


def test_rows_are_listed_with_filters(fl: Fl, admin: FakeAdmin) -> None:
    """The request has what was asked for."""
    admin.responses["ListAudit"] = response(a_chain(2))
    done = fl(
        "audit", "list", "--actor", "operator:alice", "--method", "BanClient", "--since", "2026-11-22", "--limit", 5
    )
    assert done.exit_code == 0
    assert "operator:alice" in done.stdout
    assert "edge-3" in done.stdout
    [request] = admin.requests
    assert isinstance(request, admin_pb2.ListAuditRequest)
    assert (request.actor, request.method, request.limit) == ("operator:alice", "BanClient", 5)
    assert request.since.seconds > 1_790_000_000


def test_an_export_is_verified_and_edits_are_found(fl: Fl, admin: FakeAdmin, tmp_path: Path) -> None:
    """The file has one object a line, and an older one is not replaced."""
    chain = a_chain(7)
    admin.responses["ListAudit"] = response(chain)
    done = fl("audit", "export", "--out", "audit.jsonl", "--json")
    assert json.loads(done.stdout) == {"path": "audit.jsonl", "rows": 7, "head": str(chain[-1].head)}
    assert fl("audit", "export", "--out", "audit.jsonl").exit_code == 2
    assert fl("audit", "verify", "--file", "audit.jsonl").exit_code == 0
    lines = (tmp_path / "audit.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "later.jsonl").write_text("".join(lines[3:]))
    assert fl("audit", "verify", "--file", "later.jsonl").exit_code == 1
    assert fl("audit", "verify", "--file", "later.jsonl", "--head", chain[2].head).exit_code == 0
    (tmp_path / "short.jsonl").write_text("".join(lines[:5]))
    done = fl("audit", "verify", "--file", "short.jsonl", "--head", chain[6].head, "--json")
    assert done.exit_code == 1
    found = json.loads(done.stdout)
    assert (found["intact"], [row["number"] for row in found["broken"]]) == (False, [6])
    (tmp_path / "torn.jsonl").write_text("".join(lines)[:-20])
    done = fl("audit", "verify", "--file", "torn.jsonl")
    assert (done.exit_code, "line 7 is no row" in done.stderr) == (1, True)


def test_a_coordinator_that_leaves_rows_out_is_found(fl: Fl, admin: FakeAdmin) -> None:
    """The chain is computed here, not there; and the head that it names must be in its list."""
    chain = a_chain(7)
    admin.responses["ListAudit"] = response(chain)
    assert fl("audit", "verify").exit_code == 0
    admin.responses["ListAudit"] = response([*chain[:3], *chain[4:]])
    done = fl("audit", "verify")
    assert (done.exit_code, "row 4 is missing" in done.stdout) == (1, True)
    short = response(chain[:5])
    short.head_number, short.head_hash = chain[6].head
    admin.responses["ListAudit"] = short
    done = fl("audit", "verify")
    assert (done.exit_code, "rows 6 to 7 are missing at the end" in done.stdout) == (1, True)


def test_an_empty_log_is_whole(fl: Fl, admin: FakeAdmin) -> None:
    """Of a new coordinator."""
    admin.responses["ListAudit"] = response([])
    assert fl("audit", "verify").exit_code == 0
    assert "no rows" in fl("audit", "list").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["verify", "--file", "a", "--state-dir", "b"],
        ["verify", "--head", "7"],
        ["verify", "--file", "missing"],
        ["list", "--since", "yesterday"],
    ],
)
def test_a_wrong_command_line_is_refused(fl: Fl, admin: FakeAdmin, arguments: list[str]) -> None:
    """With exit code 2, before a call."""
    done = fl("audit", *arguments)
    assert done.exit_code == 2
    assert "expected" in done.stderr or "cannot be read" in done.stderr
    assert admin.requests == []


@pytest.mark.parametrize(("text", "seconds"), [("90min", 5400), ("2h", 7200), ("7d", 604_800), ("30s", 30)])
def test_a_time_ago(text: str, seconds: int) -> None:
    """Relative to now."""
    assert since_us(text, 10**9) == (10**9 - seconds) * 10**6


def test_a_time_of_the_calendar() -> None:
    """With a time zone, or of this machine."""
    assert since_us("2026-11-22T10:00+00:00", 0.0) == 1_795_341_600_000_000
    for text in ("", "7", "1y", "2026-13-01"):
        with pytest.raises(UsageError, match="--since: expected"):
            since_us(text, 0.0)
