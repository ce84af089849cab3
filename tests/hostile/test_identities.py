"""Certificates with false names, and expired, renewed or copied ones, during an honest run."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import grpc
import pytest
from cryptography import x509

from fl_ops.admin.client import AdminClient
from fl_ops.admin.settings import Connection
from fl_ops.errors import NotAllowed
from protos.fl.v1 import admin_pb2, admin_pb2_grpc
from protos.fl.v1 import coordinator_pb2 as pb
from tests.hostile.federation import Federation
from tests.processes.certificates import credentials, section
from tests.processes.federation import Daemon
from tests.processes.process import TIMEOUT_S
from tests.processes.raw_client import RawClient

URI = x509.UniformResourceIdentifier
FORGED: dict[str, list[x509.GeneralName]] = {
    "dns": [x509.DNSName("fl://admin/x")],
    "mail": [x509.RFC822Name("fl://admin/x")],
    "first-of-two": [URI("fl://admin/x"), URI("fl://client/mallory")],
    "nul": [URI("fl://admin/x\0.example.org")],
}
"""Names that were once taken for an admin's, although no authority granted an admin URI."""


@pytest.mark.parametrize("names", FORGED.values(), ids=FORGED)
def test_a_name_of_another_type_gives_no_admin_rights(federation: Federation, names: list[x509.GeneralName]) -> None:
    """The admin port answers PERMISSION_DENIED with one line, and so does the clients' port."""
    files = federation.pki.forge("forged", names)
    operators = Connection(str(federation.server.settings["admin_listen"]), files)
    with AdminClient(operators) as admin, pytest.raises(NotAllowed, match="a certificate without an fl:// name"):
        admin.runs.list_runs()
    client = RawClient(federation.server.address, "mallory", credentials(files))
    with client, pytest.raises(grpc.RpcError) as refused:
        client.register()
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


@contextmanager
def until_it_ends(stream: Any) -> Iterator[list[grpc.RpcError]]:
    """Read a stream in a thread; its status is in the list after the block."""
    ended = []

    def read() -> None:
        try:
            for _ in stream:
                pass
        except grpc.RpcError as error:
            ended.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    yield ended
    reading.join(TIMEOUT_S)
    assert ended, "the stream did not end"


@pytest.mark.slow
def test_open_streams_end_with_the_certificate(federation: Federation, undisturbed: list[str]) -> None:
    """Attend and WatchRun end with a message when the certificate expires; afterwards it is refused."""
    run_id = federation.begin_run()
    other = federation.server.create("waits-for-ever", labels={"site": "nowhere"})
    operators = str(federation.server.settings["admin_listen"])
    began = time.monotonic()
    with federation.raw("rehearses") as rehearses:  # a certificate must be valid for longer than these calls take here
        rehearses.register(tasks=[pb.TaskOffer(name="none")])
    ends = datetime.now(UTC) + timedelta(seconds=4 + 5 * (time.monotonic() - began))
    client = federation.pki.forge("brief-client", [URI("fl://client/brief")], ends)
    admin = federation.pki.forge("brief-admin", [URI("fl://admin/brief")], ends)
    with (
        RawClient(federation.server.address, "brief", credentials(client)) as brief,
        grpc.secure_channel(operators, credentials(admin)) as channel,
    ):
        brief.register(tasks=[pb.TaskOffer(name="none")])
        watching = admin_pb2_grpc.AdminStub(channel).WatchRun(admin_pb2.WatchRunRequest(run_id=other))
        with until_it_ends(brief.attend()) as attended, until_it_ends(watching) as watched:
            pass
        for error in (*attended, *watched):
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED
            assert ":brief ended on" in str(error.details())
        with pytest.raises(grpc.RpcError, match="the certificate of client:brief ended on"):
            brief.register()
    with RawClient(federation.server.address, "brief", credentials(client)) as brief:
        with pytest.raises(grpc.RpcError) as refused:
            brief.register()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    federation.still_works(undisturbed, run_id)


