"""Connections to a coordinator's admin port: blocking calls, and a channel for an event loop.

No other module of fl_ops knows grpc.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message

from fl_common.certificates.tls_version import check_oldest_tls
from fl_common.files import check_private_key
from fl_common.proxies import channel_options
from fl_common.settings import BYTE_ORDER_MARK, SettingsError
from fl_ops.admin.failures import FailedCall, explain
from fl_ops.admin.settings import Certificates, Connection, Token
from fl_ops.admin.tls import oldest_tls
from fl_ops.errors import OpsError, UsageError
from protos.fl.v1 import admin_pb2_grpc
from protos.status import detail_of
from protos.wire import client_options

CALL_SECONDS = 60
"""Timeout of a call that is no stream."""
CREATE_SECONDS = 600
"""Timeout of a call that creates a run: the coordinator builds the model and writes it to its disk."""
_PAGE_SIZE = 1000
"""The most entries that a coordinator puts into a page."""
_CONNECT_MILLISECONDS = 5_000
_RECONNECT_MS = 1000
"""Longest wait before a lost connection is tried again: a person looks at the page meanwhile."""

Response = TypeVar("Response", bound=Message)


class AdminCalls:
    """One connection for blocking calls. Every method but `close` raises `OpsError` only."""

    def __init__(self, connection: Connection, call_seconds: float) -> None:
        self._connection, self._call_seconds = connection, call_seconds
        self._proxy = connection.proxy
        self._channel = _channel(grpc, connection, {"grpc.min_reconnect_backoff_ms": _CONNECT_MILLISECONDS})
        # The generated stub has no types; callers name that of the response.
        self._stub: Any = cast(Any, admin_pb2_grpc).AdminStub(self._channel)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def pages(self, request: Any, response: type[Response]) -> Iterator[Response]:
        """All pages of a list. request: with page_size and page_token. response: as in `call`."""
        request.page_size = _PAGE_SIZE
        while True:
            page: Any = self.call(request, response)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    def whole(self, request: Any, response: type[Response], entries: str) -> Response:
        """The first page of a list, with the entries of all pages. entries: the name of their field."""
        first, *others = self.pages(request, response)
        for page in others:
            getattr(first, entries).extend(getattr(page, entries))
        first.ClearField("next_page_token")
        return first

    def call(self, request: Message, response: type[Response], seconds: float = 0.0) -> Response:
        """The response to a request.

        response: its type, which no code at run time needs. seconds: the timeout; 0: the usual one.
        """
        del response
        seconds = seconds or self._call_seconds
        try:
            return cast(
                Response,
                self._method(request)(request, timeout=seconds, metadata=call_metadata(self._connection)),
            )
        except grpc.RpcError as exc:
            raise self._explained(exc) from exc

    def stream(self, request: Message, response: type[Response]) -> Iterator[Response]:
        """The messages of a stream, which is cancelled when the reader leaves it. response: as in `call`."""
        del response
        stream = self._method(request)(request, metadata=call_metadata(self._connection))
        try:
            yield from stream
        except grpc.RpcError as exc:
            raise self._explained(exc) from exc
        finally:
            stream.cancel()

    def _method(self, request: Message) -> Any:
        """The method that takes such a request: PauseRun for a PauseRunRequest."""
        return getattr(self._stub, request.DESCRIPTOR.name.removesuffix("Request"))

    def upload(self, method: str, requests: Iterator[Message], response: type[Response]) -> Response:
        """The response to a stream of requests. It has no timeout: models are large. response: as in `call`."""
        del response
        try:
            return cast(Response, getattr(self._stub, method)(requests, metadata=call_metadata(self._connection)))
        except grpc.RpcError as exc:
            raise self._explained(exc) from exc

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


def open_channel(connection: Connection) -> grpc.aio.Channel:
    """A channel for the calls of one event loop. Raises UsageError."""
    own = {"grpc.max_reconnect_backoff_ms": _RECONNECT_MS, "grpc.initial_reconnect_backoff_ms": 200,
           "grpc.min_reconnect_backoff_ms": _RECONNECT_MS}  # fmt: skip
    channel: grpc.aio.Channel = _channel(grpc.aio, connection, own)
    channel.get_state(try_to_connect=True)  # before the first call, which then does not wait for it
    return channel


def _channel(api: Any, connection: Connection, own: dict[str, int]) -> Any:
    """A channel of grpc or grpc.aio. own: options beside those of all clients. Raises UsageError."""
    options = tuple({**dict(client_options()), **own, **channel_options(connection.proxy)}.items())
    if connection.security is None:
        return api.insecure_channel(connection.server, options)
    return api.secure_channel(connection.server, credentials(connection.security), options)


def call_metadata(connection: Connection) -> list[tuple[str, str]]:
    """What goes with a call: the token, if the caller has one. Raises UsageError if it cannot be read."""
    security = connection.security
    return [("authorization", f"Bearer {security.read()}")] if isinstance(security, Token) else []
