"""Logins, cookies and limits of the web process, on the real application over ASGI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc.aio import insecure_channel

from fl_web.access.identities import Everybody, OneOperator
from fl_web.access.requests import FAILURES, Application, FailedLogins, OpenStreams, TooManyStreams
from fl_web.app import guarded_app
from fl_web.coordinator.reader import Reader


@pytest.fixture
async def reader() -> AsyncIterator[Reader]:
    """A Reader without a coordinator."""
    async with insecure_channel("127.0.0.1:1") as channel:
        reader = Reader(channel)
        yield reader
        await reader.close()


async def ask(
    app: Application, path: str, *headers: tuple[str, str], method: str = "GET", body: str = ""
) -> tuple[int, dict[str, str]]:
    """The status and the headers of a response."""
    path, _, query = path.partition("?")
    sent: list[Any] = []
    given = [("host", "localhost:7080"), *headers] if "host" not in dict(headers) else list(headers)
    scope = {
        "type": "http", "http_version": "1.1", "method": method, "path": path, "raw_path": path.encode(),
        "query_string": query.encode(), "scheme": "http", "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 7080),
        "headers": [(name.encode(), value.encode()) for name, value in given], "root_path": "",
    }  # fmt: skip

    async def receive() -> Any:
        return {"type": "http.request", "body": body.encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}


async def log_in(app: Application, code: str) -> tuple[int, dict[str, str]]:
    """Send the form of a login link."""
    return await ask(app, "/login", ("origin", "http://localhost:7080"), method="POST", body=f"code={code}")


async def test_a_link_of_this_process(reader: Reader) -> None:
    """The cookie of the link's first use opens the page; nothing else does."""
    identities = OneOperator(reader)
    app, code = guarded_app(identities, "How."), identities.code
    assert (await ask(app, "/nowhere"))[0] == 401
    status, headers = await log_in(app, code)
    cookie = headers["set-cookie"].partition(";")[0]
    assert (status, "Secure" in headers["set-cookie"]) == (303, False)
    assert (await ask(app, "/nowhere", ("cookie", cookie)))[0] == 404
    assert (await log_in(app, code))[0] == 401
    for wrong in ("impetus=x", "impetus=", f"other={code}", "impetus=\x7f", "=;;=", f"impetus={'x' * 5000}"):
        assert (await ask(app, "/nowhere", ("cookie", wrong)))[0] == 401
    assert (await ask(app, "/logout", ("cookie", cookie), ("origin", "http://localhost:7080"), method="POST"))[0] == 303
    assert (await ask(app, "/nowhere", ("cookie", cookie)))[0] == 401


async def test_failed_logins_are_limited(reader: Reader) -> None:
    """After ten an address waits with made-up codes; the right code and a session work. Old cookies count apart."""
    identities = OneOperator(reader)
    app = guarded_app(identities, "How.")
    for _ in range(3 * FAILURES):
        assert (await ask(app, "/nowhere", ("cookie", "impetus=old")))[0] == 401
    answers = [await log_in(app, "guess") for _ in range(FAILURES + 1)]
    assert [status for status, _ in answers] == [401] * FAILURES + [429]
    assert 0 < int(answers[-1][1]["retry-after"]) <= 61
    status, headers = await log_in(app, identities.code)
    cookie = headers["set-cookie"].partition(";")[0]
    assert (status, (await ask(app, "/nowhere", ("cookie", cookie)))[0]) == (303, 404)


async def test_codes_that_are_none(reader: Reader) -> None:
    """They are refused, whatever they are."""
    app = guarded_app(OneOperator(reader), "How.")
    own = ("origin", "http://localhost:7080")
    for form in ("", "code=", "code=a&code=b", "code=%00", "code=%E2%98%83", f"code={'x' * 4000}", "&a=1" * 20):
        assert (await ask(app, "/login", own, method="POST", body=form))[0] == 401


async def test_hosts_and_origins(reader: Reader) -> None:
    """A name of the settings is one of the page's, in any case of letters; a prefix or suffix of it is not."""
    app = guarded_app(Everybody(reader), "", hosts=["Fl.Example"])
    for host in ("fl.example", "FL.EXAMPLE:443", "localhost", "127.0.0.1:7080", "[::1]:7080"):
        assert (await ask(app, "/healthz", ("host", host)))[0] == 200, host
    for host in ("", "fl.example.evil", "evil-fl.example", "127.0.0.2", "[::2]", "localhost.evil:80", "@localhost"):
        assert (await ask(app, "/healthz", ("host", host)))[0] == 421, host
    assert (await ask(app, "/healthz", ("host", "localhost"), ("host", "localhost")))[0] == 400
    own = ("host", "fl.example")
    assert (await ask(app, "/healthz", own, ("origin", "http://fl.example")))[0] == 200
    for origin in ("null", "https://fl.example", "http://fl.example:81", "http://evil.example"):
        assert (await ask(app, "/healthz", own, ("origin", origin)))[0] == 403, origin


def test_failures_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute after the first; and other addresses are not held up."""
    now = 100.0
    monkeypatch.setattr("fl_web.access.requests.time.monotonic", lambda: now)
    failed = FailedLogins()
    for _ in range(FAILURES):
        assert failed.wait_s("a") == 0
        failed.add("a")
    assert (failed.wait_s("a"), failed.wait_s("b")) == (60.0, 0.0)
    now = 161.0
    assert failed.wait_s("a") == 0
    failed.add("a")
    assert failed.wait_s("a") == 0


def test_open_streams_of_one_and_of_all() -> None:
    """Each limit holds by itself, and a closed stream makes room."""
    streams = OpenStreams(per_session=1, in_all=2)
    with streams.opened("a"):
        with pytest.raises(TooManyStreams, match="this browser has 1 pages open"), streams.opened("a"):
            pass
        with (
            streams.opened("b"),
            pytest.raises(TooManyStreams, match="2 pages are open, which is the limit"),
            streams.opened("c"),
        ):
            pass
    with streams.opened("a"):
        pass
