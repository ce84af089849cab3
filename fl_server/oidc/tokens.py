"""Verifies a bearer token, and reads name and roles from its claims.

The accepted algorithms are those of the settings, never what the token's header asks for. Reasons of a refusal are in
our words: the library's could quote the token.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jwt
from jwt import PyJWK
from jwt import exceptions as refusals

from fl_common.certificates.names import OPERATOR_ROLES
from fl_server.errors import Forbidden, Unauthenticated
from fl_server.identity import Identity
from fl_server.oidc.keys import SigningKeys
from fl_server.settings.sections import OidcConfig

MOST_BYTES = 8000
"""Longest token; the headers of a call have little more room."""
_KNOWN = 1024
"""Tokens whose verified identity is kept: a signature takes up to 0.1 ms."""
_JWT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")
_TYPES = ("", "jwt", "at+jwt", "application/at+jwt")
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
        if "crit" in header or str(header.get("typ") or "").lower() not in _TYPES:
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
