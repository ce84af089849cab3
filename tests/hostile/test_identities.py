"""Certificates that are not what they seem, or not any more, beside an honest run."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from cryptography import x509

from fl_ops.admin_client import AdminClient
from fl_ops.errors import NotAllowed
from fl_ops.settings import Connection
from protos.fl.v1 import admin_pb2, admin_pb2_grpc
from protos.fl.v1 import coordinator_pb2 as pb
from tests.hostile.certificates import credentials, section
from tests.integration.harness import PRESENT, Daemon
from tests.integration.processes import PATIENCE_S, eventually
from tests.integration.raw_client import RawClient

URI = x509.UniformResourceIdentifier
FORGED = {
    "dns": [x509.DNSName("fl://admin/x")],
    "mail": [x509.RFC822Name("fl://admin/x")],
    "first-of-two": [URI("fl://admin/x"), URI("fl://client/mallory")],
    "nul": [URI("fl://admin/x\0.example.org")],
}
"""Names that were an admin's, though no authority that looks at URIs would have granted one."""


@pytest.mark.parametrize("names", FORGED.values(), ids=FORGED)
def test_a_name_of_another_kind_makes_no_admin(federation, names):
    """The admin port answers PERMISSION_DENIED with one line, and so does the clients' port."""
    files = federation.pki.forge("forged", names)
    operators = Connection(str(federation.server.settings["admin_listen"]), files)
    with AdminClient(operators) as admin, pytest.raises(NotAllowed, match="a certificate without an fl:// name"):
        admin.list_runs()
    client = RawClient(federation.server.address, "mallory", credentials(files))
    with client, pytest.raises(grpc.RpcError) as refused:
        client.register()
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


@contextmanager
def until_it_ends(stream):
    """The status of a stream is in the list once the block is left; the stream is read in a thread."""
    ended = []

    def read():
        try:
            for _ in stream:
                pass
        except grpc.RpcError as error:
            ended.append(error)

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    yield ended
    reading.join(PATIENCE_S)
    assert ended, "the stream did not end"


def test_what_is_open_ends_with_the_certificate(federation, undisturbed):
    """Attend and WatchRun of brief certificates end in words while others train; with them nobody gets in again."""
    run_id = federation.begin_run()
    ends = datetime.now(UTC) + timedelta(seconds=4)
    client = federation.pki.forge("brief-client", [URI("fl://client/brief")], ends)
    admin = federation.pki.forge("brief-admin", [URI("fl://admin/brief")], ends)
    other = federation.server.create("waits-for-ever", labels={"site": "nowhere"})
    operators = str(federation.server.settings["admin_listen"])
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
            assert ":brief ended on" in error.details()
        with pytest.raises(grpc.RpcError, match="the certificate of client:brief ended on"):
            brief.register()
    with RawClient(federation.server.address, "brief", credentials(client)) as brief:
        with pytest.raises(grpc.RpcError) as refused:
            brief.register()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    federation.still_works(undisturbed, run_id)


def test_a_daemon_goes_on_with_the_renewed_certificate(federation):
    """Its first certificate ends on an open connection; it comes back by itself, with the one that lies there then."""
    brief = federation.pki.forge(
        "client-renewed", [URI("fl://client/renewed")], datetime.now(UTC) + timedelta(seconds=8)
    )
    daemon = Daemon(
        federation.place, federation.server, "renewed", insecure=False, tls=section(brief), labels={"site": "elsewhere"}
    ).start()
    eventually(lambda: federation.server.client("renewed").state == PRESENT, "it attends")
    refused = daemon.logged("disconnected")
    assert "the certificate of client:renewed ended on" in refused["reason"]
    federation.pki.forge("client-renewed", [URI("fl://client/renewed")])
    eventually(lambda: federation.server.client("renewed").state == PRESENT, "it attends again")
    assert daemon.terminate() == 0


def test_a_copied_daemon_does_not_end_the_working_one(federation, undisturbed):
    """Started in mid-round with a copied key, it is sent away, both addresses are shown, and the bits are the same."""
    server, daemons = federation.server, federation.daemons
    for daemon in daemons.values():
        daemon.hold.touch()
    run_id = federation.begin_run()
    name = server.until(run_id, lambda run: run.cohort, "it draws").cohort[0]
    working = daemons[name]
    working.logged("assignment", run=run_id)
    settings = {key: working.settings[key] for key in ("tls", "shard", "labels", "task")}
    copy = Daemon(federation.place, server, name, process="copy", insecure=False, **settings).start()
    said = copy.logged("identity_in_use")
    assert f"another daemon is at work as '{name}': end one of the two" in said["reason"]
    assert said["todo"].startswith("two daemons use one identity")
    assert "wants to be" in working.logged("notice")["text"]
    line = server.logged("client_contested", client=name)
    with server.admin() as admin:
        shown = admin.get_client(name)
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


def test_a_killed_daemon_is_back_at_once(federation):
    """Its connection closed with it: the next process of the identity is no rival."""
    name, daemon = next(iter(federation.daemons.items()))
    before = len(daemon.events("registered"))
    daemon.kill()
    daemon.start()
    daemon.logged("registered", count=before + 1)
    eventually(lambda: federation.server.client(name).state == PRESENT, "it attends")
    assert not daemon.events("identity_in_use")


def test_a_banned_client_that_is_forgotten_stays_out(federation):
    """Over a restart too, until it is unbanned."""
    server = federation.server
    with federation.raw("liar") as liar:
        liar.register()
        with server.admin() as admin:
            admin.ban_client("liar", "it lies")
            assert admin.forget_client("liar") is True
        with pytest.raises(grpc.RpcError, match="to be unbanned \\(banned: it lies\\)"):
            liar.register()
        server.kill()
        server.serve()
        with pytest.raises(grpc.RpcError, match="to be unbanned \\(banned: it lies\\)"):
            liar.register()
        with server.admin() as admin:
            admin.unban_client("liar")
        assert liar.register().session_id


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_machine_that_was_reset_comes_back(federation, undisturbed):
    """Its old connection is open and silent: the newcomer waits until the transport's keepalive has found that out."""
    federation.still_works(undisturbed, federation.begin_run())
    name, old = next(iter(federation.daemons.items()))
    before = len(old.events("registered"))
    old.signal(signal.SIGSTOP)
    settings = {key: old.settings[key] for key in ("tls", "shard", "labels", "task")}
    new = Daemon(federation.place, federation.server, name, process="reset", insecure=False, **settings).start()
    new.logged("registered")
    old.signal(signal.SIGCONT)
    assert new.events("identity_in_use")
    assert new.terminate() == 0
    old.logged("registered", count=before + 1)
