"""The audit log with real processes: SIGKILL around a change, refusals, an edited ledger, and the device's own log."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from typer.testing import CliRunner

from fl_client.audit.file import RECOVERED, rows_in
from fl_client.setup.commands import app as fl_client
from fl_common.audit import AuditRow
from fl_ops.admin.audit import CoordinatorLog
from fl_ops.admin.settings import Certificates
from fl_ops.commands.cli import app as fl
from fl_ops.errors import OpsError
from protos.fl.v1 import admin_pb2
from tests.processes.certificates import Pki, credentials, section
from tests.processes.federation import Daemon, SecureCoordinator
from tests.processes.process import Workspace, eventually
from tests.processes.raw_client import RawClient


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    """A folder for all processes of one test."""
    with Workspace(tmp_path) as workspace:
        yield workspace


@pytest.fixture
def pki(workspace: Workspace) -> Pki:
    """The authority of the coordinator."""
    return Pki(workspace.folder / "pki")


@pytest.fixture
def server(workspace: Workspace, pki: Pki) -> SecureCoordinator:
    """A coordinator that requires certificates."""
    return SecureCoordinator(workspace, pki).serve()


def rows(server: SecureCoordinator) -> list[AuditRow]:
    """All rows, as an operator gets them."""
    with server.admin() as admin:
        return list(CoordinatorLog(admin, admin_pb2.ListAuditRequest()))


def verified(*arguments: object) -> tuple[int, str]:
    """Exit code and output of `fl audit verify`."""
    done = CliRunner().invoke(fl, ["audit", "verify", *map(str, arguments)])
    return done.exit_code, done.stdout


def ban_until_it_ends(server: SecureCoordinator, name: str, answered: list[str]) -> None:
    """Ban clients of this name, one after the other, until the coordinator is gone."""
    with server.admin() as admin:
        for number in range(10_000):
            client = f"{name}-{number}"
            try:
                admin.clients.ban_client(client, "in a loop")
            except OpsError:
                return
            answered.append(client)


def test_no_change_is_in_effect_without_a_row_after_sigkill(server: SecureCoordinator) -> None:
    """Bans in four threads, and a kill. Each answered ban has its result, and each one in effect its request."""
    answered: list[str] = []
    threads = [
        threading.Thread(target=ban_until_it_ends, args=(server, f"edge-{number}", answered)) for number in range(4)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: len(answered) >= 20, "bans are made")
    server.kill()
    for thread in threads:
        thread.join()
    server.serve()
    with server.admin() as admin:
        banned = {client.client_id for client in admin.clients.list_clients() if client.banned}
    found = rows(server)
    asked = {row.subject for row in found if row.result == "asked"}
    done = {row.subject for row in found if row.method == "BanClient" and row.result == "ok"}
    assert set(answered) <= done
    assert banned <= asked
    assert set(answered) <= banned
    assert {row.actor for row in found} == {"admin:alice"}
    state = Path(str(server.settings["state_dir"]))
    code, text = verified("--state-dir", state)
    assert code == 0, text
    assert "intact" in text
    assert not server.events("audit_altered")


def edit(server: SecureCoordinator, statement: str) -> None:
    """Change the ledger of a coordinator with SQL."""
    path = Path(str(server.settings["state_dir"])) / "ledger.sqlite"
    with closing(sqlite3.connect(path, timeout=60)) as database, database:
        database.execute(statement)


def connection(server: SecureCoordinator, files: Certificates) -> Sequence[str]:
    """Options of `fl`."""
    return (
        "--server", str(server.settings["admin_listen"]), "--ca", str(files.ca), "--cert", str(files.cert), "--key",
        str(files.key),
    )  # fmt: skip


def test_an_edited_ledger_is_named_by_the_command(server: SecureCoordinator, pki: Pki, tmp_path: Path) -> None:
    """Over the wire, in an export, and in the file of the ledger; also rows that are missing at the end."""
    with server.admin() as admin:
        for number in range(5):
            admin.clients.ban_client(f"edge-{number}", "lost")
    alice = connection(server, pki.issue("admin", "alice"))
    code, text = verified(*alice)
    assert code == 0
    head = text.splitlines()[-1].removeprefix("head ")
    export = tmp_path / "audit.jsonl"
    assert CliRunner().invoke(fl, ["audit", "export", "--out", str(export), *alice]).exit_code == 0
    assert verified("--file", export, "--head", head)[0] == 0
    export.write_text(export.read_text().replace("edge-2", "edge-9"))
    assert "row 5 was changed" in verified("--file", export)[1]
    edit(server, "UPDATE audit SET actor = 'operator:eve' WHERE number = 5")
    state = server.settings["state_dir"]
    for place in (alice, ("--state-dir", state)):
        code, text = verified(*place)
        assert (code, "row 5 was changed" in text) == (1, True)
    server.kill()
    edit(server, "DELETE FROM audit WHERE number > 4")
    newest = Path(str(state)) / "audit.head"
    kept = newest.read_text()
    for more in ((), ("--head", head)):
        code, text = verified("--state-dir", state, *more)
        assert (code, "missing at the end" in text) == (1, True)
    newest.unlink()
    done = CliRunner().invoke(fl, ["audit", "verify", "--state-dir", str(state)])
    assert (done.exit_code, "is missing; without it rows" in " ".join(done.output.split())) == (1, True)
    newest.write_text(kept)
    server.serve()
    assert server.events("audit_altered")
    with server.admin() as admin:
        admin.clients.ban_client("later", "lost")
    assert "audit_altered" in {row.method for row in rows(server)}
    server.kill()
    newest.unlink()
    server.serve()
    assert server.logged("audit_head_missing")
    assert verified("--state-dir", state, "--head", head)[0] == 1


@pytest.mark.slow
def test_refusals_of_identity_are_recorded(server: SecureCoordinator, pki: Pki) -> None:
    """Who, from where, what and why. A loop of them is counted."""
    device = pki.issue("client", "edge-1")
    with server.admin(device) as admin:
        for _ in range(30):
            with pytest.raises(OpsError):
                admin.runs.list_runs()
    nobody = pki.forge("nobody", [x509.DNSName("example.org")])
    for files in (nobody, pki.issue("client", "edge-2"), pki.issue("admin", "alice")):
        with RawClient(server.address, "edge-1", credentials(files)) as client, pytest.raises(grpc.RpcError):
            client.register()
    with server.admin() as admin:
        admin.clients.ban_client("edge-1", "lost device")
    with RawClient(server.address, "edge-1", credentials(device)) as client, pytest.raises(grpc.RpcError):
        client.register()
    wanted = {
        ("client:edge-1", "ListRuns", "permission_denied"),
        ("anybody", "Register", "permission_denied"),
        ("client:edge-2", "Register", "permission_denied"),
        ("admin:alice", "Register", "permission_denied"),
        ("client:edge-1", "Register", "permission_denied"),
        ("admin:alice", "BanClient", "ok"),
    }

    def all_recorded() -> list[AuditRow] | None:
        found = rows(server)
        return found if wanted <= {(row.actor, row.method, row.result) for row in found} else None

    found = eventually(all_recorded, "all rows are written")
    assert len([row for row in found if row.method == "ListRuns"]) <= 10
    assert all(row.address.startswith("127.0.0.1:") for row in found)
    assert "lost device" in next(row.detail for row in found if (row.method, row.result) == ("BanClient", "asked"))


def test_the_device_has_its_own_log(workspace: Workspace, server: SecureCoordinator, pki: Pki) -> None:
    """A round, a kill in the middle of the log's last line, and a command that checks the chain."""
    files = pki.issue("client", "edge-1")
    daemon = Daemon(workspace, server, "edge-1", insecure=False, tls=section(files)).start()
    server.until_present("edge-1")
    run = server.create("audited", round={"clients_per_round": 1, "min_clients": 1}, stop={"rounds": 1})
    server.completed(run)
    folder = Path(daemon.settings["state_dir"])
    methods = eventually(
        lambda: found if "outcome" in (found := [row.method for row in rows_in(folder)]) else None, "all is written"
    )
    expected = ["certificate_used", "registered", "assigned", "trained", "submitted", "outcome"]
    assert [method for method in methods if method in expected] == expected
    found = {row.method: row for row in rows_in(folder)}
    authority = x509.load_pem_x509_certificate(pki.ca.read_bytes())
    assert authority.fingerprint(hashes.SHA256()).hex() in found["registered"].detail
    assert found["assigned"].subject == f"{run}/0/0"
    assert "1 epoch, batches of 16" in found["assigned"].detail
    assert found["submitted"].actor.startswith("coordinator:")
    daemon.kill()
    with (folder / "audit.jsonl").open("ab") as file:
        file.write(b'{"number":')
    daemon.start()
    eventually(lambda: RECOVERED in {row.method for row in rows_in(folder)}, "the log is continued")
    done = CliRunner().invoke(fl_client, ["audit", "verify", "--state-dir", str(folder)])
    assert done.exit_code == 0, done.stdout
    assert daemon.terminate() == 0
    listed = CliRunner().invoke(fl_client, ["audit", "list", "--state-dir", str(folder), "--limit", "1000"])
    assert "submitted" in listed.stdout
    private = files.key.read_text().splitlines()[1]
    assert private not in (folder / "audit.jsonl").read_text()
