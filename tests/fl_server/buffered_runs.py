"""Whole runs with a buffer whose coordinator is killed once, and what their ledgers must say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import algorithms as fl
from fl_server.aggregation.engine import Engine
from fl_tasks import load_task
from protos.digests import digest_text
from protos.fl.v1.training_pb2 import UpdateHeader
from tests.fl_server.devices import Device
from tests.fl_server.harness import TASK, Journal, World, run_config, until
from tests.fl_server.killed_runs import complete_run

NAMES = ("a", "b", "c", "d")
BUFFER = {"close": "buffer", "goal": 2, "concurrency": 3, "max_staleness": 4}
ROUNDS = 4
Lists = list[list[tuple[str, int, bytes]]]
"""By round: (client, version, digest) in the order of the buffer."""


SECTIONS: dict[str, Any] = {"round": BUFFER, "stop": {"rounds": ROUNDS}}

Updates = dict[tuple[str, int], tuple[UpdateHeader, bytes]]
"""The devices' updates by client and version."""


async def buffered_run(folder: Path, dies_at: int | None = None) -> tuple[list[str], Lists, Updates, list[Device]]:
    """Digests, lists and updates of a run whose coordinator was killed once; its ledger is checked."""
    devices, made = [Device(name) for name in NAMES], Updates()
    if dies_at is not None:
        async with World(folder, Journal(dies_at)) as world:
            world.spawn(complete_run(world, devices, **SECTIONS))
            await until(lambda: world.journal.dead, "the coordinator is killed")
        made.update(_updates(devices))
        devices[0].kept.clear()
    async with World(folder) as world:
        digests = await complete_run(world, devices, **SECTIONS)
        lists = [world.store.taken("r", round_) for round_ in range(len(digests))]
        await until(lambda: not world.store.waiting_updates("r", 0, len(digests)), "what is left is given up")
        check_ledger(world, lists)
    return digests, lists, made | _updates(devices), devices


def _updates(devices: Sequence[Device]) -> Updates:
    return {(device.name, key[1]): kept[1:] for device in devices for key, kept in device.kept.items()}


def check_ledger(world: World, lists: Lists) -> None:
    """Nothing counts twice or is too stale. What was admitted and counts in no step was given up at the end."""
    counted = Counter((client, version) for taken in lists for client, version, _ in taken)
    assert set(counted.values()) <= {1}
    for round_, taken in enumerate(lists):
        assert len(taken) == BUFFER["goal"]
        assert all(0 <= round_ - version <= 4 for _, version, _ in taken)
        of_version = {version: {client for client, number, _ in taken if number == version} for _, version, _ in taken}
        for version, clients in of_version.items():
            asked = {client for attempt in world.store.attempts("r", version) for client in attempt.cohort}
            assert clients <= asked
    admitted = {
        (update.client_id, update.round, update.digest)
        for version in range(len(lists) + 1)
        for update in world.store.updates("r", version, 0)
        if update.admitted
    }
    assert admitted == {entry for taken in lists for entry in taken}
    assert sum(client.work.admitted for client in world.store.clients()) == len(admitted)


def models_of(folder: Path, lists: Lists, updates: Updates) -> list[str]:
    """The models that follow from the lists and from the devices' updates, without a coordinator."""
    engine = Engine(run_config(**SECTIONS), load_task(TASK, {"model": "batchnorm"}))
    folder.mkdir(exist_ok=True)
    snapshot, made = engine.first(), list[str]()
    versions = {0: snapshot}
    for round_, taken in enumerate(lists):
        entries, sources = [], list[Path]()
        for client, version, digest in taken:
            header, data = updates[client, version]
            assert header.digest.value == digest
            sources.append(folder / f"{version}-{client}")
            sources[-1].write_bytes(data)
            info = fl.UpdateInfo(client, header.num_examples, header.num_steps)
            entries.append(fl.Buffered(info, version, round_ - version))
        snapshot, _ = engine.buffered_update(snapshot, entries, sources, versions)
        versions[round_ + 1] = snapshot
        made.append(digest_text(engine.outgoing(snapshot)[0].digest))
    return made
