"""The Admin service as plain calls, grouped by subject. They return messages or raise `OpsError`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Self

from blake3 import blake3

from fl_ops.admin.calls import CALL_SECONDS, CREATE_SECONDS, AdminCalls
from fl_ops.admin.settings import Connection
from protos.chunks import make_chunk
from protos.digests import digest_message
from protos.fl.v1 import admin_pb2


class AdminClient:
    """One connection to a coordinator's admin port; a context manager. Its parts raise `OpsError` only.

    calls: the type of the connection; another one sees every call.
    """

    def __init__(
        self, connection: Connection, call_seconds: float = CALL_SECONDS, calls: type[AdminCalls] = AdminCalls
    ) -> None:
        self._calls = calls(connection, call_seconds)
        self.call = self._calls.call
        """For the calls that have no method below: those of one command, a message each way."""
        self.runs = RunCalls(self._calls)
        self.clients = ClientCalls(self._calls)
        self.models = ModelCalls(self._calls)
        self.history = HistoryCalls(self._calls)
        self.access = AccessCalls(self._calls)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()


@dataclass(frozen=True)
class _Calls:
    """The calls of one subject."""

    _calls: AdminCalls


class RunCalls(_Calls):
    """The runs: made, read, watched and steered."""

    def create_run(self, spec: admin_pb2.RunSpec) -> admin_pb2.CreateRunResponse:
        """Create a run; with what its creator should know of it."""
        return self._calls.call(admin_pb2.CreateRunRequest(spec=spec), admin_pb2.CreateRunResponse, CREATE_SECONDS)

    def list_runs(self) -> list[admin_pb2.RunStatus]:
        """All runs, in the coordinator's order."""
        return list(self._calls.whole(admin_pb2.ListRunsRequest(), admin_pb2.ListRunsResponse, "runs").runs)

    def get_run(self, run_id: str, newest: int | None = None) -> admin_pb2.GetRunResponse:
        """One run and its newest committed rounds. newest: how many; None for all."""
        request = admin_pb2.GetRunRequest(run_id=run_id)
        response = self._calls.call(request, admin_pb2.GetRunResponse)
        if newest == 0:
            return response
        first = 0 if newest is None else max(0, response.run.rounds_done - newest)
        rounds = admin_pb2.ListRoundsRequest(run_id=run_id, first_round=first)
        response.rounds.extend(self._calls.whole(rounds, admin_pb2.ListRoundsResponse, "rounds").rounds)
        return response

    def watch_run(self, run_id: str, first_round: int | None = None) -> Iterator[admin_pb2.WatchRunResponse]:
        """The run's current state, then its events until it ends. first_round: the rounds from it on come before."""
        request = admin_pb2.WatchRunRequest(run_id=run_id, first_round=first_round)
        return self._calls.stream(request, admin_pb2.WatchRunResponse)

    def list_evaluations(self, run_id: str, round_: int | None) -> admin_pb2.ListEvaluationsResponse:
        """The clients' evaluations of a round; None: of the newest evaluated round."""
        request = admin_pb2.ListEvaluationsRequest(run_id=run_id, round=round_)
        return self._calls.whole(request, admin_pb2.ListEvaluationsResponse, "evaluations")

    def pause_run(self, run_id: str) -> admin_pb2.RunStatus:
        """Start no new round after the current one."""
        return self._calls.call(admin_pb2.PauseRunRequest(run_id=run_id), admin_pb2.PauseRunResponse).run

    def resume_run(self, run_id: str, learning_rate: float | None = None) -> admin_pb2.RunStatus:
        """End a pause, or continue a failed run from its last model, optionally with another learning rate."""
        request = admin_pb2.ResumeRunRequest(run_id=run_id, learning_rate=learning_rate)
        return self._calls.call(request, admin_pb2.ResumeRunResponse).run

    def stop_run(self, run_id: str, reason: str) -> admin_pb2.RunStatus:
        """End a run now."""
        return self._calls.call(admin_pb2.StopRunRequest(run_id=run_id, reason=reason), admin_pb2.StopRunResponse).run


_FROM_THE_FIRST = {
    None, admin_pb2.CLIENT_ORDER_ID, admin_pb2.CLIENT_ORDER_STATE, admin_pb2.CLIENT_ORDER_VERSION,
}  # fmt: skip


class ClientCalls(_Calls):
    """The clients of the roster, and what an operator decides about them."""

    def list_clients(
        self,
        state: admin_pb2.ClientState | None = None,
        labels: Mapping[str, str] | None = None,
        limit: int = 0,
        order: admin_pb2.ClientOrder | None = None,
        marks: Sequence[str] = (),
        older_than: str = "",
    ) -> list[admin_pb2.ClientStatus]:
        """The clients of the roster in this state, with these labels and with one of these marks.

        limit: the most; 0: all. order: from the largest value, but by id, state and version from the first one.
        older_than: only clients with older software.
        """
        request = admin_pb2.ListClientsRequest(
            state=state, labels=labels, order=order, descending=order not in _FROM_THE_FIRST, marks=marks,
            older_than=older_than,
        )  # fmt: skip
        clients: list[admin_pb2.ClientStatus] = []
        for page in self._calls.pages(request, admin_pb2.ListClientsResponse):
            clients += page.clients
            if 0 < limit <= len(clients):
                break
        return clients[: limit or None]

    def ban_client(self, client_id: str, reason: str) -> admin_pb2.ClientStatus:
        """Refuse a client from now on."""
        request = admin_pb2.BanClientRequest(client_id=client_id, reason=reason)
        return self._calls.call(request, admin_pb2.BanClientResponse).client

    def forget_client(self, client_id: str) -> bool:
        """Remove a client from the roster. Returns whether it was banned and stays so."""
        request = admin_pb2.ForgetClientRequest(client_id=client_id)
        return self._calls.call(request, admin_pb2.ForgetClientResponse).still_banned


