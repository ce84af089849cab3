"""Who gets a certificate: for a token, for a certificate, and for one that has expired."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from fl_common.certificates.names import Holder
from fl_server.enrollment.authority import digest_of
from fl_server.enrollment.grants import Revocations, parse_token
from fl_server.enrollment.issuing import Issued
from fl_server.errors import Forbidden, InvalidInput, NotEnrolled
from tests.fl_server.enrollment.site import Site, holder, registered
from tests.fl_server.store.database.test_certificates import a_certificate
from tests.processes.certificates import Pki
from tests.processes.enrollment import csr_of, new_key


async def refused(work: Awaitable[Any], text: str, why: str = "") -> None:
    """Check that the work is refused with this text, and its reason in metrics."""
    with pytest.raises(Forbidden) as caught:
        await work
    assert text in str(caught.value)
    assert why in {"", getattr(caught.value, "why", "")}


async def test_a_token_gives_one_certificate(site: Site) -> None:
    """Of the token's name and labels, with two thirds of its life until its renewal; the history names the token."""
    key, token = new_key(), await site.token("edge-7", labels={"site": "north"})
    issued = await site.issuer.enroll(token, csr_of(key), "")
    record = issued.record
    assert (record.name, record.role, record.key) == ("edge-7", "client", digest_of(key.public_key()))
    assert (issued.labels, issued.again) == ({"site": "north"}, False)
    assert issued.renew_after - record.issued_at == pytest.approx(57_600, abs=1)
    history = site.ledger.store.history("edge-7")
    assert (history[-1].actor, history[-1].event) == (f"token:{parse_token(token).id}", "client_enrolled")


async def test_a_repeat_gets_the_same_certificate(site: Site) -> None:
    """Also with a new request of the same key. Another key is refused: the token is used."""
    key, token = new_key(), await site.token("edge-7")
    first = await site.issuer.enroll(token, csr_of(key), "")
    again = await site.issuer.enroll(token, csr_of(key), "edge-7")
    assert (again.record, again.again) == (first.record, True)
    await refused(site.issuer.enroll(token, csr_of(new_key()), ""), "given its certificates to other keys", "used")


async def test_a_guessed_secret_gives_nothing(site: Site) -> None:
    """The id of an open token with another secret, and an id that there is not: the same message."""
    token = parse_token(await site.token("edge-7"))
    other = parse_token(await site.token("edge-8"))
    texts = []
    for guess in (f"{token.id}.{other.secret}", f"{'0' * 16}.{token.secret}"):
        with pytest.raises(NotEnrolled) as caught:
            await site.issuer.enroll(guess, csr_of(new_key()), "")
        texts.append(str(caught.value))
        assert caught.value.why == "token"
        assert token.secret not in str(caught.value)
    assert texts[0] == texts[1]
    assert site.ledger.store.certificates("", None, 9) == []


@pytest.mark.parametrize("name", ["edge-8", "EDGE-7", "edge-7 ", "fl://admin/edge-7"])
async def test_a_token_for_another_name(site: Site, name: str) -> None:
    """A token is bound to its name; it stays open."""
    token = await site.token("edge-7")
    await refused(site.issuer.enroll(token, csr_of(new_key()), name), "the token's name 'edge-7', or none", "name")
    assert await site.issuer.enroll(token, csr_of(new_key()), "edge-7")


async def test_a_request_that_names_another_holder(site: Site) -> None:
    """The token is not spent by it."""
    token = await site.token("edge-7")
    csr = csr_of(new_key(), names=[x509.UniformResourceIdentifier("fl://admin/alice")])
    await refused(site.issuer.enroll(token, csr, ""), "it names 'fl://admin/alice'", "csr")
    assert await site.issuer.enroll(token, csr_of(new_key()), "")


async def test_expired_and_revoked_tokens(site: Site) -> None:
    """Each with its own word."""
    short, revoked = await site.token("edge-7", ttl_s=1e-9), await site.token("edge-8")
    await site.tokens.revoke(parse_token(revoked).id, "lost", "admin:alice")
    await refused(site.issuer.enroll(short, csr_of(new_key()), ""), "a token that has not expired", "expired")
    await refused(site.issuer.enroll(revoked, csr_of(new_key()), ""), "a token that is not revoked", "revoked")


