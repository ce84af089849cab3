"""The daemon's error for each failed call, and words for the failures whose cause grpc's own message hides."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

import grpc
import grpc.aio

from fl_client import errors
from fl_client.connection.messages import clocks_differ, log_text, seconds_of
from fl_common.proxies import Proxy
from protos.fl.v1 import errors_pb2
from protos.status import detail_of


def error_of(error: grpc.aio.AioRpcError, proxy: Proxy | None = None) -> errors.TransportError:
    """The daemon's error for a failed call: by its detail, else by its status code. proxy: of the connection."""
    code = error.code().name
    message = log_text(error.details() or code)
    detail = detail_of(error.trailing_metadata())
    if isinstance(detail, errors_pb2.SessionFenced):
        return errors.Fenced(message, detail.by_other_instance)
    if isinstance(detail, errors_pb2.ProtocolMismatch):
        clocks = clocks_differ(detail.time, time.time())
        versions = log_text(detail.version, 32), log_text(detail.min_client_version, 32)
        return errors.ProtocolMismatch(message, (detail.server.min, detail.server.max), clocks, versions)
    if isinstance(detail, errors_pb2.RetryLater):
        later = errors.Contested if code == "ABORTED" else errors.Unreachable
        return later(message, seconds_of(detail.wait))
    is_revoked = isinstance(detail, errors_pb2.NotAllowed) and detail.revoked
    if (kind := errors.Revoked if is_revoked else _BY_DETAIL.get(type(detail))) is not None:
        return kind(message)
    if code in _PERMANENT:
        return errors.Refused(f"{code}: {message}")
    explained = _explained(message)
    if proxy is not None and code == "UNAVAILABLE":
        explained = proxy.explained(explained, message, 'proxy = "none" in the settings')
    return errors.FailedCall(f"{code}: {explained}") if code in _FAULTS else errors.Unreachable(explained)


_BY_DETAIL: dict[type, type[errors.TransportError]] = {
    errors_pb2.UnknownSession: errors.SessionLost,
    errors_pb2.NotAllowed: errors.NotAllowed,
    errors_pb2.UnknownResource: errors.ResourceGone,
    errors_pb2.BrokenUpload: errors.BrokenTransfer,
}

_PERMANENT = frozenset(
    {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "ALREADY_EXISTS", "OUT_OF_RANGE", "PERMISSION_DENIED"}
)
_FAULTS = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS", "UNIMPLEMENTED"})
"""Answers of a server that runs and fails in this call. A retry helps only where the cause was temporary."""

_CLOSED_IN_HANDSHAKE = (
    "the connection was closed in the TLS handshake, before a certificate was checked: the coordinator is starting or"
    " ending, a proxy or port-forward in between has lost it, or another program listens there"
)
_EXPIRED = (
    "the coordinator's certificate, or that of its authority, has ended: its operator renews it with `fl ca renew`, or"
    " the clock of this device is wrong"
)
_NOT_YET = (
    "the coordinator's certificate, or that of its authority, is not valid yet: is the clock of this device right, and"
    " that of the authority?"
)
_FOREIGN = (
    "the coordinator's certificate is not signed by tls.ca: that file is another authority's, or a proxy on the way"
    " opens TLS (`fl-client doctor` names the issuer)"
)
_OTHER_HOST = (
    "the coordinator's certificate is for another host name: set server to a name of the certificate (`fl-client"
    " doctor` lists them), or issue it for this name too, `fl ca issue server --host NAME`"
)

_OTHER_PORT = (
    "the server is not a coordinator, or this is another of its ports: expected that of its `listen`, 7070 by default,"
    " not the one for operators, metrics or the page"
)

_EXPLANATIONS = (
    ("Connection refused", "the port is closed; is the coordinator running?"),
    ("CERTIFICATE_VERIFY_FAILED: certificate has expired", _EXPIRED),
    ("CERTIFICATE_VERIFY_FAILED: certificate is not yet valid", _NOT_YET),
    ("CERTIFICATE_VERIFY_FAILED", _FOREIGN),
    ("Hostname Verification Check failed", _OTHER_HOST),
    ("WRONG_VERSION_NUMBER", "the coordinator uses plain text, this daemon TLS: remove [tls] here or add it there"),
    ("not match", _OTHER_HOST),
    ("SSLV3_ALERT_HANDSHAKE_FAILURE", "no TLS 1.3 at the server or a proxy: see tls.min_version in the configuration"),
    ("CERTIFICATE_REQUIRED", "the coordinator requires a client certificate that its CA signed"),
    ("UNKNOWN_CA", "the coordinator does not know the CA that signed tls.cert"),
    ("Invalid cert chain file", "tls.cert is not a certificate in PEM"),
    ("Invalid private key", "tls.key is not the private key of tls.cert"),
    ("Handshake (read|write) failed", _CLOSED_IN_HANDSHAKE),
    ("DNS resolution failed|Domain name not found", "the host name is not known"),
    ("Method not found|unimplemented", _OTHER_PORT),
    (
        "failed to connect.*Socket closed",
        "the server closes the connection; does it use TLS, and know this device's CA?",
    ),
    ("Trying to connect an http1.x server", f"{_OTHER_PORT}; or it accepts TLS only"),
    ("Expected SETTINGS frame as the first frame", _OTHER_PORT),
)


def _explained(message: str) -> str:
    """grpc's message, with an explanation in front where there is one. The text decides nothing else."""
    for pattern, words in _EXPLANATIONS:
        if re.search(pattern, message):
            clock = f"; it is {datetime.now(UTC):%Y-%m-%d %H:%M} UTC here" if words in {_EXPIRED, _NOT_YET} else ""
            return f"{words}{clock} ({message})"
    return message
