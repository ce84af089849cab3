"""What the audit log keeps of each method of the Admin service: whether it changes something, its subject, its details.

Only named fields are kept, so that no secret of a request gets into a row. A method without an entry counts as one that
changes something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_NAMES = 20
"""Of a list, in one row."""


def _nothing(_: Any) -> str:
    return ""


def _field(name: str) -> Callable[[Any], str]:
    return lambda message: str(getattr(message, name))


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a row has of a call."""

    changes: bool = True
    """Whether the call changes something or gives a model away: then a row is durable before it begins."""
    subject: Callable[[Any], str] = _nothing
    """From the request."""
    details: tuple[str, ...] = ()
    """Fields of the request."""
    made: Callable[[Any], str] = _nothing
    """From the response: the subject of a call that makes something."""

    def detail(self, request: Any) -> str:
        """The named fields that are set: "reason=lost device". A stream of requests has none."""
        if not self.details:
            return ""
        given = {field.name: value for field, value in request.ListFields() if field.name in self.details}
        return ", ".join(f"{name}={given[name]}" for name in self.details if name in given)


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


def _wanted_run(request: Any) -> str:
    return str(request.spec.name or request.spec.task.name)


_RUN, _CLIENT = _field("run_id"), _field("client_id")

METHODS: Mapping[str, Recorded] = {
    "CreateRun": Recorded(subject=_wanted_run, made=_created_run),
    "ListRuns": Recorded(changes=False),
    "GetRun": Recorded(changes=False, subject=_RUN),
    "ListRounds": Recorded(changes=False, subject=_RUN),
    "WatchRun": Recorded(changes=False, subject=_RUN),
    "PauseRun": Recorded(subject=_RUN),
    "ResumeRun": Recorded(subject=_RUN, details=("learning_rate",)),
    "ExtendRun": Recorded(subject=_RUN, details=("rounds", "wall_time_s")),
    "StopRun": Recorded(subject=_RUN, details=("reason",)),
    "DeleteRun": Recorded(subject=_RUN, details=("reason",)),
    "ListClients": Recorded(changes=False),
    "GetClient": Recorded(changes=False, subject=_CLIENT),
    "BanClient": Recorded(subject=_CLIENT, details=("reason",)),
    "UnbanClient": Recorded(subject=_CLIENT),
    "ForgetClient": Recorded(subject=_CLIENT),
    "ReleaseClient": Recorded(subject=_CLIENT),
    "DrainClient": Recorded(subject=_CLIENT, details=("reason", "undo")),
    "ExportModel": Recorded(subject=_RUN, details=("round",)),
    "UploadModel": Recorded(made=_field("initial_model")),
    "ListEvaluations": Recorded(changes=False, subject=_RUN),
    "ListHistory": Recorded(changes=False, subject=_field("subject")),
    "ListCohort": Recorded(changes=False, subject=_RUN),
    "WatchHistory": Recorded(changes=False, subject=_field("subject")),
    "GetOverview": Recorded(changes=False),
    "WhoAmI": Recorded(changes=False),
    "CreateWebLink": Recorded(),
    "CreateEnrollments": Recorded(subject=_enrolled_names, details=("ttl_s",), made=_token_ids),
    "ListEnrollments": Recorded(changes=False),
    "RevokeEnrollment": Recorded(subject=_field("id"), details=("reason",)),
    "ListCertificates": Recorded(changes=False, subject=_field("name")),
    "RevokeCertificates": Recorded(subject=_revoked, details=("reason",)),
    "ListAudit": Recorded(changes=False, details=("actor", "method", "subject")),
}
