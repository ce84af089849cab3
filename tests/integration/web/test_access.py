"""The page that a coordinator serves: its process, the browsers' logins, and what hostile requests get."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from fl_ops.admin.settings import Certificates
from fl_ops.errors import NotAllowed
from fl_web.serve import MOST_OF_ADDRESS
from protos.fl.v1 import admin_pb2 as pb
from tests.processes.browser import Browser, browser, web_process
from tests.processes.certificates import Pki, page_section, server_section
from tests.processes.federation import Coordinator, Fleet, run_spec
from tests.processes.process import ROOT, Workspace, eventually, run_fl

COOKIE = "__Host-impetus"


@pytest.fixture(scope="module")
def secured(module_workspace: Workspace, pki: Pki) -> Coordinator:
    """A coordinator with certificates and a page."""
    return Coordinator(module_workspace, "secured", with_page(pki)).serve()


def with_page(pki: Pki) -> dict[str, Any]:
    """Settings with certificates and a page."""
    tls = {"tls": server_section(pki.issue("server", "s")), "web_tls": page_section(pki)}
    limits = {"refusals_per_minute": 0}  # refusals of one test do not keep those of the next out of the audit log
    return {"insecure": False, "web_listen": "127.0.0.1:0", "limits": limits, **tls}


def close_all(connections: list[socket.socket], server: Coordinator) -> None:
    """Close them, and wait until the page's process has closed its ends: until then they count for its limits."""
    for connection in connections:
        connection.close()
    page = web_process(server)
    eventually(lambda: page.num_fds() < 100, "the page has closed its connections")


def link(server: Coordinator, files: Certificates) -> str:
    """A login link of an operator."""
    with server.admin(files) as admin:
        return admin.call(pb.CreateWebLinkRequest(), pb.CreateWebLinkResponse).url


def test_a_link_lets_one_browser_in(secured: Coordinator, pki: Pki) -> None:
    """Once; the cookie is closed to scripts and other sites, and the code leaves the address at once."""
    root = pki.issue("admin", "root")
    first, second, url = browser(secured, pki), browser(secured, pki), link(secured, root)
    assert first.get("/").status == 401
    answer = first.log_in(url)
    assert (answer.status, answer.headers["location"]) == (303, "/")
    flags = answer.headers["set-cookie"].split("; ")
    assert flags[0].startswith(f"{COOKIE}=")
    assert {"HttpOnly", "SameSite=Strict", "Secure", "Path=/"} <= set(flags)
    assert 0 < int(next(flag for flag in flags if flag.startswith("Max-Age=")).partition("=")[2]) <= 8 * 3600
    assert "code=" not in answer.headers["location"] + answer.text
    assert first.get("/").status == 200
    refused = second.log_in(url)
    assert (refused.status, refused.session) == (401, "")
    assert "unknown, used or too old" in refused.text
    assert second.get("/runs").status == 401
    assert second.get("/", Cookie=f"{COOKIE}=wrong").status == 401


def test_each_browser_sees_what_its_operator_may_see(secured: Coordinator, pki: Pki) -> None:
    """Alice's run is in her own page and in a viewer's, not in Bob's; an enroller gets no link."""
    alice, bob, vera = (pki.issue(*who) for who in (("operator", "alice"), ("operator", "bob"), ("viewer", "vera")))
    with secured.admin(alice) as admin:
        admin.runs.create_run(run_spec("alices", round={"clients_per_round": 3}))
    seen = {}
    for who in (alice, bob, vera):
        each = browser(secured, pki)
        each.log_in(link(secured, who))
        seen[who.cert.stem] = ("alices" in each.get("/runs").text, each.get("/runs/alices").status)
    assert seen == {"operator-alice": (True, 200), "operator-bob": (False, 404), "viewer-vera": (True, 200)}
    with secured.admin(pki.issue("enroller", "erik")) as admin, pytest.raises(NotAllowed):
        admin.call(pb.CreateWebLinkRequest(), pb.CreateWebLinkResponse)


def test_a_certificate_in_the_browser_is_a_login(secured: Coordinator, pki: Pki) -> None:
    """An operator's opens a session; a device's and an enroller's open none that can read."""
    known = browser(secured, pki, pki.issue("viewer", "carol"))
    answer = known.get("/")
    assert (answer.status, answer.session.startswith(f"{COOKIE}=")) == (200, True)
    assert browser(secured, pki, pki.issue("client", "edge-1")).get("/").status == 401
    assert browser(secured, pki, pki.issue("enroller", "erik")).get("/").status == 403


