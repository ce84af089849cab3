"""Operators with bearer tokens: a coordinator with a port for tokens, a local provider, and `fl --token-file`."""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from fl_ops.admin.client import AdminClient
from fl_ops.admin.settings import Connection, Token
from fl_ops.errors import NotAllowed, NotFound, OpsError, Unreachable
from fl_server.rpc.methods import ADMIN, METHODS
from protos.fl.v1 import admin_pb2
from protos.wire import client_options
from tests.processes.browser import Browser
from tests.processes.certificates import Pki, credentials, page_section
from tests.processes.federation import Coordinator, SecureCoordinator, run_spec
from tests.processes.identity_provider import AUDIENCE, ISSUER, JwksServer, Key, jwks, serving_jwks
from tests.processes.process import Workspace, eventually, run_fl

ROLES = {"fl-ops": "operator", "fl-admins": "admin", "fl-eyes": "viewer", "fl-enroll": "enroller"}
SIGNER = Key("first", "RS256")


@dataclass
class Site:
    """A coordinator with certificates and tokens, and its provider."""

    workspace: Workspace
    pki: Pki
    server: Coordinator
    provider: JwksServer
    sent: list[str]
    """All tokens that were made."""

    @property
    def address(self) -> str:
        """Of the port for tokens."""
        return str(self.server.settings["token_listen"])

    def token(self, key: Key = SIGNER, **claims: Any) -> str:
        """A token with these claims changed."""
        self.sent.append(key.token(**claims))
        return self.sent[-1]

    def operator(self, key: Key = SIGNER, **claims: Any) -> AdminClient:
        """A connection with such a token."""
        return AdminClient(Connection(self.address, Token(self.pki.ca, text=self.token(key, **claims))))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A site; its provider serves keys over https with a certificate of the same authority."""
    with Workspace(tmp_path_factory.mktemp("tokens")) as workspace:
        pki = Pki(workspace.folder / "pki")
        own = pki.issue("server", "provider")
        with serving_jwks(jwks(SIGNER.public()), (own.cert, own.key)) as provider:
            oidc = {
                "issuer": ISSUER, "audience": AUDIENCE, "jwks_url": provider.url, "jwks_ca": str(pki.ca),
                "roles": ROLES,
            }  # fmt: skip
            settings = {"token_listen": "127.0.0.1:0", "web_listen": "127.0.0.1:0", "oidc": oidc, "reflection": True}
            server = SecureCoordinator(workspace, pki, {**settings, "web_tls": page_section(pki)}).serve()
            yield Site(workspace, pki, server, provider, [])


def status(site: Site, method: str, metadata: list[tuple[str, str]], address: str = "") -> tuple[str, str]:
    """Code and text of a call with an empty request and this metadata, over TLS without a client certificate."""
    security = grpc.ssl_channel_credentials(site.pki.ca.read_bytes())
    with grpc.secure_channel(address or site.address, security, list(client_options())) as channel:
        call: Any = channel.stream_stream(method)
        try:
            next(call(iter([b""]), timeout=60, metadata=metadata))
        except grpc.RpcError as error:
            failed: Any = error
            return failed.code().name, failed.details()
    return "OK", ""


def test_an_operator_with_a_token_runs_and_owns_a_run(site: Site) -> None:
    """Name, roles, source and end are those of the token; the history and the run have the name."""
    with site.operator() as operator:
        found = operator.access.who_am_i()
        assert (found.identity, list(found.roles), found.source) == ("operator:oidc:alice", ["operator"], "token")
        assert found.ends.seconds > time.time()
        run = operator.runs.create_run(run_spec("by-token", round={"clients_per_round": 3})).run
        assert run.spec.owner == "oidc:alice"
        assert ("operator:oidc:alice", "run_created") in [
            (entry.actor, entry.event) for entry in operator.history.list_history(run.run_id, 0)
        ]
        operator.runs.stop_run(run.run_id, "enough")
    with site.operator(sub="bob") as other, pytest.raises(NotFound, match="no run 'by-token'"):
        other.runs.get_run("by-token")
    with (
        site.operator(groups=["fl-eyes"]) as viewer,
        pytest.raises(NotAllowed, match="needed: the role operator or ad"),
    ):
        viewer.runs.stop_run("by-token", "")


def test_every_admin_method_checks_the_roles_of_a_token(site: Site) -> None:
    """The same table as for certificates."""
    for group, role in ROLES.items():
        metadata = [("authorization", f"Bearer {site.token(groups=[group])}")]
        for method, row in METHODS.items():
            if method.startswith(ADMIN):
                refused = status(site, method, metadata)[0] in {"PERMISSION_DENIED", "UNAUTHENTICATED"}
                assert refused == (role not in row.roles), (method, role)


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"iss": "https://evil.example.org"}, "its claim iss is not oidc.issuer"),
        ({"aud": "another-service"}, "its claim aud has not oidc.audience"),
        ({"iat": 1_600_000_000, "exp": 1_600_000_060}, "it has expired: get a new one"),
        ({"nbf": 4_000_000_000}, "it is not valid yet"),
    ],
    ids=["issuer", "audience", "expired", "not yet valid"],
)
def test_an_invalid_token_is_refused(site: Site, claims: dict[str, Any], reason: str) -> None:
    """The operator learns why, and nothing is served."""
    with site.operator(**claims) as operator, pytest.raises(NotAllowed, match=reason):
        operator.runs.list_runs()


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "Basic YWxpY2U6c2VjcmV0")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer a"), ("authorization", "Bearer b")],
        [("authorization", "Bearer not-a-token")],
    ],
    ids=["none", "basic", "empty", "blank", "two", "no token"],
)
def test_a_call_without_a_token_is_unauthenticated(site: Site, metadata: list[tuple[str, str]]) -> None:
    """For every admin method; health and reflection are for everyone."""
    for method in METHODS:
        if method.startswith(ADMIN):
            code, text = status(site, method, metadata)
            assert code == "UNAUTHENTICATED", method
            assert "the caller has no identity" in text
    assert status(site, f"{ADMIN}ListRuns", [])[1].endswith("a token (token_listen)")
    assert status(site, "/grpc.health.v1.Health/Check", [])[0] == "OK"


def test_a_token_is_worth_nothing_at_other_ports(site: Site) -> None:
    """The ports of clients and of operators with certificates ask for a certificate, and then ignore a token."""
    admin_token = [("authorization", f"Bearer {site.token(groups=['fl-admins'])}")]
    for port in ("listen", "admin_listen"):
        assert status(site, f"{ADMIN}ListRuns", admin_token, str(site.server.settings[port]))[0] == "UNAVAILABLE"
    security = credentials(site.pki.issue("viewer", "vera"))
    with grpc.secure_channel(str(site.server.settings["admin_listen"]), security) as channel:
        call: Any = channel.unary_unary(f"{ADMIN}WhoAmI", response_deserializer=admin_pb2.WhoAmIResponse.FromString)
        assert call(b"", timeout=60, metadata=admin_token).identity == "viewer:vera"
    for method in METHODS:
        if method.startswith(("/fl.v1.Coordinator", "/fl.v1.Cert", "/fl.v1.Enroll")):
            assert status(site, method, admin_token)[0] == "UNIMPLEMENTED", method


@pytest.mark.slow
def test_an_open_stream_ends_with_its_token(site: Site) -> None:
    """A watch of a run is over soon after the token's end, with the leeway."""
    with site.operator(groups=["fl-admins"]) as admin:
        run = admin.runs.create_run(run_spec("watched-by-token")).run.run_id
    now = int(time.time())
    with (
        site.operator(groups=["fl-eyes"], iat=now - 100, exp=now - 27) as viewer,
        pytest.raises(NotAllowed, match="the token of viewer:oidc:alice ended on .*: connect again with a renewed"),
    ):
        for _ in viewer.runs.watch_run(run):
            pass


