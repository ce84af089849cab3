"""Tokens, certificates and revocations in the ledger, on every backend."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fl_server.store.database.ledger_certificates import (
    CERTIFICATES_KEPT_S,
    TOKENS_KEPT_S,
    CertificateRecord,
    EnrollmentRecord,
    NotSpent,
    RevocationRecord,
)
from fl_server.store.database.store import Store, open_sqlite
from tests.fl_server.store.records import why

NOW = 1000.0


def a_token(id_: str = "t1", **changes: Any) -> EnrollmentRecord:
    """A token with one use for edge-7, from NOW to NOW + 60."""
    values: dict[str, Any] = {
        "secret_hash": b"\1" * 32, "name": "edge-7", "prefix": False, "labels": {"site": "north"}, "uses": 1,
        "uses_left": 1, "created_at": NOW, "expires_at": NOW + 60.0, "actor": "admin:eve",
    }  # fmt: skip
    return EnrollmentRecord(id_, **{**values, **changes})


def a_certificate(serial: str = "a1", **changes: Any) -> CertificateRecord:
    """A certificate of edge-7 for the token t1, valid until NOW + 100."""
    values: dict[str, Any] = {
        "role": "client", "name": "edge-7", "key": "11", "issued_at": NOW + 1.0, "not_before": NOW - 300.0,
        "not_after": NOW + 100.0, "enrollment_id": "t1", "content": b"der",
    }  # fmt: skip
    return CertificateRecord(serial, **{**values, **changes})


def a_revocation(kind: Any = "serial", value: str = "a1", **changes: Any) -> RevocationRecord:
    """A revocation at NOW + 10."""
    values: dict[str, Any] = {"name": "edge-7", "revoked_at": NOW + 10.0, "actor": "admin:eve", "reason": "stolen"}
    return RevocationRecord(kind, value, **{**values, **changes})


@pytest.fixture
def ledger(empty_store: Store) -> Store:
    """A ledger with the token t1."""
    empty_store.add_enrollments([a_token()], [why("enrollment_created", "edge-7")])
    return empty_store


def test_a_token_is_kept_whole(ledger: Store) -> None:
    """The record is the one that was written, with a row of history; an unknown id gives nothing."""
    assert ledger.enrollment("t1") == a_token()
    assert ledger.enrollment("t2") is None
    assert [entry.event for entry in ledger.history("edge-7")] == ["enrollment_created"]


def test_a_token_is_spent_once_and_with_the_certificate(ledger: Store) -> None:
    """The same key gets the same certificate again, without another row of history; another key gets nothing."""
    first = a_certificate()
    assert ledger.spend(first, why("client_enrolled", "edge-7")) == first
    assert ledger.spend(a_certificate("a2"), why("client_enrolled", "edge-7")) == first
    assert ledger.spend(a_certificate("a3", key="22"), why("client_enrolled", "edge-7")) is NotSpent.USED
    token = ledger.enrollment("t1")
    assert token is not None
    assert (token.uses_left, [each.serial for each in ledger.certificates("", None, 9)]) == (0, ["a1"])
    assert [entry.event for entry in ledger.history("edge-7")] == ["enrollment_created", "client_enrolled"]


@pytest.mark.parametrize(
    ("token", "refusal"),
    [
        ({"expires_at": NOW + 1.0}, NotSpent.EXPIRED),
        ({"revoked": True}, NotSpent.REVOKED),
        ({"uses_left": 0}, NotSpent.USED),
    ],
)
def test_a_token_that_is_over_gives_nothing(empty_store: Store, token: dict[str, Any], refusal: NotSpent) -> None:
    """Expired at this moment, revoked or without a use; the same for one that is unknown."""
    empty_store.add_enrollments([a_token(**token)], [why()])
    assert empty_store.spend(a_certificate(), why()) is refusal
    assert empty_store.spend(a_certificate(enrollment_id="t9"), why()) is NotSpent.REVOKED
    assert empty_store.certificates("", None, 9) == []


def test_a_lost_response_can_be_repeated_after_the_token_has_expired(ledger: Store) -> None:
    """Not after its revocation, and not when the certificate has ended."""
    first = a_certificate()
    ledger.spend(first, why())
    late = a_certificate("a2", issued_at=NOW + 70.0)
    assert ledger.spend(late, why()) == first
    assert ledger.spend(replace(late, issued_at=NOW + 100.0), why()) is NotSpent.EXPIRED
    ledger.revoke_enrollment("t1", why())
    assert ledger.spend(late, why()) is NotSpent.REVOKED


def test_a_revoked_token_has_one_row_of_history(ledger: Store) -> None:
    """The second revocation changes nothing; an unknown token is None."""
    revoked = replace(a_token(), revoked=True)
    assert ledger.revoke_enrollment("t1", why("enrollment_revoked", "t1")) == revoked
    assert ledger.revoke_enrollment("t1", why("enrollment_revoked", "t1")) == revoked
    assert ledger.revoke_enrollment("t2", why("enrollment_revoked", "t1")) is None
    assert len(ledger.history("t1")) == 1


@pytest.fixture
def bootstrap(empty_store: Store) -> Store:
    """A ledger with a token of two uses for names with the prefix gpu-."""
    empty_store.add_enrollments([a_token(name="gpu-", prefix=True, uses=2, uses_left=2)], [why()])
    return empty_store


def test_a_name_with_a_valid_certificate_of_another_key_is_taken(bootstrap: Store) -> None:
    """The use is not lost. The name is free after the end of the certificate; its holder keeps getting it."""
    held = a_certificate("g1", name="gpu-1")
    assert bootstrap.spend(held, why()) == held
    taking = a_certificate("g2", name="gpu-1", key="22")
    assert bootstrap.spend(taking, why()) is NotSpent.NAME
    token = bootstrap.enrollment("t1")
    assert token is not None
    assert token.uses_left == 1
    assert bootstrap.spend(a_certificate("g3", name="gpu-1"), why()) == held
    assert bootstrap.spend(a_certificate("g4", name="gpu-2"), why()) is NotSpent.KEY
    bootstrap.add_enrollments([a_token("t2", name="gpu-", prefix=True, expires_at=NOW + 900.0)], [why()])
    later = replace(taking, enrollment_id="t2", issued_at=NOW + 100.0, not_after=NOW + 200.0)
    assert bootstrap.spend(later, why()) == later


@pytest.mark.parametrize(("kind", "value"), [("serial", "g1"), ("key", "11"), ("name", "gpu-1")])
def test_a_revocation_frees_a_name(bootstrap: Store, kind: Any, value: str) -> None:
    """By serial, key or name: the certificate that held the name counts no more."""
    bootstrap.spend(a_certificate("g1", name="gpu-1"), why())
    bootstrap.revoke([a_revocation(kind, value)], why())
    taking = a_certificate("g2", name="gpu-1", key="22", not_before=NOW + 11.0)
    assert bootstrap.spend(taking, why()) == taking


def test_a_certificate_after_a_revocation_of_the_name_holds_it(bootstrap: Store) -> None:
    """A revocation by name denies the certificates that begin before it, no later ones."""
    bootstrap.revoke([a_revocation("name", "gpu-1")], why())
    held = a_certificate("g1", name="gpu-1", not_before=NOW + 11.0)
    assert bootstrap.spend(held, why()) == held
    assert bootstrap.spend(a_certificate("g2", name="gpu-1", key="22"), why()) is NotSpent.NAME


def test_lists_are_pages_in_order_of_time(empty_store: Store) -> None:
    """The newest first, then by id; a page continues after the last entry."""
    tokens = [a_token(f"t{number}", created_at=NOW + number // 2) for number in range(5)]
    empty_store.add_enrollments(tokens, [why()])
    for number in range(5):
        empty_store.add_certificate(a_certificate(f"c{number}", issued_at=NOW + number // 2, enrollment_id=""))
    order = [4, 3, 2, 1, 0]
    assert [each.id for each in empty_store.enrollments(None, 9)] == [f"t{number}" for number in order]
    assert [each.id for each in empty_store.enrollments((NOW + 1, "t3"), 2)] == ["t2", "t1"]
    assert [each.serial for each in empty_store.certificates("", None, 9)] == [f"c{number}" for number in order]
    assert [each.serial for each in empty_store.certificates("edge-7", (NOW + 1, "c3"), 1)] == ["c2"]
    assert empty_store.certificates("edge-8", None, 9) == []


def test_certificates_are_found_by_serial_key_and_name(empty_store: Store) -> None:
    """A name is that of a client; other roles may have the same."""
    for serial, role, key in (("c1", "client", "11"), ("c2", "client", "22"), ("c3", "admin", "22")):
        empty_store.add_certificate(a_certificate(serial, role=role, key=key, enrollment_id=""))

    def serials(kind: Any, value: str) -> list[str]:
        return sorted(each.serial for each in empty_store.certificates_with(kind, value))

    assert serials("serial", "c1") == ["c1"]
    assert serials("key", "22") == ["c2", "c3"]
    assert serials("name", "edge-7") == ["c1", "c2"]


def test_what_ended_long_ago_is_removed(ledger: Store) -> None:
    """Certificates with the next one of their name, tokens with the next ones."""
    ledger.spend(a_certificate(), why())
    late = NOW + 101.0 + CERTIFICATES_KEPT_S
    ledger.add_certificate(a_certificate("b1", name="edge-8", issued_at=late, not_after=late + 9, enrollment_id=""))
    assert len(ledger.certificates("", None, 9)) == 2
    ledger.add_certificate(a_certificate("b0", issued_at=late, enrollment_id=""), kept_s=CERTIFICATES_KEPT_S + 9)
    assert len(ledger.certificates("edge-7", None, 9)) == 2
    ledger.add_certificate(a_certificate("b2", issued_at=late, not_after=late + 9, enrollment_id=""))
    assert [each.serial for each in ledger.certificates("edge-7", None, 9)] == ["b2"]
    ledger.add_enrollments([a_token("t2", created_at=NOW + 61.0 + TOKENS_KEPT_S)], [why()])
    assert [each.id for each in ledger.enrollments(None, 9)] == ["t2"]


def test_the_first_revocation_stands_except_that_of_a_name(empty_store: Store) -> None:
    """A later revocation of a name denies later certificates too."""
    first = [a_revocation(kind, value) for kind, value in (("serial", "a1"), ("key", "11"), ("name", "edge-7"))]
    empty_store.revoke(first, why("certificates_revoked", "edge-7"))
    empty_store.revoke([replace(each, revoked_at=NOW + 20.0) for each in first], why())
    assert {row.kind: row.revoked_at for row in empty_store.revocations()} == {
        "serial": NOW + 10.0, "key": NOW + 10.0, "name": NOW + 20.0,
    }  # fmt: skip
    assert [entry.event for entry in empty_store.history("edge-7")] == ["certificates_revoked"]


def test_revocations_of_foreign_certificates_are_listed(empty_store: Store) -> None:
    """Those whose serial or key no certificate of the ledger has, the newest first."""
    empty_store.add_certificate(a_certificate(enrollment_id=""))
    rows = [
        a_revocation("serial", "a1"), a_revocation("key", "11"), a_revocation("name", "edge-7"),
        a_revocation("serial", "f1", revoked_at=NOW), a_revocation("key", "f2", name=""),
    ]  # fmt: skip
    empty_store.revoke(rows, why())
    assert [row.value for row in empty_store.revocations_alone("", None, 9)] == ["f2", "f1"]
    assert [row.value for row in empty_store.revocations_alone("", (NOW + 10.0, "f2"), 9)] == ["f1"]
    assert [row.value for row in empty_store.revocations_alone("edge-7", None, 9)] == ["f1"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A ledger in a file, with the token t1."""
    path = tmp_path / "ledger.sqlite"
    store = open_sqlite(path)
    store.add_enrollments([a_token()], [why()])
    store.close()
    return path


def test_of_many_spenders_at_once_one_wins(ledger: Store) -> None:
    """Threads with different keys: one certificate, and as many refusals as others."""
    with ThreadPoolExecutor(4) as pool:
        results = list(
            pool.map(lambda number: ledger.spend(a_certificate(f"c{number}", key=f"{number:02}"), why()), range(8))
        )
    assert [result for result in results if isinstance(result, NotSpent)] == [NotSpent.USED] * 7
    assert len(ledger.certificates("", None, 99)) == 1


def test_a_spent_token_stays_spent_after_a_restart(file: Path) -> None:
    """With its certificate, which a repeat gets from the new process."""
    store = open_sqlite(file)
    store.spend(a_certificate(), why())
    store.close()
    again = open_sqlite(file)
    assert again.spend(a_certificate("a2"), why()) == a_certificate()
    again.close()
