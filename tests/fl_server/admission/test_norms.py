"""Norm limits relative to earlier updates: the rounds that are used, longer updates, and restarts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import algorithms as fl
from fl_server.admission.client_rules import UpdateRefused
from fl_server.admission.gate import AdmissionGate
from fl_server.admission.norms import NO_LIMIT, NormHistory, RelativeNorm
from fl_server.aggregation.updates import UpdateShape
from fl_server.run_settings.sections import RoundSection
from fl_server.store.records import UpdateRecord
from protos.codec import Layout, digest_of, pack
from protos.fl.v1.training_pb2 import REFUSAL_REASON_RELATIVE_NORM, Assignment, UpdateHeader
from tests.fl_server.devices import Device, update_message
from tests.fl_server.harness import TASK, Journal, World, until

TENSORS = {"w": torch.tensor([3.0, 4.0])}
LAYOUT = Layout.of(TENSORS, trainable=("w",))
LIMITED = RoundSection(max_relative_norm=2.0)


def history(*rounds: Sequence[float]) -> NormHistory:
    """The history after committed rounds with these norms."""
    result = NormHistory()
    for norms in rounds:
        result = result.after({"delta": norm} for norm in norms)
    return result


def limit_after(*rounds: Sequence[float], model_norm: float = 0.0) -> float:
    """The limit of twice the reference after these rounds."""
    return history(*rounds).limit(LIMITED, model_norm).limit


def test_there_is_no_limit_before_three_rounds() -> None:
    """Two are too few."""
    assert limit_after([1.0] * 3, [2.0] * 3) == 0.0
    assert limit_after([1.0] * 3, [2.0] * 3, [1.0] * 3) == 4.0


def test_the_reference_is_the_largest_median_of_any_round() -> None:
    """It stays for the rest of the run, however short the updates of later rounds are; of a round one may be long."""
    rounds = [[1.0, 2.0, 50.0], [1.0, 3.0, 4.0], [1e-9] * 3]
    assert limit_after(*rounds) == limit_after(*rounds, *([1e-12] * 4 for _ in range(1000))) == 6.0
    assert limit_after(*rounds, [5.0, 6.0, 7.0]) == 12.0


def test_rounds_of_one_or_two_updates_are_compared_together() -> None:
    """By the lower median of the latest nine norms, so that one long update raises no limit for ever."""
    assert limit_after([1.0, 2.0], [3.0, 1e30], [4.0]) == 6.0
    assert limit_after([1.0], [1e30], [2.0]) == 4.0
    assert limit_after(*([float(norm)] for norm in range(1, 15))) == 20.0  # of 6 to 14


def test_the_model_s_norm_is_a_floor() -> None:
    """One part in a hundred of it, where all updates were shorter. A limit that clips has none."""
    assert limit_after(*[[1e-9] * 3] * 3, model_norm=500.0) == 10.0
    assert limit_after(*[[7.0] * 3] * 3, model_norm=500.0) == 14.0
    clips = RoundSection(max_relative_norm=2.0, over_relative_norm="clip")
    assert history(*[[1.0] * 3] * 3).limit(clips, 500.0).limit == 2.0


def test_without_the_setting_there_is_no_limit() -> None:
    """For any number of rounds."""
    assert history([1.0], [1.0], [1.0]).limit(RoundSection(max_relative_norm=0), 1.0) == NO_LIMIT


def test_a_median_of_zero_gives_no_limit() -> None:
    """A limit of 2 * 0 would refuse every update from then on."""
    assert gate(times=2.0, reference=0.0).clip_factor(5.0) == 1.0
    assert admitted(gate(times=2.0, reference=0.0)) == 5.0


def gate(
    payload: fl.Payload = "delta", max_norm: float = 0.0, clip_norm: float = 0.0, **relative: Any
) -> AdmissionGate:
    """A gate with these rules."""
    return AdmissionGate(
        UpdateShape.of([payload], LAYOUT, LAYOUT), 1000, max_norm, clip_norm, 0, RelativeNorm(**relative)
    )


@pytest.fixture(autouse=True)
def _update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of norm 5."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_bytes(pack(TENSORS, LAYOUT))


def admitted(gate: AdmissionGate) -> float:
    """The norm of the update in the file, if the gate admits it."""
    return next(iter(gate.check_file(Path("x"), digest_of(pack(TENSORS, LAYOUT))).values()))


def test_a_longer_update_is_refused() -> None:
    """5 is not over 2 * 2.5, and is over 2 * 2. The message names the source of the limit."""
    assert admitted(gate(times=2.0, reference=2.5)) == 5.0
    message = "expected an update of norm 4 at most .2 times the largest median of a round.*, got 5"
    with pytest.raises(UpdateRefused, match=message) as refused:
        admitted(gate(times=2.0, reference=2.0))
    assert refused.value.reason == REFUSAL_REASON_RELATIVE_NORM


def test_a_longer_update_is_clipped_if_configured() -> None:
    """From 5 to 4; to the smaller of two limits; a shorter update is unchanged."""
    assert admitted(gate(times=2.0, reference=2.0, clips=True)) == 5.0
    assert gate(times=2.0, reference=2.0, clips=True).clip_factor(5.0) == 0.8
    assert gate(times=2.0, reference=2.0, clips=True, clip_norm=1.0).clip_factor(5.0) == 0.2
    assert gate(times=2.0, reference=2.0, clips=True, clip_norm=9.0).clip_factor(5.0) == 0.8
    assert gate(times=2.0, reference=2.0, clips=True).clip_factor(3.0) == 1.0
    assert gate(times=2.0, reference=2.0).clip_factor(5.0) == 1.0


def test_the_absolute_limit_applies_too() -> None:
    """It is checked first, and its message does not mention medians."""
    with pytest.raises(UpdateRefused, match="expected an update of norm 3 at most .round.max_update_norm., got 5"):
        admitted(gate(times=2.0, reference=2.0, max_norm=3.0))


def test_other_payloads_than_the_delta_have_no_delta_limit() -> None:
    """The limit for deltas does not apply to a full gradient."""
    assert admitted(gate("full_gradient", times=2.0, reference=2.0)) == 5.0
    assert gate("full_gradient", times=2.0, reference=2.0, clips=True).clip_factor(5.0) == 1.0


ROUND = {"clients_per_round": 3, "max_relative_norm": 1.0, "over_relative_norm": "clip"}


class Growing(Device):
    """Sends longer updates each round, for any model: 1, 2, 3 ... times the first one."""

    async def update(self, world: World, assignment: Assignment) -> tuple[UpdateHeader, bytes]:
        """The update for an assignment, the same each time."""
        _, layout, _ = await self.fetch(world, assignment.resources[0].digest)
        length = 0.01 * (1 + assignment.key.round)
        delta = {entry.name: torch.full(entry.shape, length) for entry in layout.entries}
        return update_message(assignment, layout, bytes(pack(delta, layout)), attempt=assignment.attempt)


PLAIN = {"model": "plain"}


async def run_rounds(folder: Path, dies_at: int | None = None) -> tuple[list[str], list[list[UpdateRecord]], list[str]]:
    """Digests, ledger rows and writes of six rounds with clipped later updates. The coordinator may die once."""
    devices = [Growing(name, options=PLAIN) for name in "abc"]

    async def work(world: World) -> list[str]:
        for device in devices:
            await device.connect(world)
        if not world.coordinator.runs():
            await world.create(task={"name": TASK, "options": PLAIN}, round=ROUND, stop={"rounds": 6})
        return await world.completed()

    if dies_at is not None:
        async with World(folder, Journal(dies_at)) as world:
            world.spawn(work(world))
            await until(lambda: world.journal.dead, "the coordinator dies")
    async with World(folder) as world:
        digests = await work(world)
        lines = [world.store.updates("r", round_, 0) for round_ in range(6)]
        return digests, lines, world.journal.writes


async def test_the_limit_comes_from_committed_rounds_and_survives_a_restart(tmp_path: Path) -> None:
    """Rounds 0 to 2 clip nothing; later rounds clip to the largest median of the rounds before them.

    A coordinator that dies in round 4, or between a checkpoint and its commit, computes the same models.
    """
    digests, lines, writes = await run_rounds(tmp_path / "undisturbed")
    for round_, updates in enumerate(lines):
        before = max((median([each.norm for each in earlier]) for earlier in lines[:round_]), default=0.0)
        limit = before if round_ >= 3 else float("inf")
        assert [each.clip_factor for each in updates] == [min(1.0, limit / each.norm) for each in updates]
    # The median of round 2 is 3/4 of that of round 3, and so on.
    factors = [each.clip_factor for updates in lines for each in updates]
    assert factors == pytest.approx(9 * [1.0] + 3 * [3 / 4] + 3 * [4 / 5] + 3 * [5 / 6])
    opened = [at for at, name in enumerate(writes, start=1) if name == "open_attempt"]
    saved = [at for at, name in enumerate(writes, start=1) if name == "save"]
    for name, dies_at in (("opened", opened[4]), ("saved", saved[4])):
        assert (await run_rounds(tmp_path / name, dies_at))[0] == digests


async def test_a_run_that_is_extended_after_a_restart_keeps_its_limit(tmp_path: Path) -> None:
    """The limit is restored with the run."""
    async with World(tmp_path) as world:
        for name in "abc":
            await Device(name).connect(world)
        run = await world.create(round=ROUND, stop={"rounds": 3})
        await world.completed()
        limit = run.context.norms.limit(run.config.round, 1.0)
    async with World(tmp_path) as world:
        run = world.coordinator.run("r")
        await world.coordinator.actions.extend(run, 1, 0.0, "admin")
        assert run.context.norms.limit(run.config.round, 1.0) == limit
        assert limit.limit > 0


def test_a_history_that_was_put_back_gives_the_same_limits() -> None:
    """Bit for bit, also after further rounds. Before the first commit there is none."""
    first, other = history([1 / 3, 2.0], [0.1 + 0.2, 3.0, 4.0], [3.0, 4.0, 5.0]), NormHistory()
    other.put_back(first.to_text())
    for _ in range(3):
        assert other.to_text() == first.to_text()
        first, other = first.after([{"delta": 1e-7 / 3}] * 2), other.after([{"delta": 1e-7 / 3}] * 2)
    other.put_back("")
    assert other.reference("delta") == 0.0
