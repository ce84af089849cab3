"""A run that loses power at its coordinator, and a coordinator that starts with the kept files of the drive."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fl_server.store.errors import Durability
from fl_server.store.state_directory import lock_directory
from tests.fl_server.devices import Device
from tests.fl_server.harness import World
from tests.power.drives import ALL, Cut, Tree, after_each, put
from tests.power.recorder import Operation, Recorder

NAMES = ("a", "b", "c")
STATE = "state"


@dataclass(frozen=True, slots=True)
class Job:
    """A run and its durability: what an acknowledged update has to survive."""

    durability: Durability
    sections: Mapping[str, Any] = field(default_factory=dict)
    exchanges: int = 1
    """Number of exchanges in each round."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """The knowledge of the devices and the operator at the power cut."""

    devices: Mapping[str, tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]] = field(default_factory=dict)
    """Per device: pending update, received outcomes and the origin of its state. Devices lose no power here."""
    acknowledged: frozenset[tuple[str, int, int]] = frozenset()
    """(client, round, exchange) of the updates with a receipt."""
    created: bool = False
    """The operator has the run's id."""
    commits: int = 0
    """Number of rounds with a reported commit."""


class RecordingDevice(Device):
    """A device that records received messages and counts sent ones."""

    def __init__(self, name: str, fleet: Fleet) -> None:
        super().__init__(name)
        self.fleet = fleet
        self.sent: list[tuple[str, int, int]] = []

    def _keep_outcome(self, outcome: Any) -> None:
        super()._keep_outcome(outcome)
        self.fleet.report(commits=outcome.key.round + 1)

    async def update(self, world: World, assignment: Any) -> Any:
        self.fleet.report(commits=assignment.key.round)
        answer = await super().update(world, assignment)
        self.fleet.report()
        return answer

    async def _send(self, world: World, header: Any, data: bytes) -> Any:
        key = (self.name, header.key.round, header.key.exchange)
        self.sent.append(key)
        receipt = await super()._send(world, header, data)
        assert receipt.admitted, receipt
        self.fleet.report(key)
        return receipt


class Fleet:
    """Three devices and their common knowledge."""

    def __init__(self, view: FleetView | None = None, recorder: Recorder | None = None) -> None:
        self.view, self._recorder = view or FleetView(), recorder
        self.devices = [RecordingDevice(name, self) for name in NAMES]
        for device in self.devices:
            if device.name in self.view.devices:
                device.kept, device.outcomes, device.states = map(dict, self.view.devices[device.name])

    def report(self, *acknowledged: tuple[str, int, int], commits: int = 0, created: bool = False) -> None:
        """Record a received message or a decision."""
        self.view = replace(
            self.view,
            devices={each.name: (dict(each.kept), dict(each.outcomes), dict(each.states)) for each in self.devices},
            acknowledged=self.view.acknowledged.union(acknowledged),
            created=self.view.created or created,
            commits=max(self.view.commits, commits),
        )
        if self._recorder is not None:
            self._recorder.report(self.view)

    async def work(self, world: World, job: Job) -> list[str]:
        """Connect all devices, create the run if it does not exist, and return its digests after its end."""
        for device in self.devices:
            await device.connect(world)
        if not world.coordinator.runs():
            await world.create(**job.sections)
            self.report(created=True)
        return await world.completed()


@asynccontextmanager
async def started(folder: Path, job: Job) -> Any:
    """A coordinator with the lock of its state directory."""
    with lock_directory(folder):
        async with World(folder, durability=job.durability) as world:
            yield world


@dataclass(frozen=True, slots=True)
class LedgerFacts:
    """The ledger's rows of an ended run, which no power cut may change."""

    digests: Sequence[str]
    accepted: Sequence[Sequence[tuple[str, bytes]] | None]
    """(client, digest) of the accepted updates, by round, in its last exchange."""
    counted: Mapping[str, int]
    """Number of counted updates by client."""

    @staticmethod
    def of(world: World, exchanges: int) -> LedgerFacts:
        """Read the facts from the ledger."""
        digests = [commit.model_digest for commit in world.store.commits("r")]
        accepted = [world.store.accepted("r", round_, exchanges - 1) for round_ in range(len(digests))]
        return LedgerFacts(digests, accepted, {each.client_id: each.updates_counted for each in world.store.clients()})


