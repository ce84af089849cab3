"""Checks of certificate requests (PKCS#10). Only the key is used: names and everything else come from the ledger."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fl_common.certificates.names import Holder
from fl_server.errors import InvalidInput, NotEnrolled

_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
_DIGESTS = (hashes.SHA256, hashes.SHA384, hashes.SHA512)
_KEY = "an elliptic-curve key on P-256, P-384 or P-521"


@dataclass(frozen=True)
class RequestedKey:
    """The public key of a request, whose private key its sender has."""

    key: ec.EllipticCurvePublicKey

    @property
    def digest(self) -> str:
        """SHA-256 of the key (SubjectPublicKeyInfo, DER) in hex."""
        return digest_of(self.key)


def digest_of(key: ec.EllipticCurvePublicKey) -> str:
    """SHA-256 of a public key (SubjectPublicKeyInfo, DER) in hex."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def read_request(csr: bytes, holder: Holder) -> RequestedKey:
    """The key of a request for this holder.

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
    return RequestedKey(key)


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
