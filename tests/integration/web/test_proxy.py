"""The page behind nginx, with the configuration of docs/operation/web.md: TLS on both sides, logins, live changes."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from protos.fl.v1 import admin_pb2
from tests.processes.browser import Answer, Browser
from tests.processes.certificates import Pki, page_section
from tests.processes.federation import SecureCoordinator
from tests.processes.process import Workspace, eventually
from tests.processes.reverse_proxy import free_port, nginx

pytest.importorskip("starlette", reason="the extra `web` is not installed")
pytestmark = pytest.mark.slow


@dataclass
class Site:
    """A coordinator with a page, and nginx before it."""

    server: SecureCoordinator
    pki: Pki
    host: str
    """host:port of nginx."""

    def __post_init__(self) -> None:
        tls = ssl.create_default_context(cafile=str(self.pki.ca))
        self.browser = Browser(self.host, tls)

    def log_in(self) -> Answer:
        """Use a new login link."""
        with self.server.admin(self.pki.issue("viewer", "vera")) as admin:
            url = admin.call(admin_pb2.CreateWebLinkRequest(), admin_pb2.CreateWebLinkResponse).url
        assert url.startswith(f"https://{self.host}/login?code=")
        return self.browser.log_in(url)

    @contextmanager
    def stream(self, path: str) -> Iterator[http.client.HTTPResponse]:
        """An event stream, for as long as the block lasts."""
        connection = http.client.HTTPSConnection(self.host, timeout=60, context=self.browser.tls)
        with closing(connection):
            connection.request("GET", path, headers={"Cookie": self.browser.cookie})
            yield connection.getresponse()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """The coordinator is on loopback; browsers know nginx alone."""
    port = free_port()
    with Workspace(tmp_path / "site") as workspace:
        workspace.folder.mkdir()
        pki = Pki(workspace.folder / "pki")
        host = f"localhost:{port}"
        web = {"web_listen": "127.0.0.1:0", "web_address": host, "web_tls": page_section(pki)}
        server = SecureCoordinator(workspace, pki, web).serve()
        files = pki.issue("server", "proxy", hosts=("localhost",))
        with nginx(tmp_path, port, str(server.settings["web_listen"]), files):
            yield Site(server, pki, host)


def test_a_browser_logs_in_and_sees_changes_at_once(site: Site) -> None:
    """The cookie is for https alone; an event passes nginx when it happens, and not when a buffer is full."""
    answer = site.log_in()
    assert (answer.status, answer.headers["location"]) == (303, "/")
    assert answer.session.startswith("__Host-impetus=")
    assert {"Secure", "HttpOnly", "SameSite=Strict", "Path=/"} <= set(answer.headers["set-cookie"].split("; "))
    page = site.browser.get("/events")
    assert (page.status, "Events" in page.text) == (200, True)
    with site.stream("/live?view=events&all=1&after=0") as stream:
        assert (stream.status, stream.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        site.server.create("behind-nginx")
        while b"behind-nginx" not in (line := stream.readline()):
            assert line, "the stream goes on until the event came"


def test_what_is_refused_without_a_proxy_is_refused_behind_it(site: Site) -> None:
    """Another host name, and requests of another site's page; the page's own logout works."""
    each = site.browser
    assert each.get("/").status == 401
    assert each.get("/", Host="evil.example.org").status == 421
    site.log_in()
    assert each.send("/logout", Origin="https://evil.example.org").status == 403
    assert each.get("/").status == 200
    assert each.send("/logout").status == 303
    assert each.get("/").status == 401


def test_a_coordinator_that_is_away_is_a_bad_gateway(site: Site) -> None:
    """nginx answers in its place, and passes the page on again afterwards."""
    site.server.kill()
    eventually(lambda: site.browser.get("/").status == 502, "the page's process has ended with it")
    site.server.serve()
    eventually(lambda: site.browser.get("/").status == 401, "the page is back")