@pytest.mark.slow
def test_a_daemon_continues_with_the_renewed_certificate(federation: Federation) -> None:
    """Its first certificate expires on an open connection. The daemon reconnects with the renewed one."""
    name: list[x509.GeneralName] = [URI("fl://client/renewed")]
    files = section(federation.pki.forge("client-renewed", name))
    settings: dict[str, Any] = {"insecure": False, "tls": files, "labels": {"site": "elsewhere"}}
    daemon = Daemon(federation.workspace, federation.server, "renewed", **settings)
    began = time.monotonic()  # the certificate must be valid for longer than a start takes here
    daemon.start()
    federation.server.until_present("renewed")
    took_s = time.monotonic() - began
    assert daemon.terminate() == 0
    federation.pki.forge("client-renewed", name, datetime.now(UTC) + timedelta(seconds=4 + 4 * took_s))
    daemon.start()
    daemon.logged("registered", count=2)
    refused = daemon.logged("disconnected")
    assert "the certificate of client:renewed ended on" in refused["reason"]
    federation.pki.forge("client-renewed", name)
    federation.server.until_present("renewed")
    assert daemon.terminate() == 0


@pytest.mark.slow
def test_a_copied_daemon_does_not_end_the_working_one(federation: Federation, undisturbed: list[str]) -> None:
    """A daemon with a copied key starts during a round. It is refused, both addresses are shown, and the bits stay."""
    server, daemons = federation.server, federation.daemons
    for daemon in daemons.values():
        daemon.hold.touch()
    run_id = federation.begin_run()
    name = server.until(run_id, lambda run: run.cohort, "it draws").cohort[0]
    working = daemons[name]
    working.logged("assignment", run=run_id)
    settings = {key: working.settings[key] for key in ("tls", "shard", "labels", "task")}
    copy = Daemon(federation.workspace, server, name, process="copy", insecure=False, **settings).start()
    line = copy.logged("identity_in_use")
    assert f"another daemon is at work as '{name}': end one of the two" in line["reason"]
    assert line["todo"].startswith("two daemons use one identity")
    assert "another daemon tried to register" in working.logged("notice")["text"]
    line = server.logged("client_contested", client=name)
    with server.admin() as admin:
        shown = admin.call(admin_pb2.GetClientRequest(client_id=name), admin_pb2.GetClientResponse)
    assert (shown.session.address, shown.refused.address) == (line["address_at_work"], line["address_refused"])
    assert shown.session.address != shown.refused.address
    assert shown.session.certificate_serial == shown.refused.certificate_serial != ""
    assert shown.conflicts >= 1
    assert shown.work.startswith(f"run {run_id}, round 0, collecting")
    assert "client_contested" in server.history(name)
    for daemon in daemons.values():
        daemon.hold.unlink()
    federation.still_works(undisturbed, run_id)
    assert (copy.exit_code, copy.terminate()) == (None, 0)
    assert not working.events("fenced")


def test_a_killed_daemon_is_back_at_once(federation: Federation) -> None:
    """The kill closes its connection, so the next process with the identity is accepted at once."""
    name, daemon = next(iter(federation.daemons.items()))
    before = len(daemon.events("registered"))
    daemon.kill()
    daemon.start()
    daemon.logged("registered", count=before + 1)
    federation.server.until_present(name)
    assert not daemon.events("identity_in_use")


def test_a_forgotten_client_stays_banned(federation: Federation) -> None:
    """The ban stays after a restart, until it is removed."""
    server = federation.server
    with federation.raw("liar") as liar:
        liar.register()
        with server.admin() as admin:
            admin.clients.ban_client("liar", "it lies")
            assert admin.clients.forget_client("liar") is True
        with pytest.raises(grpc.RpcError, match="to be unbanned \\(banned: it lies\\)"):
            liar.register()
        server.kill()
        server.serve()
        with pytest.raises(grpc.RpcError, match="to be unbanned \\(banned: it lies\\)"):
            liar.register()
        with server.admin() as admin:
            admin.call(admin_pb2.UnbanClientRequest(client_id="liar"), admin_pb2.UnbanClientResponse)
        assert liar.register().session_id


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_machine_that_was_reset_comes_back(federation: Federation, undisturbed: list[str]) -> None:
    """Its old connection is open and silent. The new process waits until the transport's keepalive closes that."""
    federation.still_works(undisturbed, federation.begin_run())
    name, old = next(iter(federation.daemons.items()))
    before = len(old.events("registered"))
    old.signal(signal.SIGSTOP)
    settings = {key: old.settings[key] for key in ("tls", "shard", "labels", "task")}
    new = Daemon(federation.workspace, federation.server, name, process="reset", insecure=False, **settings).start()
    new.logged("registered")
    old.signal(signal.SIGCONT)
    assert new.events("identity_in_use")
    assert new.terminate() == 0
    old.logged("registered", count=before + 1)
