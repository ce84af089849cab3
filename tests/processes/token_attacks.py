"""Attacks on enrollment tokens, and what the refusal of each says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cryptography import x509

from protos.fl.v1 import admin_pb2
from tests.processes.enrollment import EnrollingCoordinator, RawDevice, csr_of


def other_name(server: EnrollingCoordinator) -> Callable[[], Any]:
    """A token of edge-a2 for the name of another device."""
    token = server.create_token("edge-a2")
    return lambda: RawDevice(server).enroll(token, name="edge-a1")


def other_san(server: EnrollingCoordinator) -> Callable[[], Any]:
    """A request that names an admin."""
    device, token = RawDevice(server), server.create_token("edge-a3")
    csr = csr_of(device.key, names=[x509.UniformResourceIdentifier("fl://admin/alice")])
    return lambda: device.enroll(token, csr)


def used_twice(server: EnrollingCoordinator) -> Callable[[], Any]:
    """A stolen token, after its device has used it."""
    token = server.create_token("edge-a4")
    RawDevice(server).enroll(token)
    return lambda: RawDevice(server).enroll(token)


def expired(server: EnrollingCoordinator) -> Callable[[], Any]:
    """A token from yesterday."""
    token = server.create_token("edge-a5", ttl_s=1e-6)
    return lambda: RawDevice(server).enroll(token)


def revoked(server: EnrollingCoordinator) -> Callable[[], Any]:
    """A token that the operator has revoked."""
    token = server.create_token("edge-a6")
    with server.admin() as admin:
        request = admin_pb2.RevokeEnrollmentRequest(id=token.partition(".")[0], reason="lost")
        assert admin.call(request, admin_pb2.RevokeEnrollmentResponse).enrollment.state == "revoked"
    return lambda: RawDevice(server).enroll(token)


def guessed(server: EnrollingCoordinator) -> Callable[[], Any]:
    """The id of an open token with another secret."""
    token, other = server.create_token("edge-a7"), server.create_token("edge-a8")
    return lambda: RawDevice(server).enroll(f"{token.partition('.')[0]}.{other.partition('.')[2]}")


def name_of_another_pod(server: EnrollingCoordinator) -> Callable[[], Any]:
    """A bootstrap token for the name of a pod that has a certificate."""
    token = server.create_token(name_prefix="gpu-", uses=9)
    RawDevice(server).enroll(token, name="gpu-1")
    return lambda: RawDevice(server).enroll(token, name="gpu-1")


Attack = Callable[[EnrollingCoordinator], Callable[[], Any]]
ATTACKS: dict[Attack, str] = {
    other_name: "needed: the token's name 'edge-a2', or none; not 'edge-a1'",
    other_san: "needed: a request that names nobody or fl://client/edge-a3; it names 'fl://admin/alice'",
    used_twice: "needed: a token with a use left",
    expired: "needed: a token that has not expired",
    revoked: "needed: a token that is not revoked",
    guessed: "needed: a token of this coordinator",
    name_of_another_pod: "needed: a free name: this one has a valid certificate with another key",
}
