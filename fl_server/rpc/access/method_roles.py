"""The roles that may call each method. A method without a row is refused, so a new one is closed until it has one.

viewer    reads runs, clients and history of all operators; no models
operator  reads and changes its own runs, exports their models, drains and releases clients
enroller  tokens for devices, and the list of certificates; nothing else
admin     everything, for runs of all operators
client    a device: the Coordinator service, and renewal of its certificate

No role has methods of both Admin and Coordinator. Bans, their end and the removal of a client are for an admin, because
they take the client's state out of the runs of all operators; a drained or released client leaves nothing behind. The
audit log is for an admin: it names callers and addresses of all. An auditor gets an export of it and needs no role.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fl_common.certificates.names import OPERATOR_ROLES, ROLES
from fl_server.errors import Forbidden, Unauthenticated
from fl_server.identity import ANYBODY, Identity

ADMIN = "/fl.v1.Admin/"
"""Prefix of the operators' methods."""
EVERYONE = frozenset({ANYBODY.role, *ROLES})
"""Callers without a certificate too."""
_CLIENT = frozenset({"client"})
_ANY_OPERATOR = frozenset(OPERATOR_ROLES)
_READ = frozenset({"viewer", "operator", "admin"})
_OPERATE = frozenset({"operator", "admin"})
_ENROLL = frozenset({"enroller", "admin"})
_ADMIN_ONLY = frozenset({"admin"})


def _rows(service: str, roles: frozenset[str], *methods: str) -> dict[str, frozenset[str]]:
    return {f"/{service}/{method}": roles for method in methods}


METHOD_ROLES: Mapping[str, frozenset[str]] = {
    **_rows(
        "fl.v1.Coordinator", _CLIENT,
        "Register", "Attend", "FetchModel", "SubmitUpdate", "QueryUpload", "ReportStatus", "ReportEvaluation",
    ),
    **_rows("fl.v1.Certificates", _CLIENT, "Renew"),
    **_rows("fl.v1.Enrollment", EVERYONE, "Enroll", "Reenroll"),
    **_rows("fl.v1.Admin", _ANY_OPERATOR, "WhoAmI"),
    **_rows("fl.v1.Admin", _READ, "CreateWebLink"),
    **_rows(
        "fl.v1.Admin", _READ,
        "ListRuns", "GetRun", "ListRounds", "WatchRun", "ListEvaluations", "ListClients", "GetClient", "ListHistory",
        "ListCohort", "WatchHistory", "GetOverview",
    ),
    # A model is the result of the work, and reveals something of the data: a viewer does not get it.
    **_rows(
        "fl.v1.Admin", _OPERATE,
        "CreateRun", "PauseRun", "ResumeRun", "ExtendRun", "StopRun", "DeleteRun", "ExportModel", "UploadModel",
        "DrainClient", "ReleaseClient",
    ),
    **_rows(
        "fl.v1.Admin", _ENROLL, "CreateEnrollments", "ListEnrollments", "RevokeEnrollment", "ListCertificates"
    ),
    **_rows(
        "fl.v1.Admin", _ADMIN_ONLY, "BanClient", "UnbanClient", "ForgetClient", "RevokeCertificates", "ListAudit"
    ),
    # At the web process's socket only, which nobody else can open.
    **_rows("fl.v1.WebLogin", EVERYONE, "GetLink", "OpenByCode", "OpenByCertificate", "CloseSession"),
    **_rows("grpc.health.v1.Health", EVERYONE, "Check", "List", "Watch"),
    **_rows("grpc.reflection.v1alpha.ServerReflection", EVERYONE, "ServerReflectionInfo"),
}  # fmt: skip
"""By a method's full name. A test compares the table with the services."""

WEB_METHODS = frozenset(
    name
    for name, roles in METHOD_ROLES.items()
    if name.startswith("/fl.v1.WebLogin/")
    or (name.startswith(ADMIN) and (roles in {_READ, _ANY_OPERATOR} or name == f"{ADMIN}ExportModel"))
) - {f"{ADMIN}CreateWebLink"}
"""Methods that browsers may call through the web process: those that read, and ExportModel for its own roles."""


def require_role(who: Identity, allowed: frozenset[str] | None, *, trusts_everybody: bool) -> None:
    """Raise unless the caller has one of the roles.

    Args:
        who: the caller.
        allowed: the method's row; None: it has none.
        trusts_everybody: whether a caller without an identity may call every method that has a row.

    Raises:
        Unauthenticated: the caller has no identity.
        Forbidden: none of its roles is allowed, or the method has no row.
    """
    if allowed is None:
        raise Forbidden(str(who), "a row for this method in the table of roles")
    if not allowed.isdisjoint(who.roles) or (trusts_everybody and who is ANYBODY):
        return
    if who is ANYBODY:
        sources = "a certificate (admin_listen) or a token (token_listen)" if "admin" in allowed else "a certificate"
        raise Unauthenticated(f"needed: {roles_text(allowed)}, by {sources}")
    raise Forbidden(str(who), roles_text(allowed), ordered(allowed))


def methods_of(who: Identity) -> list[str]:
    """Names of the operators' methods that the caller may call, in order. ANYBODY: all, where it may call any."""
    mine = ((name, allowed) for name, allowed in METHOD_ROLES.items() if name.startswith(ADMIN))
    return sorted(
        name.removeprefix(ADMIN) for name, allowed in mine if who is ANYBODY or not allowed.isdisjoint(who.roles)
    )


def roles_text(roles: Iterable[str]) -> str:
    """The roles in words: "the role viewer, operator or admin"."""
    *others, last = ordered(roles)
    return f"the role {', '.join(others)} or {last}" if others else f"the role {last}"


def ordered(roles: Iterable[str]) -> list[str]:
    """Roles in the order of ROLES."""
    return [role for role in ROLES if role in roles]