async def test_a_bootstrap_token_has_many_uses(site: Site) -> None:
    """Each device chooses a name with the prefix, once."""
    token = await site.token(prefix="gpu-", uses=2)
    keys = [new_key() for _ in range(3)]
    names = [(await site.issuer.enroll(token, csr_of(key), f"gpu-{n}")).record.name for n, key in enumerate(keys[:2])]
    assert names == ["gpu-0", "gpu-1"]
    await refused(site.issuer.enroll(token, csr_of(keys[2]), "gpu-2"), "to other keys", "used")
    assert (await site.issuer.enroll(token, csr_of(keys[0]), "gpu-0")).again


@pytest.mark.parametrize("name", ["edge-7", "gpu-", "gpu", "xgpu-1"])
async def test_a_name_without_the_prefix(site: Site, name: str) -> None:
    """It must begin with the prefix and be longer."""
    token = await site.token(prefix="gpu-", uses=2)
    await refused(site.issuer.enroll(token, csr_of(new_key()), name), "that begins with 'gpu-' and is longer", "name")


@pytest.mark.parametrize("name", ["", "gpu-/..", "gpu-" + "x" * 61])
async def test_a_name_that_cannot_be(site: Site, name: str) -> None:
    """Not an id."""
    token = await site.token(prefix="gpu-", uses=2)
    with pytest.raises(InvalidInput, match="name: expected a name that begins with 'gpu-'"):
        await site.issuer.enroll(token, csr_of(new_key()), name)


async def test_a_pod_cannot_take_the_name_of_another(site: Site) -> None:
    """Until the operator revokes the name's certificate: then a device with a new key gets it."""
    token, key = await site.token(prefix="gpu-", uses=9), new_key()
    await site.issuer.enroll(token, csr_of(key), "gpu-1")
    thief = site.issuer.enroll(token, csr_of(new_key()), "gpu-1")
    await refused(thief, "a valid certificate with another key. If its device lost the key", "name")
    await site.revocations.revoke("name", "gpu-1", "lost its disk", "admin:alice")
    await refused(site.issuer.enroll(token, csr_of(key), "gpu-1"), "a new key: this one is revoked", "revoked")
    older = site.issuer.enroll(token, csr_of(new_key()), "gpu-1")
    await refused(older, "a token made after the revocation of this name's certificate", "revoked")
    again = await site.issuer.enroll(await site.token(prefix="gpu-", uses=9), csr_of(new_key()), "gpu-1")
    assert site.revocations.of_record(again.record) is None


@pytest.mark.parametrize("kind", ["serial", "key", "name"])
async def test_a_token_older_than_a_revocation_gives_the_name_nothing(site: Site, kind: Any) -> None:
    """A thief who has the bootstrap token of a stolen device does not come back with it; other names do."""
    token = await site.token(prefix="gpu-", uses=9)
    record = (await site.issuer.enroll(token, csr_of(new_key()), "gpu-1")).record
    value = {"serial": record.serial, "key": record.key, "name": "gpu-1"}[kind]
    await site.revocations.revoke(kind, value, "stolen", "admin:alice")
    await refused(site.issuer.enroll(token, csr_of(new_key()), "gpu-1"), "this one is older", "revoked")
    assert await site.issuer.enroll(token, csr_of(new_key()), "gpu-2")
    assert await site.issuer.enroll(await site.token("gpu-1"), csr_of(new_key()), "")


async def test_a_renewal_keeps_its_chain_and_its_labels(site: Site) -> None:
    """Of the token at its begin; also where the ledger was restored and lacks the certificate in between."""
    first = (
        await site.issuer.enroll(await site.token("edge-7", labels={"site": "north"}), csr_of(new_key()), "")
    ).record
    second = await site.issuer.renew(holder(serial=first.serial), csr_of(new_key()))
    assert (second.record.renewed_from, second.labels) == (first.serial, {"site": "north"})
    lost = await site.issuer.renew(holder(serial="dead"), csr_of(new_key()))
    assert (lost.record.renewed_from, lost.labels) == ("dead", {"site": "north"})


