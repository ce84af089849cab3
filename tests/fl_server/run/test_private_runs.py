"""Runs with client-level privacy: bits after a kill, charges, budgets, backups, and what is refused or not kept."""

from __future__ import annotations

import asyncio
import math
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fl_common.privacy.accountant import Mechanism, epsilon_of
from fl_server.errors import InvalidInput
from fl_server.rpc.views import run_status
from fl_server.store import state_directory
from tests.fl_server import harness
from tests.fl_server.devices import Device
from tests.fl_server.harness import Journal, World, until
from tests.fl_server.killed_runs import NAMES, complete_run, completed_after_kill
from tests.marks import slow_except

ROUNDS = 5
PRIVACY: dict[str, Any] = {
    "unit": "client",
    "noise_multiplier": 1.0,
    "clip": 0.5,
    "delta": 0.01,
    "max_epsilon": 50.0,
    "clip_quantile": 0.6,
}
PLAIN = {"name": "tests.processes.tiny_task:Tiny", "options": {"model": "plain"}}
PRIVATE: dict[str, Any] = {
    "task": PLAIN,
    "round": {"sampling": "bernoulli", "rate": 0.4},
    "population": 3,
    "privacy": PRIVACY,
    "stop": {"rounds": ROUNDS},
}
NOT_SECRET = SimpleNamespace(token_bytes=lambda size: bytes(range(size)))
Charges = list[tuple[int, int, int, float]]


@pytest.fixture(autouse=True)
def _one_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets are made by chance: here all runs have the same, so that their bits can be compared."""
    monkeypatch.setattr(state_directory, "secrets", NOT_SECRET)


def devices() -> list[Device]:
    """Three devices with the plain model."""
    return [Device(name, options={"model": "plain"}) for name in NAMES]


def charges(world: World, account: str = PLAIN["name"]) -> Charges:  # type: ignore[assignment]
    """(number, round, attempt, clip) of each charge."""
    return [(charge.number, charge.round, charge.attempt, charge.clip) for charge in world.store.charges(account)]


async def outcome(folder: Path, dies_at: int | str | None = None, **sections: Any) -> tuple[list[str], Any, Charges]:
    """Model digests, accepted lists and charges of a run whose coordinator was killed once, or not."""
    async with completed_after_kill(folder, devices(), dies_at, **PRIVATE | sections) as (world, digests):
        return digests, [world.store.accepted("r", round_, 0) for round_ in range(ROUNDS)], charges(world)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Any, Charges]:
    """The outcome without a kill."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_directory, "secrets", NOT_SECRET)
        return asyncio.run(outcome(tmp_path_factory.mktemp("undisturbed")))


def test_rounds_have_any_number_of_clients_and_each_is_charged(undisturbed: tuple[list[str], Any, Charges]) -> None:
    """One of the five rounds has no update. Every round has another model: the noise is there without updates too.

    The clip of each round is in its charge, before the round's assignments are sent.
    """
    digests, accepted, charged = undisturbed
    sizes = [len(clients) for clients in accepted]
    assert 0 in sizes
    assert max(sizes) >= 2
    assert len(set(digests)) == ROUNDS
    assert [charge[:3] for charge in charged] == [(round_ + 1, round_, 0) for round_ in range(ROUNDS)]
    clips = [clip for _, _, _, clip in charged]
    assert clips[0] == PRIVACY["clip"]
    assert len(set(clips)) > 2


@pytest.mark.parametrize("dies_at", slow_except([*range(9, 46), "save"], 20, "save"))
async def test_a_kill_after_any_write_changes_no_bit_and_no_charge(
    tmp_path: Path, undisturbed: tuple[list[str], Any, Charges], dies_at: int | str
) -> None:
    """The same cohorts, noise and models, and no draw is charged twice or not at all."""
    assert await outcome(tmp_path, dies_at) == undisturbed


