"""A run whose coordinator loses its power, and the coordinator that is started on what the drive kept."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fl_server.store.files import Durability
from fl_server.store.lock import lock_directory
from tests.fl_server.devices import Device
from tests.fl_server.harness import World
from tests.power.drives import ALL, Cut, Tree, after_each, put
from tests.power.recorder import Operation, Recorder

NAMES = ("a", "b", "c")
STATE = "state"


@dataclass(frozen=True, slots=True)
class Job:
    """What is run, and what an acknowledged update shall survive."""

    durability: Durability
    sections: Mapping[str, Any] = field(default_factory=dict)
    exchanges: int = 1
    """Of each round."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the fleet knows when the power is cut."""

    devices: Mapping[str, tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]] = field(default_factory=dict)
    """What each device keeps, has heard, and has its state by: its own power is not cut."""
    acknowledged: frozenset[tuple[str, int, int]] = frozenset()
    """(client, round, exchange) of the updates that there was a receipt for."""
    created: bool = False
    """The operator was told that the run is there."""
    commits: int = 0
    """Rounds that somebody knows to be committed."""


class Witness(Device):
    """A device that tells the recorder what it hears, and counts what it sends."""

    def __init__(self, name: str, fleet: Fleet) -> None:
        super().__init__(name)
        self.fleet = fleet
        self.sent: list[tuple[str, int, int]] = []

    def _hear(self, outcome: Any) -> None:
        super()._hear(outcome)
        self.fleet.tell(commits=outcome.key.round + 1)

    async def update(self, world: World, assignment: Any) -> Any:
        self.fleet.tell(commits=assignment.key.round)
        answer = await super().update(world, assignment)
        self.fleet.tell()
        return answer

    async def _send(self, world: World, header: Any, data: bytes) -> Any:
        key = (self.name, header.key.round, header.key.exchange)
        self.sent.append(key)
        receipt = await super()._send(world, header, data)
        assert receipt.admitted, receipt
        self.fleet.tell(key)
        return receipt


class Fleet:
    """Three devices, and what they know together."""

    def __init__(self, said: Said | None = None, recorder: Recorder | None = None) -> None:
        self.said, self._recorder = said or Said(), recorder
        self.devices = [Witness(name, self) for name in NAMES]
        for device in self.devices:
            if device.name in self.said.devices:
                device.kept, device.outcomes, device.states = map(dict, self.said.devices[device.name])

    def tell(self, *acknowledged: tuple[str, int, int], commits: int = 0, created: bool = False) -> None:
        """Somebody has heard something, or has made up its mind."""
        self.said = replace(
            self.said,
            devices={each.name: (dict(each.kept), dict(each.outcomes), dict(each.states)) for each in self.devices},
            acknowledged=self.said.acknowledged.union(acknowledged),
            created=self.said.created or created,
            commits=max(self.said.commits, commits),
        )
        if self._recorder is not None:
            self._recorder.tell(self.said)

    async def work(self, world: World, job: Job) -> list[str]:
        """All come, and the run is made unless it is there; digests of its models when it has ended."""
        for device in self.devices:
            await device.come(world)
        if not world.coordinator.runs():
            await world.create(**job.sections)
            self.tell(created=True)
        return await world.completed()


@asynccontextmanager
async def started(folder: Path, job: Job) -> Any:
    """A coordinator on a state directory that is its own."""
    with lock_directory(folder):
        async with World(folder, durability=job.durability) as world:
            yield world


@dataclass(frozen=True, slots=True)
class Facts:
    """What the ledger says of a run that has ended, and that no power cut may change."""

    digests: Sequence[str]
    accepted: Sequence[Sequence[tuple[str, bytes]] | None]
    """By round, of its last exchange."""
    counted: Mapping[str, int]
    """Updates by client."""

    @staticmethod
    def of(world: World, exchanges: int) -> Facts:
        """As the ledger has it."""
        digests = [commit.model_digest for commit in world.store.commits("r")]
        accepted = [world.store.accepted("r", round_, exchanges - 1) for round_ in range(len(digests))]
        return Facts(digests, accepted, {each.client_id: each.updates_counted for each in world.store.clients()})


