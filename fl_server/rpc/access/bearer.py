"""The bearer token of a call: `authorization: Bearer TOKEN` in its metadata, as in RFC 6750."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import grpc.aio

from fl_server.errors import Unauthenticated
from fl_server.identity import ANYBODY, Identity

_SCHEME = "bearer "


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
