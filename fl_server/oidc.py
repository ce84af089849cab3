"""Operators' identities from bearer tokens of an OpenID Connect provider.

The provider's signing keys are read from a file or an https address, kept, and read again when they may have changed.
Only asymmetric keys for signatures are used. A key of a JWKS that is anything else is left out, so a shared secret or a
public key can never be taken for the secret of an HMAC.

A token is verified, and name and roles are read from its claims. The accepted algorithms are those of the settings,
never what the token's header asks for. Reasons of a refusal are in our words: the library's could quote the token,
which is never part of a log line, a repr or an error.

Nothing here knows grpc, runs or certificates.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import ssl
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import jwt
import structlog
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK
from jwt import exceptions as refusals
from jwt.exceptions import PyJWTError

from fl_common.certificates.names import OPERATOR_ROLES
from fl_common.proxies import ENVIRONMENT, NONE, is_this_machine
from fl_common.settings import SettingsError
from fl_common.units import counted
from fl_common.waiting import shielded
from fl_server.errors import Forbidden, NotNow, Unauthenticated, one_line
from fl_server.identity import Identity
from fl_server.settings.sections import OidcConfig

log = structlog.get_logger()

LEAST_WAIT_S = 10.0
"""Least time between two reads: tokens with unknown keys must not make the coordinator call the provider for each."""
READ_S = 5.0
"""Time for one read."""
MOST_AGE_S = 86_400.0
"""Keys that could not be read again for this long are not used any more."""
_MOST_BYTES = 256 << 10
_MOST_KEYS = 64
_LEAST_RSA_BITS = 2048
_TYPES = {"RSA": "RS256", "EC": "ES256", "OKP": "EdDSA"}
"""Type of a key -> the algorithm of its signatures."""
MOST_BYTES = 8000
"""Longest token; the headers of a call have little more room."""
_KNOWN = 1024
"""Tokens whose verified identity is kept: a signature takes up to 0.1 ms."""
_JWT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_TOKEN_TYPES = ("", "jwt", "at+jwt", "application/at+jwt")
"""Header `typ` of ID and access tokens. Others (logout+jwt) have the same claims and another purpose."""
_NAME = re.compile(r"[!-~]{1,128}")
_BY_STRENGTH = ("viewer", "enroller", "operator", "admin")
"""Roles in order: of several, the last of these is part of the caller's name in history and logs."""
_CLAIMS = ("exp", "iat", "iss", "aud")
_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (refusals.ExpiredSignatureError, "it has expired: get a new one"),
    (refusals.ImmatureSignatureError, "it is not valid yet: check the clocks of the provider and of the coordinator"),
    (refusals.InvalidIssuerError, "its claim iss is not oidc.issuer"),
    (refusals.InvalidAudienceError, "its claim aud has not oidc.audience: get a token for this coordinator"),
    (refusals.MissingRequiredClaimError, f"expected the claims {', '.join(_CLAIMS)}, and one is missing"),
    (refusals.InvalidSignatureError, "its signature is not by a key of the provider"),
    (refusals.InvalidAlgorithmError, "its algorithm is not that of its key"),
)
"""The first that matches counts."""


