"""A daemon with an assignment of private steps: charged first, the same after a restart, and limited by its site."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_client.privacy.account import FILE, Account, read_account
from fl_client.privacy.files import WITNESS, AccountFiles
from fl_common.privacy.accountant import Mechanism
from fl_tasks import Batched, Samples, Shard
from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2
from tests.fl_client.fake_coordinator import FakeCoordinator, TinyTask
from tests.fl_client.fleet import Fleet
from tests.processes.policies import without_floors

NOISE, CLIP, DELTA = 2.0, 0.5, 1e-5
STEPS = 3
QUICK = {"check_s": 0.02}


def private(coordinator: FakeCoordinator, round_number: int = 0, **privacy: Any) -> training_pb2.Assignment:
    """Three private steps on batches of about one of the two examples."""
    work = coordinator.assignment(round_number, local_steps=STEPS)
    work.training.batch_size = 1
    given: dict[str, Any] = {"unit": "record", "noise_multiplier": NOISE, "clip": CLIP, "delta": DELTA} | privacy
    work.training.privacy.CopyFrom(training_pb2.LocalPrivacy(**given))
    return work


def account(fleet: Fleet) -> Account:
    """The account as it is on the disk."""
    found = read_account(fleet.folder / FILE)
    assert found is not None
    return found


def spent(fleet: Fleet) -> int:
    """Steps on the account."""
    return sum(account(fleet).spent.values())


def failures(coordinator: FakeCoordinator) -> list[pb.WorkFailure]:
    """All reported failures."""
    return [failure for status in coordinator.calls["ReportStatus"] for failure in status.failures]


async def test_the_header_says_what_was_applied_and_nothing_of_the_data(
    fleet: Fleet, coordinator: FakeCoordinator
) -> None:
    """No loss, no metrics of epochs, no seconds; the number of examples is the registered one."""
    async with fleet.daemon() as daemon:
        await coordinator.until_called("Attend")
        coordinator.push(assignment=private(coordinator))
        await coordinator.until(lambda: coordinator.updates)
        header = coordinator.updates[0][0]
        await daemon.until(lambda: daemon.count("privacy_epsilon") > 0)
    registered = coordinator.calls["Register"][0].tasks[0].train_examples
    assert (header.num_examples, header.num_steps, header.training_seconds) == (registered, STEPS, 0.0)
    assert not header.HasField("training_loss")
    assert not header.epochs
    assert header.privacy.applied == training_pb2.LocalPrivacy(
        unit="record", noise_multiplier=NOISE, clip=CLIP, delta=DELTA
    )
    assert header.privacy.epsilon == pytest.approx(account(fleet).epsilon(DELTA))
    assert account(fleet).spent == {Mechanism(NOISE, 1 / registered): STEPS}


async def test_the_same_work_after_a_restart_has_the_same_bits_and_is_charged_once(
    fleet: Fleet, coordinator: FakeCoordinator
) -> None:
    """The saved update is lost too, so that the second process trains again. Other work has other noise."""
    digests = []
    for attempt in range(3):
        async with fleet.daemon():
            await coordinator.until_called("Attend", attempt + 1)
            work = private(coordinator)
            if attempt == 2:
                work.training.learning_rate *= 2
            coordinator.push(assignment=work)
            await coordinator.until(lambda: coordinator.updates)
        digests.append(coordinator.updates.pop(0)[0].digest.value)
        coordinator.receipts.clear()
        for kept in (fleet.folder / "pending").iterdir():
            kept.unlink()
    assert digests[0] == digests[1] != digests[2]
    assert spent(fleet) == 2 * STEPS


async def test_a_charge_that_a_kill_left_alone_is_counted_before_its_steps(
    fleet: Fleet, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account was written and its witness was not: the same work is not charged again, and an older copy is."""
    count = AccountFiles.count

    def killed(files: AccountFiles, given: Account) -> None:
        if given.charges:
            raise OSError(5, "as if the process had ended here")
        count(files, given)

    for attempt in range(2):
        with monkeypatch.context() as patched:
            if not attempt:
                patched.setattr(AccountFiles, "count", killed)
            async with fleet.daemon():
                await coordinator.until_called("Attend", attempt + 1)
                coordinator.push(assignment=private(coordinator))
                await coordinator.until(lambda: coordinator.updates or failures(coordinator))
        witness = AccountFiles(fleet.folder).witness()
        assert witness is not None
        assert (witness.charges, account(fleet).charges, len(coordinator.updates)) == (attempt, 1, attempt)
        if not attempt:
            coordinator.calls["ReportStatus"].clear()
    assert spent(fleet) == STEPS


