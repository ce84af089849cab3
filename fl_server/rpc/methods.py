"""The methods of the services, one row each: the roles that may call it, the limits of its request, its audit rows.

A method without a row is refused, so a new one is closed until it has one. The roles:

viewer    reads runs, clients and history of all operators; no models
operator  reads and changes its own runs, exports their models, drains and releases clients
enroller  tokens for devices, and the list of certificates; nothing else
admin     everything, for runs of all operators
client    a device: the Coordinator service, and renewal of its certificate
worker    a process that ends the streams of devices: the Workers service

No role has methods of both Admin and Coordinator. Bans, their end and the removal of a client are for an admin, because
they take the client's state out of the runs of all operators; a drained or released client leaves nothing behind. The
audit log is for an admin: it names callers and addresses of all. An auditor gets an export of it and needs no role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fl_common.certificates.names import OPERATOR_ROLES, ROLES
from fl_server.audit.calls import Recorded
from fl_server.identity import ANYBODY, Identity
from protos.wire import MAX_MESSAGE_BYTES

ADMIN = "/fl.v1.Admin/"
"""Prefix of the operators' methods."""
EVERYONE = frozenset({ANYBODY.role, *ROLES})
"""Callers without a certificate too."""
_CLIENT = frozenset({"client"})
_WORKER = frozenset({"worker"})
WORKERS = "/fl.v1.Workers/"
"""Prefix of the workers' methods."""
WORKER_CALLS = 65_536
"""Calls at once of one worker: one for each transfer of a client."""
_ANY_OPERATOR = frozenset(OPERATOR_ROLES)
_READ = frozenset({"viewer", "operator", "admin"})
# A model is the result of the work, and reveals something of the data: a viewer does not get it.
_OPERATE = frozenset({"operator", "admin"})
_ENROLL = frozenset({"enroller", "admin"})
_ADMIN_ONLY = frozenset({"admin"})
_NAMES = 20
"""Most names of a list in one row of the audit log."""


@dataclass(frozen=True, slots=True)
class RequestLimit:
    """The limits of a method. The defaults are far above every honest request."""

    size_bytes: int = 64 << 10
    """Largest serialized request; for a stream of requests, the largest of each."""
    values: int = 10_000
    """Fields, sub-messages and elements in it, at any depth; each costs up to some hundred bytes once it is parsed."""
    at_once: int = 16
    """Calls of the method by one caller."""


@dataclass(frozen=True, slots=True)
class Method:
    """What is decided about a method before its own code runs."""

    roles: frozenset[str]
    limit: RequestLimit = RequestLimit()
    recorded: Recorded | None = None
    """Rows of the audit log; None: only calls that are refused for their identity have one."""


def _field(name: str) -> Callable[[Any], str]:
    return lambda message: str(getattr(message, name))


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    return " ".join(names[:_NAMES]) + more


def _enrolled_names(request: Any) -> str:
    return _listed([spec.name or f"{spec.name_prefix}*" for spec in request.specs])


def _token_ids(response: Any) -> str:
    return _listed([created.enrollment.id for created in response.created])


def _revoked(request: Any) -> str:
    given = {"name": request.name, "serial": request.serial, "key": request.key}
    return " ".join(f"{kind}={value}" for kind, value in given.items() if value)


def _created_run(response: Any) -> str:
    return str(response.run.run_id)


def _added(response: Any) -> str:
    return f"{response.release.model} {response.release.package.digest}"


def _released(response: Any) -> str:
    return f"{response.release.model} {response.release.version}"


def _wanted_run(request: Any) -> str:
    return str(request.spec.name or request.spec.task.name)


_SMALL = RequestLimit(size_bytes=1 << 10, values=16, at_once=8)
_CERTIFICATE = RequestLimit(size_bytes=16 << 10, values=16, at_once=4)
_ADMIN_CALL = RequestLimit(at_once=32)
_LARGEST_RUN = RequestLimit(size_bytes=1 << 20, values=50_000)
_TOKENS = RequestLimit(size_bytes=1 << 20, values=50_000, at_once=4)
"""A thousand tokens with some labels each."""
_MODEL = RequestLimit(size_bytes=1 << 20, values=64, at_once=2)
"""A chunk of 512 KiB, or a header. The size is that of CreateRun, so that the port takes no larger messages."""
_LOGIN = RequestLimit(size_bytes=1 << 10, values=4, at_once=64)
_RUN, _CLIENT_ID, _SUBJECT = _field("run_id"), _field("client_id"), _field("subject")
_LIST = Recorded(changes=False)
_OF_RUN, _OF_CLIENT = Recorded(changes=False, subject=_RUN), Recorded(changes=False, subject=_CLIENT_ID)
_OF_SUBJECT = Recorded(changes=False, subject=_SUBJECT)


