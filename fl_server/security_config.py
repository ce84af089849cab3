"""The coordinator's settings for certificates: sections [tls] and [enrollment] of server.toml."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from fl_common.certificates.tls_version import TlsVersion
from fl_common.settings import Section

_YEAR_S = 31_536_000


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
