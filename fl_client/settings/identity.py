"""The identity of this device: the configured name, which must be the certificate's name where TLS is used.

A certificate names its holder by one URI in its subject alternative name: fl://client/edge-3.
"""

from __future__ import annotations

from pathlib import Path

from fl_client.errors import ConfigError
from fl_client.settings.config import ClientConfig
from fl_common.certificates.names import Holder, NoHolder, holder_of, read_certificate
from fl_common.certificates.pem import Pem
from fl_common.settings import SettingsError


def identity_of(config: ClientConfig) -> str:
    """The client id. Raises ConfigError when the certificate is another client's, or names no client."""
    if config.tls is None:
        return config.client_id or ""  # never empty: without TLS the configuration must have one
    name = _certificate_name(config.tls.cert)
    if config.client_id not in (None, name):
        raise ConfigError(
            f"client_id: {config.tls.cert} is the certificate of {name!r}, but client_id = {config.client_id!r}:"
            " remove client_id, or use that device's own certificate"
        )
    return name


def check_name(pem: Pem, client_id: str) -> None:
    """Raises SettingsError unless the certificate is this client's. A device keeps its name while it runs."""
    try:
        holder = holder_of(pem.leaf)
    except NoHolder as none:
        raise SettingsError(f"tls.cert: expected a new certificate of {client_id!r}: {none}; {_OWN}") from None
    if holder != Holder("client", client_id):
        raise SettingsError(f"tls.cert: expected a new certificate of {client_id!r}, got {holder.uri}: {_OWN}")


def _certificate_name(path: Path) -> str:
    try:
        certificate = read_certificate(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"tls.cert: expected a certificate that can be read, got {error}") from None
    except ValueError as error:
        raise ConfigError(f"tls.cert: expected a certificate in PEM in {path}, got other content ({error})") from None
    try:
        holder = holder_of(certificate)
    except NoHolder as none:
        raise ConfigError(f"tls.cert: {path} is no client's certificate: {none}; {_ISSUE}") from None
    if holder.role != "client":
        raise ConfigError(
            f"tls.cert: expected a client's certificate, which names it by a URI such as fl://client/edge-3, got"
            f" {holder.uri} in {path}; {_ISSUE}"
        )
    return holder.name


_ISSUE = "`fl ca issue client NAME` makes one"
_OWN = "put this device's own certificate there, or restart its daemon with another state_dir"
