"""Issues certificates to devices: for a token, for the current certificate, or for one that has expired.

`fl ca rotate` asks before a step which clients depend on an authority. A client does if its newest certificate is of
that authority, or if it checks the coordinator by no other one. Only clients that could come back count: their
certificate is valid, or may still be renewed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ParamSpec, TypeVar

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from fl_common.certificates.leaf import is_issuer, issuer_key_id, key_id
from fl_common.certificates.names import Holder
from fl_common.certificates.pem import PemWatcher, fingerprint
from fl_common.names import check_id
from fl_common.units import duration
from fl_server import identity
from fl_server.enrollment.authority import Authority, Validity, check_signature, digest_of, read_request
from fl_server.enrollment.grants import Revocations, parse_token
from fl_server.errors import InvalidInput, NotConfigured, NotEnrolled, short
from fl_server.identity import Identity
from fl_server.settings.sections import EnrollmentConfig
from fl_server.store.database.ledger_certificates import (
    CERTIFICATES_KEPT_S,
    CertificateRecord,
    EnrollmentRecord,
    NotSpent,
)
from fl_server.store.ledger import Ledger
from fl_server.store.records import ClientRecord, HistoryRecord
from protos.fl.v1 import admin_pb2 as pb
from protos.wire import timestamp

P = ParamSpec("P")
R = TypeVar("R")
AT_ONCE = 8
"""Requests under way; others wait, so that a fleet that renews at once does not hold up the event loop."""
RENEW_SHARE = 2 / 3
"""Devices renew a certificate after this share of its validity."""
_TAKEN = (
    "a free name: this one has a valid certificate with another key. If its device lost the key, "
    "`fl clients revoke NAME` frees the name; without that it is free when the certificate ends"
)
_NEEDED = {
    NotSpent.USED: ("used", "a token with a use left; this one has given its certificates to other keys"),
    NotSpent.EXPIRED: ("expired", "a token that has not expired"),
    NotSpent.REVOKED: ("revoked", "a token that is not revoked"),
    NotSpent.KEY: ("name", "a new key: the same token gave this key a certificate of another name"),
    NotSpent.NAME: ("name", _TAKEN),
    NotSpent.OLDER: ("revoked", "a token made after the revocation of this name's certificate; this one is older"),
}


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate for its device."""

    record: CertificateRecord
    labels: dict[str, str]
    again: bool = False
    """It was issued before, and this is a repeat of the request."""

    @property
    def renew_after(self) -> float:
        """When the device renews it, in Unix seconds."""
        return self.record.issued_at + RENEW_SHARE * (self.record.not_after - self.record.issued_at)


@dataclass(frozen=True, slots=True)
class Checks:
    """What else decides whether a holder gets a certificate."""

    revocations: Revocations
    may_call: Callable[[Identity], None]
    """Raises Forbidden for a banned client."""
    registered: Callable[[str], ClientRecord | None]
    """The client of this name on the roster; None if there is none."""


