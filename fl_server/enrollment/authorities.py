"""The authorities of certificates in use, and the clients that depend on each: what `fl ca rotate` asks before a step.

A client depends on an authority if its newest certificate is of that authority, or if it checks the coordinator by no
other one. Only clients that could come back count: their certificate is valid, or may still be renewed.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from cryptography import x509

from fl_common.certificates.leaf import is_issuer, issuer_key_id, key_id
from fl_common.certificates.pem import PemWatcher, fingerprint
from fl_server.enrollment.grants import Revocations
from fl_server.enrollment.issuing import Issuer
from fl_server.errors import NotConfigured
from fl_server.store.ledger import Ledger
from fl_server.store.records import ClientRecord
from protos.fl.v1 import admin_pb2 as pb
from protos.wire import timestamp

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
    dependents, strangers = (
        sorted({*holders, *need_it}),
        sorted(client.name for client in clients if digest not in client.checks_by),
    )
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