class SigningKeys:
    """The usable keys, by their id. Lives on the event loop; reads in a thread."""

    def __init__(self, config: OidcConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._keys: dict[str, PyJWK] = {}
        self._read_at: float | None = None
        self._tried_at: float | None = None
        self._reading: asyncio.Task[None] | None = None
        self.version = 0
        """Changes with the keys."""

    async def start(self) -> None:
        """Read the keys. Raises SettingsError for a file without usable keys; an address may be down for a while."""
        await self._read()
        if self._read_at is None and self._config.jwks_file is not None:
            raise SettingsError(f"oidc.jwks_file: expected signing keys in {self._config.jwks_file}: see the log")

    async def current(self) -> int:
        """`version`, after what is due: keys that are too old are read again. Raises NotNow without any keys."""
        age_s = None if self._read_at is None else self._clock() - self._read_at
        if age_s is None or age_s >= MOST_AGE_S:
            await self._read_again()
            if self._read_at is None or self._clock() - self._read_at >= MOST_AGE_S:
                raise NotNow("the signing keys of the identity provider cannot be read", LEAST_WAIT_S)
        elif age_s >= self._config.refresh_s:
            self._begin()  # the old keys serve until then
        return self.version

    async def find(self, kid: str | None) -> PyJWK | None:
        """The key of a token's header; None for an unknown one. Without an id: the only key there is."""
        if (key := self._known(kid)) is None:
            await self._read_again()
            key = self._known(kid)
        return key

    def _known(self, kid: str | None) -> PyJWK | None:
        if kid is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(kid)

    async def _read_again(self) -> None:
        if (reading := self._begin()) is not None:
            await shielded(reading)

    def _begin(self) -> asyncio.Task[None] | None:
        """The read under way, or a new one; None so soon after the last."""
        if self._reading is None or self._reading.done():
            if self._tried_at is not None and self._clock() - self._tried_at < LEAST_WAIT_S:
                return None
            self._tried_at = self._clock()
            self._reading = asyncio.create_task(self._read())
        return self._reading

    async def _read(self) -> None:
        config = self._config
        self._tried_at = self._clock()
        try:
            async with asyncio.timeout(2 * READ_S):
                raw = await asyncio.to_thread(_content, config)
            keys = usable_keys(raw, config.algorithms)
        except (OSError, ValueError, HTTPException) as error:  # TimeoutError is an OSError
            source = config.jwks_file or config.jwks_url
            log.warning("signing_keys_not_read", source=str(source), reason=one_line(str(error) or repr(error), 300))
            return
        self._read_at = self._clock()
        if keys.keys() != self._keys.keys() or any(keys[kid].key != self._keys[kid].key for kid in keys):
            log.info("signing_keys_read", keys=len(keys))
            self._keys, self.version = keys, self.version + 1


def usable_keys(raw: bytes, algorithms: list[Any]) -> dict[str, PyJWK]:
    """The public keys of a JWKS for these algorithms, by id. Raises ValueError if there is none."""
    try:
        entries = json.loads(raw)["keys"]
    except (ValueError, TypeError, KeyError, RecursionError):
        entries = None
    if not isinstance(entries, list):
        raise ValueError('expected a JWKS, {"keys": [...]}, got other content')
    keys = {str(entry.get("kid", "")): key for entry in entries[:_MOST_KEYS] if (key := _key(entry, algorithms))}
    if not keys:
        raise ValueError(
            f"expected public keys for {' or '.join(algorithms)}, got {counted(len(entries), 'key')}, none of "
            "them such a one"
        )
    return keys


def _key(entry: object, algorithms: list[Any]) -> PyJWK | None:
    """A usable key; None for others: for encryption, a shared secret, an unknown curve, too short."""
    if not isinstance(entry, Mapping) or entry.get("use", "sig") != "sig":
        return None
    algorithm = entry.get("alg") or _TYPES.get(str(entry.get("kty")))
    if algorithm not in algorithms or _TYPES.get(str(entry.get("kty"))) != algorithm:
        return None
    try:
        key = PyJWK(dict(entry), algorithm)
    except (PyJWTError, ValueError, TypeError):
        return None
    if hasattr(key.key, "private_bytes"):  # a private key that was put into the JWKS by mistake
        return None
    return None if isinstance(key.key, RSAPublicKey) and key.key.key_size < _LEAST_RSA_BITS else key


def _content(config: OidcConfig) -> bytes:
    """The JWKS; blocking. Raises OSError, ValueError, HTTPException."""
    if config.jwks_file is not None:
        return _bounded(config.jwks_file)
    context = ssl.create_default_context(cafile=None if config.jwks_ca is None else str(config.jwks_ca))
    proxies = proxies_of(config)
    handlers = (urllib.request.ProxyHandler(proxies), urllib.request.HTTPSHandler(context=context), _NoRedirects())
    opener = urllib.request.build_opener(*handlers)
    ends = time.monotonic() + READ_S
    content = b""
    try:
        opened = opener.open(str(config.jwks_url), timeout=READ_S)
    except HTTPError as error:
        error.close()
        raise ValueError(f"expected the status 200, got {error.code}{_through(config, proxies)}") from None
    except OSError as error:
        raise OSError(f"{error}{_through(config, proxies)}") from None
    with opened as response:
        while part := response.read1(_MOST_BYTES):
            content += part
            if len(content) > _MOST_BYTES:
                raise ValueError(f"expected at most {_MOST_BYTES} bytes, got more")
            if time.monotonic() > ends:
                raise TimeoutError(f"expected the keys within {READ_S:g} s")
    return content


def proxies_of(config: OidcConfig) -> dict[str, str]:
    """URL of the proxy for the scheme of `jwks_url`; empty for a direct connection."""
    parts = urlsplit(str(config.jwks_url))
    host = parts.hostname or ""
    if config.proxy == NONE or is_this_machine(host):
        return {}
    if config.proxy != ENVIRONMENT:
        return {parts.scheme: config.proxy}
    if urllib.request.proxy_bypass(host):
        return {}
    proxies = urllib.request.getproxies()
    return {parts.scheme: proxies[parts.scheme]} if parts.scheme in proxies else {}


def _through(config: OidcConfig, proxies: Mapping[str, str]) -> str:
    """The proxy without its password, and what names it, for a message."""
    for scheme, url in proxies.items():
        by_variable = config.proxy == ENVIRONMENT
        source = f"the variable {scheme}_proxy" if by_variable else "oidc.proxy"
        return (
            f", through the proxy {url.rpartition('@')[2]} of {source}: if it is not needed, set oidc.proxy = "
            f'"{NONE}"{", or add the host to no_proxy" if by_variable else ""}'
        )
    return ""


def _bounded(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(_MOST_BYTES + 1)
    if len(content) > _MOST_BYTES:
        raise ValueError(f"expected at most {_MOST_BYTES} bytes, got more")
    return content


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect could lead to plain text; it is an error of the setting."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class TokenVerifier:
    """Identities of tokens of one provider. Lives on the event loop."""

    def __init__(self, config: OidcConfig, keys: SigningKeys, clock: Callable[[], float] = time.time) -> None:
        self._config, self._keys, self._clock = config, keys, clock
        self._known: OrderedDict[bytes, Identity] = OrderedDict()
        """Holders by the digest of the token, the least recently used first."""
        self._version = -1
        """Version of the keys that verified them."""

    async def start(self) -> None:
        """Read the keys. Raises SettingsError."""
        await self._keys.start()

    async def identity(self, token: str) -> Identity:
        """The holder of a token.

        Raises:
            Unauthenticated: the token is not valid here.
            Forbidden: it gives no role.
            NotNow: the provider's keys cannot be read.
        """
        if (version := await self._keys.current()) != self._version:
            self._known.clear()
            self._version = version
        digest = hashlib.sha256(token.encode()).digest()
        if (known := self._known.get(digest)) is None:
            known = self._holder(await self._claims(token))
            if self._keys.version == self._version:  # reading the keys may have changed them
                self._known[digest] = known
                while len(self._known) > _KNOWN:
                    self._known.popitem(last=False)
        else:
            self._known.move_to_end(digest)
        return known

    async def _claims(self, token: str) -> Mapping[str, Any]:
        """The claims of a valid token."""
        key = await self._key(_header(token))
        try:
            # The algorithm is the key's: a header with another one is refused.
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                issuer=self._config.issuer,
                audience=self._config.audience,
                leeway=self._config.leeway_s,
                options={"require": list(_CLAIMS), "verify_exp": False, "verify_nbf": False, "verify_iat": False},
            )
        except (refusals.PyJWTError, ValueError, TypeError, RecursionError) as error:
            raise _refused(error) from None
        self._check_times(claims)
        return claims

    async def _key(self, header: Mapping[str, Any]) -> PyJWK:
        """The key of a token."""
        if header.get("alg") not in self._config.algorithms:
            raise Unauthenticated(f"the token's signature is not {' or '.join(self._config.algorithms)}")
        if "crit" in header or str(header.get("typ") or "").lower() not in _TOKEN_TYPES:
            raise Unauthenticated("the token is no ID token or access token")
        kid = header.get("kid")
        key = await self._keys.find(kid if isinstance(kid, str) else None)
        if key is None:
            raise Unauthenticated("the token is signed with a key that the provider does not have (any more)")
        return key

    def _check_times(self, claims: Mapping[str, Any]) -> None:
        """Check exp, nbf and iat by our clock. Numbers may have fractions; booleans and texts are refused."""
        config, now = self._config, self._clock()
        times = {name: claims[name] for name in ("exp", "iat", "nbf") if name in claims}
        if not all(type(seconds) in (int, float) and abs(seconds) < 2**53 for seconds in times.values()):
            raise Unauthenticated("the token's times are not numbers of seconds")
        if times["exp"] + config.leeway_s <= now:
            raise _refused(refusals.ExpiredSignatureError())
        if max(times["iat"], times.get("nbf", 0)) - config.leeway_s > now:
            raise _refused(refusals.ImmatureSignatureError())
        if times["exp"] - times["iat"] > config.most_lifetime_s:
            raise Unauthenticated(
                f"the token is valid for {times['exp'] - times['iat']:.0f} s: expected at most "
                f"{config.most_lifetime_s:g} s (oidc.most_lifetime_s)"
            )

    def _holder(self, claims: Mapping[str, Any]) -> Identity:
        """Name and roles in the claims."""
        config = self._config
        name = _claim(claims, config.name_claim)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise Unauthenticated(
                f"the token's claim {config.name_claim} is no name: expected 1 to 128 visible ASCII characters"
            )
        name = config.name_prefix + name
        roles = frozenset(config.roles[group] for group in _groups(claims, config.roles_claim) if group in config.roles)
        if not roles:
            needed = f"a token with one of the groups of oidc.roles in its claim {config.roles_claim}"
            raise Forbidden(f"anybody:{name}", needed, OPERATOR_ROLES)
        strongest = max(roles, key=_BY_STRENGTH.index)
        return Identity(strongest, name, claims["exp"] + config.leeway_s, source="token", roles=roles)


def _header(token: str) -> Mapping[str, Any]:
    """The header, which nothing vouches for yet."""
    if len(token) > MOST_BYTES or not _JWT.fullmatch(token):
        raise Unauthenticated("the token is no JWT with a signature")
    try:
        header = jwt.get_unverified_header(token)
    except (refusals.PyJWTError, ValueError, TypeError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise Unauthenticated("the token is no JWT with a signature")
    return header


def _claim(claims: Mapping[str, Any], path: str) -> Any:
    """A claim by its name, or by a path of keys with dots."""
    if path in claims:
        return claims[path]
    value: Any = claims
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _groups(claims: Mapping[str, Any], path: str) -> Iterable[str]:
    value = _claim(claims, path)
    if isinstance(value, str):
        return value.split()
    return [group for group in value if isinstance(group, str)] if isinstance(value, list) else []


def _refused(error: Exception) -> Unauthenticated:
    reason = next((text for kind, text in _REASONS if isinstance(error, kind)), "it cannot be read")
    return Unauthenticated(f"the token is refused: {reason}")
