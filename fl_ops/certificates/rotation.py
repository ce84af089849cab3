"""The change of an authority in a folder, in steps between which all certificates stay valid: `fl ca rotate`.

    begin    STEM.crt has the old and the new authority: everybody who gets the file trusts both. The old one signs.
    sign     STEM.key is the new one's key: it signs from now on, and so the folder's own certificates.
    finish   STEM.crt has the new authority alone.

Each step is a series of files that are replaced whole. The stage is told by the certificates in STEM.crt and by the one
that STEM.key belongs to. So after a kill between two files, the same step does the rest when it is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fl_common.certificates.leaf import Authority, Leaf, Period, is_issuer, period_of, sign_leaf
from fl_common.certificates.names import ROLES, Holder
from fl_ops.certificates import ca
from fl_ops.certificates.pki import AUTHORITY, Pair, load_authority, make_authority, write_client_bundle
from fl_ops.errors import UsageError
from fl_ops.files import PRIVATE, Target, written_whole


class Stage(Enum):
    """How far a change is."""

    SINGLE = "single"
    """There is one authority, and no change."""
    TRUSTED = "trusted"
    """Both are trusted, and the old one signs."""
    SIGNING = "signing"
    """Both are trusted, and the new one signs."""


@dataclass(frozen=True)
class Rotation:
    """One authority of a folder, and its successor while there is one."""

    directory: Path
    stem: str
    stage: Stage
    old: x509.Certificate
    new: x509.Certificate | None = None

    @classmethod
    def of(cls, directory: Path, role: str = "") -> Rotation:
        """The state of the files. role: of `fl ca limited ROLE`; empty: the first authority. Raises UsageError."""
        stem = f"{AUTHORITY}-{role}" if role else AUTHORITY
        signing = load_authority(Pair(directory, stem)).certificate
        known = x509.load_pem_x509_certificates(Pair(directory, stem).certificate.read_bytes())
        if len(known) > 2:
            raise UsageError(f"expected one or two authorities in {directory / stem}.crt, got {len(known)}")
        stage = Stage.SINGLE if len(known) == 1 else Stage.TRUSTED if signing == known[0] else Stage.SIGNING
        return cls(directory, stem, stage, known[0], known[1] if len(known) > 1 else None)

    @property
    def left_over(self) -> bool:
        """Whether a finished change was killed before its last files."""
        return self.stage is Stage.SINGLE and self._earlier.key.exists()

    def begin(self, days: int) -> Rotation:
        """Make the new authority, and trust both. In the stage TRUSTED, does what a killed step has left."""
        following = self._following()
        if following is None or self.new not in {None, following.certificate}:
            following = self._made(days)
        self._write_certificates(self.old, following.certificate)
        return Rotation.of(self.directory, self._role)

    def sign(self) -> list[str]:
        """The new authority signs from now on. Returns the file stems of the certificates that it signed again."""
        if self.stage is Stage.TRUSTED:
            following = self._following()
            if following is None or following.certificate != self.new:
                raise UsageError(f"{self._next.key} is not the new authority's key: `fl ca rotate` makes another one")
            self._write_key(self._earlier.key, Pair(self.directory, self.stem).key.read_bytes())
            self._write_key(Pair(self.directory, self.stem).key, self._next.key.read_bytes())
        signer = load_authority(Pair(self.directory, self.stem))
        again = [stem for stem, leaf in self.leaves() if self._signed_again(signer, stem, leaf)]
        for path in (self._next.certificate, self._next.key):
            path.unlink(missing_ok=True)
        return again

    def finish(self) -> None:
        """Trust the new authority alone. Also does what a killed step has left."""
        self._write_certificates(self.new or self.old)
        self._earlier.key.unlink(missing_ok=True)

    def leaves(self) -> Iterator[tuple[str, x509.Certificate]]:
        """The certificates in the folder that the old authority signed, by file stem."""
        for path in sorted(path for role in ROLES for path in self.directory.glob(f"{role}-*.crt")):
            try:
                leaf = x509.load_pem_x509_certificate(path.read_bytes())
            except (OSError, ValueError):
                continue  # no certificate: `client-ca.crt` and other files may be beside
            if is_issuer(self.old, leaf):
                yield path.stem, leaf

    @property
    def _role(self) -> str:
        return self.stem.removeprefix(AUTHORITY).removeprefix("-")

    @property
    def _next(self) -> Pair:
        return Pair(self.directory, f"{self.stem}-next", replace=True)

    @property
    def _earlier(self) -> Pair:
        return Pair(self.directory, f"{self.stem}-old", replace=True)

    def _following(self) -> Authority | None:
        """The new authority, if a step has made it."""
        try:
            return load_authority(self._next)
        except UsageError:
            return None

    def _made(self, days: int) -> Authority:
        names = self.old.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        name = _following_name(str(names[0].value) if names else "Impetus CA")
        make_authority(self._next, name, days, self._role)
        return load_authority(self._next)

    def _write_certificates(self, *authorities: x509.Certificate) -> None:
        with written_whole(Target(self.directory / f"{self.stem}.crt", replace=True)) as file:
            file.write(b"".join(map(ca.certificate_pem, authorities)))
        write_client_bundle(self.directory)

    @staticmethod
    def _write_key(path: Path, content: bytes) -> None:
        with written_whole(Target(path, PRIVATE, replace=True)) as file:
            file.write(content)

    def _signed_again(self, signer: Authority, stem: str, leaf: x509.Certificate) -> bool:
        """Sign a certificate for its holder and key again: one file is replaced, so the pair always fits together."""
        try:
            holder, key = ca.identity_of(leaf), leaf.public_key()
        except ValueError:
            return False
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False  # a pair of another program
        now, period = datetime.now(UTC), period_of(leaf)
        ends = min(now + (period.ends - period.begins), signer.certificate.not_valid_after_utc)
        again = Leaf(Holder(holder.role, holder.name), Period(now - ca.CLOCK_SKEW, ends), holder.hosts)
        with written_whole(Target(self.directory / f"{stem}.crt", replace=True)) as file:
            file.write(ca.certificate_pem(sign_leaf(signer, again, key)))
        return True


def _following_name(name: str) -> str:
    """The name of the next authority: "Clinic CA" -> "Clinic CA 2" -> "Clinic CA 3"."""
    numbered = re.fullmatch(r"(.*) (\d{1,6})", name)
    base, number = (numbered[1], int(numbered[2])) if numbered else (name, 1)
    return f"{base[:56]} {number + 1}"
