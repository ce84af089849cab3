"""Enrollment with coordinators that have settings or an end of their own."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import grpc

from fl_client.__main__ import main
from protos.fl.v1 import enrollment_pb2 as pb
from protos.fl.v1 import enrollment_pb2_grpc
from protos.fl.v1.errors_pb2 import RetryLater
from tests.processes.certificates import Pki
from tests.processes.enrollment import EnrollingCoordinator, RawDevice, csr_of, error_of
from tests.processes.holding_relay import holding_relay
from tests.processes.process import TIMEOUT_S, Workspace, eventually, run_fl
from tests.processes.raw_client import RawClient, detail

DENIED, LIMITED = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.RESOURCE_EXHAUSTED


def test_claimed_labels_do_not_count_where_the_settings_say_so(workspace: Workspace) -> None:
    """With `claimed_labels = false` runs and operators see the labels of the token alone."""
    server = EnrollingCoordinator(workspace, Pki(workspace.folder / "pki"), claimed_labels=False).serve()
    device = RawDevice(server)
    device.enroll(server.create_token("site-1", labels={"site": "north"}))
    with RawClient(server.address, "site-1", device.credentials()) as client:
        client.register(labels={"site": "south", "gpu": "a100"})
        client.attend()
        with server.admin() as admin:
            assert [dict(each.labels) for each in admin.clients.list_clients(labels={"site": "north"})] == [
                {"site": "north"}
            ]
            assert not list(admin.clients.list_clients(labels={"gpu": "a100"}))


def test_the_printed_command_works(workspace: Workspace, tmp_path: Path) -> None:
    """The coordinator has chosen free ports, and the command of `fl enroll create` gives a device its certificate."""
    server = EnrollingCoordinator(workspace, Pki(workspace.folder / "pki"))
    del server.settings["enroll_address"]
    server.configure()
    server.serve()
    files = server.pki.issue("admin", "bob")
    options = ("--ca", files.ca, "--cert", files.cert, "--key", files.key, "--server", server.settings["admin_listen"])
    made = run_fl("enroll", "create", "--name", "edge-9", "--json", *map(str, options), folder=tmp_path)
    program, *words = shlex.split(json.loads(made.stdout)["command"])
    assert (program, words[2]) == ("fl-client", server.address)
    assert main([*words, "--only-certificate", "--state-dir", str(tmp_path / "state")]) == 0


def test_a_lost_response_is_repeated_after_a_kill(module_workspace: Workspace) -> None:
    """SIGKILL after the token is spent and before the response arrives: the repeat gets the same certificate.

    The revocations of before hold after the restart.
    """
    pki = Pki(module_workspace.folder / "pki-k")
    server = EnrollingCoordinator(module_workspace, pki, name="killed").serve()
    gone, device, token = server.enrolled("edge-k2"), RawDevice(server), server.create_token("edge-k1")
    with server.admin() as admin:
        admin.access.revoke_certificates("stolen", name="edge-k2")
    port = str(server.settings["enroll_listen"])
    with holding_relay(port) as relay:
        root = grpc.ssl_channel_credentials(pki.ca.read_bytes())
        with grpc.secure_channel(relay.address, root) as channel:
            grpc.channel_ready_future(channel).result(TIMEOUT_S)
            relay.hold()
            stub: Any = enrollment_pb2_grpc.EnrollmentStub(channel)
            lost = stub.Enroll.future(pb.EnrollRequest(token=token, csr=csr_of(device.key)), timeout=TIMEOUT_S)
            eventually(lambda: states(server)[token.partition(".")[0]] == "used", "the token is spent")
            server.kill()
            assert not lost.done()
            lost.cancel()
    server.serve()
    with server.admin() as admin:
        issued = [each.serial for each in admin.access.list_certificates("edge-k1")]
    device.enroll(token)
    assert [f"{device.leaf.serial_number:x}"] == issued
    assert error_of(lambda: RawDevice(server).enroll(token)).code() is DENIED
    assert error_of(gone.renew).code() is DENIED
    with RawClient(server.address, "edge-k1", device.credentials()) as client:
        client.register()


def states(server: EnrollingCoordinator) -> dict[str, str]:
    """The tokens' states by id."""
    with server.admin() as admin:
        return {each.id: each.state for each in admin.access.list_enrollments()}


def test_limits_of_requests(module_workspace: Workspace) -> None:
    """Renewals of a client, and failures of an address, are refused with a time to wait; others are not affected."""
    pki = Pki(module_workspace.folder / "pki-l")
    server = EnrollingCoordinator(
        module_workspace, pki, name="limited", renewals_per_min=2.0, address_failures_per_min=3.0
    ).serve()
    first, second = server.enrolled("edge-l1"), server.enrolled("edge-l2")
    for _ in range(2):
        first.renew()
    error: Any = error_of(first.renew)
    assert error.code() is LIMITED
    assert "enrollment.renewals_per_min" in error.details()
    assert isinstance(detail(error), RetryLater)
    assert second.renew().name == "edge-l2"
    codes = [error_of(lambda: RawDevice(server).enroll(f"{'0' * 16}.{'x' * 43}")).code() for _ in range(5)]
    assert codes[:3] == [DENIED] * 3
    assert codes[-1] is LIMITED