@pytest.mark.parametrize("kind", ["serial", "key"])
async def test_a_certificate_that_was_renewed_from_a_revoked_one_is_revoked(site: Site, kind: Any) -> None:
    """The whole chain after it, also one that is asked for meanwhile; what it was renewed from is not."""
    first = (await site.issuer.enroll(await site.token("edge-7"), csr_of(new_key()), "")).record
    chain = [first]
    for _ in range(3):
        who = holder(serial=chain[-1].serial, key=chain[-1].key)
        chain.append((await site.issuer.renew(who, csr_of(new_key()))).record)
    value = {"serial": chain[1].serial, "key": chain[1].key}[kind]
    done = await site.revocations.revoke(kind, value, "copied", "admin:alice")
    assert {each.serial for each in done.certificates} == {each.serial for each in chain[1:]}
    assert [site.revocations.of_record(each) is not None for each in chain] == [False, True, True, True]
    restarted = Revocations(site.ledger)
    await restarted.load()
    assert [restarted.of_record(each) is not None for each in chain] == [False, True, True, True]
    late = site.issuer.renew(holder(serial=chain[1].serial, key=chain[1].key), csr_of(new_key()))
    await refused(late, "a certificate that is not revoked", "revoked")


async def test_a_pod_cannot_take_the_name_of_a_client_of_another_authority(site: Site) -> None:
    """Such a client registered with another certificate, whatever the ledger has. A token with the name may take it."""
    site.roster["gpu-1"] = registered("gpu-1")
    token = await site.token(prefix="gpu-", uses=9)
    await refused(site.issuer.enroll(token, csr_of(new_key()), "gpu-1"), "has registered without enrollment", "name")
    assert await site.issuer.enroll(await site.token("gpu-1"), csr_of(new_key()), "")
    key = new_key()
    await site.issuer.enroll(token, csr_of(key), "gpu-2")
    site.roster["gpu-2"] = registered("gpu-2")
    await refused(site.issuer.enroll(token, csr_of(new_key()), "gpu-2"), "has registered without enrollment", "name")
    site.roster["gpu-2"] = registered("gpu-2", enrolled={})
    assert (await site.issuer.enroll(token, csr_of(key), "gpu-2")).again


async def test_a_banned_client_gets_no_certificate(site: Site) -> None:
    """Neither for a token nor for an expired certificate."""
    device = await Expired.of(site)
    site.banned.add("edge-7")
    await refused(site.issuer.enroll(await site.token("edge-7"), csr_of(new_key()), ""), "to be unbanned")
    await refused(device.reenroll(), "to be unbanned")


async def test_a_revoked_certificate_is_not_given_again(site: Site) -> None:
    """A repeat with the token of a certificate whose serial number is revoked."""
    key, token = new_key(), await site.token("edge-7")
    first = await site.issuer.enroll(token, csr_of(key), "")
    await site.revocations.revoke("serial", first.record.serial, "stolen", "admin:alice")
    await refused(site.issuer.enroll(token, csr_of(key), ""), "the certificate is revoked (stolen)", "revoked")


async def test_a_renewal_keeps_the_name(site: Site) -> None:
    """With the same or a new key; a request with another name and a revoked key are refused."""
    key = new_key()
    for each in (key, new_key()):
        renewed = await site.issuer.renew(holder(), csr_of(each))
        assert (renewed.record.name, renewed.record.enrollment_id) == ("edge-7", "")
    assert len(site.ledger.store.certificates("edge-7", None, 9)) == 2
    csr = csr_of(key, names=[x509.UniformResourceIdentifier("fl://client/edge-8")])
    await refused(site.issuer.renew(holder(), csr), "a request that names nobody or fl://client/edge-7", "csr")
    await site.revocations.revoke("key", digest_of(key.public_key()), "stolen", "admin:alice")
    await refused(site.issuer.renew(holder(), csr_of(key)), "a new key: this one is revoked", "revoked")


