"""A norm limit beside earlier updates: which rounds count, what becomes of longer ones, and restarts."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import torch

from fl_server.admission import Gate, Refused
from fl_server.norms import NO_LIMIT, NormHistory, RelativeNorm
from fl_server.run_config import RoundSection
from fl_server.shapes import UpdateShape
from protos.codec import Layout, digest_of, pack
from protos.fl.v1.training_pb2 import REFUSAL_REASON_NORM
from tests.fl_server.devices import Device, announced
from tests.fl_server.harness import TASK, Journal, World, until

TENSORS = {"w": torch.tensor([3.0, 4.0])}
LAYOUT = Layout.of(TENSORS, trainable=("w",))
LIMITED = RoundSection(max_relative_norm=2.0)


def history(*rounds):
    """What committed rounds with these norms leave behind."""
    made = NormHistory()
    for number, norms in enumerate(rounds):
        made.add(number, [{"delta": norm} for norm in norms])
    return made


def test_there_is_no_limit_before_three_rounds():
    """Two are too few; of 1, 2, 3, 4, 50 in three rounds the median is 3, and twice that the limit."""
    assert history([1.0, 2.0], [3.0, 4.0]).limit(LIMITED).limit == 0.0
    assert history([1.0, 2.0], [3.0, 4.0], [50.0]).limit(LIMITED).limit == 6.0


def test_the_latest_ten_rounds_are_looked_at():
    """Norms 1, 2, ... 14: the median of 5 to 14 is 9.5."""
    assert history(*([float(norm)] for norm in range(1, 15))).limit(LIMITED).median == 9.5


def test_a_round_that_is_told_twice_counts_once():
    """Read back after a restart, it stands where it stood."""
    twice = history([1.0], [2.0], [6.0])
    twice.add(2, [{"delta": 6.0}])
    assert twice.limit(LIMITED) == history([1.0], [2.0], [6.0]).limit(LIMITED)


def test_without_the_setting_there_is_no_limit():
    """However many rounds there were."""
    assert history([1.0], [1.0], [1.0]).limit(RoundSection(max_relative_norm=0)) == NO_LIMIT


def test_updates_that_were_all_zero_limit_nothing():
    """Twice nothing would refuse everybody for ever."""
    assert gate(times=2.0, median=0.0).clip_factor(5.0) == 1.0
    assert admitted(gate(times=2.0, median=0.0)) == 5.0


def gate(payload="delta", max_norm=0.0, clip_norm=0.0, **relative):
    """What a round asks for."""
    return Gate(UpdateShape.of([payload], LAYOUT, LAYOUT), 1000, max_norm, clip_norm, 0, RelativeNorm(**relative))


@pytest.fixture(autouse=True)
def _update(tmp_path, monkeypatch):
    """An update of norm 5."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_bytes(pack(TENSORS, LAYOUT))


def admitted(gate):
    """Its norm, if the gate lets it through."""
    return next(iter(gate.check_file(Path("x"), digest_of(pack(TENSORS, LAYOUT))).values()))


def test_a_longer_update_is_refused():
    """5 is not over 2 * 2.5, and is over 2 * 2; the words say where the limit comes from."""
    assert admitted(gate(times=2.0, median=2.5)) == 5.0
    words = "expected an update of norm 4 at most .2 times the median of those that counted., got 5"
    with pytest.raises(Refused, match=words) as refused:
        admitted(gate(times=2.0, median=2.0))
    assert refused.value.reason == REFUSAL_REASON_NORM


def test_a_longer_update_is_clipped_where_that_is_asked_for():
    """To 4 of 5; to the smaller of two limits; a shorter one is left alone."""
    assert admitted(gate(times=2.0, median=2.0, clips=True)) == 5.0
    assert gate(times=2.0, median=2.0, clips=True).clip_factor(5.0) == 0.8
    assert gate(times=2.0, median=2.0, clips=True, clip_norm=1.0).clip_factor(5.0) == 0.2
    assert gate(times=2.0, median=2.0, clips=True, clip_norm=9.0).clip_factor(5.0) == 0.8
    assert gate(times=2.0, median=2.0, clips=True).clip_factor(3.0) == 1.0
    assert gate(times=2.0, median=2.0).clip_factor(5.0) == 1.0


