"""The coordinator's own authority: signs certificates of devices, from files that may be renewed while it runs.

Of a certificate request (PKCS#10) only the key is used: names and everything else come from the ledger.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from fl_common.certificates.leaf import CLOCK_SKEW, Leaf, Period, is_issuer, period_of, sign_leaf
from fl_common.certificates.leaf import Authority as Signer
from fl_common.certificates.names import Holder
from fl_common.certificates.pem import Pem, PemChange, PemFiles, PemWatcher, fingerprint
from fl_common.settings import SettingsError
from fl_server.errors import InvalidInput, NotConfigured, NotEnrolled
from fl_server.settings.sections import EnrollmentConfig

log = structlog.get_logger()


@dataclass(frozen=True)
class Validity:
    """When a new certificate is valid: `begins` no earlier than this (Unix seconds), for so many seconds."""

    now: float
    seconds: float
    begins: float = 0.0


class Authority:
    """Signs with the current files. `poll` is for one thread; any thread may sign."""

    def __init__(self, config: EnrollmentConfig, server: PemWatcher) -> None:
        """Read the files.

        server: has the coordinator's own certificate and the authorities of its clients, as they are now.
        Raises SettingsError for files that cannot be used, or that belong to another authority.
        """
        self._server = server
        bundle, setting = (config.ca_cert, "ca_cert") if config.server_ca is None else (config.server_ca, "server_ca")
        files = _AuthorityFiles(config.ca_cert, config.ca_key, bundle, setting, "enrollment", "ca_")
        self._files = PemWatcher(files, _check)
        files.valid_now(self._files.pem)
        if not _trusts(server.pem.ca or b"", self._files.pem.leaf):
            raise SettingsError(
                f"enrollment.ca_cert: expected an authority of tls.client_ca, got {config.ca_cert}, whose certificates"
                " would be refused: add it to the file of tls.client_ca"
            )
        if _issuer_of(server.pem, self._files.pem) is None:
            raise SettingsError(
                f"enrollment.{setting}: expected the authority that signed tls.cert, got another in {bundle}: devices"
                " could not check this coordinator; set enrollment.server_ca"
            )
        self._presented: tuple[Pem, Pem, Pem] | None = None

    def poll(self) -> None:
        """Use renewed files. Blocking."""
        match self._files.poll():
            case PemChange.RENEWED:
                log.info("authority_renewed", serial=f"{self._files.pem.leaf.serial_number:x}")
            case PemChange.UNUSABLE:
                log.warning("authority_not_used", reason=self._files.problem, todo="the earlier one stays in use")

    @property
    def certificate(self) -> x509.Certificate:
        """The authority's own certificate."""
        return self._files.pem.leaf

    @property
    def period(self) -> Period:
        """When the authority's certificate is valid."""
        return period_of(self.certificate)

    def sign(self, holder: Holder, key: ec.EllipticCurvePublicKey, span: Validity) -> bytes:
        """A certificate in DER. It ends with the authority at the latest. Raises NotConfigured when that has ended."""
        pem = self._files.pem
        signing = load_pem_private_key(pem.key, password=None)
        assert isinstance(signing, ec.EllipticCurvePrivateKey)  # noqa: S101 - _check has refused other keys
        now = datetime.fromtimestamp(int(span.now), UTC)
        begins = max(now - CLOCK_SKEW, datetime.fromtimestamp(int(span.begins), UTC))
        ends = min(now + timedelta(seconds=span.seconds), pem.leaf.not_valid_after_utc)
        if ends <= now:
            raise NotConfigured("enrollment (its authority has ended)", "a new enrollment.ca_cert")
        leaf = Leaf(holder, Period(begins, ends))
        return sign_leaf(Signer(pem.leaf, signing), leaf, key).public_bytes(Encoding.DER)

    def chain(self, certificate: bytes) -> bytes:
        """A certificate (DER) as PEM, with the authority's own if another authority signed that."""
        leaf = x509.load_der_x509_certificate(certificate)
        above = [
            parent
            for parent in x509.load_pem_x509_certificates(self._files.pem.cert)
            if parent.issuer != parent.subject
        ]
        return b"".join(parent.public_bytes(Encoding.PEM) for parent in (leaf, *above))

    def signed(self, certificate: x509.Certificate) -> bool:
        """Whether this authority signed the certificate, or an earlier one that its file still has."""
        known = x509.load_pem_x509_certificates(self._files.pem.cert)
        return any(is_issuer(authority, certificate) for authority in known)

    def presented(self) -> Pem:
        """The coordinator's certificate for `enroll_listen`, followed by the authority that signed it.

        A device reads the chain without a check, compares the authority's digest with the one that it was given, and
        opens a second connection that trusts this authority alone. The same object as long as nothing has changed.
        """
        server, own, known = self._server.pem, self._files.pem, self._presented
        if known is None or known[0] is not server or known[1] is not own:
            issuer = _issuer_of(server, own)
            above = b"" if issuer is None else issuer.public_bytes(Encoding.PEM)
            known = self._presented = (server, own, replace(server, cert=server.cert.rstrip() + b"\n" + above, ca=None))
        return known[2]

    def server_authorities(self) -> bytes:
        """The authorities by which devices check the coordinator, PEM. The one that signed it now is the first."""
        own, first = self._files.pem, _issuer_of(self._server.pem, self._files.pem)
        others = [authority for authority in x509.load_pem_x509_certificates(own.ca or own.cert) if authority != first]
        return b"".join(
            authority.public_bytes(Encoding.PEM) for authority in ([] if first is None else [first]) + others
        )

    def fingerprint(self) -> str:
        """SHA-256 of the authority that signed the coordinator's certificate (DER) in hex."""
        issuer = _issuer_of(self._server.pem, self._files.pem) or self._files.pem.leaf
        return fingerprint(issuer)


