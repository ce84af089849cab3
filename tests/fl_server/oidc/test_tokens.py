"""Which tokens are accepted, with keys made here; and names and roles from claims."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.warnings import InsecureKeyLengthWarning
from structlog.testing import capture_logs

from fl_server.errors import Forbidden, ServerError, Unauthenticated
from fl_server.oidc import SigningKeys, TokenVerifier
from fl_server.settings.sections import OidcConfig, OperatorRole
from tests.processes.identity_provider import AUDIENCE, ISSUER, Key, jwks

ROLES: dict[str, OperatorRole] = {
    "fl-ops": "operator", "fl-admins": "admin", "fl-eyes": "viewer", "fl-enroll": "enroller"
}  # fmt: skip
KEYS = {algorithm: Key(f"key-{algorithm}", algorithm) for algorithm in ("RS256", "ES256", "EdDSA")}
OWN = KEYS["ES256"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JWKS with one key of each kind."""
    path = tmp_path_factory.mktemp("jwks") / "jwks.json"
    path.write_bytes(jwks(*(key.public() for key in KEYS.values())))
    return path


async def verifier(file: Path, clock: Callable[[], float] = time.time, **settings: Any) -> TokenVerifier:
    """A verifier with these settings."""
    config = OidcConfig(
        **{"issuer": ISSUER, "audience": AUDIENCE, "jwks_file": file, "roles": ROLES, **settings}
    )  # fmt: skip
    made = TokenVerifier(config, SigningKeys(config), clock)
    await made.start()
    return made


@pytest.mark.parametrize("algorithm", KEYS)
async def test_a_valid_token_is_an_identity(file: Path, algorithm: str) -> None:
    """Name, role, source and end; of each algorithm. The end has the leeway, as the check of the time has."""
    now = int(time.time())
    found = await (await verifier(file)).identity(KEYS[algorithm].token(exp=now + 60))
    assert (str(found), found.source, set(found.roles)) == ("operator:oidc:alice", "token", {"operator"})
    assert found.ends == now + 90
    found.check_time()


