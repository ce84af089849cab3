"""Epsilon by the second accountant: with the draws that it is of, in a thread, and no coordinator needs it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from fl_common.privacy import loss_distributions
from fl_common.privacy.accountant import Mechanism, Spent, epsilon_of
from fl_common.privacy.loss_distributions import tight_epsilon_of
from fl_server import privacy_accounts
from fl_server.privacy_accounts import Question, SecondAccountant, Tight
from fl_server.rpc.admin import AdminService
from fl_web.facts.run import privacy_text
from protos.fl.v1 import admin_pb2 as pb
from tests.fl_server.devices import NO_CONTEXT
from tests.fl_server.harness import World
from tests.fl_server.killed_runs import complete_run
from tests.fl_server.run.test_private_runs import PRIVATE, ROUNDS, devices

SPENT: Spent = {Mechanism(1.0, 0.4): ROUNDS}


def question(draws: int) -> Question:
    """Of so many draws."""
    return Question({Mechanism(1.0, 0.1): draws}, {Mechanism(1.0, 1.0): draws}, 1e-5)


async def shown(world: World) -> pb.RunStatus:
    """The run as `fl run show` gets it."""
    admin = AdminService(world.services, world.coordinator)
    return (await admin.GetRun(pb.GetRunRequest(run_id="r"), NO_CONTEXT)).run


async def test_both_accountants_are_shown_and_named(tmp_path: Path) -> None:
    """In the reply that `fl run show` and the page read, and as metrics."""
    async with World(tmp_path) as world:
        await complete_run(world, devices(), **PRIVATE)
        run = await shown(world)
        by_losses = world.metric("fl_privacy_epsilon", run="r", accountant="loss_distributions")
        by_divergences = world.metric("fl_privacy_epsilon", run="r", accountant="renyi")
    tight = tight_epsilon_of(SPENT, 0.01)
    assert run.privacy.tight_epsilon == tight == by_losses
    assert run.privacy.tight_epsilon_of_seen_cohorts == tight_epsilon_of({Mechanism(1.0, 1.0): ROUNDS}, 0.01)
    assert run.privacy.epsilon == by_divergences == pytest.approx(epsilon_of(SPENT, 0.01))
    text = privacy_text(run)
    assert (
        f"{tight:.3g} ({run.privacy.tight_epsilon_of_seen_cohorts:.3g} for who sees the cohorts) by dp-accounting"
        in text
    )
    assert (
        f"{run.privacy.epsilon:.3g} ({run.privacy.epsilon_of_seen_cohorts:.3g} for who sees the cohorts) by Renyi"
        in text
    )


async def test_without_the_extra_the_first_accountant_is_shown_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run ends after the same draws, and the text names the one accountant."""
    monkeypatch.setattr(loss_distributions, "find_spec", lambda name: None)
    async with World(tmp_path) as world:
        await complete_run(world, devices(), **PRIVATE)
        run = await shown(world)
        assert world.metric("fl_privacy_epsilon", run="r", accountant="renyi") == run.privacy.epsilon
    assert not run.privacy.HasField("tight_epsilon")
    assert "Renyi" in privacy_text(run)
    assert "dp-accounting" not in privacy_text(run)


async def test_an_answer_is_of_its_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is computed, a metric has the older one, and a status has none of other draws."""
    goes_on = Event()

    def slow(spent: Spent, delta: float) -> float:
        goes_on.wait()
        return float(sum(spent.values()))

    monkeypatch.setattr(privacy_accounts, "tight_epsilon_of", slow)
    monkeypatch.setattr(privacy_accounts, "is_installed", lambda: True)
    with ThreadPoolExecutor(1) as pool:
        accountant = SecondAccountant(pool)
        assert accountant.newest("r", question(1)) is None
        assert accountant.newest("r", question(2)) is None  # asked again later: one computation at a time
        goes_on.set()
        await accountant.settled("r", question(2))
        assert accountant.exact("r", question(2)) == Tight(2.0, 2.0)
        goes_on.clear()
        assert accountant.newest("r", question(3)) == Tight(2.0, 2.0)
        assert accountant.exact("r", question(3)) is None
        goes_on.set()


async def test_an_error_of_the_library_leaves_the_first_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The question is not asked again and again."""

    def fails(*_: Any) -> float:
        raise MemoryError

    monkeypatch.setattr(privacy_accounts, "tight_epsilon_of", fails)
    monkeypatch.setattr(privacy_accounts, "is_installed", lambda: True)
    with ThreadPoolExecutor(1) as pool:
        accountant = SecondAccountant(pool)
        await accountant.settled("r", question(1))
        assert accountant.exact("r", question(1)) == Tight(None, None)
