"""The section [oidc] of server.toml."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from fl_common.settings import Section, is_loopback

OperatorRole = Literal["viewer", "operator", "enroller", "admin"]
Algorithm = Literal["RS256", "ES256", "EdDSA"]


def _https_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ValueError("expected a URL without a user and a password")
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname))):
        raise ValueError(f"expected a URL https://..., or http://... of this machine, got {url!r}")
    return url


class OidcConfig(Section):
    """Tokens (JWT) of an OpenID Connect provider, which operators send to `token_listen`.

    A token must have the claims iss, aud, exp and iat.
    """

    issuer: str = Field(min_length=1)
    """The claim `iss` of tokens, exactly."""
    audience: str = Field(min_length=1)
    """The claim `aud` of tokens, or one of its values. A name for this coordinator alone: tokens for other services are
    refused."""
    jwks_url: Annotated[str, AfterValidator(_https_url)] | None = None
    """The provider's signing keys (JWKS), https only."""
    jwks_ca: Path | None = None
    """CA of that address, PEM; the system's authorities if it is missing."""
    use_proxy: bool = True
    """Read `jwks_url` through the proxy of the variable https_proxy, except for a loopback address and the hosts of
    no_proxy."""
    jwks_file: Path | None = None
    """The signing keys in a file, in place of `jwks_url`."""
    refresh_s: float = Field(default=600.0, ge=10, le=86_400)
    """Age of the keys after which they are read again, and so about the longest use of a key that was removed. For a
    token with an unknown key they are read at once, at most every 10 s."""
    algorithms: list[Algorithm] = Field(default=["RS256", "ES256", "EdDSA"], min_length=1)
    """Accepted signatures."""
    name_claim: str = Field(default="sub", min_length=1)
    """The claim with the operator's name, which history, audit and owners of runs have. A claim that its holder can
    change at the provider lets one operator take another's name."""
    name_prefix: str = Field(default="oidc:", pattern=r"^[A-Za-z0-9._:@/-]{0,32}$")
    """Precedes the name, so that it is never a certificate's name. "": names of both kinds are the same people."""
    roles_claim: str = Field(default="groups", min_length=1)
    """The claim with the operator's groups, a list or a text with blanks. "a.b" is the key b in the claim a, unless a
    claim is named "a.b"."""
    roles: dict[str, OperatorRole] = Field(min_length=1)
    """The role of each group. Other groups count for nothing; a token without any of these is refused."""
    leeway_s: float = Field(default=30.0, ge=0, le=300)
    """Difference of the clocks that is accepted."""
    most_lifetime_s: float = Field(default=14_400.0, gt=0, le=604_800)
    """Longest time from `iat` to `exp`. A token cannot be revoked, so this is how long a removed operator keeps its
    roles."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.jwks_url is None) == (self.jwks_file is None):
            raise ValueError("expected jwks_url or jwks_file, and not both")
        if self.jwks_ca is not None and self.jwks_url is None:
            raise ValueError("jwks_ca: expected jwks_url with it, found none")
        return self