def test_the_absolute_limit_stands_beside_it():
    """It is looked at first, and without words on medians."""
    with pytest.raises(Refused, match="expected an update of norm 3 at most, got 5"):
        admitted(gate(times=2.0, median=2.0, max_norm=3.0))


def test_what_is_no_delta_has_no_limit():
    """A full gradient's norm is no norm of a delta."""
    assert admitted(gate("full_gradient", times=2.0, median=2.0)) == 5.0
    assert gate("full_gradient", times=2.0, median=2.0, clips=True).clip_factor(5.0) == 1.0


ROUND = {"clients_per_round": 3, "max_relative_norm": 1.0, "over_relative_norm": "clip"}


class Growing(Device):
    """Sends longer updates from round to round, whatever the model: 1, 2, 3 ... times the first ones."""

    async def update(self, world, assignment):
        """The answer to an assignment, the same each time."""
        _, layout, _ = await self.fetch(world, assignment.resources[0].digest)
        length = 0.01 * (1 + assignment.key.round)
        delta = {entry.name: torch.full(entry.shape, length) for entry in layout.entries}
        return announced(assignment, layout, bytes(pack(delta, layout)), attempt=assignment.attempt)


PLAIN = {"model": "plain"}


async def lived(folder, dies_at=None):
    """A run of six rounds in which the later updates are clipped, and whose coordinator may die once."""
    devices = [Growing(name, options=PLAIN) for name in "abc"]

    async def work(world):
        for device in devices:
            await device.come(world)
        if not world.coordinator.runs():
            await world.create(task={"name": TASK, "options": PLAIN}, round=ROUND, stop={"rounds": 6})
        return await world.completed()

    if dies_at is not None:
        async with World(folder, Journal(dies_at)) as world:
            world.spawn(work(world))
            await until(lambda: world.journal.dead, "it dies, and has not written all before")
    async with World(folder) as world:
        digests = await work(world)
        lines = [world.store.updates("r", round_, 0) for round_ in range(6)]
        return digests, lines, world.journal.writes


async def test_the_limit_is_of_committed_rounds_and_outlives_a_restart(tmp_path):
    """Rounds 0 to 2 clip nothing, later ones to the median of the rounds before them.

    A coordinator that dies in round 4, or before the ledger's line on a checkpoint, comes to the same models.
    """
    digests, lines, writes = await lived(tmp_path / "undisturbed")
    for round_, updates in enumerate(lines):
        before = median([each.norm for earlier in lines[:round_] for each in earlier]) if round_ >= 3 else float("inf")
        assert [each.clip_factor for each in updates] == [min(1.0, before / each.norm) for each in updates]
    # 1, 2 and 3 make 2, of which 4 is the double; 1 to 4 make 2.5, half of 5; 1 to 5 make 3, half of 6.
    factors = [each.clip_factor for updates in lines for each in updates]
    assert factors == pytest.approx(9 * [1.0] + 9 * [0.5])
    opened = [at for at, name in enumerate(writes, start=1) if name == "open_attempt"]
    saved = [at for at, name in enumerate(writes, start=1) if name == "save"]
    for name, dies_at in (("opened", opened[4]), ("saved", saved[4])):
        assert (await lived(tmp_path / name, dies_at))[0] == digests


async def test_an_ended_run_that_is_extended_after_a_restart_knows_its_norms(tmp_path):
    """Its limit is read back with it."""
    async with World(tmp_path) as world:
        for name in "abc":
            await Device(name).come(world)
        run = await world.create(round=ROUND, stop={"rounds": 3})
        await world.completed()
        limit = run.norms.limit(run.config.round)
    async with World(tmp_path) as world:
        run = world.coordinator.run("r")
        await world.coordinator.extend(run, 1, 0.0, "admin")
        assert run.norms.limit(run.config.round) == limit
        assert limit.limit > 0