class Expired:
    """A device with an expired certificate of the site's authority."""

    def __init__(self, site: Site, pki: Pki, ended_s: float, uri: str = "fl://client/edge-7") -> None:
        self.site, self.key = site, new_key()
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(pki.authority.certificate.subject)
            .public_key(self.key.public_key())
            .serial_number(0xA1)
            .not_valid_before(now - timedelta(seconds=3600 + ended_s))
            .not_valid_after(now - timedelta(seconds=ended_s))
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
        )
        self.certificate = builder.sign(pki.authority.key, hashes.SHA256()).public_bytes(Encoding.PEM)

    @classmethod
    async def of(cls, site: Site) -> Expired:
        """One that expired half a minute ago."""
        return cls(site, site.pki, 30.0)

    async def reenroll(self, key: Any = None, proof: Any = None) -> Issued:
        """Ask for another certificate, by default for a new key, with the right proof."""
        csr = csr_of(key or new_key())
        signature = (proof or self.key).sign(csr, ec.ECDSA(hashes.SHA256()))
        return await self.site.issuer.reenroll(self.certificate, csr, signature)


async def test_an_expired_certificate_proves_its_holder_within_the_grace(site: Site) -> None:
    """With the old key's signature; a minute after the end it proves nothing, and the refusal names the setting."""
    issued = await (await Expired.of(site)).reenroll()
    assert issued.record.name == "edge-7"
    await refused(
        Expired(site, site.pki, 61.0).reenroll(), "expired less than 1 min 00 s ago (enrollment.expired", "expired"
    )


async def test_without_the_old_key_an_expired_certificate_proves_nothing(site: Site) -> None:
    """The certificate is public: anybody may have seen it."""
    device = await Expired.of(site)
    await refused(device.reenroll(proof=new_key()), "a signature of the request by the key of the expired", "csr")


async def test_an_expired_certificate_of_others_proves_nothing(site: Site, tmp_path: Any) -> None:
    """Of another authority, of an operator, or other bytes."""
    foreign = Expired(site, Pki(tmp_path / "foreign"), 30.0)
    admin = Expired(site, site.pki, 30.0, "fl://admin/edge-7")
    for device in (foreign, admin):
        await refused(device.reenroll(), "a client's certificate of this coordinator's authority", "csr")
    nobody = Expired(site, site.pki, 30.0, "https://example.org")
    await refused(nobody.reenroll(), "a certificate without an fl:// name")
    nobody.certificate = b"x"
    await refused(nobody.reenroll(), "a certificate without an fl:// name")


async def test_without_a_grace_an_expired_certificate_proves_nothing(tmp_path: Any) -> None:
    """The refusal names the setting."""
    site = Site(tmp_path, {"expired_grace_s": 0})
    await refused((await Expired.of(site)).reenroll(), "(enrollment.expired_grace_s is 0)", "expired")
    site.close()


async def test_a_robot_that_was_off_over_a_weekend_returns(tmp_path: Any) -> None:
    """The default grace is a week."""
    site = Site(tmp_path)
    weekend = 3 * 86_400.0
    assert (await Expired(site, site.pki, weekend).reenroll()).record.name == "edge-7"
    await refused(Expired(site, site.pki, 8 * 86_400.0).reenroll(), "expired less than 7 d 0 h ago", "expired")
    site.close()


@pytest.mark.parametrize("begins_s", [60.0, -7200.0], ids=["later", "clock-set-back"])
@pytest.mark.parametrize("generations", [1, 2])
async def test_an_older_key_proves_nothing_within_the_grace(site: Site, begins_s: float, generations: int) -> None:
    """The name's certificate was renewed for another key, also while the coordinator's clock was set back."""
    device, parent = await Expired.of(site), "a1"
    for number in range(generations):
        begins, ended = time.time() - 3600 + begins_s, time.time() - 9
        times = {"issued_at": begins, "not_before": begins, "not_after": ended}
        record = a_certificate(f"b{number}", key=f"{number}{number}", enrollment_id="", renewed_from=parent, **times)
        site.ledger.store.add_certificate(record)
        parent = record.serial
    await refused(device.reenroll(), "the newest certificate of this name: this one was renewed for another", "name")


