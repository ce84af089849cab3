"""The able clients of a task, which are kept up to date client by client."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from fl_server.clients import eligibility as module
from fl_server.clients.draw_rules import Candidate, Requirements, Selection, offer_for, rule_for
from fl_server.clients.eligibility import AbleClients
from fl_server.clients.fleet import Fleet
from fl_server.store.records import ClientRecord
from protos.fl.v1 import coordinator_pb2 as pb
from tests.fl_server.devices import Device
from tests.fl_server.fleet_checks import OFFER
from tests.fl_server.harness import World

NORTH = {"site": "north"}
NOTHING = Requirements({}, {})


class _Fleet:
    """The clients that are here, and which of them were checked."""

    def __init__(self, here: Iterable[str]) -> None:
        self.here, self.checked = list(here), list[str]()

    def present(self) -> tuple[str, ...]:
        return tuple(self.here)

    def is_able(self, client: str, requires: Requirements) -> bool:
        self.checked.append(client)
        return client in requires.task.get("clients", self.here)


def test_only_changed_clients_are_checked() -> None:
    """All of them when the task is new, then one."""
    fleet = _Fleet(f"client-{number:03d}" for number in range(500))
    here, checked, clients = fleet.here, fleet.checked, AbleClients(fleet, fleet)  # type: ignore[arg-type]  # a double
    assert clients.of(NOTHING) == tuple(here)
    assert len(checked) == 500
    here.remove("client-007")
    clients.changed("client-007")
    assert clients.of(NOTHING) == tuple(here)
    assert clients.of(NOTHING) is clients.of(NOTHING)
    assert checked[500:] == ["client-007"]


def test_few_tasks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was asked for longest ago is found again."""
    monkeypatch.setattr(module, "MOST_KINDS", 2)
    fleet = _Fleet("ab")
    clients = AbleClients(fleet, fleet)  # type: ignore[arg-type]  # a double
    for wanted in ("a", "b", "ab", "a"):
        assert clients.of(Requirements({"clients": wanted}, {})) == tuple(wanted)


async def test_it_is_what_a_check_of_all_clients_finds(tmp_path: Path) -> None:
    """After each of many changes: availability, drains, bans, labels, clients that leave, return or are forgotten."""
    chance = random.Random(7)
    async with World(tmp_path) as world:
        devices = {name: Device(name, labels=NORTH if name in "ace" else {}) for name in "abcdef"}
        for device in devices.values():
            await device.connect(world)
        for _ in range(150):
            await _change(world, devices, chance)
            for requires in (Requirements(OFFER, {}), Requirements(OFFER, NORTH)):
                assert world.fleet.eligibility.able_clients(requires) == _all_checked(world.fleet, requires)


async def _change(world: World, devices: Mapping[str, Device], chance: random.Random) -> None:
    name = chance.choice(sorted(devices))
    known, fleet = world.fleet.records.find(name), world.fleet
    match chance.randrange(7) if known is not None and not known.banned else 7:
        case 0:
            fleet.eligibility.set_availability(name, pb.Availability(may_train=chance.random() < 0.5))
        case 1:
            await world.operators.drain(name, "", chance.random() < 0.5, "admin")
        case 2:
            assert known is not None
            await fleet.records.write(replace(known, labels=chance.choice([NORTH, {}])), None)
        case 3:
            await world.operators.ban(name, "", "admin")
        case 4:
            await world.operators.forget(name, "admin")
        case 5:
            fleet.workers.change("r", {name}, {*devices} - {name})
        case 6:
            await devices[name].connect(world)
        case _:
            if known is not None:
                await world.operators.unban(name, "admin")
            await devices[name].connect(world)


def _all_checked(fleet: Fleet, requires: Requirements) -> tuple[str, ...]:
    selection = fleet.eligibility.selection("", requires)
    candidates = {client: fleet.eligibility.candidate(client) for client in fleet.attendance.roster.present()}
    reasons = {client: candidate and rule_for(selection, candidate) for client, candidate in candidates.items()}
    return tuple(client for client, rule in reasons.items() if rule is None or rule.reason == "at_work")


def test_labels_and_version_are_those_of_one_offer() -> None:
    """A client with the task for two data is able for the labels of each; no offer has the version with the labels."""
    offers = [
        {"name": "t", "version": version, "source": "s", "data": data, "labels": {"data": data}}
        for data, version in (("old", "1"), ("new", "2"))
    ]
    record = ClientRecord("a", 1.0, 2.0, labels=NORTH, tasks=offers)
    task = {"name": "t", "version": "2", "source": "s"}
    reasons = {}
    for labels in ({}, {"data": "new"}, {"data": "new", **NORTH}, {"data": "old"}, {"data": "none"}):
        requires = Requirements(task, labels)
        rule = rule_for(Selection(requires), Candidate(record, True, pb.Availability(may_train=True)))
        offer = offer_for(requires, record)
        reasons[str(sorted(labels.values()))] = None if rule is None else rule.reason
        assert (offer is None) == (rule is not None)
        assert offer is None or offer["data"] == "new"
    assert reasons == {
        "[]": None, "['new']": None, "['new', 'north']": None, "['old']": "task_code", "['none']": "labels",
    }  # fmt: skip