async def _live(recorder: Recorder, job: Job, said: Said) -> Facts:
    with recorder.recording():
        fleet = Fleet(said, recorder)
        async with started(recorder.folder / STATE, job) as world:
            digests = await fleet.work(world, job)
            recorder.tell(replace(fleet.said, commits=len(digests)))
            return Facts.of(world, job.exchanges)


@dataclass(frozen=True, slots=True)
class Life:
    """A run that nothing happened to: all that was done to its state directory, and what came of it."""

    job: Job
    record: Sequence[Operation]
    facts: Facts
    first: int = 0
    """Operations before it are another life's."""

    @staticmethod
    def of(job: Job, folder: Path) -> Life:
        """Run it, and write all down."""
        recorder = Recorder(folder)
        facts = asyncio.run(_live(recorder, job, Said()))
        return Life(job, recorder.record, facts)

    def killed(self, at: int, folder: Path) -> Life:
        """The same run, but the coordinator was killed after operation number `at`, and another one went on."""
        *_, drive = after_each(self.record[:at])
        put(drive.cut(ALL), folder)
        recorder = Recorder(folder)
        recorder.adopt(drive.paths(), self.record[:at])
        facts = asyncio.run(_live(recorder, self.job, drive.told or Said()))
        assert facts == self.facts
        return Life(self.job, recorder.record, facts, first=at + 1)

    def wrecks(self, how: Cut) -> list[Wreck]:
        """What may be left by a cut after each operation; of several alike, the one of which most was said."""
        found: dict[object, Wreck] = {}
        for at, drive in enumerate(after_each(self.record)):
            if at < self.first:
                continue
            tree = drive.cut(replace(how, seed=how.seed * 1_000_003 + at))
            found[frozenset(tree.items())] = Wreck(self, at, how, tree, drive.told or Said())
        return list(found.values())


@dataclass(frozen=True, slots=True)
class Wreck:
    """What a cut left."""

    life: Life
    at: int
    how: Cut
    tree: Tree
    said: Said

    def __str__(self) -> str:
        return f"after operation {self.at} of {len(self.life.record)}, {self.how}"

    async def recover(self, folder: Path) -> None:
        """Start a coordinator on it and let the run end. Fails where something was lost that was promised."""
        put(self.tree, folder)
        fleet, life = Fleet(self.said), self.life
        async with started(folder / STATE, life.job) as world:
            self._check_what_is_there(world)
            await fleet.work(world, life.job)
            assert Facts.of(world, life.job.exchanges) == life.facts
            self._check_the_end(world, fleet)

    def _check_what_is_there(self, world: World) -> None:
        """Nobody knows more of the run and its commits than the coordinator does."""
        assert world.coordinator.runs() or not self.said.created
        known = [commit.model_digest for commit in world.store.commits("r")]
        assert known == list(self.life.facts.digests[: len(known)])
        assert len(known) >= self.said.commits
        for run in world.coordinator.runs():
            assert run.status != "failed", run.state.ending

    def _check_the_end(self, world: World, fleet: Fleet) -> None:
        """Nothing was begun anew; with "power", nothing was sent that had been acknowledged.

        With "process" a round may be that has lost the bytes of an exchange that was over: nobody is asked for those.
        """
        events = [entry.event for entry in world.store.history("r")]
        assert not {"states_restarted", "state_lost"}.intersection(events), events
        if self.life.job.durability == "power" or self.life.job.exchanges == 1:
            assert "round_restarted" not in events
        if self.life.job.durability == "power":
            assert "update_dropped" not in events
            sent = {key for device in fleet.devices for key in device.sent}
            assert not sent & self.said.acknowledged
