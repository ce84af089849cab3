"""Failures of calls to the coordinator, as the web page shows them.

WebError
├── Unreachable    the coordinator does not answer; it is tried again
├── NotFound       no such run, client, round or page
├── NotAllowed     the roles of the caller do not allow it
├── WrongInput     the coordinator refuses a value of the address
└── Failed         every other failure
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import unquote

import grpc


class WebError(Exception):
    """A view cannot be shown. status: of HTTP; title: what happened, in a few words."""

    status = 500
    title = "The view cannot be shown"


class Unreachable(WebError):
    """The coordinator does not answer."""

    status = 503
    title = "The coordinator does not answer"


class NotFound(WebError):
    """There is no such run, client, round or page."""

    status = 404
    title = "Not found"


class NotAllowed(WebError):
    """The roles of the caller do not allow the call."""

    status = 403
    title = "Not allowed"


class WrongInput(WebError):
    """The coordinator refuses a value."""

    status = 400
    title = "A value in the address is not valid"


class Failed(WebError):
    """Every other failure of a call."""

    status = 502
    title = "The coordinator cannot answer"


_KINDS: Mapping[grpc.StatusCode, type[WebError]] = {
    grpc.StatusCode.UNAVAILABLE: Unreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: Unreachable,
    grpc.StatusCode.CANCELLED: Unreachable,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.INVALID_ARGUMENT: WrongInput,
}


def login_needed(error: Exception) -> bool:
    """Whether a call failed because the coordinator does not know the identity any more."""
    return isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED


_REFUSED = re.compile(r"(?:ipv[46]|unix):(?P<address>[^\s]+?): .*(?:Connection refused|No such file)")
_CUT = ("Socket closed", "Connection reset", "Broken pipe", "Stream removed", "GOAWAY")


def _plain(details: str) -> str:
    """The reason of a lost connection for a person: gRPC's own texts are about its parts."""
    if found := _REFUSED.search(details):
        return f"nothing listens at {unquote(found['address'])}"
    if any(each in details for each in _CUT):
        return "the connection was closed"
    return details


def explained(error: grpc.aio.AioRpcError) -> Exception:
    """The error to raise for a failed call. An unknown identity stays as it is: access control asks for a login."""
    if login_needed(error):
        return error
    text = error.details() or error.code().name.lower().replace("_", " ")
    kind = _KINDS.get(error.code(), Failed)
    return kind(_plain(text) if kind is Unreachable else text)
