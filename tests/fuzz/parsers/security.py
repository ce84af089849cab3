"""Requests for certificates, tokens of both kinds, keys of a provider, and a site's policy."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import jwt
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from fl_client.enrollment.enroll import parse_fingerprint
from fl_client.enrollment.folder import checked, new_request
from fl_client.errors import ConfigError, UnusableCertificate
from fl_client.policy.config import read_policy
from fl_common.certificates.leaf import is_issuer
from fl_common.certificates.names import Holder
from fl_server.enrollment.authority import check_signature, read_request
from fl_server.enrollment.grants import new_token, parse_token
from fl_server.errors import Forbidden, InvalidInput, NotEnrolled, NotNow, Unauthenticated
from fl_server.identity import of_certificate
from fl_server.oidc import SigningKeys, TokenVerifier, usable_keys
from fl_server.settings.sections import OidcConfig
from protos.fl.v1.enrollment_pb2 import IssuedCertificate
from tests.fuzz.parser import Parser
from tests.fuzz.parsers.certificates import pem_of
from tests.processes.certificates import Pki
from tests.processes.identity_provider import AUDIENCE, ISSUER, Key, jwks

_ALGORITHMS = ["RS256", "ES256", "EdDSA"]
_INVALID = (ValueError,)
_POLICY = """
[coordinators]
allowed = ["fl.example.org:7070"]
[tasks.allowed]
digits = {}
[algorithms]
allowed = ["fedavg", "fedcm"]
[work]
max_epochs = 5
max_steps = 1000
[day]
max_steps = 10_000
[hours]
allowed = ["mon-fri 22:00-06:00"]
"""


def parsers(folder: Path, opened: ExitStack) -> Iterator[Parser]:
    """The readers of what a caller without a certificate sends, first."""
    request, holder = new_request(), Holder("client", "edge-1")
    yield Parser("security.csr", [request.csr], lambda raw: read_request(raw, holder), (InvalidInput, NotEnrolled), 3)
    yield Parser("security.token", [new_token().text], lambda raw: parse_token(raw.decode("latin-1")), (NotEnrolled,))
    yield Parser(
        "security.fingerprint", ["a" * 64], lambda raw: parse_fingerprint(raw.decode("latin-1")), (ValueError,)
    )
    yield from _oidc(folder, opened)
    yield _expired(folder)
    yield _issued(folder)
    path = folder / "policy.toml"

    def policy(raw: bytes) -> None:
        path.write_bytes(raw)
        read_policy(path)

    path.touch(0o600)
    yield Parser("security.policy", [_POLICY], policy, (ConfigError,))


def _oidc(folder: Path, opened: ExitStack) -> Iterator[Parser]:
    """A provider's keys, and tokens: damaged ones, and well-signed ones with other claims."""
    key, file, loop = Key("a"), folder / "jwks.json", asyncio.new_event_loop()
    opened.callback(loop.close)
    file.write_bytes(jwks(key.public()))
    config = OidcConfig(issuer=ISSUER, audience=AUDIENCE, roles={"x": "viewer"}, jwks_file=file)
    verifier = TokenVerifier(config, SigningKeys(config))
    loop.run_until_complete(verifier.start())
    now = int(time.time())
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "anna", "iat": now, "exp": now + 600, "groups": ["x", "y"]}
    refusals = (Unauthenticated, Forbidden, NotNow)

    def verify(raw: bytes) -> None:
        loop.run_until_complete(verifier.identity(raw.decode("latin-1")))

    def signed(raw: bytes) -> None:
        payload = jwt.api_jws.encode(raw, key.private, "ES256", {"kid": "a"})
        loop.run_until_complete(verifier.identity(payload))

    yield Parser("security.jwt", [jwt.encode(claims, key.private, "ES256", {"kid": "a"})], verify, refusals)
    yield Parser("security.jwt_claims", [json.dumps(claims)], signed, refusals, 2)
    keys = jwks(key.public()).decode()
    yield Parser("security.jwks", [keys], lambda raw: usable_keys(raw, _ALGORITHMS), (ValueError,), 2)


def _expired(folder: Path) -> Parser:
    """The expired certificate with which a device enrolls again, and a signature by its key."""
    pki = Pki(folder / "expired")
    der = x509.load_pem_x509_certificate(pki.issue("client", "edge-1").cert.read_bytes()).public_bytes(Encoding.DER)

    def call(raw: bytes) -> None:
        of_certificate(pem_of(raw))
        leaf = x509.load_pem_x509_certificate(pem_of(raw))
        is_issuer(pki.authority.certificate, leaf)
        check_signature(leaf, raw[-70:], raw)

    return Parser("security.expired", [der], call, (Forbidden, InvalidInput, NotEnrolled), 2)


def _issued(folder: Path) -> Parser:
    """The certificate that a device gets: as a message, and with a damaged certificate inside."""
    pki = Pki(folder / "pki")
    leaf = pki.issue("client", "edge-1")
    chain, key = leaf.cert.read_bytes(), leaf.key.read_bytes()
    der = x509.load_pem_x509_certificate(chain).public_bytes(Encoding.DER)

    def call(raw: bytes) -> None:
        issued = IssuedCertificate()
        for field in issued.DESCRIPTOR.fields:
            if field.type == field.TYPE_BYTES:
                setattr(issued, field.name, pem_of(raw))
            elif field.type == field.TYPE_STRING:
                setattr(issued, field.name, pem_of(raw).decode())
        checked(issued, key, "edge-1")

    return Parser("security.issued", [der], call, (UnusableCertificate,), 2)