@dataclass(frozen=True)
class Issuer:
    """Issues certificates. Lives on the event loop; signatures are made and checked in `threads`."""

    ledger: Ledger
    config: EnrollmentConfig
    authority: Authority
    checks: Checks
    threads: Executor
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    """A caller of the methods below takes a turn."""

    async def enroll(self, token_text: str, csr: bytes, name: str) -> Issued:
        """A certificate for a token. A repeat with the same key gets the same certificate.

        Raises NotEnrolled, InvalidInput, Forbidden, NotConfigured.
        """
        token, store = parse_token(token_text), self.ledger.store
        record = await self.ledger.do(store.enrollment, token.id)
        if record is None or not token.opens(record):
            raise NotEnrolled("token", "a token of this coordinator; `fl enroll create` makes one")
        holder = Holder("client", _name_for(record, name))
        self.checks.may_call(Identity(holder.role, holder.name))
        if record.prefix:
            await self._check_roster(holder.name)
        signed = replace(await self._sign(csr, holder), enrollment_id=record.id, labels=dict(record.labels))
        why = HistoryRecord(
            signed.issued_at, f"token:{record.id}", "client_enrolled", holder.name, f"serial {signed.serial}"
        )
        kept = await self.ledger.do(store.spend, signed, why, self._kept_s)
        if isinstance(kept, NotSpent):
            raise NotEnrolled(*_NEEDED[kept])
        if denied := self.checks.revocations.of_record(kept):
            raise NotEnrolled("revoked", f"a new key and a new token: the certificate is revoked ({denied.reason})")
        return Issued(kept, dict(record.labels), again=kept is not signed)

    async def renew(self, who: Identity, csr: bytes) -> Issued:
        """A new certificate for the holder of a valid one."""
        return await self._renewed(who, await self._sign(csr, Holder("client", who.name)))

    async def reenroll(self, certificate: bytes, csr: bytes, signature: bytes) -> Issued:
        """A new certificate for the holder of the name's newest one, if that expired less than the grace ago.

        certificate: PEM. signature: of the request, by the expired certificate's key.
        Raises NotEnrolled, InvalidInput, Forbidden, NotConfigured.
        """
        if not self.config.expired_grace_s:
            off = "a token: this coordinator renews no expired certificates (enrollment.expired_grace_s is 0)"
            raise NotEnrolled("expired", off)
        who = await self._in_thread(self._proved_holder, certificate, csr, signature)
        self.checks.may_call(who)
        if denied := self.checks.revocations.denied(who):
            raise NotEnrolled("revoked", f"a certificate that is not revoked ({denied})", str(who))
        signed = await self._sign(csr, Holder("client", who.name))
        await self._check_newest(who, signed)
        return await self._renewed(who, signed)

    async def _renewed(self, who: Identity, signed: CertificateRecord) -> Issued:
        """Keep a certificate with the labels of the one that its holder has. Raises NotEnrolled if that is revoked.

        A ledger that was restored from a backup may lack the holder's: then the labels are those of the newest there.
        """
        store = self.ledger.store
        known = await self.ledger.do(store.certificates_with, "serial", who.serial)
        known = known or await self.ledger.do(store.certificates, who.name, None, 1)
        renewed = replace(signed, renewed_from=who.serial, labels=dict(known[0].labels) if known else {})
        if not await self.ledger.do(store.add_certificate, renewed, who.key, self._kept_s):
            raise NotEnrolled("revoked", "a certificate that is not revoked", str(who))
        return Issued(renewed, dict(renewed.labels))

    def _proved_holder(self, certificate: bytes, csr: bytes, signature: bytes) -> Identity:
        """The holder of an expired certificate, whose key the caller has."""
        who = identity.of_certificate(certificate)
        leaf = x509.load_pem_x509_certificate(certificate)
        if who.role != "client" or not self.authority.signed(leaf):
            raise NotEnrolled("csr", "a client's certificate of this coordinator's authority, or a token", str(who))
        if who.ends is None or time.time() >= who.ends + self.config.expired_grace_s:
            grace = (
                f"a token, or a certificate that expired less than {duration(self.config.expired_grace_s)} ago "
                "(enrollment.expired_grace_s)"
            )
            raise NotEnrolled("expired", grace, str(who))
        check_signature(leaf, signature, csr)
        return who

    @property
    def _kept_s(self) -> float:
        """How long after its end the ledger keeps a certificate.

        An expired one is the newest of its name only if no later one is in the ledger. A later one has begun at most a
        lifetime before the end of the expired one.
        """
        return max(CERTIFICATES_KEPT_S, self.config.expired_grace_s + self.config.lifetime_s)

    async def _check_newest(self, who: Identity, signed: CertificateRecord) -> None:
        """Refuse a certificate that is not the newest of its name.

        A later one with the key of the request does not count: its answer was lost, and the caller has that key. What
        was renewed from the caller's is later whatever its dates are, because a coordinator's clock may be set back.
        """
        of_name = await self.ledger.do(self.ledger.store.certificates_with, "name", who.name)
        denied = self.checks.revocations.of_record
        valid = [record for record in of_name if record.not_after > signed.issued_at and denied(record) is None]
        if any(record.key not in {who.key, signed.key} for record in valid):
            raise NotEnrolled(*_NEEDED[NotSpent.NAME], str(who))
        before, after = _chain(who.serial, of_name)
        keys = {who.key, signed.key}
        others = [record for record in of_name if record.serial not in before and record.key not in keys]
        if any(record.serial in after for record in others):
            renewed = "a token, or the newest certificate of this name: this one was renewed for another key"
            raise NotEnrolled("name", renewed, str(who))
        if any(record.not_before >= who.begins for record in others):
            given = "a token: the name was given to another key after this certificate was issued"
            raise NotEnrolled("name", given, str(who))

    async def _check_roster(self, name: str) -> None:
        """Refuse a name for a prefix token that belongs to a client with a certificate of another source."""
        known = self.checks.registered(name)
        if known is None or known.enrolled is not None:
            return
        issued = await self.ledger.do(self.ledger.store.certificates, name, None, 1)
        if known.instance_id or not issued:  # an operator may have named it before it registered
            free = f"a free name: a client {name!r} has registered without enrollment; `fl clients forget {name}`"
            raise NotEnrolled("name", free)

    async def _sign(self, csr: bytes, holder: Holder) -> CertificateRecord:
        """Check a request, and sign a certificate for its key."""
        key = await self._in_thread(read_request, csr, holder)
        if self.checks.revocations.key_is_denied(digest_of(key)):
            raise NotEnrolled("revoked", "a new key: this one is revoked")
        span = Validity(time.time(), self.config.lifetime_s, self.checks.revocations.first_begin(holder.name))
        return await self._in_thread(self._signed, key, holder, span)

    def _signed(self, key: ec.EllipticCurvePublicKey, holder: Holder, span: Validity) -> CertificateRecord:
        content = self.authority.sign(holder, key, span)
        leaf = x509.load_der_x509_certificate(content)
        return CertificateRecord(
            serial=f"{leaf.serial_number:x}",
            role=holder.role,
            name=holder.name,
            key=digest_of(key),
            issued_at=span.now,
            not_before=leaf.not_valid_before_utc.timestamp(),
            not_after=leaf.not_valid_after_utc.timestamp(),
            enrollment_id="",
            content=content,
        )

    async def _in_thread(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await asyncio.get_running_loop().run_in_executor(self.threads, partial(function, *args, **kwargs))


def _chain(serial: str, certificates: Sequence[CertificateRecord]) -> tuple[set[str], set[str]]:
    """The serials of a certificate and those that it was renewed from, and those that were renewed from it."""
    parents = {certificate.serial: certificate.renewed_from for certificate in certificates}
    above, before = serial, {serial}
    while above := parents.get(above, ""):
        before.add(above)
    below = {serial}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return before, below - {serial}


def _name_for(token: EnrollmentRecord, wanted: str) -> str:
    """The name in the certificate. Raises NotEnrolled for one that the token does not give."""
    if not token.prefix:
        if wanted not in {"", token.name}:
            raise NotEnrolled("name", f"the token's name {token.name!r}, or none; not {short(wanted)!r}")
        return token.name
    try:
        check_id("name", wanted)
    except ValueError:
        expected = f"a name that begins with {token.name!r}, 1 to 64 of A-Z a-z 0-9 . _ - in all"
        raise InvalidInput("name", expected, wanted) from None
    if not wanted.startswith(token.name) or wanted == token.name:
        raise NotEnrolled("name", f"a name that begins with {token.name!r} and is longer; not {wanted!r}")
    return wanted


_NAMES = 10
"""Names of clients in one list."""


@dataclass(frozen=True, slots=True)
class _Client:
    """A client that could come back."""

    name: str
    issuer: str
    """Key id of the authority of its newest certificate, in hex; empty: unknown."""
    checks_by: frozenset[str]
    """Fingerprints of the authorities by which it checks the coordinator; empty: unknown."""


@dataclass(frozen=True)
class Authorities:
    """The authorities of one coordinator. Lives on the event loop."""

    ledger: Ledger
    files: PemWatcher | None
    """The coordinator's certificate and the authorities of its callers; None: it uses no certificates."""
    issuer: Issuer | None
    revocations: Revocations
    clients: Mapping[str, ClientRecord]

    async def listed(self) -> pb.ListAuthoritiesResponse:
        """Every authority with its clients. Raises NotConfigured without certificates."""
        if self.files is None or (accepted := self.files.pem.ca) is None:
            raise NotConfigured("the list of authorities", "[tls] with client_ca")
        callers = x509.load_pem_x509_certificates(accepted)
        own = None if self.issuer is None else self.issuer.authority
        given = callers if own is None else x509.load_pem_x509_certificates(own.server_authorities())
        last = x509.load_pem_x509_certificates(self.files.pem.cert)[-1]
        clients = [*self._attended(), *await self._never_attended()]
        response = pb.ListAuthoritiesResponse(clients=len(clients))
        for authority in dict.fromkeys([*callers, *given, *([] if own is None else [own.certificate])]):
            listed = _counted(authority, {fingerprint(other) for other in given}, clients)
            listed.accepted, listed.given = authority in callers, authority in given
            listed.signs = own is not None and authority == own.certificate
            listed.signed_coordinator = authority == last or is_issuer(authority, last)
            response.authorities.append(listed)
        return response

    def _attended(self) -> Iterator[_Client]:
        """The clients that were connected with a certificate which is of use still."""
        now = time.time()
        for record in self.clients.values():
            if record.banned or (newest := record.certificate) is None:
                continue
            grace_s = 0.0 if record.enrolled is None else self._grace_s
            revoked = self.revocations.of(newest["serial"], "", record.client_id, newest["begins"])
            if newest["ends"] + grace_s > now and revoked is None:
                yield _Client(record.client_id, newest["issuer"], frozenset(newest["authorities"]))

    async def _never_attended(self) -> list[_Client]:
        """The clients that have a certificate from here and were not connected with one yet."""
        store = self.ledger.store
        unused = await self.ledger.do(store.certificates_never_presented, time.time() - self._grace_s)
        return [
            _Client(record.name, issuer_key_id(x509.load_der_x509_certificate(record.content)), frozenset())
            for record in unused
            if self.revocations.of_record(record) is None
        ]

    @property
    def _grace_s(self) -> float:
        return 0.0 if self.issuer is None else self.issuer.config.expired_grace_s


def _counted(authority: x509.Certificate, given: Collection[str], clients: Collection[_Client]) -> pb.Authority:
    """An authority with its clients. given: fingerprints of those by which clients are told to check."""
    own, digest = key_id(authority), fingerprint(authority)
    others = {other for other in given if other != digest}
    holders = [client.name for client in clients if client.issuer == own]
    need_it = {client.name for client in clients if digest in given and not client.checks_by & others}
    dependents = sorted({*holders, *need_it})
    strangers = sorted(client.name for client in clients if digest not in client.checks_by)
    names = authority.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    return pb.Authority(
        fingerprint=digest,
        name=str(names[0].value) if names else "",
        not_after=timestamp(authority.not_valid_after_utc.timestamp()),
        holders=len(holders),
        dependents=len(dependents),
        dependent_names=dependents[:_NAMES],
        strangers=len(strangers),
        stranger_names=strangers[:_NAMES],
    )
