"""The provider's signing keys: read from a file or an https address, kept, and read again when they may have changed.

Only asymmetric keys for signatures are used. A key of a JWKS that is anything else is left out, so a shared secret or a
public key can never be taken for the secret of an HMAC.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

import structlog
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from fl_common.proxies import ENVIRONMENT, NONE, is_this_machine
from fl_common.settings import SettingsError
from fl_server.errors import NotNow, one_line
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
            await asyncio.shield(reading)

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
            raw = await asyncio.wait_for(asyncio.to_thread(_content, config), 2 * READ_S)
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
            f"expected public keys for {' or '.join(algorithms)}, got {len(entries)} keys, none of them such a one"
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