class _AuthorityFiles(PemFiles):
    """The files of an authority. While it is changed, its file has the old and the new one, and the key decides.

    So one step, the replacement of the key, makes the new one sign.
    """

    def contents(self) -> Pem:
        """The contents, with the certificate of the key in front."""
        pem = super().contents()
        try:
            key = load_pem_private_key(pem.key, password=None).public_key()
            known = x509.load_pem_x509_certificates(pem.cert)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            return pem  # `check` says what is wrong
        ordered = sorted(known, key=lambda certificate: certificate.public_key() != key)
        if ordered == known or len(known) != pem.cert.count(b"-----BEGIN CERTIFICATE-----"):
            return pem
        return replace(pem, cert=b"".join(certificate.public_bytes(Encoding.PEM) for certificate in ordered))


def _check(pem: Pem) -> None:
    """Raises SettingsError unless certificate and key can sign certificates."""
    leaf, key = pem.leaf, load_pem_private_key(pem.key, password=None)
    try:
        is_authority = leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except x509.ExtensionNotFound:
        is_authority = False
    try:
        usage = leaf.extensions.get_extension_for_class(x509.KeyUsage).value
        is_authority = is_authority and usage.key_cert_sign
    except x509.ExtensionNotFound:
        pass
    if not is_authority:
        raise SettingsError("enrollment.ca_cert: expected the certificate of an authority, got another certificate")
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SettingsError("enrollment.ca_key: expected an elliptic-curve key, as `fl ca init` makes it, got another")


def _trusts(bundle: bytes, authority: x509.Certificate) -> bool:
    """Whether these authorities are the authority, or have signed it."""
    return any(
        trusted == authority or is_issuer(trusted, authority) for trusted in x509.load_pem_x509_certificates(bundle)
    )


def _issuer_of(server: Pem, own: Pem) -> x509.Certificate | None:
    """The authority that signed the last certificate of the coordinator's chain; None if it is not known."""
    last = x509.load_pem_x509_certificates(server.cert)[-1]
    known = x509.load_pem_x509_certificates(own.ca or own.cert)
    return next((authority for authority in known if authority == last or is_issuer(authority, last)), None)


_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_DIGESTS = (hashes.SHA256, hashes.SHA384, hashes.SHA512)
_KEY = "an elliptic-curve key on P-256, P-384 or P-521"


def digest_of(key: ec.EllipticCurvePublicKey) -> str:
    """SHA-256 of a public key (SubjectPublicKeyInfo, DER) in hex."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def read_request(csr: bytes, holder: Holder) -> ec.EllipticCurvePublicKey:
    """The public key of a request for this holder, whose private key its sender has.

    Raises:
        InvalidInput: it is no request in DER, is signed by another key, or its key is weak or of an unsupported kind.
        NotEnrolled: its subject or its names name another holder.
    """
    try:
        request = x509.load_der_x509_csr(csr)
        key = request.public_key()
        digest, signed = request.signature_hash_algorithm, request.is_signature_valid
    except (ValueError, TypeError, x509.InvalidVersion, UnsupportedAlgorithm) as error:
        raise InvalidInput("csr", f"a certificate request in DER (PKCS#10) for {_KEY}", error) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, _CURVES):
        raise InvalidInput("csr", _KEY, _kind_of(key))
    if not isinstance(digest, _DIGESTS):
        raise InvalidInput("csr", "a request signed with SHA-256, SHA-384 or SHA-512", getattr(digest, "name", "none"))
    if not signed:
        raise InvalidInput("csr", "a request signed by its own key", "another signature")
    _check_names(request, holder)
    return key


def check_signature(certificate: x509.Certificate, signature: bytes, message: bytes) -> None:
    """Raises NotEnrolled unless the certificate's key made the signature (ECDSA with SHA-256) of the message."""
    key = certificate.public_key()
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InvalidInput("certificate", f"a certificate of {_KEY}", _kind_of(key))
    try:
        key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise NotEnrolled("csr", "a signature of the request by the key of the expired certificate") from None


def _check_names(request: x509.CertificateSigningRequest, holder: Holder) -> None:
    try:
        subject = [str(name.value) for name in request.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise InvalidInput("csr", "a request with names that can be read, or none", error) from None
    own = x509.UniformResourceIdentifier(holder.uri)
    others = [name for name in subject if name != holder.name] + [str(name.value) for name in names if name != own]
    if others:
        raise NotEnrolled("csr", f"a request that names nobody or {holder.uri}; it names {others[0][:120]!r}")


def _kind_of(key: object) -> str:
    curve = getattr(key, "curve", None)
    bits = getattr(key, "key_size", "")
    return f"a key on {curve.name}" if curve is not None else f"{type(key).__name__} {bits}".strip()
