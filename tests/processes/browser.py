"""Requests to a coordinator's own page, as a browser makes them: TLS, the cookie of its session."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from fl_ops.admin.settings import Certificates
from tests.processes.certificates import Pki
from tests.processes.federation import Coordinator


@dataclass
class Answer:
    """A whole response."""

    status: int
    headers: Mapping[str, str]
    text: str

    @property
    def session(self) -> str:
        """The cookie that it sets, as a browser sends it; empty without one."""
        return self.headers.get("set-cookie", "").partition(";")[0]


@dataclass
class Browser:
    """Requests to a page."""

    address: str
    tls: ssl.SSLContext | None = None
    cookie: str = ""

    def get(self, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
        """Make a request on a connection of its own."""
        connection = (
            http.client.HTTPConnection(self.address, timeout=60)
            if self.tls is None
            else http.client.HTTPSConnection(self.address, timeout=60, context=self.tls)
        )
        own = {"Cookie": self.cookie} if self.cookie else {}
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, headers={**own, **given})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read().decode())
        finally:
            connection.close()

    def send(self, path: str, body: str = "", **headers: str) -> Answer:
        """Send a form of the page itself."""
        scheme = "http" if self.tls is None else "https"
        return self.get(path, "POST", body, **{"Origin": f"{scheme}://{self.address}", **headers})

    def log_in(self, link: str) -> Answer:
        """Follow a login link and press its button, if it has one, as a person does: the cookie is kept."""
        path, _, form = link.partition(self.address)[2].partition("?")
        shown = self.get(f"{path}?{form}")
        if shown.status == 401:
            return shown
        assert 'method="post"' in shown.text
        answer = self.send(path, form)
        self.cookie = answer.session or self.cookie
        return answer


def browser(server: Coordinator, pki: Pki, holder: Certificates | None = None) -> Browser:
    """A browser that trusts the authority, and may have a certificate."""
    tls = ssl.create_default_context(cafile=str(pki.ca))
    if holder is not None:
        tls.load_cert_chain(holder.cert, holder.key)
    return Browser(server.settings["web_listen"], tls)


def web_process(server: Coordinator, count: int = 1) -> psutil.Process:
    """The process that serves the coordinator's page, since its `count`th start."""
    return psutil.Process(server.logged("web_process_started", count)["pid"])