async def test_no_step_is_made_before_the_charge_is_on_the_disk(
    fleet: Fleet, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A charge that cannot be written ends the work; the next one is charged as a whole."""
    write = AccountFiles.write

    def full(files: AccountFiles, given: Account) -> None:
        if given.spent:
            raise OSError(28, "No space left on device")
        write(files, given)

    with monkeypatch.context() as patched:
        patched.setattr(AccountFiles, "write", full)
        async with fleet.daemon() as daemon:
            await coordinator.until_called("Attend")
            coordinator.push(assignment=private(coordinator))
            await coordinator.until(lambda: failures(coordinator))
            assert daemon.count("training_steps_total") == 0
    (failure,) = failures(coordinator)
    assert failure.reason == pb.FAILURE_REASON_RESOURCES
    assert account(fleet).spent == {}


@pytest.mark.parametrize("lost", [FILE, WITNESS])
async def test_a_lost_account_ends_private_training_until_the_owner_resets_it(
    fleet: Fleet, coordinator: FakeCoordinator, lost: str
) -> None:
    """A new account would forget what was spent. Other training goes on."""
    async with fleet.daemon():
        await coordinator.until_called("Attend")
        coordinator.push(assignment=private(coordinator))
        await coordinator.until(lambda: coordinator.updates)
    (fleet.folder / "identity.json").write_text('{"client_id": "edge-1"}')
    (fleet.folder / lost).unlink()
    async with fleet.daemon() as daemon:
        await coordinator.until_called("Attend", 2)
        coordinator.push(assignment=private(coordinator, 1))
        await coordinator.until(lambda: failures(coordinator))
        assert daemon.count("training_steps_total") == 0
        coordinator.push(assignment=coordinator.assignment(2))
        await coordinator.until(lambda: len(coordinator.updates) == 2)
    (failure,) = failures(coordinator)
    assert "privacy account is lost" in failure.message
    AccountFiles(fleet.folder).reset(keep=False)
    async with fleet.daemon():
        await coordinator.until_called("Attend", 3)
        coordinator.push(assignment=private(coordinator, 3))
        await coordinator.until(lambda: len(coordinator.updates) == 3)
    assert spent(fleet) == STEPS


class SampledTask(TinyTask):
    """The same examples, read one by one."""

    def train_data(self, shard: Shard) -> Samples:  # type: ignore[override]
        """Pairs (inputs, target)."""
        held = super().train_data(shard)
        return Samples([*zip(held.inputs, held.targets, strict=True)])


class BatchedTask(TinyTask):
    """The same examples, in batches of the task's own."""

    def train_data(self, shard: Shard) -> Batched:  # type: ignore[override]
        """One batch."""
        held = super().train_data(shard)
        return Batched(lambda _: [(held.inputs, held.targets)], 1, len(held))


class LoopTask(TinyTask):
    """The same examples, in a training loop of the task's own."""

    def train(self, model: Any, data: Any, context: Any) -> None:
        """Never called."""
        raise AssertionError("expected no training")


OTHER_TASKS = {
    BatchedTask: "got Batched, whose batches the task makes of several examples",
    LoopTask: "expected a task without a training loop of its own",
}


async def test_samples_are_drawn_one_by_one_with_the_same_bits(fleet: Fleet, coordinator: FakeCoordinator) -> None:
    """A restart makes the same update, which is charged once."""
    fleet.task, digests = SampledTask(), []
    for attempt in range(2):
        async with fleet.daemon():
            await coordinator.until_called("Attend", attempt + 1)
            coordinator.push(assignment=private(coordinator))
            await coordinator.until(lambda: coordinator.updates or failures(coordinator))
        assert not failures(coordinator)
        digests.append(coordinator.updates.pop(0)[0].digest.value)
        coordinator.receipts.clear()
        for kept in (fleet.folder / "pending").iterdir():
            kept.unlink()
    assert digests[0] == digests[1]
    assert spent(fleet) == STEPS


@pytest.mark.parametrize("task", OTHER_TASKS)
async def test_what_the_task_does_by_itself_is_refused_with_the_reason(
    fleet: Fleet, coordinator: FakeCoordinator, task: type[TinyTask]
) -> None:
    """Nothing is charged."""
    fleet.task = task()
    async with fleet.daemon():
        await coordinator.until_called("Attend")
        coordinator.push(assignment=private(coordinator))
        await coordinator.until(lambda: failures(coordinator))
    assert OTHER_TASKS[task] in failures(coordinator)[0].message
    assert not (fleet.folder / FILE).exists()


async def test_the_site_s_limit_ends_the_training(fleet: Fleet, coordinator: FakeCoordinator, tmp_path: Path) -> None:
    """A round that would exceed it is refused before its first step, and is not charged."""
    one_round = Account.new().with_charge(b"", Mechanism(NOISE, 1.0), STEPS, DELTA).epsilon()
    policy = tmp_path / "policy.toml"
    policy.write_text(without_floors(f"[privacy]\nmax_epsilon = {1.2 * one_round}\n[share]\nprivacy = false"))
    async with fleet.daemon(policy=policy, gates=QUICK) as daemon:
        await coordinator.until_called("Attend")
        work = private(coordinator)
        work.training.batch_size = 100
        coordinator.push(assignment=work)
        await coordinator.until(lambda: coordinator.updates)
        assert not coordinator.updates[0][0].privacy.HasField("epsilon")
        second = private(coordinator, 1)
        second.training.batch_size = 100
        coordinator.push(assignment=second)
        await coordinator.until(lambda: failures(coordinator))
        assert daemon.count("policy_refusals_total", rule="privacy") == 1
        assert daemon.count("training_steps_total") == STEPS
    (failure,) = failures(coordinator)
    assert failure.reason == pb.FAILURE_REASON_POLICY
    assert failure.message.startswith("policy: privacy: privacy.max_epsilon is ")
    assert spent(fleet) == STEPS


async def test_the_site_s_least_wins_over_the_run_s(fleet: Fleet, coordinator: FakeCoordinator, tmp_path: Path) -> None:
    """More noise and a smaller delta than the run's; a run without privacy is refused."""
    policy = tmp_path / "policy.toml"
    policy.write_text(without_floors("[privacy]\nmin_noise_multiplier = 7.0\nmax_delta = 1e-7"))
    async with fleet.daemon(policy=policy, gates=QUICK):
        await coordinator.until_called("Attend")
        coordinator.push(assignment=private(coordinator))
        await coordinator.until(lambda: coordinator.updates)
        coordinator.push(assignment=coordinator.assignment(1))
        await coordinator.until(lambda: failures(coordinator))
    applied = coordinator.updates[0][0].privacy.applied
    assert (applied.noise_multiplier, applied.delta, applied.clip) == (7.0, 1e-7, CLIP)
    assert "the run states no differential privacy" in failures(coordinator)[0].message


def _personal(work: training_pb2.Assignment) -> None:
    work.personal.append("seen")


def _clipped(work: training_pb2.Assignment) -> None:
    work.training.max_gradient_norm = 1.0


def _sam(work: training_pb2.Assignment) -> None:
    work.training.algorithm.name = "fedsam"


REFUSED: list[tuple[dict[str, Any], Callable[[training_pb2.Assignment], None], str]] = [
    ({"unit": "client"}, lambda work: None, 'unit: expected "record"'),
    ({"noise_multiplier": 0.0}, lambda work: None, "noise_multiplier: expected a number over 0"),
    ({"clip": float("nan")}, lambda work: None, "clip: expected a number over 0"),
    ({"delta": 1.0}, lambda work: None, "delta: expected a number over 0 and below 1"),
    ({}, _personal, "expected a run without personal parameters"),
    ({}, _clipped, "expected max_gradient_norm = 0"),
    ({}, _sam, "its ascent step depends on the whole batch, without noise"),
]


@pytest.mark.parametrize(("privacy", "change", "message"), REFUSED, ids=[row[2][:20] for row in REFUSED])
async def test_what_would_reveal_more_is_refused_and_costs_nothing(
    fleet: Fleet,
    coordinator: FakeCoordinator,
    privacy: dict[str, Any],
    change: Callable[[training_pb2.Assignment], None],
    message: str,
) -> None:
    """The device checks for itself, before it charges."""
    async with fleet.daemon() as daemon:
        await coordinator.until_called("Attend")
        work = private(coordinator, **privacy)
        change(work)
        coordinator.push(assignment=work)
        await coordinator.until(lambda: failures(coordinator))
        assert daemon.count("training_steps_total") == 0
    assert message in failures(coordinator)[0].message
    assert not (fleet.folder / FILE).exists() or not json.loads((fleet.folder / FILE).read_text())["spent"]