NOW = int(time.time())
REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "issuer": ({"iss": "https://id.example.org/realms/other"}, "its claim iss is not oidc.issuer"),
    "issuer with slash": ({"iss": f"{ISSUER}/"}, "its claim iss is not oidc.issuer"),
    "audience": ({"aud": "another"}, "its claim aud has not oidc.audience"),
    "audiences": ({"aud": ["another", "third"]}, "its claim aud has not oidc.audience"),
    "expired": ({"iat": NOW - 100, "exp": NOW - 40}, "it has expired: get a new one"),
    "not yet valid": ({"nbf": NOW + 4000}, "it is not valid yet"),
    "issued later": ({"iat": NOW + 4000, "exp": NOW + 4060}, "it is not valid yet"),
    "no end": ({"exp": None}, "expected the claims exp, iat, iss, aud, and one is missing"),
    "no begin": ({"iat": None}, "and one is missing"),
    "no issuer": ({"iss": None}, "and one is missing"),
    "no audience": ({"aud": None}, "and one is missing"),
    "too long": ({"exp": NOW + 90_000}, "expected at most 14400 s (oidc.most_lifetime_s)"),
    "for ever": ({"exp": 10**400}, "the token's times are not numbers of seconds"),
    "end of another type": ({"exp": True}, "the token's times are not numbers of seconds"),
    "end as text": ({"exp": str(NOW + 60)}, "the token's times are not numbers of seconds"),
    "no name": ({"sub": None}, "the token's claim sub is no name"),
    "empty name": ({"sub": ""}, "the token's claim sub is no name"),
    "name with a newline": ({"sub": "alice\nadmin:root"}, "the token's claim sub is no name"),
    "long name": ({"sub": "x" * 129}, "the token's claim sub is no name"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_wrong_claim_is_refused(file: Path, case: str) -> None:
    """With the reason, and without a word of the token."""
    claims, reason = REFUSED[case]
    token = OWN.token(**claims)
    with pytest.raises(Unauthenticated) as refused:
        await (await verifier(file)).identity(token)
    assert reason in str(refused.value)
    assert not any(part in str(refused.value) for part in token.split("."))


def signed_as(algorithm: str, signature: Callable[[bytes], bytes]) -> str:
    """A token whose header names an algorithm, with any signature."""
    _, payload, _ = OWN.token().split(".")
    header = base64.urlsafe_b64encode(json.dumps({"alg": algorithm, "kid": KEYS["RS256"].kid}).encode()).rstrip(b"=")
    signed = header + b"." + payload.encode()
    return (signed + b"." + base64.urlsafe_b64encode(signature(signed)).rstrip(b"=")).decode()


def public_pem() -> bytes:
    """The public key as text that everybody has."""
    public: Any = KEYS["RS256"].private.public_key()
    pem: bytes = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem


@pytest.mark.parametrize(
    "token",
    [
        signed_as("none", lambda _: b"x"),
        signed_as("None", lambda _: b"x"),
        signed_as("HS256", lambda signed: hmac.digest(public_pem(), signed, "sha256")),
        signed_as("HS256", lambda signed: hmac.digest(b"", signed, "sha256")),
        signed_as("PS256", lambda _: b"x" * 256),
        signed_as("RS256", lambda _: b"x" * 256),
        Key(OWN.kid).token(),
        OWN.token({"kid": KEYS["RS256"].kid}),
        OWN.token()[:-8] + "AAAAAAAA",
        jwt.encode({"iss": ISSUER}, "", algorithm="none"),
        OWN.token({"crit": ["exp"], "exp": 1}),
        OWN.token({"typ": "logout+jwt"}),
        OWN.token({"kid": "unknown"}),
        signed_as("ES256", lambda _: b"x" * 64),
        "a.b.c",
        "",
        "x" * 100,
        "x." * 5000,
        "[[[.e30.AAAA",
    ],
    ids=[
        "none", "None", "HS256 with the public key", "HS256 with nothing", "PS256", "no signature of RS256",
        "another key of the same id", "another algorithm than the key's", "another signature", "unsigned", "critical",
        "logout", "unknown key", "no signature of ES256", "three texts", "nothing", "a text", "many parts", "brackets",
    ],
)  # fmt: skip
async def test_a_forged_token_is_refused(file: Path, token: str) -> None:
    """Whatever its header asks for, only the provider's keys with their own algorithm count."""
    with pytest.raises(Unauthenticated) as refused:
        await (await verifier(file)).identity(token)
    assert str(refused.value).startswith("the caller has no identity: the token")


async def test_an_algorithm_that_is_not_in_the_settings_is_refused(file: Path) -> None:
    """Although the provider has a key for it."""
    only = await verifier(file, algorithms=["EdDSA"])
    await only.identity(KEYS["EdDSA"].token())
    with pytest.raises(Unauthenticated, match="signature is not EdDSA"):
        await only.identity(OWN.token())


async def test_a_short_key_is_not_used(tmp_path: Path) -> None:
    """RSA with 1024 bits signs nothing here."""
    weak = Key("weak", "RS256")
    weak.private = rsa.generate_private_key(public_exponent=65537, key_size=1024)  # noqa: S505 - that is the test
    (tmp_path / "keys").write_bytes(jwks(weak.public(), OWN.public()))
    with pytest.warns(InsecureKeyLengthWarning):
        token = weak.token()
    with pytest.raises(Unauthenticated, match="a key that the provider does not have"):
        await (await verifier(tmp_path / "keys")).identity(token)


GROUPS: Mapping[str, tuple[dict[str, Any], dict[str, Any], str, set[str]]] = {
    "several": ({"groups": ["fl-eyes", "x", "fl-ops"]}, {}, "operator:oidc:alice", {"viewer", "operator"}),
    "admin": ({"groups": ["fl-ops", "fl-admins"]}, {}, "admin:oidc:alice", {"operator", "admin"}),
    "enroller": ({"groups": ["fl-enroll", "fl-eyes"]}, {}, "enroller:oidc:alice", {"enroller", "viewer"}),
    "text": ({"groups": "a fl-eyes b"}, {}, "viewer:oidc:alice", {"viewer"}),
    "path": (
        {"realm_access": {"roles": ["fl-admins"]}},
        {"roles_claim": "realm_access.roles"},
        "admin:oidc:alice",
        {"admin"},
    ),
    "claim with dots": (
        {"https://example.org/groups": ["fl-ops"]},
        {"roles_claim": "https://example.org/groups"},
        "operator:oidc:alice",
        {"operator"},
    ),
    "name": (
        {"preferred_username": "alice@example.org"},
        {"name_claim": "preferred_username", "name_prefix": ""},
        "operator:alice@example.org",
        {"operator"},
    ),
}


@pytest.mark.parametrize("case", GROUPS)
async def test_groups_become_roles(file: Path, case: str) -> None:
    """By the table of the settings; unknown groups count for nothing."""
    claims, settings, shown, roles = GROUPS[case]
    found = await (await verifier(file, **settings)).identity(OWN.token(**claims))
    assert (str(found), set(found.roles)) == (shown, roles)


@pytest.mark.parametrize("groups", [None, [], ["FL-OPS"], ["fl-ops "], {"fl-ops": True}, [["fl-ops"]], 7, "fl-opsfl"])
async def test_a_token_without_a_group_of_the_settings_is_refused(file: Path, groups: Any) -> None:
    """Its holder is known, and has no role."""
    with pytest.raises(Forbidden, match="anybody:oidc:alice is not allowed .* one of the groups of oidc.roles"):
        await (await verifier(file)).identity(OWN.token(groups=groups))


async def test_a_token_is_verified_once_and_ends_in_time(file: Path) -> None:
    """The second call has the same identity; after the end it is refused, from the memory too."""
    made = await verifier(file)
    token = OWN.token(exp=int(time.time()) + 1, iat=int(time.time()) - 10)
    first = await made.identity(token)
    assert await made.identity(token) is first
    late = await verifier(file, lambda: time.time() + 100)
    with pytest.raises(Unauthenticated, match="it has expired"):
        await late.identity(token)


async def test_a_token_of_a_removed_key_is_forgotten(tmp_path: Path) -> None:
    """An identity that was verified before ends with its key, also if nobody uses a new key."""
    now = [0.0]
    (tmp_path / "keys").write_bytes(jwks(OWN.public(), KEYS["EdDSA"].public()))
    config = OidcConfig(issuer=ISSUER, audience=AUDIENCE, jwks_file=tmp_path / "keys", roles={"fl-ops": "operator"})
    made = TokenVerifier(config, SigningKeys(config, lambda: now[0]))
    await made.start()
    token = OWN.token()
    await made.identity(token)
    (tmp_path / "keys").write_bytes(jwks(KEYS["EdDSA"].public()))
    now[0] = config.refresh_s

    async def refused() -> bool:
        try:
            await made.identity(token)
        except Unauthenticated:
            return True
        return False

    await made.identity(token)  # the keys are read meanwhile
    for _ in range(1000):
        if await refused():
            break
        await asyncio.sleep(0.01)
    assert await refused()


async def test_no_token_is_logged_or_shown(file: Path) -> None:
    """Not in logs, and not in errors with their causes."""
    made = await verifier(file)
    with capture_logs() as logs:
        for token in (OWN.token(), OWN.token(iss="x"), OWN.token({"kid": "other"}), OWN.token(groups=[])):
            try:
                await made.identity(token)
            except ServerError as error:
                chain = [error, error.__cause__, error.__context__ if not error.__suppress_context__ else None]
                assert not any(part in repr(each) for each in chain for part in token.split("."))
            assert not any(part in repr(logs) for part in token.split("."))