@pytest.mark.parametrize("name", ["make", "counted"])
async def test_a_kill_after_a_file_of_secrets_changes_no_bit_and_no_charge(
    tmp_path: Path, undisturbed: tuple[list[str], Any, Charges], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The key is there and its run is not; or the charge is counted outside of the ledger, and no work was sent."""
    here, journal, original = devices(), Journal(name), getattr(state_directory.RunSecrets, name)
    with monkeypatch.context() as patch:
        patch.setattr(harness, "WRITES", harness.WRITES | {name})
        patch.setattr(state_directory.RunSecrets, name, lambda *args: journal.call(name, original, *args))
        async with World(tmp_path, journal) as world:
            world.spawn(complete_run(world, here, **PRIVATE))
            await until(lambda: journal.dead, "the coordinator is killed")
    here[0].kept.clear()
    async with World(tmp_path) as world:
        digests = await complete_run(world, here, **PRIVATE)
        found = digests, [world.store.accepted("r", round_, 0) for round_ in range(ROUNDS)], charges(world)
    assert found == undisturbed


async def test_the_budget_ends_the_run_and_holds_for_the_account(tmp_path: Path) -> None:
    """Three draws are allowed. Then neither this run nor another one on the account goes on; another account does."""
    most = epsilon_of({Mechanism(1.0, 0.4): 3}, 0.01)
    wanted = PRIVATE | {"privacy": PRIVACY | {"max_epsilon": most + 1e-9}}
    async with World(tmp_path) as world:
        for device in devices():
            await device.connect(world)
        run = await world.create(**wanted)
        assert len(await world.completed()) == 3
        assert run.state.ending == ("completed", "its privacy budget allows 3 draws")
        status = run_status(run).privacy
        assert (status.draws, status.most_draws, status.account) == (3, 3, PLAIN["name"])
        assert status.epsilon == pytest.approx(most)
        assert status.epsilon_of_seen_cohorts == pytest.approx(epsilon_of({Mechanism(1.0, 1.0): 3}, 0.01))
        with pytest.raises(InvalidInput, match="privacy.max_epsilon: expected at least .*, for one draw of this run"):
            await world.create(**(wanted | {"name": "s"}))
        other = {"name": "t", "privacy": wanted["privacy"] | {"account": "other"}}
        await world.create(**(wanted | other))
        assert len(await world.completed("t")) == 3


async def test_an_account_has_one_run_at_a_time(tmp_path: Path) -> None:
    """A second one is refused until the first has ended, and is charged after it."""
    async with World(tmp_path) as world:
        run = await world.create(**PRIVATE)
        with pytest.raises(InvalidInput, match="privacy.account: expected an account that no other run .* the run r:"):
            await world.create(**(PRIVATE | {"name": "s"}))
        await world.coordinator.actions.stop(run, "", "admin")
        for device in devices():
            await device.connect(world)
        second = await world.create(**(PRIVATE | {"name": "s", "stop": {"rounds": 2}}))
        await world.completed("s")
        assert [charge[:3] for charge in charges(world)] == [(1, 0, 0), (2, 1, 0)]
        assert second.account is not None
        await world.coordinator.actions.extend(second, 1, 0.0, "admin")
        await world.completed("s")
        assert charges(world)[-1][:3] == (3, 2, 0)


async def test_a_restored_backup_does_not_take_charges_back(tmp_path: Path) -> None:
    """The ledger of round 2 is put back after round 5: the account still has what was released."""
    folder, backup = tmp_path / "state", tmp_path / "backup.sqlite"
    async with World(folder) as world:
        await complete_run(world, devices(), **(PRIVATE | {"stop": {"rounds": 2}}))
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger, closing(sqlite3.connect(backup)) as copy:
        ledger.backup(copy)
    async with World(folder) as world:
        for device in devices():
            await device.connect(world)
        await world.coordinator.actions.extend(world.coordinator.run("r"), 3, 0.0, "admin")
        await world.completed()
        assert len(charges(world)) == ROUNDS
        epsilon = world.metric("fl_privacy_epsilon", run="r", accountant="renyi")
        assert epsilon == pytest.approx(epsilon_of({Mechanism(1.0, 0.4): ROUNDS}, 0.01))
    for path in folder.glob("ledger.sqlite*"):
        path.unlink()
    shutil.copy(backup, folder / "ledger.sqlite")
    async with World(folder) as world:
        found = world.store.charges(PLAIN["name"])
        assert [charge.number for charge in found] == [1, 2, 3, 4, 5]
        assert {(charge.noise_multiplier, charge.rate) for charge in found} == {(1.0, 0.4)}


async def test_nothing_of_single_clients_is_kept_beside_the_model(tmp_path: Path) -> None:
    """No mean loss of the clients, no norms of their updates, no metrics of their epochs; norms of the step are."""
    async with World(tmp_path) as world:
        await complete_run(world, devices(), **PRIVATE)
        commits = world.store.commits("r")
        assert {(commit.training_loss, commit.norms, tuple(commit.epochs)) for commit in commits} == {(None, "", ())}
        updates = [update for commit in commits for update in world.store.updates("r", commit.round, 0)]
        assert len(updates) == sum(commit.accepted for commit in commits) > 0
        kept = [(update.norms, update.training_loss, tuple(update.epochs)) for update in updates]
        assert kept == [(None, None, ())] * len(updates)
        assert all(math.isnan(update.norm) for update in updates)
        norms = world.coordinator.run("r").rounds.latest_statistics.norms
        assert {*norms} == {"aggregate", "direction", "clip"}


async def test_running_statistics_are_refused(tmp_path: Path) -> None:
    """A model with BatchNorm has means over clients without noise; the secret of the refused run is removed."""
    async with World(tmp_path) as world:
        with pytest.raises(InvalidInput, match=r"expected a model without running statistics with \[privacy\], .*got"):
            await world.create(**(PRIVATE | {"task": PLAIN | {"options": {"model": "batchnorm"}}}))
        assert not (tmp_path / "privacy" / "r.key").exists()


async def test_a_lost_secret_stops_the_run_alone(tmp_path: Path) -> None:
    """The coordinator starts, and the run names the file that is missing."""
    async with World(tmp_path) as world:
        await world.create(**PRIVATE)
    (tmp_path / "privacy" / "r.key").unlink()
    async with World(tmp_path) as world:
        problem = world.coordinator.table.not_loaded.get("r")
        assert problem is not None
        assert "r.key from a backup" in problem.explained


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"round": {}}, "round.sampling: expected 'bernoulli' with [privacy]"),
        ({"round": {"sampling": "bernoulli", "quorum": 2}}, "round.quorum: expected none with [privacy]"),
        ({"round": {"sampling": "bernoulli", "min_accepted": 2}}, "round.min_accepted: expected none with [privacy]"),
        ({"round": {"reducer": "median", "clients_per_round": 3, "quorum": 3}}, "round.reducer: expected 'mean' with"),
        ({"round": {"sampling": "bernoulli", "close": "goal"}}, "round.close: expected 'cohort' with [privacy]"),
        ({"round": {"sampling": "bernoulli", "max_relative_norm": 3.0}}, "round.max_relative_norm: expected 0.0"),
        ({"evaluation": {"clients_every": 1}}, "evaluation.clients_every: expected 0 with [privacy]: the metrics of"),
        ({"encodings": {"update": "int8"}}, "encodings.update: expected 'plain' with [privacy]"),
        ({"population": 0}, "population: expected N"),
        ({"population": 200}, "privacy.delta: expected at most 1 / population, 0.005, got 0.01"),
        ({"algorithm": {"name": "scaffold"}}, "algorithm.name: expected a method whose clients send their delta alone"),
        ({"algorithm": {"name": "mime"}}, "algorithm.name: expected a method whose clients send their delta alone"),
        (
            {"algorithm": {"name": "fedavg", "parameters": {"weights": "examples"}}},
            'algorithm.parameters.weights: expected "uniform" with [privacy]',
        ),
        ({"local": {"epochs": 1}}, "local.steps: expected a number of steps with [privacy]: fedcm divides"),
    ],
)  # fmt: skip
async def test_what_would_break_the_promise_is_refused(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    """Each with its reason; nothing is created."""
    async with World(tmp_path) as world:
        with pytest.raises(InvalidInput) as refused:
            await world.create(**(PRIVATE | sections))
        assert message in str(refused.value)
        assert not world.coordinator.runs()
