"""The Admin service as plain calls, which return messages or raise `OpsError`. The only module of fl_ops with grpc."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar, cast

import grpc
from google.protobuf.message import Message

from fl_common.certificates.tls_version import check_oldest_tls
from fl_common.file_permissions import check_private_key
from fl_common.proxies import channel_options
from fl_common.settings import BYTE_ORDER_MARK, SettingsError
from fl_ops.admin.failures import FailedCall, explain
from fl_ops.admin.model_parts import model_parts
from fl_ops.admin.settings import Certificates, Connection, Token, oldest_tls
from fl_ops.errors import OpsError, UnknownCall, UsageError
from protos.fl.v1 import admin_pb2, admin_pb2_grpc
from protos.status import detail_of
from protos.wire import client_options

CALL_SECONDS = 60
"""Timeout of a call that is no stream. Creating a run takes long: it builds the model."""
_MAX_RESPONSE_BYTES = 64 << 20
"""A coordinator that is older than pages sends a list as one message."""
_PAGE_SIZE = 1000
"""The most entries that a coordinator puts into a page."""
_CONNECT_MILLISECONDS = 5_000

Response = TypeVar("Response", bound=Message)


class AdminClient:
    """One connection to a coordinator's admin port; a context manager. Every method raises `OpsError` only."""

    def __init__(self, connection: Connection, call_seconds: float = CALL_SECONDS) -> None:
        self._connection, self._call_seconds = connection, call_seconds
        own = {
            "grpc.max_receive_message_length": _MAX_RESPONSE_BYTES,
            "grpc.min_reconnect_backoff_ms": _CONNECT_MILLISECONDS,
        }
        self._proxy = connection.proxy
        options = tuple({**dict(client_options()), **own, **channel_options(self._proxy)}.items())
        if connection.security is None:
            self._channel = grpc.insecure_channel(connection.server, options)
        else:
            self._channel = grpc.secure_channel(connection.server, credentials(connection.security), options)
        # The generated stub has no types; `_call` and `_stream` add them.
        self._stub: Any = cast(Any, admin_pb2_grpc).AdminStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def create_run(self, spec: admin_pb2.RunSpec) -> admin_pb2.CreateRunResponse:
        """Create a run; with what its creator should know of it."""
        return self._call("CreateRun", admin_pb2.CreateRunRequest(spec=spec), admin_pb2.CreateRunResponse)

    def list_runs(self) -> list[admin_pb2.RunStatus]:
        """All runs, in the coordinator's order."""
        pages = self._pages("ListRuns", admin_pb2.ListRunsRequest(), admin_pb2.ListRunsResponse)
        return [run for page in pages for run in page.runs]

    def get_run(self, run_id: str, newest: int | None = None) -> admin_pb2.GetRunResponse:
        """One run and its newest committed rounds. newest: how many; None for all."""
        request = admin_pb2.GetRunRequest(run_id=run_id)
        response = self._call("GetRun", request, admin_pb2.GetRunResponse)
        if newest == 0:
            return response
        first = 0 if newest is None else max(0, response.run.rounds_done - newest)
        rounds = admin_pb2.ListRoundsRequest(run_id=run_id, first_round=first)
        try:
            for page in self._pages("ListRounds", rounds, admin_pb2.ListRoundsResponse):
                response.rounds.extend(page.rounds)
        except UnknownCall:
            request.with_rounds = True
            response = self._call("GetRun", request, admin_pb2.GetRunResponse)
            del response.rounds[:first]
        return response

    def watch_run(self, run_id: str) -> Iterator[admin_pb2.WatchRunResponse]:
        """The run's current state, then its events until it ends."""
        return self._stream("WatchRun", admin_pb2.WatchRunRequest(run_id=run_id), admin_pb2.WatchRunResponse)

    def pause_run(self, run_id: str) -> admin_pb2.RunStatus:
        """Start no new round after the current one."""
        return self._call("PauseRun", admin_pb2.PauseRunRequest(run_id=run_id), admin_pb2.PauseRunResponse).run

    def resume_run(self, run_id: str, learning_rate: float | None = None) -> admin_pb2.RunStatus:
        """End a pause, or continue a failed run from its last model, optionally with another learning rate."""
        request = admin_pb2.ResumeRunRequest(run_id=run_id, learning_rate=learning_rate)
        return self._call("ResumeRun", request, admin_pb2.ResumeRunResponse).run

    def extend_run(self, run_id: str, rounds: int, wall_time_s: float) -> admin_pb2.RunStatus:
        """Give a run additional rounds and seconds."""
        request = admin_pb2.ExtendRunRequest(run_id=run_id, rounds=rounds, wall_time_s=wall_time_s)
        return self._call("ExtendRun", request, admin_pb2.ExtendRunResponse).run

    def stop_run(self, run_id: str, reason: str) -> admin_pb2.RunStatus:
        """End a run now."""
        return self._call(
            "StopRun", admin_pb2.StopRunRequest(run_id=run_id, reason=reason), admin_pb2.StopRunResponse
        ).run

    def delete_run(self, run_id: str, reason: str) -> bool:
        """Delete an ended run. Returns False if its data is still being removed."""
        request = admin_pb2.DeleteRunRequest(run_id=run_id, reason=reason)
        return self._call("DeleteRun", request, admin_pb2.DeleteRunResponse).finished

    def list_history(self, subject: str, limit: int) -> list[admin_pb2.HistoryEntry]:
        """The newest `limit` history entries of a run or client, oldest first; 0: the coordinator's limit."""
        request = admin_pb2.ListHistoryRequest(subject=subject, limit=limit)
        pages = self._pages("ListHistory", request, admin_pb2.ListHistoryResponse)
        return [entry for page in pages for entry in page.entries]

    def watch_history(self, after: int | None = None, subject: str = "") -> Iterator[admin_pb2.WatchHistoryResponse]:
        """The history's entries after a number, then new ones, without end. after: None for only new ones."""
        request = admin_pb2.WatchHistoryRequest(after_number=after, subject=subject)
        return self._stream("WatchHistory", request, admin_pb2.WatchHistoryResponse)

    def get_overview(self, runs: int, points: int) -> admin_pb2.GetOverviewResponse:
        """Counts, and the newest `runs` runs in short, each with its newest `points` values of its metric."""
        request = admin_pb2.GetOverviewRequest(page_size=runs, points=points)
        return self._call("GetOverview", request, admin_pb2.GetOverviewResponse)

    def list_audit(self, request: admin_pb2.ListAuditRequest) -> Iterator[admin_pb2.ListAuditResponse]:
        """The pages of the audit log."""
        return self._pages("ListAudit", request, admin_pb2.ListAuditResponse)

    def list_evaluations(self, run_id: str, round_: int | None) -> admin_pb2.ListEvaluationsResponse:
        """The clients' evaluations of a round; None: of the newest evaluated round."""
        request = admin_pb2.ListEvaluationsRequest(run_id=run_id, round=round_)
        first, *others = self._pages("ListEvaluations", request, admin_pb2.ListEvaluationsResponse)
        for page in others:
            first.evaluations.extend(page.evaluations)
        first.ClearField("next_page_token")
        return first

    def list_cohort(self, run_id: str, limit: int) -> admin_pb2.ListCohortResponse:
        """The first `limit` clients (at most 1,000) of the round under way, each with its phase, and counts of all."""
        request = admin_pb2.ListCohortRequest(run_id=run_id, page_size=limit)
        return self._call("ListCohort", request, admin_pb2.ListCohortResponse)

    def list_clients(
        self, state: admin_pb2.ClientState | None = None, labels: Mapping[str, str] | None = None, limit: int = 0
    ) -> list[admin_pb2.ClientStatus]:
        """The clients of the roster in this state and with these labels, in order of id. limit: the most; 0: all."""
        request = admin_pb2.ListClientsRequest(state=state, labels=labels)
        found: list[admin_pb2.ClientStatus] = []
        for page in self._pages("ListClients", request, admin_pb2.ListClientsResponse):
            found += page.clients
            if 0 < limit <= len(found):
                break
        return found[: limit or None]

    def get_client(self, client_id: str, history: int = 0) -> admin_pb2.GetClientResponse:
        """One client with its newest `history` entries; 0: the coordinator's limit."""
        request = admin_pb2.GetClientRequest(client_id=client_id, history=history)
        return self._call("GetClient", request, admin_pb2.GetClientResponse)

    def ban_client(self, client_id: str, reason: str) -> admin_pb2.ClientStatus:
        """Refuse a client from now on."""
        return self._call(
            "BanClient", admin_pb2.BanClientRequest(client_id=client_id, reason=reason), admin_pb2.BanClientResponse
        ).client

    def unban_client(self, client_id: str) -> admin_pb2.ClientStatus:
        """Admit a banned client again."""
        return self._call(
            "UnbanClient", admin_pb2.UnbanClientRequest(client_id=client_id), admin_pb2.UnbanClientResponse
        ).client

    def release_client(self, client_id: str) -> admin_pb2.ClientStatus:
        """End a client's quarantine."""
        return self._call(
            "ReleaseClient", admin_pb2.ReleaseClientRequest(client_id=client_id), admin_pb2.ReleaseClientResponse
        ).client

    def forget_client(self, client_id: str) -> bool:
        """Remove a client from the roster. Returns whether it was banned and stays so."""
        return bool(
            self._call(
                "ForgetClient", admin_pb2.ForgetClientRequest(client_id=client_id), admin_pb2.ForgetClientResponse
            ).still_banned
        )

    def drain_client(self, client_id: str, reason: str, undo: bool) -> admin_pb2.ClientStatus:
        """Assign no new work to a client; with `undo`, assign work again."""
        request = admin_pb2.DrainClientRequest(client_id=client_id, reason=reason, undo=undo)
        return self._call("DrainClient", request, admin_pb2.DrainClientResponse).client

    def create_enrollments(
        self, specs: Sequence[admin_pb2.EnrollmentSpec], ttl_s: float
    ) -> admin_pb2.CreateEnrollmentsResponse:
        """Make tokens for devices. ttl_s: 0 for the coordinator's default."""
        request = admin_pb2.CreateEnrollmentsRequest(specs=specs, ttl_s=ttl_s)
        return self._call("CreateEnrollments", request, admin_pb2.CreateEnrollmentsResponse)

    def list_enrollments(self) -> list[admin_pb2.EnrollmentToken]:
        """All tokens, the newest first."""
        pages = self._pages("ListEnrollments", admin_pb2.ListEnrollmentsRequest(), admin_pb2.ListEnrollmentsResponse)
        return [token for page in pages for token in page.enrollments]

    def revoke_enrollment(self, token_id: str, reason: str) -> admin_pb2.EnrollmentToken:
        """Make a token useless."""
        request = admin_pb2.RevokeEnrollmentRequest(id=token_id, reason=reason)
        return self._call("RevokeEnrollment", request, admin_pb2.RevokeEnrollmentResponse).enrollment

    def list_certificates(self, name: str = "") -> list[admin_pb2.CertificateStatus]:
        """The certificates of a client, or all, the newest first."""
        request = admin_pb2.ListCertificatesRequest(name=name)
        pages = self._pages("ListCertificates", request, admin_pb2.ListCertificatesResponse)
        return [certificate for page in pages for certificate in page.certificates]

    def revoke_certificates(self, reason: str, **which: str) -> list[admin_pb2.CertificateStatus]:
        """Deny certificates. which: one of name, serial and key."""
        request = admin_pb2.RevokeCertificatesRequest(reason=reason, **which)
        return list(self._call("RevokeCertificates", request, admin_pb2.RevokeCertificatesResponse).revoked)

    def export_model(self, run_id: str, which: str, model: str = "") -> Iterator[admin_pb2.ExportModelResponse]:
        """Header and chunks of a model. which: "latest", "best" or a round's number. model: "averaged" or committed."""
        request = admin_pb2.ExportModelRequest(run_id=run_id, round=which, model=model)
        return self._stream("ExportModel", request, admin_pb2.ExportModelResponse)

    def upload_model(self, file: BinaryIO) -> str:
        """Send a safetensors file. Returns the `initial_model` of a run that starts from it."""
        try:
            stream = self._stub.UploadModel(model_parts(file), metadata=self._metadata())
            return cast(admin_pb2.UploadModelResponse, stream).initial_model
        except grpc.RpcError as exc:
            raise self._explained(exc) from exc

    def create_web_link(self) -> admin_pb2.CreateWebLinkResponse:
        """A link with which the caller's browser opens the coordinator's page."""
        return self._call("CreateWebLink", admin_pb2.CreateWebLinkRequest(), admin_pb2.CreateWebLinkResponse)

    def who_am_i(self) -> admin_pb2.WhoAmIResponse:
        """The caller as the coordinator knows it."""
        return self._call("WhoAmI", admin_pb2.WhoAmIRequest(), admin_pb2.WhoAmIResponse)

    def _pages(self, method: str, request: Any, response: type[Response]) -> Iterator[Response]:
        """All pages of a list. request: with page_size and page_token."""
        request.page_size = _PAGE_SIZE
        while True:
            page: Any = self._call(method, request, response)
            yield page
            # A coordinator that is older than pages sends the whole list without a token.
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def _call(self, method: str, request: Message, response: type[Response]) -> Response:
        del response  # only for the type
        try:
            return cast(
                Response, getattr(self._stub, method)(request, timeout=self._call_seconds, metadata=self._metadata())
            )
        except grpc.RpcError as exc:
            raise self._explained(exc) from exc

    def _stream(self, method: str, request: Message, response: type[Response]) -> Iterator[Response]:
        del response  # only for the type
        stream = getattr(self._stub, method)(request, metadata=self._metadata())
        try:
            yield from stream
        except grpc.RpcError as exc:
            raise self._explained(exc) from exc
        finally:
            stream.cancel()

    def _metadata(self) -> list[tuple[str, str]]:
        """The token, if the caller has one: then the connection is TLS."""
        security = self._connection.security
        return [("authorization", f"Bearer {security.read()}")] if isinstance(security, Token) else []

    def _explained(self, error: Any) -> OpsError:
        """error: of grpc; its stubs do not declare that an RpcError of a call has code, details and metadata."""
        detail = detail_of((entry.key, entry.value) for entry in error.trailing_metadata() or ())
        server, security = self._connection.server, self._connection.security
        return explain(FailedCall(server, security, error.code().name, error.details() or "", detail, self._proxy))


def credentials(files: Certificates | Token) -> grpc.ChannelCredentials:
    """The credentials of a connection. Raises UsageError."""
    if isinstance(files, Token):
        check_oldest_tls(oldest_tls(os.environ))
        return grpc.ssl_channel_credentials(_read(files.ca))
    try:
        check_private_key(files.key, "--key")
    except SettingsError as exc:
        raise UsageError(str(exc)) from None
    check_oldest_tls(oldest_tls(os.environ))
    from fl_ops.certificates import ca  # imported here: plain-text connections must not wait for cryptography

    authority, certificate, key = (_read(path) for path in (files.ca, files.cert, files.key))
    try:
        leaf, _ = ca.load_pair(certificate, key)
    except (ValueError, TypeError) as exc:
        raise UsageError(f"{files.cert} and {files.key} are no certificate and key in PEM: {exc}") from exc
    if leaf.not_valid_after_utc < datetime.now(UTC):
        raise UsageError(f"{files.cert} expired on {leaf.not_valid_after_utc:%Y-%m-%d}: issue a new one")
    return grpc.ssl_channel_credentials(authority, key, certificate)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(BYTE_ORDER_MARK)
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}") from exc
