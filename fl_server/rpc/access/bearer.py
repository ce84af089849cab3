"""What the metadata of a call says of its caller: a bearer token as in RFC 6750, and the address of a browser."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import grpc.aio

from fl_server.errors import Unauthenticated
from fl_server.identity import ANYBODY, Identity
from protos.wire import BROWSER_ADDRESS

_SCHEME = "bearer "
_MOST_ADDRESS = 64


class Tokens(Protocol):
    """Verifies tokens; `oidc.tokens.TokenVerifier`, or another in tests."""

    async def identity(self, token: str) -> Identity:
        """The holder of a token. Raises Unauthenticated, Forbidden, NotNow."""
        ...


async def token_holder(tokens: Tokens, context: grpc.aio.ServicerContext[Any, Any]) -> Identity:
    """The caller of a port for tokens; ANYBODY without a token. Raises Unauthenticated, Forbidden, NotNow."""
    metadata: Iterable[tuple[str, Any]] = context.invocation_metadata() or ()
    found = [value for key, value in metadata if key == "authorization"]
    if not found:
        return ANYBODY
    if len(found) > 1 or not isinstance(found[0], str) or found[0][: len(_SCHEME)].lower() != _SCHEME:
        raise Unauthenticated("expected the metadata authorization: Bearer TOKEN, once, got another form")
    return await tokens.identity(found[0][len(_SCHEME) :].strip())


def browser_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """host:port of the browser that the web process calls for; empty if it names none."""
    metadata: Iterable[tuple[str, Any]] = context.invocation_metadata() or ()
    return str(next((value for key, value in metadata if key == BROWSER_ADDRESS), ""))[:_MOST_ADDRESS]