async def _record_run(recorder: Recorder, job: Job, view: FleetView) -> LedgerFacts:
    with recorder.recording():
        fleet = Fleet(view, recorder)
        async with started(recorder.folder / STATE, job) as world:
            digests = await fleet.work(world, job)
            recorder.report(replace(fleet.view, commits=len(digests)))
            return LedgerFacts.of(world, job.exchanges)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run without faults: all operations on its state directory, and its result."""

    job: Job
    record: Sequence[Operation]
    facts: LedgerFacts
    first: int = 0
    """Index of the first operation of this coordinator; earlier ones are of a killed one."""

    @staticmethod
    def of(job: Job, folder: Path) -> RecordedRun:
        """Execute the run and record it."""
        recorder = Recorder(folder)
        facts = asyncio.run(_record_run(recorder, job, FleetView()))
        return RecordedRun(job, recorder.record, facts)

    def killed(self, at: int, folder: Path) -> RecordedRun:
        """The same run with a coordinator that is killed after operation `at` and restarted."""
        *_, drive = after_each(self.record[:at])
        put(drive.cut(ALL), folder)
        recorder = Recorder(folder)
        recorder.adopt(drive.paths(), self.record[:at])
        facts = asyncio.run(_record_run(recorder, self.job, drive.reported or FleetView()))
        assert facts == self.facts
        return RecordedRun(self.job, recorder.record, facts, first=at + 1)

    def crash_images(self, how: Cut) -> list[CrashImage]:
        """Possible contents of the drive after a cut behind each operation, without duplicates."""
        found: dict[object, CrashImage] = {}
        for at, drive in enumerate(after_each(self.record)):
            if at < self.first:
                continue
            tree = drive.cut(replace(how, seed=how.seed * 1_000_003 + at))
            found[frozenset(tree.items())] = CrashImage(self, at, how, tree, drive.reported or FleetView())
        return list(found.values())


@dataclass(frozen=True, slots=True)
class CrashImage:
    """The content of the drive after a power cut."""

    run: RecordedRun
    at: int
    how: Cut
    tree: Tree
    view: FleetView

    def __str__(self) -> str:
        return f"after operation {self.at} of {len(self.run.record)}, {self.how}"

    async def recover(self, folder: Path) -> None:
        """Start a coordinator on the image and complete the run. Fails if promised data was lost."""
        put(self.tree, folder)
        fleet, run = Fleet(self.view), self.run
        async with started(folder / STATE, run.job) as world:
            self._check_restored(world)
            await fleet.work(world, run.job)
            assert LedgerFacts.of(world, run.job.exchanges) == run.facts
            self._check_result(world, fleet)

    def _check_restored(self, world: World) -> None:
        """Check that the coordinator knows the run and every reported commit."""
        assert world.coordinator.runs() or not self.view.created
        known = [commit.model_digest for commit in world.store.commits("r")]
        assert known == list(self.run.facts.digests[: len(known)])
        assert len(known) >= self.view.commits
        for run in world.coordinator.runs():
            assert run.status != "failed", run.state.ending

    def _check_result(self, world: World, fleet: Fleet) -> None:
        """Check that no work was repeated, and with "power" that no acknowledged update was sent again.

        With "process" a round of several exchanges may lose the bytes of a finished exchange; then the round restarts.
        """
        events = [entry.event for entry in world.store.history("r")]
        assert not {"states_restarted", "state_lost"}.intersection(events), events
        if self.run.job.durability == "power" or self.run.job.exchanges == 1:
            assert "round_restarted" not in events
        if self.run.job.durability == "power":
            assert "update_dropped" not in events
            sent = {key for device in fleet.devices for key in device.sent}
            assert not sent & self.view.acknowledged
