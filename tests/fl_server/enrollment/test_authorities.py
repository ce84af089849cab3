"""Which clients depend on an authority, and which do not trust it yet."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fl_common.certificates.leaf import key_id
from fl_common.certificates.pem import PemFiles, PemWatcher, fingerprint
from fl_ops.certificates import ca
from fl_server.enrollment.authority import Authority
from fl_server.enrollment.issuing import Authorities
from fl_server.errors import NotConfigured
from protos.fl.v1 import admin_pb2 as pb
from tests.fl_server.enrollment.site import Site, config_of, registered
from tests.processes.certificates import Pki
from tests.processes.enrollment import csr_of, new_key


class Changing:
    """A site whose authority is being changed: both are trusted."""

    def __init__(self, site: Site) -> None:
        self.site, self.old = site, site.pki.authority.certificate
        self.next = Pki(site.folder / "next", "Next")
        self.new = self.next.authority.certificate
        server = site.pki.issue("server", "coordinator")
        site.pki.ca.write_bytes(ca.certificate_pem(self.old) + ca.certificate_pem(self.new))
        self.files = PemWatcher(PemFiles(server.cert, server.key, site.pki.ca))
        object.__setattr__(site.issuer, "authority", Authority(config_of(site.pki), self.files))

    def attended(self, name: str, signer: Any, *trusts: Any, ends_s: float = 60.0, **changes: Any) -> None:
        """A client that attended with a certificate of this authority."""
        shown = {
            "serial": f"a{len(self.site.roster)}", "begins": time.time() - 300, "ends": time.time() + ends_s,
            "issuer": key_id(signer), "authorities": [fingerprint(authority) for authority in trusts],
        }  # fmt: skip
        self.site.roster[name] = registered(name, certificate=shown, **changes)

    async def listed(self) -> tuple[pb.Authority, pb.Authority, int]:
        """The old authority, the new one, and the number of clients."""
        site = self.site
        found = await Authorities(site.ledger, self.files, site.issuer, site.revocations, site.roster).listed()
        old, new = (
            next(each for each in found.authorities if each.fingerprint == fingerprint(authority))
            for authority in (self.old, self.new)
        )
        return old, new, found.clients


@pytest.fixture
def changing(site: Site) -> Changing:
    """The site in the middle of a change."""
    return Changing(site)


async def test_what_an_authority_does(changing: Changing) -> None:
    """Both are accepted and given; the key says which one signs."""
    old, new, clients = await changing.listed()
    assert [(each.accepted, each.given, each.signs, each.signed_coordinator) for each in (old, new)] == [
        (True, True, True, True), (True, True, False, False),
    ]  # fmt: skip
    assert ([old.name, new.name], clients) == (["Tests", "Next"], 0)


async def test_who_depends_on_an_authority(changing: Changing) -> None:
    """Who has its certificate, and who checks the coordinator by no other one; unknown trust counts as none."""
    changing.attended("done", changing.new, changing.new, changing.old)
    changing.attended("holds", changing.old, changing.new, changing.old)
    changing.attended("checks", changing.new, changing.old)
    changing.attended("silent", changing.new)
    old, new, clients = await changing.listed()
    assert (list(old.dependent_names), old.holders) == (["checks", "holds", "silent"], 1)
    assert (list(new.stranger_names), new.holders) == (["checks", "silent"], 3)
    assert (old.dependents, new.strangers, clients) == (3, 2, 4)


async def test_who_cannot_come_back_anyway_does_not_count(changing: Changing) -> None:
    """A banned client, one with a revoked certificate, and one whose certificate ended longer ago than the grace."""
    changing.attended("banned", changing.old, banned=True)
    changing.attended("late", changing.old, ends_s=-30.0, enrolled={})
    changing.attended("own-files", changing.old, ends_s=-30.0)
    changing.attended("gone", changing.old, ends_s=-90.0, enrolled={})
    changing.attended("revoked", changing.old)
    changing.site.roster["no-certificate"] = registered("no-certificate")
    await changing.site.revocations.revoke("name", "revoked", "stolen", "admin:alice")
    old, _, clients = await changing.listed()
    assert (list(old.dependent_names), clients) == (["late"], 1)


async def test_a_device_that_was_never_connected_counts(changing: Changing) -> None:
    """It has a certificate of a token, and its daemon is not started yet; a revoked one does not count."""
    site = changing.site
    for name in ("new-one", "stolen"):
        await site.issuer.enroll(await site.token(name), csr_of(new_key()), "")
    await site.revocations.revoke("name", "stolen", "lost", "admin:alice")
    old, new, _ = await changing.listed()
    assert (list(old.dependent_names), list(new.stranger_names)) == (["new-one"], ["new-one"])


async def test_names_of_many_clients_are_counted(changing: Changing) -> None:
    """The first ten are named."""
    for number in range(25):
        changing.attended(f"edge-{number:02}", changing.old, changing.old)
    old, _, _ = await changing.listed()
    assert (old.dependents, list(old.dependent_names)) == (25, [f"edge-{number:02}" for number in range(10)])


async def test_no_authorities_without_certificates(site: Site) -> None:
    """The call is refused, with the setting."""
    with pytest.raises(NotConfigured, match="client_ca"):
        await Authorities(site.ledger, None, None, site.revocations, {}).listed()


async def test_an_expired_certificate_of_the_old_authority_is_renewed(changing: Changing) -> None:
    """A device that was off while the key was changed comes back: both authorities prove it."""
    (changing.site.pki.folder / "ca.key").write_bytes(ca.key_pem(changing.next.authority.key))
    authority = changing.site.issuer.authority
    authority.poll()
    authority.poll()
    assert authority.certificate == changing.new
    for pki in (changing.site.pki, changing.next):
        files = pki.issue("client", "edge-1")
        assert authority.signed(PemFiles(files.cert, files.key, None).read().leaf)