def test_a_session_ends_with_the_operators_certificate(secured: Coordinator, pki: Pki) -> None:
    """A revocation ends the session and its links; the browser is told to log in, and its cookie is removed."""
    dora, root = pki.issue("viewer", "dora"), pki.issue("admin", "root")
    used, unused = browser(secured, pki), browser(secured, pki)
    used.log_in(link(secured, dora))
    left = link(secured, dora)
    assert used.get("/").status == 200
    with secured.admin(root) as admin:
        leaf = x509.load_pem_x509_certificate(dora.cert.read_bytes())
        admin.access.revoke_certificates("left the company", serial=f"{leaf.serial_number:x}")
    # The web process may use a reply again for less than a second.
    answer = eventually(lambda: answer if (answer := used.get("/")).status != 200 else None, "the session has ended")
    assert (answer.status, answer.session) == (401, f"{COOKIE}=")
    assert unused.log_in(left).status == 401
    assert browser(secured, pki, dora).get("/").status == 401


def test_logging_out(secured: Coordinator, pki: Pki) -> None:
    """Ends the session at the coordinator; a link alone, and another site's page, cannot do it."""
    each = browser(secured, pki)
    each.log_in(link(secured, pki.issue("viewer", "vera")))
    for site in ("cross-site", "same-origin", "none"):
        shown = each.get("/logout", Sec_Fetch_Site=site, Sec_Fetch_Mode="navigate")
        assert (shown.status, shown.session, 'method="post"' in shown.text) == (200, "", True)
    assert each.send("/logout", Origin="https://evil.example").status == 403
    assert each.get("/logout", "POST", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 403
    assert each.get("/").status == 200
    answer = each.send("/logout")
    assert (answer.status, answer.session) == (303, f"{COOKIE}=")
    assert each.get("/").status == 401


def test_a_login_is_a_form_of_the_page_itself(secured: Coordinator, pki: Pki) -> None:
    """A program that opens the link first uses nothing up, and another site's page logs nobody in."""
    each, url = browser(secured, pki), link(secured, pki.issue("viewer", "vera"))
    path, _, form = url.partition(each.address)[2].partition("?")
    for method, foreign in (("HEAD", {}), ("GET", {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"})):
        shown = each.get(f"{path}?{form}", method, **foreign)
        assert (shown.status, shown.session) == (200, "")
    assert "This link is for viewer:vera. Log in only if you asked for it yourself." in shown.text
    for origin in ("https://evil.example", "null"):
        assert each.send(path, form, Origin=origin).status == 403
    assert each.get(path, "POST", form).status == 403
    assert each.send(path, form + "&" * 5000).status == 401
    assert each.log_in(url).status == 303
    for late in (url, f"{each.address}/login?code=made-up"):
        assert each.get(late.partition(each.address)[2]).status == 401


def test_strangers_lock_nobody_out(secured: Coordinator, pki: Pki) -> None:
    """After many made-up codes and cookies of one address, sessions, links and certificates there work as before."""
    vera = pki.issue("viewer", "vera")
    known, late, stranger = browser(secured, pki), browser(secured, pki), browser(secured, pki)
    known.log_in(link(secured, vera))
    url = link(secured, vera)
    codes = [stranger.send("/login", f"code=guess-{number}").status for number in range(12)]
    assert (set(codes[:8]), codes[-1]) == ({401}, 429)
    for number in range(12):
        made_up = stranger.get("/runs", Cookie=f"{COOKIE}=made-up-{number}")
        assert made_up.status == 401
    assert made_up.session == "", "a cookie that was not checked is not cleared"
    os.kill(web_process(secured).pid, signal.SIGKILL)  # the new process knows no session yet
    eventually(lambda: len(secured.events("web_process_started")) > 1, "the process is started again")
    for number in range(12):
        stranger.get("/runs", Cookie=f"{COOKIE}=made-up-{number}")
    assert known.get("/").status == 200
    assert late.log_in(url).status == 303
    assert late.get("/").status == 200
    assert browser(secured, pki, vera).get("/").status == 200


def test_logins_are_in_the_audit_log_with_the_browsers_address(secured: Coordinator, pki: Pki) -> None:
    """Logins by link and by certificate, logouts, and refused logins; each with the address that the browser has."""
    zoe = pki.issue("viewer", "zoe")
    each = browser(secured, pki)
    each.log_in(link(secured, zoe))
    each.send("/logout")
    browser(secured, pki, zoe).get("/")
    browser(secured, pki).send("/login", "code=made-up")
    with secured.admin(pki.issue("admin", "root")) as admin:

        def recorded() -> list[pb.AuditEntry] | None:
            """All rows, once that of the refused login is among them: a refusal is answered before it is written."""
            rows = [row for page in admin.history.list_audit(pb.ListAuditRequest()) for row in page.entries]
            return rows if any(is_refused(row) for row in rows) else None

        rows = eventually(recorded, "the refused login in the audit log")
    own = {(row.method, row.address.partition(":")[0]) for row in rows if row.actor == "viewer:zoe"}
    logins = {(method, "127.0.0.1") for method in ("OpenByCode", "CloseSession", "OpenByCertificate")}
    assert logins <= own
    assert {row.address.partition(":")[0] for row in rows if is_refused(row)} == {"127.0.0.1"}


def is_refused(row: pb.AuditEntry) -> bool:
    """Whether a login with a made-up link was refused; other calls without a session are in the log, too."""
    return (row.method, row.result) == ("OpenByCode", "unauthenticated")


def test_one_address_leaves_room_for_others(plain: Coordinator) -> None:
    """Its connections are counted when they are accepted: silent ones too, and others are served."""
    host, _, port = plain.settings["web_listen"].rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=60) for _ in range(MOST_OF_ADDRESS)]
    try:
        with socket.create_connection((host, int(port)), timeout=60) as over:
            assert over.recv(1) == b""
        with socket.create_connection((host, int(port)), timeout=60, source_address=("127.0.0.2", 0)) as other:
            other.sendall(f"GET /healthz HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
            assert other.recv(64).startswith(b"HTTP/1.1 200 OK")
    finally:
        close_all(silent, plain)


def test_the_page_has_a_key_of_its_own(module_workspace: Workspace, pki: Pki) -> None:
    """Without one, and with the coordinator's, the coordinator does not start, and names what to set."""
    settings = with_page(pki)
    none: dict[str, str] = {}
    for own, why in ((none, "expected a [web_tls] section"), (settings["tls"], "expected a key of the page's own")):
        page = {name: own[name] for name in ("cert", "key") if name in own}
        given = {name: value for name, value in settings.items() if name != "web_tls"}
        server = Coordinator(module_workspace, f"key-{len(page)}", given | ({"web_tls": page} if page else {}))
        assert server.start().wait() == 2
        assert why in server.errors()


def test_a_renewed_key_of_the_page_is_used(secured: Coordinator, pki: Pki) -> None:
    """The web process gets it through its pipe and goes on; one that cannot be used leaves the earlier one in use."""
    host, _, port = str(secured.settings["web_listen"]).rpartition(":")
    secured.logged("web_process_started")
    place, starts = secured.settings["web_tls"], len(secured.events("web_process_started"))

    def served() -> int:
        pem = ssl.get_server_certificate((host, int(port)))
        return x509.load_pem_x509_certificate(pem.encode()).serial_number

    def put(key: str, cert: str) -> int:
        shutil.copy(key, place["key"])
        shutil.copy(cert, place["cert"])
        return x509.load_pem_x509_certificate(Path(cert).read_bytes()).serial_number

    files = pki.issue("server", "page-renewed", hosts=("127.0.0.1", "localhost"))
    before, renewed = served(), put(str(files.key), str(files.cert))
    assert before != renewed
    secured.logged("page_certificate_renewed")
    eventually(lambda: served() == renewed, "the page has the renewed certificate")
    put(secured.settings["tls"]["key"], secured.settings["tls"]["cert"])
    assert "key of the page's own" in secured.logged("page_certificate_not_used")["reason"]
    assert (served(), len(secured.events("web_process_started"))) == (renewed, starts)


def test_an_opened_link_is_in_the_audit_log(secured: Coordinator, pki: Pki) -> None:
    """With its caller and without the code, which no log has."""
    url = link(secured, pki.issue("viewer", "vera"))
    with secured.admin(pki.issue("admin", "root")) as admin:
        pages = admin.history.list_audit(pb.ListAuditRequest(actor="viewer:vera", method="CreateWebLink"))
        rows = [row for page in pages for row in page.entries]
    assert {row.result for row in rows} == {"asked", "ok"}
    assert url.partition("code=")[2] not in str(rows) + secured.tail(1000)


def test_the_page_without_certificates(plain: Coordinator) -> None:
    """It needs no login; a foreign host name, as in DNS rebinding, and requests of other sites are refused."""
    each = Browser(plain.settings["web_listen"])
    assert (each.get("/").status, each.get("/login?code=x").status) == (200, 404)
    assert each.get("/", Host="evil.example").status == 421
    assert each.get("/", Host=f"localhost:{each.address.partition(':')[2]}").status == 200
    assert each.get("/", Origin="http://evil.example").status == 403
    assert each.get("/live?view=runs", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors").status == 403
    assert each.get("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 200
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert each.get("/runs", method).status == 405


@pytest.mark.parametrize("path", ["/", "/nowhere", "/static/page.css", "/healthz"])
def test_the_headers_of_every_response(plain: Coordinator, path: str) -> None:
    """Also of refusals."""
    for headers in ({}, {"Host": "evil.example"}):
        answer = Browser(plain.settings["web_listen"]).get(path, **headers)
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cache-control"] == ("no-cache" if "page.css" in path and not headers else "no-store")
        assert "server" not in answer.headers


def test_hostile_requests(plain: Coordinator) -> None:
    """Long addresses, floods of headers and bytes that are no HTTP are refused, and the page goes on."""
    each = Browser(plain.settings["web_listen"])
    assert each.get(f"/runs/{'x' * 2000}").status == 414
    assert each.get(f"/runs?search={'x' * 9000}").status == 414
    assert each.get("/runs/%00%ff%2e%2e").status == 404
    assert each.get("/static/..%2f..%2fapp.py").status == 404
    assert each.get("/clients?state=99&order=x&descending=%ff").status in {200, 400}
    host, _, port = each.address.rpartition(":")
    for sent in (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, b"\x16\x03\x01" * 100, b"GET " + b"/" * 70_000):
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            try:
                connection.sendall(sent)
                assert connection.recv(64).startswith((b"HTTP/1.1 4", b""))
            except ConnectionError:
                pass
    assert each.get("/").status == 200


def test_many_streams(plain: Coordinator) -> None:
    """One more than the limit gets 503 with a reason; a closed one makes room."""
    host, _, port = plain.settings["web_listen"].rpartition(":")
    request = f"GET /live?view=runs HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
    opened: list[socket.socket] = []

    def one_more() -> bytes:
        connection = socket.create_connection((host, int(port)), timeout=60)
        opened.append(connection)
        connection.sendall(request)
        return connection.recv(4096)

    try:
        answers = [one_more() for _ in range(501)]
        assert {answer.split(b"\r\n")[0] for answer in answers[:500]} == {b"HTTP/1.1 200 OK"}
        assert answers[500].startswith(b"HTTP/1.1 503")
        opened.pop(0).close()
        eventually(lambda: one_more().startswith(b"HTTP/1.1 200"), "a stream is admitted again")
    finally:
        close_all(opened, plain)


@pytest.mark.slow
def test_sessions_survive_the_web_process_and_not_the_coordinator(module_workspace: Workspace, pki: Pki) -> None:
    """The coordinator keeps them, in memory."""
    server = Coordinator(module_workspace, "kept", with_page(pki)).serve()
    vera, each = pki.issue("viewer", "vera"), browser(server, pki)
    each.log_in(link(server, vera))
    os.kill(web_process(server).pid, signal.SIGKILL)
    assert each.get("/").status == 200
    server.kill()
    server.serve()
    assert each.get("/").status == 401
    each.log_in(link(server, vera))
    assert each.get("/").status == 200


def test_the_socket_is_the_owners_alone(plain: Coordinator) -> None:
    """It and its folder are closed to other users."""
    folder = Path(plain.settings["state_dir"]) / "web"
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "socket")] == [0o700, 0o600]


def test_fl_web_open_shows_the_link(secured: Coordinator, pki: Pki) -> None:
    """With the operator's certificate; the link works, and says how long."""
    vera = pki.issue("viewer", "vera")
    options = ["--ca", str(vera.ca), "--cert", str(vera.cert), "--key", str(vera.key)]
    server = str(secured.settings["admin_listen"])
    done = run_fl("web", "open", "--server", server, *options, folder=secured.folder)
    assert done.returncode == 0, done.stderr
    url, until = done.stdout.splitlines()
    assert until.startswith("One browser can use it, until ")
    assert browser(secured, pki).log_in(url).status == 303


def test_fl_web_open_without_a_page_or_identities(fleet: Fleet, plain: Coordinator) -> None:
    """The setting is named; where there are no identities, the link has no code."""
    off = run_fl("web", "open", "--insecure", "--server", fleet.server.settings["admin_listen"], folder=plain.folder)
    assert off.returncode == 1
    assert "set web_listen in its server.toml" in off.stderr
    on = run_fl("web", "open", "--insecure", "--server", plain.settings["admin_listen"], folder=plain.folder)
    assert on.stdout.strip() == f"http://{plain.settings['web_listen']}/"


def test_fl_web_serves_with_the_operators_identity(secured: Coordinator, pki: Pki) -> None:
    """One link, one browser, until SIGINT; another user of this machine cannot read with the operator's identity."""
    vera = pki.issue("viewer", "vera")
    options = ["--ca", str(vera.ca), "--cert", str(vera.cert), "--key", str(vera.key), "--json"]
    command = [sys.executable, "-m", "fl_ops", "web", "--server", str(secured.settings["admin_listen"]), *options]
    command += ["--listen", "127.0.0.1:0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=secured.folder, text=True) as process:
        try:
            assert process.stdout is not None
            shown = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
            each = Browser(shown["address"].removeprefix("http://").rstrip("/"))
            assert each.get("/").status == 401
            assert each.log_in(shown["link"]).status == 303
            assert each.get("/").status == 200
            assert Browser(each.address).log_in(shown["link"]).status == 401
            process.send_signal(signal.SIGINT)
            assert process.wait(120) in {0, 130}
        finally:
            process.kill()
