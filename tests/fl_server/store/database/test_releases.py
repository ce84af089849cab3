"""Releases and their devices in every ledger, on any database."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fl_server.rounds.releases import Device, DeviceState, Kind
from fl_server.store.database.ledger_clients import ReleaseRecord
from fl_server.store.database.store import Store
from fl_server.store.errors import StoreError
from tests.fl_server.store.records import events, why

RULES = {"stages": [0.5, 1.0], "advance_after_s": 0.0, "most_failed": 0.1, "metric": "", "most_drop": 0.0,
         "lower_is_better": False}  # fmt: skip


def a_release(version: int = 1) -> ReleaseRecord:
    """A release that nobody has yet."""
    return ReleaseRecord(
        Kind.MODEL, "digits", version, "r1", "", b"{}", b"s" * 64, "ed25519:00", b"d" * 32, 10.0 + version, RULES
    )


def test_a_release_and_its_devices_are_read_as_they_were_written(store: Store) -> None:
    """Each write replaces the devices that it names, leaves the others, and has its line of history."""
    store.add_release(a_release(), why("release_created", "r1"))
    good = Device(DeviceState.EVALUATED, "", 10, {"accuracy": 0.5}, {"accuracy": 0.25}, 3.5)
    bad = Device(DeviceState.REFUSED, "wrong \0 signature", reported_at=4.5)
    release = replace(a_release().release({"b": Device(), "a": bad, "Z": good}), share=0.5, stage_began=2.0)
    store.save_release(release, ["b", "a", "Z"], [why("release_advanced", "r1")])
    store.save_release(replace(release, devices={"b": good}), ["b"], [])
    (record,) = store.releases(Kind.MODEL)
    assert record == replace(a_release(), share=0.5, stage_began=2.0)
    devices = store.release_devices(Kind.MODEL, "digits", 1)
    assert devices == {"Z": good, "a": replace(bad, detail="wrong \ufffd signature"), "b": good}
    assert list(devices) == ["Z", "a", "b"]
    assert list(store.release_devices(Kind.MODEL, "digits", 1, "Z", 1)) == ["a"]
    assert record.release(devices).rules.stages == (0.5, 1.0)
    assert events(store, "r1")[-2:] == ["release_created", "release_advanced"]


def test_a_version_is_added_once_and_a_forgotten_client_leaves_its_releases(store: Store) -> None:
    """Releases themselves stay, also those of a run that is deleted."""
    store.add_release(a_release(), why("release_created", "r1"))
    store.add_release(a_release(2), why("release_created", "r1"))
    with pytest.raises(StoreError, match="exists already"):
        store.add_release(a_release(), why("release_created", "r1"))
    store.save_release(a_release().release({"a": Device(), "b": Device()}), ["a", "b"], [])
    store.forget_client("a", why("client_forgotten", "a"))
    assert list(store.release_devices(Kind.MODEL, "digits", 1)) == ["b"]
    assert [record.version for record in store.releases(Kind.MODEL)] == [1, 2]
