"""The certificate of the web page: its own files, which the coordinator reads and passes on to the web process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog
from cryptography import x509

from fl_common.certificates.pem import Pem, PemChange, PemFiles, PemWatcher
from fl_common.settings import SettingsError
from fl_server.security_config import TlsConfig, WebTlsConfig

log = structlog.get_logger()


class PageCertificate:
    """The files of `[web_tls]`. `poll` is for one thread; any thread may read the others."""

    def __init__(self, own: WebTlsConfig, tls: TlsConfig, coordinator: Callable[[], Pem]) -> None:
        """Read the files. Raises SettingsError for files that cannot be used.

        coordinator: the files of `[tls]` in use.
        """
        self._coordinator, self._min_version = coordinator, tls.min_version
        files = PemFiles(own.cert, own.key, None, section="web_tls")
        self._files = PemWatcher(files, self._check)
        files.valid_now(self._files.pem)
        page, theirs = self._files.pem.leaf, coordinator().leaf
        if page.issuer == theirs.issuer and (hosts := _hosts(page) & _hosts(theirs)):
            todo = "web_tls: use an authority that no device trusts; with this key one can pose as the coordinator"
            log.warning("page_has_the_coordinators_name", hosts=sorted(hosts), todo=todo)

    def poll(self) -> None:
        """Use renewed files. Blocking."""
        match self._files.poll():
            case PemChange.RENEWED:
                log.info("page_certificate_renewed", serial=f"{self._files.pem.leaf.serial_number:x}")
            case PemChange.UNUSABLE:
                log.warning(
                    "page_certificate_not_used", reason=self._files.problem, todo="the earlier one stays in use"
                )

    def values(self) -> Mapping[str, str | None]:
        """What the web process needs for TLS, as it is now."""
        pem, authorities = self._files.pem, self._coordinator().ca
        return {
            "cert": pem.cert.decode("latin-1"),
            "key": pem.key.decode("latin-1"),
            "client_ca": None if authorities is None else authorities.decode("latin-1"),
            "min_version": self._min_version,
        }

    def _check(self, pem: Pem) -> None:
        if pem.leaf.public_key() == self._coordinator().leaf.public_key():
            raise SettingsError("web_tls.key: expected a key of the page's own, got the key of [tls]")


def _hosts(leaf: x509.Certificate) -> set[str]:
    """The DNS names and addresses of a certificate."""
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    return {*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))}
