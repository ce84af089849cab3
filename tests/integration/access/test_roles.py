"""Every admin method with every wrong role, and clients' methods with operators' certificates, on a real server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool
from google.protobuf.message import Message
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from fl_ops.errors import NotAllowed
from fl_server.rpc.methods import ADMIN, EVERYONE, METHODS
from protos.fl.v1 import admin_pb2 as pb
from protos.status import detail_of
from protos.wire import client_options
from tests.processes.certificates import Pki, credentials
from tests.processes.federation import SecureCoordinator, run_spec
from tests.processes.process import Workspace, run_fl

ROLES = ("viewer", "operator", "enroller", "admin", "client")
"""A server's certificate is refused in the handshake, because it is not made for callers."""
RUN = "role-target"
REQUESTS: Mapping[str, Message] = {
    "CreateRun": pb.CreateRunRequest(spec=run_spec("role-forbidden")),
    **{
        name: getattr(pb, f"{name}Request")(run_id=RUN)
        for name in (
            "GetRun", "ListRounds", "WatchRun", "PauseRun", "ResumeRun", "StopRun", "DeleteRun", "ExportModel",
            "ListEvaluations",
        )
    },
    "ExtendRun": pb.ExtendRunRequest(run_id=RUN, rounds=5),
    **{
        name: getattr(pb, f"{name}Request")(client_id="edge-1")
        for name in ("GetClient", "BanClient", "UnbanClient", "ForgetClient", "ReleaseClient", "DrainClient")
    },
    "CreateEnrollments": pb.CreateEnrollmentsRequest(specs=[pb.EnrollmentSpec(name="edge-9")]),
    "RevokeEnrollment": pb.RevokeEnrollmentRequest(id="x"),
    "RevokeCertificates": pb.RevokeCertificatesRequest(name="edge-1"),
}  # fmt: skip
"""Requests that would have an effect, or return something. Methods that are not here get an empty request."""
ADMIN_METHODS = sorted(name for name in METHODS if name.startswith(ADMIN))
CLIENT_METHODS = sorted(name for name in METHODS if name.startswith(("/fl.v1.Coordinator/", "/fl.v1.Cert")))
NO_IDENTITY = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


@pytest.fixture(scope="module")
def server(module_workspace: Workspace, pki: Pki) -> SecureCoordinator:
    """A coordinator with one run, which has no owner, because it waits for clients that never come."""
    server = SecureCoordinator(module_workspace, pki, {"reflection": True}).serve()
    server.create(RUN)
    return server


@pytest.fixture(scope="module")
def channels(server: SecureCoordinator, pki: Pki) -> Iterator[dict[tuple[str, str], grpc.Channel]]:
    """By role and port: a connection with a certificate of that role."""
    opened = {
        (role, port): grpc.secure_channel(
            str(server.settings[port]), credentials(pki.issue(role, f"{role}-1")), list(client_options())
        )
        for role in ROLES
        for port in ("listen", "admin_listen")
    }
    yield opened
    for channel in opened.values():
        channel.close()


def status_of(channel: grpc.Channel, method: str, request: Message | None = None) -> tuple[grpc.StatusCode, Any]:
    """The status of a call; for a stream of responses, of its first message."""
    call: Any = channel.stream_stream(method)
    responses = call(iter([b"" if request is None else request.SerializeToString()]), timeout=60)
    try:
        next(responses)
    except grpc.RpcError as error:
        return error.code(), error
    finally:
        responses.cancel()
    return grpc.StatusCode.OK, None


def state_of(server: SecureCoordinator) -> tuple[list[str], int]:
    """All that a call could change: runs with their states, and the number of history entries."""
    with server.admin() as admin:
        return [f"{run.run_id} {run.state}" for run in admin.runs.list_runs()], len(admin.history.list_history("", 0))


def test_every_admin_method_refuses_every_wrong_role(
    server: SecureCoordinator, channels: dict[tuple[str, str], grpc.Channel]
) -> None:
    """With the caller and the roles that are needed; and nothing changes."""
    before = state_of(server)
    for method in ADMIN_METHODS:
        request = REQUESTS.get(method.removeprefix(ADMIN))
        for role in sorted(set(ROLES) - METHODS[method].roles):
            code, error = status_of(channels[role, "admin_listen"], method, request)
            assert code is grpc.StatusCode.PERMISSION_DENIED, (method, role, code)
            assert f"{role}:{role}-1 is not allowed to do this; needed: the role" in error.details(), (method, role)
            detail: Any = detail_of((entry.key, entry.value) for entry in error.trailing_metadata())
            assert set(detail.roles) == METHODS[method].roles
    assert state_of(server) == before


