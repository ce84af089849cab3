"""The coordinator's settings for certificates and operators' tokens: [tls], [web_tls], [enrollment], [oidc]."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from fl_common.certificates.tls_version import TlsVersion
from fl_common.settings import Section, is_loopback

_YEAR_S = 31_536_000
OperatorRole = Literal["viewer", "operator", "enroller", "admin"]
Algorithm = Literal["RS256", "ES256", "EdDSA"]


class TlsConfig(Section):
    """Certificates and keys, as PEM files."""

    cert: Path
    """The coordinator's certificate."""
    key: Path
    """Its private key."""
    client_ca: Path | None = None
    """The CA of clients and admins. A caller needs a certificate that it signed, which has the caller's name."""
    no_client_certificates: bool = False
    """Accept callers without a certificate, in place of `client_ca`: everyone who reaches `listen` can register as any
    client, and every program on this machine is an admin."""
    min_version: TlsVersion = "1.3"
    """Oldest TLS version of all ports. "1.2" is for peers that cannot do better."""


class WebTlsConfig(Section):
    """The certificate of the web page, with a key of its own: whoever gets the page's key is not the coordinator.

    Best from an authority that browsers know; devices should not trust it. `fl ca init --dir page-pki --host NAME`
    makes one for a page without such an authority.
    """

    cert: Path
    """PEM: the page's certificate, followed by the intermediate ones."""
    key: Path
    """Its private key, which only its owner may read. It must not be the key of `[tls]`."""


class EnrollmentConfig(Section):
    """The authority that signs certificates of devices, and its limits.

    With this section devices can renew their certificates at `listen`; with `enroll_listen` too they get their first
    one for a token.
    """

    ca_cert: Path
    """The authority's certificate: `ca.crt` of `fl ca init`. `tls.client_ca` must have it too."""
    ca_key: Path
    """Its private key, which only its owner may read: `ca.key`, or a mounted Secret of Kubernetes."""
    server_ca: Path | None = None
    """The authority that signed `tls.cert`; devices get it with their certificate. None: `ca_cert`."""
    lifetime_s: float = Field(default=86_400.0, ge=10, le=_YEAR_S)
    """Validity of a certificate. Daemons renew it at two thirds."""
    token_ttl_s: float = Field(default=3_600.0, gt=0, le=_YEAR_S)
    """Validity of a token that `fl enroll create` makes without `--ttl`."""
    expired_grace_s: float = Field(default=0.0, ge=0, le=_YEAR_S)
    """How long after its end a certificate still proves its holder's name for a new one. 0: a device that was off for
    longer than its certificate needs a token."""
    requests_per_s: float = Field(default=100.0, gt=0)
    """Requests at `enroll_listen` a second. Those of one second may come at once; further ones wait up to ten seconds
    in their call, and are refused with a time to wait beyond that."""
    address_requests_per_s: float = Field(default=50.0, gt=0)
    """The same for one address, or one /64 network of IPv6."""
    address_failures_per_min: float = Field(default=30.0, gt=0)
    """Refused requests of one address a minute. Above this rate its further requests are refused unread."""
    claimed_labels: bool = True
    """Whether labels of a device's own settings count beside those of its token, which always win. False: runs see
    labels of tokens alone."""
    renewals_per_min: float = Field(default=10.0, gt=0)
    """Renewals of one client a minute."""


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
