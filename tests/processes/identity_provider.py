"""An OpenID Connect provider for tests: keys, tokens, and a JWKS in a file or over HTTP on loopback."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from tests.processes.planted import plant

ISSUER, AUDIENCE = "https://id.example.org/realms/fl", "impetus"
_MAKE: Mapping[str, Any] = {
    "RS256": (lambda: rsa.generate_private_key(public_exponent=65537, key_size=2048), RSAAlgorithm),
    "ES256": (lambda: ec.generate_private_key(ec.SECP256R1()), ECAlgorithm),
    "EdDSA": (ed25519.Ed25519PrivateKey.generate, OKPAlgorithm),
}


class Key:
    """A signing key with an id."""

    def __init__(self, kid: str, algorithm: str = "ES256") -> None:
        make, self._kind = _MAKE[algorithm]
        self.kid, self.algorithm, self.private = kid, algorithm, make()

    def public(self, **changes: Any) -> dict[str, Any]:
        """The public key as an entry of a JWKS. changes: other members; None removes one."""
        entry = {**json.loads(self._kind.to_jwk(self.private.public_key())), "kid": self.kid, "use": "sig", **changes}
        return {name: value for name, value in entry.items() if value is not None}

    def token(self, headers: Mapping[str, Any] | None = None, **claims: Any) -> str:
        """A token that is valid for a minute, with these claims or headers changed; None removes a claim."""
        now = int(time.time())
        both = {
            "iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "iat": now, "exp": now + 60, "groups": ["fl-ops"], **claims,
        }  # fmt: skip
        payload = {name: value for name, value in both.items() if value is not None}
        made = jwt.encode(payload, self.private, self.algorithm, headers={"kid": self.kid, **(headers or {})})
        return plant(made, "an operator's token")


def jwks(*entries: Mapping[str, Any]) -> bytes:
    """A set of keys, as a provider publishes it."""
    return json.dumps({"keys": list(entries)}).encode()


class JwksServer:
    """The content at a URL on loopback, which a test may change; and how often it was read."""

    def __init__(self, content: bytes) -> None:
        self.content, self.reads, self.redirect = content, 0, ""
        self.url = ""


class _Server(ThreadingHTTPServer):
    """On a free port of loopback, with TLS if there is a certificate."""

    def __init__(self, handler: type[BaseHTTPRequestHandler], certificate: tuple[Path, Path] | None) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._context: ssl.SSLContext | None = None
        if certificate is not None:
            self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._context.load_cert_chain(*map(str, certificate))

    def get_request(self) -> tuple[Any, Any]:
        """A connection after its handshake."""
        connection, address = super().get_request()
        if self._context is None:
            return connection, address
        try:
            return self._context.wrap_socket(connection, server_side=True), address
        except OSError:
            connection.close()
            raise


@contextmanager
def serving_jwks(content: bytes, certificate: tuple[Path, Path] | None = None) -> Iterator[JwksServer]:
    """Serve a JWKS over HTTP, or over HTTPS with a certificate and its key."""
    served = JwksServer(content)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.reads += 1
            self.send_response(302 if served.redirect else 200)
            if served.redirect:
                self.send_header("Location", served.redirect)
            self.send_header("Content-Length", str(len(served.content)))
            self.end_headers()
            self.wfile.write(served.content)

        def log_message(self, *_: Any) -> None:
            pass

    with _Server(Handler, certificate) as server:
        served.url = f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_port}/jwks"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
