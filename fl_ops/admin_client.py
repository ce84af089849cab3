"""The Admin service as plain calls: messages come back, or `OpsError`s. Nothing else in fl_ops knows grpc."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import Message

from fl_ops.errors import Misused, OpsError
from fl_ops.failures import Failure, explain
from fl_ops.settings import Certificates, Connection
from protos.fl.v1 import admin_pb2, admin_pb2_grpc
from protos.private_files import check_private_key
from protos.settings import SettingsError
from protos.status import detail_of
from protos.wire import client_options

CALL_SECONDS = 60
"""A call that answers once has this long: creating a run builds its model."""
# A list of 10,000 clients is one message.
_MAX_ANSWER_BYTES = 64 << 20
_CONNECT_MILLISECONDS = 5_000


class AdminClient:
    """One connection to a coordinator's admin port; a context manager. Every method raises `OpsError`s only."""

    def __init__(self, connection: Connection) -> None:
        self._server = connection.server
        own = {
            "grpc.max_receive_message_length": _MAX_ANSWER_BYTES,
            "grpc.min_reconnect_backoff_ms": _CONNECT_MILLISECONDS,
        }
        options = tuple({**dict(client_options()), **own}.items())
        if connection.certificates is None:
            self._channel = grpc.insecure_channel(connection.server, options)
        else:
            self._channel = grpc.secure_channel(connection.server, _credentials(connection.certificates), options)
        self._stub: Any = admin_pb2_grpc.AdminStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    def create_run(self, spec: admin_pb2.RunSpec) -> admin_pb2.RunStatus:
        """Stores a new run."""
        return self._call("CreateRun", admin_pb2.CreateRunRequest(spec=spec)).run

    def list_runs(self) -> list[admin_pb2.RunStatus]:
        """Every run, in the coordinator's order."""
        return list(self._call("ListRuns", admin_pb2.ListRunsRequest()).runs)

    def get_run(self, run_id: str) -> admin_pb2.GetRunResponse:
        """One run and its committed rounds."""
        return self._call("GetRun", admin_pb2.GetRunRequest(run_id=run_id, with_rounds=True))

    def watch_run(self, run_id: str) -> Iterator[admin_pb2.WatchRunResponse]:
        """The run as it is now, then its events, until it ends."""
        return self._stream("WatchRun", admin_pb2.WatchRunRequest(run_id=run_id))

    def pause_run(self, run_id: str) -> admin_pb2.RunStatus:
        """No new round after the one under way."""
        return self._call("PauseRun", admin_pb2.PauseRunRequest(run_id=run_id)).run

    def resume_run(self, run_id: str, learning_rate: float | None = None) -> admin_pb2.RunStatus:
        """Ends a pause; a failed run goes on from its last committed model, with another learning rate if given."""
        request = admin_pb2.ResumeRunRequest(run_id=run_id, learning_rate=learning_rate)
        return self._call("ResumeRun", request).run

    def extend_run(self, run_id: str, rounds: int, wall_time_s: float) -> admin_pb2.RunStatus:
        """More rounds, and more seconds, than the run had."""
        request = admin_pb2.ExtendRunRequest(run_id=run_id, rounds=rounds, wall_time_s=wall_time_s)
        return self._call("ExtendRun", request).run

    def stop_run(self, run_id: str, reason: str) -> admin_pb2.RunStatus:
        """Ends a run now."""
        return self._call("StopRun", admin_pb2.StopRunRequest(run_id=run_id, reason=reason)).run

    def list_history(self, subject: str, limit: int) -> list[admin_pb2.HistoryEntry]:
        """Newest `limit` entries about a run or client, oldest first; 0: as many as the coordinator gives."""
        return list(self._call("ListHistory", admin_pb2.ListHistoryRequest(subject=subject, limit=limit)).entries)

    def list_evaluations(self, run_id: str, round_: int | None) -> admin_pb2.ListEvaluationsResponse:
        """What clients said of a round; None: the newest that they were asked about."""
        return self._call("ListEvaluations", admin_pb2.ListEvaluationsRequest(run_id=run_id, round=round_))

    def list_clients(self) -> list[admin_pb2.ClientStatus]:
        """Every client of the roster."""
        return list(self._call("ListClients", admin_pb2.ListClientsRequest()).clients)

    def get_client(self, client_id: str, history: int = 0) -> admin_pb2.GetClientResponse:
        """One client, with its newest history entries; 0: as many as the coordinator gives."""
        request = admin_pb2.GetClientRequest(client_id=client_id, history=history)
        answer: admin_pb2.GetClientResponse = self._call("GetClient", request)
        return answer

    def ban_client(self, client_id: str, reason: str) -> admin_pb2.ClientStatus:
        """Refuses a client from now on."""
        return self._call("BanClient", admin_pb2.BanClientRequest(client_id=client_id, reason=reason)).client

    def unban_client(self, client_id: str) -> admin_pb2.ClientStatus:
        """Lets a banned client in again."""
        return self._call("UnbanClient", admin_pb2.UnbanClientRequest(client_id=client_id)).client

    def release_client(self, client_id: str) -> admin_pb2.ClientStatus:
        """Ends a client's quarantine."""
        return self._call("ReleaseClient", admin_pb2.ReleaseClientRequest(client_id=client_id)).client

    def forget_client(self, client_id: str) -> bool:
        """Takes a client off the roster; True if it was banned, and stays so."""
        return bool(self._call("ForgetClient", admin_pb2.ForgetClientRequest(client_id=client_id)).still_banned)

    def drain_client(self, client_id: str, reason: str, undo: bool) -> admin_pb2.ClientStatus:
        """No new work for a client; with `undo`, work again."""
        request = admin_pb2.DrainClientRequest(client_id=client_id, reason=reason, undo=undo)
        return self._call("DrainClient", request).client

    def export_model(self, run_id: str, which: str) -> Iterator[admin_pb2.ExportModelResponse]:
        """Header and chunks of a model: which is "latest", "best" or a round's number."""
        return self._stream("ExportModel", admin_pb2.ExportModelRequest(run_id=run_id, round=which))

    def _call(self, method: str, request: Message) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=CALL_SECONDS)
        except grpc.RpcError as exc:
            raise _explained(exc, self._server) from exc

    def _stream(self, method: str, request: Message) -> Iterator[Any]:
        stream = getattr(self._stub, method)(request)
        try:
            yield from stream
        except grpc.RpcError as exc:
            raise _explained(exc, self._server) from exc
        finally:
            stream.cancel()


def _credentials(files: Certificates) -> grpc.ChannelCredentials:
    try:
        check_private_key(files.key, "--key")
    except SettingsError as exc:
        raise Misused(str(exc)) from None
    from fl_ops import ca  # and the library that it stands on: only those who connect by TLS wait for it

    authority, certificate, key = (_read(path) for path in (files.ca, files.cert, files.key))
    try:
        leaf, _ = ca.load_pair(certificate, key)
    except (ValueError, TypeError) as exc:
        raise Misused(f"{files.cert} and {files.key} are no certificate and key in PEM: {exc}") from exc
    if leaf.not_valid_after_utc < datetime.now(UTC):
        raise Misused(f"{files.cert} ended on {leaf.not_valid_after_utc:%Y-%m-%d}: issue a new one")
    return grpc.ssl_channel_credentials(authority, key, certificate)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as exc:
        raise Misused(f"{path} cannot be read: {exc.strerror}") from exc


def _explained(error: Any, server: str) -> OpsError:
    detail = detail_of((entry.key, entry.value) for entry in error.trailing_metadata() or ())
    return explain(Failure(server, error.code().name, error.details() or "", detail))
