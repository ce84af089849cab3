"""The table of methods and roles: complete, closed by default, and no role with methods of clients and of operators."""

from __future__ import annotations

import pytest
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from fl_common.certificates.names import OPERATOR_ROLES, ROLES
from fl_server.errors import Forbidden, Unauthenticated
from fl_server.identity import ANYBODY, Identity
from fl_server.rpc.call_limits import NESTED
from fl_server.rpc.interceptors import require_role
from fl_server.rpc.methods import ADMIN, EVERYONE, METHODS, WEB_METHODS, methods_of
from protos.fl.v1 import admin_pb2, coordinator_pb2, enrollment_pb2, web_pb2, worker_pb2

FILES = (
    coordinator_pb2.DESCRIPTOR,
    admin_pb2.DESCRIPTOR,
    enrollment_pb2.DESCRIPTOR,
    web_pb2.DESCRIPTOR,
    worker_pb2.DESCRIPTOR,
    health_pb2.DESCRIPTOR,
    reflection_pb2.DESCRIPTOR,
)
READ = {
    "ListRuns", "GetRun", "ListRounds", "WatchRun", "ListEvaluations", "ListClients", "GetClient", "ListHistory",
    "WatchHistory", "GetOverview", "ListCohort", "ListReleases", "GetRelease", "CreateWebLink",
    "WhoAmI",
}  # fmt: skip


def methods(service: ServiceDescriptor) -> set[str]:
    """Full names of a service's methods."""
    return {f"/{service.full_name}/{method.name}" for method in service.methods}


def test_every_method_of_every_service_has_a_row() -> None:
    """And no other method has one."""
    services = [service for file in FILES for service in file.services_by_name.values()]
    assert set().union(*map(methods, services)) == set(METHODS) == set(NESTED)
    assert {service.full_name for service in services} >= {"fl.v1.Admin", "fl.v1.Certificates", "fl.v1.Enrollment"}


def test_rows_have_known_roles() -> None:
    """A misspelt role would close a method for good."""
    for name, method in METHODS.items():
        assert method.roles, name
        assert method.roles <= EVERYONE, name


def test_no_role_has_methods_of_clients_and_of_operators() -> None:
    """A stolen key of a device opens no admin method, an admin's key is no device, and neither is a worker."""
    for service, roles in (
        ("Coordinator", {"client"}),
        ("Certificates", {"client"}),
        ("Workers", {"worker"}),
        ("Admin", set(OPERATOR_ROLES)),
    ):
        for method in methods(descriptor_pool.Default().FindServiceByName(f"fl.v1.{service}")):
            assert METHODS[method].roles <= roles, method


def test_what_each_role_may_do() -> None:
    """A viewer reads, an operator also runs, an enroller makes tokens, an admin does everything."""
    allowed = {role: set(methods_of(Identity(role, "x"))) for role in ROLES}
    assert allowed["viewer"] == READ
    assert allowed["operator"] == READ | {
        "CreateRun", "PauseRun", "ResumeRun", "ExtendRun", "StopRun", "DeleteRun", "ExportModel", "UploadModel",
        "DrainClient", "ReleaseClient", "AddPackage", "CreateRelease", "AdvanceRelease", "RollBackRelease",
    }  # fmt: skip
    assert allowed["enroller"] == {
        "WhoAmI", "CreateEnrollments", "ListEnrollments", "RevokeEnrollment", "ListCertificates",
        "ListAuthorities",
    }  # fmt: skip
    assert allowed["admin"] == set(methods_of(ANYBODY)) == {method.name for method in _admin().methods}
    assert allowed["server"] == allowed["client"] == set()


def test_what_a_browser_may_do() -> None:
    """It reads, and exports models; it changes nothing, makes no link, and sees neither tokens nor the audit log."""
    names = {name.rpartition("/")[2] for name in WEB_METHODS if name.startswith(ADMIN)}
    assert names == (READ | {"ExportModel"}) - {"CreateWebLink"}


def _admin() -> ServiceDescriptor:
    service: ServiceDescriptor = descriptor_pool.Default().FindServiceByName("fl.v1.Admin")
    return service


def test_a_caller_with_several_roles_may_do_what_one_of_them_may() -> None:
    """A token may give several."""
    both = Identity("viewer", "x", source="token", roles=frozenset({"viewer", "enroller"}))
    require_role(both, METHODS[f"{ADMIN}ListRuns"].roles, trusts_everybody=False)
    require_role(both, METHODS[f"{ADMIN}ListCertificates"].roles, trusts_everybody=False)
    with pytest.raises(Forbidden, match=r"viewer:x is not allowed .*needed: the role operator or admin$") as refused:
        require_role(both, METHODS[f"{ADMIN}StopRun"].roles, trusts_everybody=False)
    assert list(refused.value.detail.roles) == ["operator", "admin"]


@pytest.mark.parametrize("who", [ANYBODY, Identity("admin", "alice")], ids=str)
def test_a_method_without_a_row_is_refused(who: Identity) -> None:
    """To everyone, with and without certificates."""
    for trusts_everybody in (True, False):
        with pytest.raises(Forbidden, match="a row for this method in the table of roles"):
            require_role(who, None, trusts_everybody=trusts_everybody)


def test_a_caller_without_an_identity_passes_only_where_nobody_has_one() -> None:
    """And at methods that are for everyone."""
    require_role(ANYBODY, METHODS[f"{ADMIN}ListRuns"].roles, trusts_everybody=True)
    require_role(ANYBODY, METHODS["/fl.v1.Enrollment/Enroll"].roles, trusts_everybody=False)
    with pytest.raises(Unauthenticated, match="needed: the role viewer, operator or admin, by a cert"):
        require_role(ANYBODY, METHODS[f"{ADMIN}ListRuns"].roles, trusts_everybody=False)


def test_a_certificate_cannot_claim_the_anonymous_identity() -> None:
    """An identity with the texts of ANYBODY is still an identity, and its role is checked."""
    with pytest.raises(Forbidden):
        require_role(Identity("anybody", ""), METHODS[f"{ADMIN}ListRuns"].roles, trusts_everybody=True)
