"""How long a browser keeps a file of the page."""

from __future__ import annotations

from typing import Any

import pytest

from fl_web.app import build_app
from fl_web.rendering import static_address


async def cache_control(address: str) -> str:
    """The header of the answer."""
    path, _, query = address.partition("?")
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": []}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await build_app()(scope, receive, send)
    assert sent[0]["status"] == 200
    return str(dict(sent[0]["headers"])[b"cache-control"].decode())


@pytest.mark.parametrize(
    ("address", "kept"),
    [
        (static_address("page.js"), "public, max-age=31536000, immutable"),
        ("/static/format.js", "no-cache"),
    ],
)
async def test_only_an_address_with_a_hash_is_kept(address: str, kept: str) -> None:
    """A module that another one imports has no hash: a browser asks for it again, so that an update reaches it."""
    assert await cache_control(address) == kept
