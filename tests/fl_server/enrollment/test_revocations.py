"""Denied certificates: by serial, key and name, at once and after a restart."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fl_server.enrollment.grants import Revocations
from fl_server.errors import InvalidInput
from fl_server.identity import ANYBODY
from tests.fl_server.enrollment.site import Site, holder
from tests.fl_server.store.database.test_certificates import a_certificate

KEY = "b2" * 32


@pytest.mark.parametrize(("kind", "value"), [("serial", "00:A1"), ("key", "B2" * 32), ("name", "edge-7")])
async def test_a_revocation_denies_what_it_names(site: Site, kind: Any, value: str) -> None:
    """Written in any common form; also after a restart. The reason is part of the refusal."""
    assert site.revocations.denied(holder()) == ""
    await site.revocations.revoke(kind, value, "stolen", "admin:alice")
    restarted = Revocations(site.ledger)
    await restarted.load()
    for revocations in (site.revocations, restarted):
        assert revocations.denied(holder()).endswith(": stolen")
        assert revocations.denied(holder("edge-8", serial="a2", key="c3" * 32)) == ""
        assert revocations.denied(ANYBODY) == ""


async def test_a_name_is_denied_until_its_next_certificate(site: Site) -> None:
    """Certificates that begin before the revocation, and the known keys, whatever begins later."""
    site.ledger.store.add_certificate(a_certificate("a1", key=KEY, not_after=time.time() + 60))
    revoked = await site.revocations.revoke("name", "edge-7", "stolen", "admin:alice")
    assert [each.serial for each in revoked.certificates] == ["a1"]
    later = site.revocations.first_begin("edge-7")
    assert later > time.time() - 1
    assert site.revocations.denied(holder(serial="ff", key="ee" * 32, begins=later)) == ""
    assert site.revocations.denied(holder(serial="ff", key="ee" * 32, begins=later - 2)) != ""
    assert site.revocations.denied(holder(serial="ff", key=KEY, begins=later)) != ""
    assert site.revocations.key_is_denied(KEY)
    assert site.revocations.first_begin("edge-8") == 0.0


async def test_a_name_of_an_operator_is_another(site: Site) -> None:
    """`fl clients revoke alice` does not deny the operator alice; a serial does."""
    await site.revocations.revoke("name", "edge-7", "stolen", "admin:alice")
    admin = holder()
    object.__setattr__(admin, "role", "admin")
    assert site.revocations.denied(admin) == ""
    await site.revocations.revoke("serial", "a1", "left", "admin:bob")
    assert site.revocations.denied(admin) == "serial a1: left"


async def test_a_second_revocation_of_a_name_denies_later_certificates(site: Site) -> None:
    """Of a serial the first reason stands."""
    await site.revocations.revoke("name", "edge-7", "first", "admin:alice")
    await site.revocations.revoke("name", "edge-7", "second", "admin:alice")
    row = site.revocations.of("ff", "ee" * 32, "edge-7", time.time() - 9)
    assert row is not None
    assert row.reason == "second"
    for reason in ("first", "second"):
        await site.revocations.revoke("serial", "a1", reason, "admin:alice")
    assert site.revocations.denied(holder(begins=time.time() + 9)) == "serial a1: first"


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("serial", "xyz", "a serial number in hex"), ("serial", "0", "a serial number in hex"),
        ("serial", "1" * 41, "a serial number"), ("key", "12", "64 characters of hex"), ("name", "../x", "name: "),
    ],
)  # fmt: skip
async def test_a_value_that_cannot_be(site: Site, kind: Any, value: str, expected: str) -> None:
    """Nothing is written."""
    with pytest.raises(InvalidInput, match=expected):
        await site.revocations.revoke(kind, value, "", "admin:alice")
    assert site.ledger.store.revocations() == []


async def test_open_calls_end_after_the_ledger_is_written(site: Site) -> None:
    """The watchers are called once everything denies the certificate."""
    seen: list[tuple[bool, int]] = []
    site.revocations.on_change.append(
        lambda: seen.append((bool(site.revocations.denied(holder())), len(site.ledger.store.revocations())))
    )
    await site.revocations.revoke("serial", "a1", "stolen", "admin:alice")
    assert seen == [(True, 1)]