@pytest.mark.slow
def test_the_provider_changes_its_key(site: Site) -> None:
    """A token with a new key is accepted as soon as the coordinator may ask the provider again."""
    second = Key("second", "EdDSA")
    site.provider.content = jwks(SIGNER.public(), second.public())
    reasons: list[str] = []

    def accepted() -> bool:
        with site.operator(second) as operator:
            try:
                operator.runs.list_runs()
            except NotAllowed as error:
                reasons.append(str(error))
                return False
        return True

    eventually(accepted, "the new key is read")
    assert all("a key that the provider does not have" in reason for reason in reasons)
    with site.operator() as operator:  # the first key is there too
        operator.runs.list_runs()


def test_the_command_with_a_token_file(site: Site, tmp_path: Path) -> None:
    """It reads the file at each call, refuses one that others can read, and never prints the token."""
    file = tmp_path / "token"
    file.write_text(site.token() + "\n")
    file.chmod(0o600)
    words = ["--server", site.address, "--ca", str(site.pki.ca), "--token-file", str(file)]
    shown = run_fl("whoami", *words, folder=tmp_path)
    assert shown.returncode == 0
    assert "operator:oidc:alice" in shown.stdout
    file.write_text(site.token(aud="another-service"))
    refused = run_fl("whoami", *words, folder=tmp_path)
    assert refused.returncode == 4
    assert "get a token for this coordinator" in " ".join(refused.stderr.split())
    file.chmod(0o644)
    opened = run_fl("whoami", *words, folder=tmp_path)
    assert opened.returncode == 2
    assert "expected a token that only its owner can read" in " ".join(opened.stderr.split())
    for result in (shown, refused, opened):
        assert not any(part in result.stdout + result.stderr for token in site.sent for part in token.split(".")[1:])