def _reading(recorded: Recorded = _LIST, at_once: int = 32) -> Method:
    return Method(_READ, RequestLimit(at_once=at_once), recorded)


def _changing(roles: frozenset[str], subject: Callable[[Any], str], *details: str) -> Method:
    return Method(roles, _ADMIN_CALL, Recorded(subject=subject, details=details))


METHODS: Mapping[str, Method] = {
    # A thousand pending keys and states, and 64 labels and tasks with texts of 256 characters, fit into 512 KiB.
    "/fl.v1.Coordinator/Register": Method(_CLIENT, RequestLimit(size_bytes=512 << 10, at_once=4)),
    "/fl.v1.Coordinator/Attend": Method(_CLIENT, RequestLimit(size_bytes=256 << 10, at_once=8)),
    "/fl.v1.Coordinator/FetchModel": Method(_CLIENT, _SMALL),
    # Chunks, which have their own limit, and one header: `requests.parse_request` counts its values.
    "/fl.v1.Coordinator/SubmitUpdate": Method(_CLIENT, RequestLimit(size_bytes=MAX_MESSAGE_BYTES, at_once=8)),
    "/fl.v1.Coordinator/QueryUpload": Method(_CLIENT, _SMALL),
    # 64 failures with 4,000 characters each.
    "/fl.v1.Coordinator/ReportStatus": Method(_CLIENT, RequestLimit(size_bytes=1 << 20, values=2_000, at_once=8)),
    # An answer of 1 MiB.
    "/fl.v1.Coordinator/AnswerStage": Method(_CLIENT, RequestLimit(size_bytes=(1 << 20) + 1024, values=16, at_once=8)),
    "/fl.v1.Coordinator/ReportEvaluation": Method(_CLIENT, RequestLimit(at_once=8)),
    "/fl.v1.Coordinator/ReportRelease": Method(_CLIENT, RequestLimit(at_once=8)),
    f"{WORKERS}Serve": Method(_WORKER, _SMALL),
    # A header, the squares of a model's tensors, and pieces of its buffers.
    f"{WORKERS}ReceiveUpdate": Method(
        _WORKER, RequestLimit(size_bytes=2 * MAX_MESSAGE_BYTES, values=1 << 20, at_once=WORKER_CALLS)
    ),
    f"{WORKERS}SendResource": Method(_WORKER, RequestLimit(at_once=WORKER_CALLS)),
    f"{WORKERS}QueryForClient": Method(_WORKER, RequestLimit(at_once=WORKER_CALLS)),
    f"{WORKERS}FetchResource": Method(_WORKER, _SMALL),
    "/fl.v1.Certificates/Renew": Method(_CLIENT, _CERTIFICATE),
    "/fl.v1.Enrollment/Enroll": Method(EVERYONE, _CERTIFICATE),
    "/fl.v1.Enrollment/Reenroll": Method(EVERYONE, _CERTIFICATE),
    "/fl.v1.Admin/WhoAmI": Method(_ANY_OPERATOR, _ADMIN_CALL, _LIST),
    "/fl.v1.Admin/CreateWebLink": Method(_READ, _ADMIN_CALL, Recorded()),
    "/fl.v1.Admin/ListRuns": _reading(),
    "/fl.v1.Admin/GetRun": _reading(_OF_RUN),
    "/fl.v1.Admin/ListRounds": _reading(_OF_RUN),
    "/fl.v1.Admin/WatchRun": _reading(_OF_RUN, at_once=64),
    "/fl.v1.Admin/ListEvaluations": _reading(_OF_RUN),
    "/fl.v1.Admin/ListCohort": _reading(_OF_RUN),
    "/fl.v1.Admin/ListClients": _reading(),
    "/fl.v1.Admin/GetClient": _reading(_OF_CLIENT),
    "/fl.v1.Admin/ListHistory": _reading(_OF_SUBJECT),
    "/fl.v1.Admin/WatchHistory": Method(_READ, RequestLimit(4 << 10, values=16, at_once=64), _OF_SUBJECT),
    "/fl.v1.Admin/GetOverview": _reading(),
    "/fl.v1.Admin/CreateRun": Method(_OPERATE, _LARGEST_RUN, Recorded(subject=_wanted_run, made=_created_run)),
    "/fl.v1.Admin/PauseRun": _changing(_OPERATE, _RUN),
    "/fl.v1.Admin/ResumeRun": _changing(_OPERATE, _RUN, "learning_rate"),
    "/fl.v1.Admin/ExtendRun": _changing(_OPERATE, _RUN, "rounds", "wall_time_s"),
    "/fl.v1.Admin/StopRun": _changing(_OPERATE, _RUN, "reason"),
    "/fl.v1.Admin/DeleteRun": _changing(_OPERATE, _RUN, "reason"),
    "/fl.v1.Admin/ExportModel": _changing(_OPERATE, _RUN, "round"),
    "/fl.v1.Admin/UploadModel": Method(_OPERATE, _MODEL, Recorded(made=_field("initial_model"))),
    "/fl.v1.Admin/AddPackage": Method(_OPERATE, _ADMIN_CALL, Recorded(made=_added)),
    "/fl.v1.Admin/CreateRelease": Method(_OPERATE, _ADMIN_CALL, Recorded(details=("signer",), made=_released)),
    "/fl.v1.Admin/AdvanceRelease": _changing(_OPERATE, _field("model"), "kind", "share"),
    "/fl.v1.Admin/RollBackRelease": _changing(_OPERATE, _field("model"), "kind", "version", "reason"),
    "/fl.v1.Admin/ListReleases": _reading(Recorded(changes=False, subject=_field("model"))),
    "/fl.v1.Admin/GetRelease": _reading(Recorded(changes=False, subject=_field("model"))),
    "/fl.v1.Admin/DrainClient": _changing(_OPERATE, _CLIENT_ID, "reason", "undo"),
    "/fl.v1.Admin/ReleaseClient": _changing(_OPERATE, _CLIENT_ID),
    "/fl.v1.Admin/CreateEnrollments": Method(
        _ENROLL, _TOKENS, Recorded(subject=_enrolled_names, details=("ttl_s",), made=_token_ids)
    ),
    "/fl.v1.Admin/ListEnrollments": Method(_ENROLL, _ADMIN_CALL, _LIST),
    "/fl.v1.Admin/RevokeEnrollment": _changing(_ENROLL, _field("id"), "reason"),
    "/fl.v1.Admin/ListCertificates": Method(_ENROLL, _ADMIN_CALL, Recorded(changes=False, subject=_field("name"))),
    "/fl.v1.Admin/ListAuthorities": Method(_ENROLL, RequestLimit(at_once=2), _LIST),
    "/fl.v1.Admin/BanClient": _changing(_ADMIN_ONLY, _CLIENT_ID, "reason"),
    "/fl.v1.Admin/UnbanClient": _changing(_ADMIN_ONLY, _CLIENT_ID),
    "/fl.v1.Admin/ForgetClient": _changing(_ADMIN_ONLY, _CLIENT_ID),
    "/fl.v1.Admin/RevokeCertificates": _changing(_ADMIN_ONLY, _revoked, "reason"),
    "/fl.v1.Admin/ListAudit": Method(
        _ADMIN_ONLY, _ADMIN_CALL, Recorded(changes=False, details=("actor", "method", "subject"))
    ),
    # At the web process's socket only, which nobody else can open.
    "/fl.v1.WebLogin/GetLink": Method(EVERYONE, _LOGIN),
    "/fl.v1.WebLogin/OpenByCode": Method(EVERYONE, _LOGIN),
    "/fl.v1.WebLogin/OpenByCertificate": Method(EVERYONE, RequestLimit(16 << 10, values=4, at_once=64)),
    "/fl.v1.WebLogin/CloseSession": Method(EVERYONE, _LOGIN),
    "/grpc.health.v1.Health/Check": Method(EVERYONE, _SMALL),
    "/grpc.health.v1.Health/List": Method(EVERYONE, _SMALL),
    "/grpc.health.v1.Health/Watch": Method(EVERYONE, _SMALL),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": Method(EVERYONE, RequestLimit(4 << 10, 32, 2)),
}
"""The rows by the methods' full names. A test compares the table with the services."""

WEB_METHODS = frozenset(
    name
    for name, method in METHODS.items()
    if name.startswith("/fl.v1.WebLogin/")
    or (name.startswith(ADMIN) and (method.roles in {_READ, _ANY_OPERATOR} or name == f"{ADMIN}ExportModel"))
) - {f"{ADMIN}CreateWebLink"}
"""Methods that browsers may call through the web process: those that read, and ExportModel for its own roles."""


def largest_request(prefix: str) -> int:
    """Bytes of the largest request of the methods whose names begin with this."""
    return max(method.limit.size_bytes for name, method in METHODS.items() if name.startswith(prefix))


def methods_of(who: Identity) -> list[str]:
    """Names of the operators' methods that the caller may call, in order. ANYBODY: all, where it may call any."""
    mine = ((name, method.roles) for name, method in METHODS.items() if name.startswith(ADMIN))
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