async def test_a_clock_that_jumps_forward_and_back_changes_nothing(site: Site, monkeypatch: Any) -> None:
    """A refused device is accepted when the coordinator's clock is right again, and only the newest key then."""
    device, now = await Expired.of(site), time.time()
    with monkeypatch.context() as jumped:
        jumped.setattr(time, "time", lambda: now + 9 * 86_400.0)
        await refused(device.reenroll(), "(enrollment.expired_grace_s)", "expired")
    key = new_key()
    assert (await device.reenroll(key)).record.renewed_from == "a1"
    with monkeypatch.context() as jumped:
        jumped.setattr(time, "time", lambda: now - 9 * 86_400.0)
        await refused(device.reenroll(), "a valid certificate with another key", "name")


async def test_rows_are_kept_for_the_grace_and_a_lifetime(tmp_path: Any) -> None:
    """A later certificate that was removed would make an older one the newest."""
    site = Site(tmp_path, {"expired_grace_s": 30 * 86_400.0})
    for serial, ended_s in (("c1", 30.5 * 86_400.0), ("c2", 31.5 * 86_400.0)):
        ended = a_certificate(serial, issued_at=1.0, not_after=time.time() - ended_s, enrollment_id="")
        site.ledger.store.add_certificate(ended)
    await site.issuer.renew(holder(), csr_of(new_key()))
    assert "c1" in {record.serial for record in site.ledger.store.certificates("edge-7", None, 9)}
    assert "c2" not in {record.serial for record in site.ledger.store.certificates("edge-7", None, 9)}
    site.close()


@pytest.mark.parametrize("kind", ["serial", "key", "name"])
async def test_a_revoked_certificate_proves_nothing(site: Site, kind: Any) -> None:
    """In whatever way it was revoked."""
    device = await Expired.of(site)
    values = {"serial": "a1", "key": digest_of(device.key.public_key()), "name": "edge-7"}
    await site.revocations.revoke(kind, values[kind], "stolen", "admin:alice")
    await refused(device.reenroll(), "a certificate that is not revoked", "revoked")


async def test_a_name_that_another_device_got_since_stays_with_it(site: Site) -> None:
    """An old disk does not get the name back while the new device has a valid certificate."""
    device = await Expired.of(site)
    key = new_key()
    await site.issuer.enroll(await site.token("edge-7"), csr_of(key), "")
    await refused(device.reenroll(), "a valid certificate with another key", "name")
    assert (await device.reenroll(key)).record.name == "edge-7"  # it has the new key too: a renewal was cut


async def test_a_name_that_another_device_had_since_stays_with_it(site: Site) -> None:
    """Also when the other device's certificate is revoked, or has ended in the meantime."""
    device = await Expired.of(site)
    other = (await site.issuer.enroll(await site.token("edge-7"), csr_of(new_key()), "")).record
    await site.revocations.revoke("serial", other.serial, "stolen too", "admin:alice")
    await refused(device.reenroll(), "the name was given to another key after this certificate", "name")


async def test_a_device_whose_renewal_was_lost_keeps_its_name(site: Site) -> None:
    """Certificates that were renewed from its own, and that it never received, are not of another device."""
    device = await Expired.of(site)
    lost = (await device.reenroll(key := new_key())).record
    assert lost.renewed_from == "a1"
    assert (await device.reenroll(key)).record.renewed_from == "a1"


async def test_a_certificate_begins_after_the_revocation_of_its_name(site: Site) -> None:
    """Otherwise it would be denied: certificates begin some minutes before their issue."""
    await site.revocations.revoke("name", "edge-7", "stolen", "admin:alice")
    issued = await site.issuer.enroll(await site.token("edge-7"), csr_of(new_key()), "")
    assert abs(issued.record.not_before - time.time()) < 60
    assert site.revocations.of_record(issued.record) is None


async def test_signatures_are_made_in_threads(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the check of a request nor a signature is made on the event loop's thread."""
    names: list[str] = []
    sign = type(site.issuer.authority).sign

    def recording(self: Any, holder: Holder, *more: Any) -> bytes:
        names.append(threading.current_thread().name)
        return sign(self, holder, *more)

    monkeypatch.setattr(type(site.issuer.authority), "sign", recording)
    await site.issuer.enroll(await site.token("edge-7"), csr_of(new_key()), "")
    assert len(names) == 1
    assert names[0] != "MainThread"