@pytest.mark.slow
def test_a_token_opens_the_web_page_until_it_ends(site: Site, tmp_path: Path) -> None:
    """`fl web open` makes a link; the browser has the token's identity, and its session and streams end with it."""
    file, now = tmp_path / "token", int(time.time())
    file.touch(0o600)
    words = ["--server", site.address, "--ca", str(site.pki.ca), "--token-file", str(file)]
    page = Browser(str(site.server.settings["web_listen"]), ssl.create_default_context(cafile=str(site.pki.ca)))
    file.write_text(site.token(groups=["fl-eyes"], iat=now - 100, exp=now - 15))  # ends with the leeway of 30 s
    made = run_fl("web", "open", *words, folder=tmp_path)
    assert made.returncode == 0, made.stderr
    answer = page.log_in(made.stdout.split()[0])
    assert answer.status == 303
    (seconds,) = re.findall(r"Max-Age=(\d+)", answer.headers["set-cookie"])
    assert int(seconds) <= now + 15 - time.time()
    assert "oidc:alice" in page.get("/").text
    assert "event: login" in page.get("/live?view=events").text, "the stream ends by itself"
    assert page.get("/").status == 401


def test_a_token_without_a_role_to_read_opens_no_page(site: Site, tmp_path: Path) -> None:
    """The operator learns what is needed."""
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(site.token(groups=["fl-strangers"]))
    words = ["--server", site.address, "--ca", str(site.pki.ca), "--token-file", str(file)]
    refused = run_fl("web", "open", *words, folder=tmp_path)
    assert refused.returncode == 4
    assert "a token with one of the groups of oidc.roles" in " ".join(refused.stderr.split())


def test_a_token_at_the_port_of_certificates_is_explained(site: Site) -> None:
    """The operator learns which address is for tokens."""
    admin_port = str(site.server.settings["admin_listen"])
    security = Token(site.pki.ca, text=site.token())
    with AdminClient(Connection(admin_port, security)) as wrong, pytest.raises(OpsError) as refused:
        wrong.runs.list_runs()
    assert isinstance(refused.value, Unreachable)
    assert security.text not in str(refused.value)


def test_no_token_is_in_the_logs(site: Site) -> None:
    """Not one part of any token that was sent, accepted or refused."""
    with site.operator() as operator, site.operator(iss="other") as stranger:
        operator.runs.list_runs()
        with pytest.raises(NotAllowed):
            stranger.runs.list_runs()
    text = "\n".join(path.read_text(errors="replace") for path in site.workspace.folder.glob("server.*"))
    assert "rpc_refused" in text
    payloads = {part for token in site.sent for part in token.split(".")[1:]}
    assert payloads
    assert not any(part in text for part in payloads)