def test_the_right_roles_are_not_refused(
    server: SecureCoordinator, channels: dict[tuple[str, str], grpc.Channel]
) -> None:
    """They may get another error, because an empty request has none of what the method needs."""
    for method in ADMIN_METHODS:
        for role in METHODS[method].roles:
            code, _ = status_of(channels[role, "admin_listen"], method)
            assert code not in NO_IDENTITY, (method, role, code)


def test_no_operator_calls_a_method_of_clients(channels: dict[tuple[str, str], grpc.Channel]) -> None:
    """On the clients' port, with every method; a client's own certificate passes the check."""
    for method in CLIENT_METHODS:
        for role in ROLES:
            code, error = status_of(channels[role, "listen"], method)
            if code is grpc.StatusCode.UNIMPLEMENTED:  # not served by this version
                assert method == "/fl.v1.Certificates/Renew"
            elif role == "client":
                assert code is not grpc.StatusCode.PERMISSION_DENIED, method
            else:
                assert code is grpc.StatusCode.PERMISSION_DENIED, (method, role, code)
                assert "needed: the role client" in error.details()


def test_a_port_has_the_methods_of_its_service_only(channels: dict[tuple[str, str], grpc.Channel]) -> None:
    """Admin methods are not served to clients' connections, and the reverse, for every role."""
    for method, port in (*((name, "listen") for name in ADMIN_METHODS), *((n, "admin_listen") for n in CLIENT_METHODS)):
        for role in ("admin", "client"):
            assert status_of(channels[role, port], method)[0] is grpc.StatusCode.UNIMPLEMENTED, (method, port)


def test_every_method_that_reflection_lists_has_a_row(channels: dict[tuple[str, str], grpc.Channel]) -> None:
    """On both ports: what is served cannot be missing in the table."""
    served: set[str] = set()
    for port in ("listen", "admin_listen"):
        for service in _reflected(channels["admin", port]):
            methods = _descriptor(service).methods
            served |= {f"/{service}/{method.name}" for method in methods}
    assert served <= METHODS.keys()
    assert served >= {f"{ADMIN}ListRuns", "/fl.v1.Coordinator/Register"}


def _reflected(channel: grpc.Channel) -> list[str]:
    """Names of the services that a port lists."""
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (response,) = stub.ServerReflectionInfo(iter([request]), timeout=60)
    return [service.name for service in response.list_services_response.service]


def _descriptor(service: str) -> Any:
    assert health.SERVICE_NAME  # imported, so the pool has the standard services too
    assert reflection.SERVICE_NAME
    return descriptor_pool.Default().FindServiceByName(service)


def test_the_command_explains_a_refused_role(module_workspace: Workspace, server: SecureCoordinator, pki: Pki) -> None:
    """Exit code 4, the role that is needed, and how to get it; `fl whoami` shows what one has."""
    files = pki.issue("viewer", "dora")
    options = ("--ca", files.ca, "--cert", files.cert, "--key", files.key, "--server", server.settings["admin_listen"])
    words = [str(each) for each in options]
    refused = run_fl("run", "stop", RUN, *words, folder=module_workspace.folder)
    assert refused.returncode == 4
    text = " ".join(refused.stderr.split())
    assert "viewer:dora is not allowed to do this; needed: the role operator or admin" in text
    assert "`fl ca issue operator NAME`" in text
    shown = run_fl("whoami", *words, folder=module_workspace.folder)
    assert shown.returncode == 0
    assert [line.split()[:2] for line in shown.stdout.splitlines()[:3]] == [
        ["identity", "viewer:dora"], ["roles", "viewer"], ["source", "your"]
    ]  # fmt: skip
    assert "ListRuns" in shown.stdout
    assert "StopRun" not in shown.stdout


def test_who_am_i(server: SecureCoordinator, pki: Pki) -> None:
    """Every operator may ask; a client may not."""
    for role in ("viewer", "operator", "enroller", "admin"):
        files = pki.issue(role, "eva")
        with server.admin(files) as admin:
            found = admin.access.who_am_i()
        assert (found.identity, list(found.roles), found.source) == (f"{role}:eva", [role], "certificate")
        allowed = {name for name, row in METHODS.items() if role in row.roles and row.roles != EVERYONE}
        assert {f"{ADMIN}{name}" for name in found.methods} == allowed
        assert found.HasField("ends")
    with server.admin(pki.issue("client", "eva")) as admin, pytest.raises(NotAllowed):
        admin.access.who_am_i()