class ModelCalls(_Calls):
    """The models of runs, as streams of chunks."""

    def export_model(self, run_id: str, which: str, model: str = "") -> Iterator[admin_pb2.ExportModelResponse]:
        """Header and chunks of a model. which: "latest", "best" or a round's number. model: "averaged" or committed."""
        request = admin_pb2.ExportModelRequest(run_id=run_id, round=which, model=model)
        return self._calls.stream(request, admin_pb2.ExportModelResponse)

    def upload_model(self, file: BinaryIO, *, release: bool = False) -> str:
        """Send a safetensors file. Returns the `initial_model` of a run that starts from it.

        release: the file has the files of a release, for `CreateRelease`.
        """
        parts = model_parts(file, release=release)
        return self._calls.upload("UploadModel", parts, admin_pb2.UploadModelResponse).initial_model

    def list_releases(self, model: str = "", kind: str = "model") -> list[admin_pb2.ReleaseStatus]:
        """The releases of a model or package, or of all of a kind, the newest first."""
        request = admin_pb2.ListReleasesRequest(model=model, kind=kind)
        return list(self._calls.whole(request, admin_pb2.ListReleasesResponse, "releases").releases)

    def get_release(self, model: str, version: int = 0, kind: str = "model") -> admin_pb2.GetReleaseResponse:
        """One release of a model or package and all its devices. version: 0 for the newest."""
        request = admin_pb2.GetReleaseRequest(model=model, version=version, kind=kind)
        return self._calls.whole(request, admin_pb2.GetReleaseResponse, "devices")


class HistoryCalls(_Calls):
    """The history of runs and clients, and the audit log."""

    def list_history(self, subject: str, limit: int) -> list[admin_pb2.HistoryEntry]:
        """The newest `limit` history entries of a run or client, oldest first; 0: the coordinator's limit."""
        request = admin_pb2.ListHistoryRequest(subject=subject, limit=limit)
        return list(self._calls.whole(request, admin_pb2.ListHistoryResponse, "entries").entries)

    def watch_history(self) -> Iterator[admin_pb2.WatchHistoryResponse]:
        """New entries of the history, without end."""
        return self._calls.stream(admin_pb2.WatchHistoryRequest(), admin_pb2.WatchHistoryResponse)

    def list_audit(self, request: admin_pb2.ListAuditRequest) -> Iterator[admin_pb2.ListAuditResponse]:
        """The pages of the audit log."""
        return self._calls.pages(request, admin_pb2.ListAuditResponse)


class AccessCalls(_Calls):
    """Who may call: tokens for devices, certificates, links to the page, and the caller itself."""

    def list_enrollments(self) -> list[admin_pb2.EnrollmentToken]:
        """All tokens, the newest first."""
        request, response = admin_pb2.ListEnrollmentsRequest(), admin_pb2.ListEnrollmentsResponse
        return list(self._calls.whole(request, response, "enrollments").enrollments)

    def list_certificates(self, name: str = "") -> list[admin_pb2.CertificateStatus]:
        """The certificates of a client, or all, the newest first."""
        request = admin_pb2.ListCertificatesRequest(name=name)
        return list(self._calls.whole(request, admin_pb2.ListCertificatesResponse, "certificates").certificates)

    def revoke_certificates(self, reason: str, **which: str) -> list[admin_pb2.CertificateStatus]:
        """Deny certificates. which: one of name, serial and key."""
        request = admin_pb2.RevokeCertificatesRequest(reason=reason, **which)
        return list(self._calls.call(request, admin_pb2.RevokeCertificatesResponse).revoked)

    def who_am_i(self) -> admin_pb2.WhoAmIResponse:
        """The caller as the coordinator knows it."""
        return self._calls.call(admin_pb2.WhoAmIRequest(), admin_pb2.WhoAmIResponse)


CHUNK_BYTES = 512 << 10
"""The largest chunk that a coordinator takes."""


def model_parts(file: BinaryIO, *, release: bool = False) -> Iterator[admin_pb2.UploadModelRequest]:
    """Header and chunks of an open file, which is read twice: for its digest, and to be sent. Raises OSError."""
    hasher, size = blake3(), 0
    file.seek(0)
    while block := file.read(CHUNK_BYTES):
        hasher.update(block)
        size += len(block)
    header = admin_pb2.UploadModelHeader(size_bytes=size, digest=digest_message(hasher.digest()), release=release)
    yield admin_pb2.UploadModelRequest(header=header)
    file.seek(0)
    offset = 0
    while block := file.read(CHUNK_BYTES):
        chunk = make_chunk(block, 0, len(block))
        chunk.offset = offset
        yield admin_pb2.UploadModelRequest(chunk=chunk)
        offset += len(block)
