"""SIGKILL at each durable write of a private round, of the coordinator or a device, changes no bit and no charge."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fl_client.privacy.account import FILE, Account, read_account, write_account
from fl_common.privacy.accountant import Mechanism
from fl_ops.errors import OpsError
from fl_ops.simulate.engines.client_work import simulated_secret
from fl_ops.simulate.replay import open_ledger
from fl_server.store.state_directory import CHARGES
from tests.chaos.cluster import KillableCoordinator
from tests.chaos.points import EVERY_ROUND, PRIVATE, points
from tests.processes.federation import Daemon, Fleet, run_spec
from tests.processes.process import Workspace, eventually
from tests.processes.simulated import replay, simulated_digests

ROUNDS = 3
OF_CLIENTS: dict[str, Any] = {
    "local": {"epochs": None, "steps": 2},
    "round": {"sampling": "bernoulli", "rate": 0.9, "clients_per_round": None, "min_clients": 2},
    "population": 2,
    "privacy": {
        "unit": "client", "noise_multiplier": 0.5, "clip": 0.3, "delta": 0.01, "max_epsilon": 1000.0,
        "clip_quantile": 0.7,
    },
    "stop": {"rounds": ROUNDS},
}  # fmt: skip
POINTS = points(*EVERY_ROUND, *PRIVATE)
STEPS, BATCH, EXAMPLES = 2, 32, 192
OF_RECORDS: dict[str, Any] = {
    "privacy": {"unit": "record", "noise_multiplier": 1.5, "clip": 0.5, "delta": 1e-5},
    "local": {"epochs": None, "steps": STEPS, "batch_size": BATCH},
    "round": {"clients_per_round": 1, "min_clients": 1},
    "stop": {"rounds": 1},
}
_LATEST = 90
"""Changes of files in a start of a daemon and a round: far more than there are."""


class KillableFleet(Fleet):
    """A coordinator that kills itself at chosen points, and two daemons."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.server: KillableCoordinator = KillableCoordinator(
            workspace, {"limits": {"reattach_grace_s": 60.0}}
        ).serve()
        self.daemons = {f"edge-{index}": self.daemon(index, 2).start() for index in range(2)}
        self.until_all_present()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KillableFleet]:
    """The fleet of all points."""
    with Workspace(tmp_path_factory.mktemp("private")) as workspace:
        yield KillableFleet(workspace)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_a_coordinator_killed_at_each_write_makes_the_same_noise_and_charges_each_draw_once(
    fleet: KillableFleet, point: str
) -> None:
    """After the restart the models are those of the replay, which has the secret, and no account is behind."""
    name, server = point.replace(" ", "-").replace("'", ""), fleet.server
    server.orders.kill_at(point, 1)
    privacy = OF_CLIENTS["privacy"] | {"account": name}
    spec = run_spec(name, **OF_CLIENTS | {"privacy": privacy})
    with server.admin() as admin, suppress(OpsError):  # the call may die with the coordinator
        admin.runs.create_run(spec)
    eventually(lambda: server.orders.executed, f"the coordinator dies {point}")
    eventually(lambda: server.exit_code is not None, "it is dead")
    assert server.exit_code == -signal.SIGKILL
    server.serve()
    with server.admin() as admin:
        if name not in {run.run_id for run in admin.runs.list_runs()}:
            admin.runs.create_run(spec)
    assert len(server.digests(name)) == ROUNDS
    result = replay(server, name, clients=2)
    assert result.exit_code == 0, result.output
    state = Path(server.settings["state_dir"])
    ledger = open_ledger(state)
    try:
        charges = ledger.charges(name)
    finally:
        ledger.close()
    assert [charge.number for charge in charges] == list(range(1, ROUNDS + 1))
    assert [(charge.round, charge.attempt) for charge in charges] == [(round_, 0) for round_ in range(ROUNDS)]
    assert json.loads((state / "privacy" / CHARGES).read_text())[name]["number"] == ROUNDS


class KilledDaemon(Daemon):
    """A daemon that SIGKILL ends at a change of a file in its state directory."""

    step = 0

    def environment(self) -> dict[str, str]:
        """With the step."""
        return {**super().environment(), "KILL_AT": str(self.step), "KILL_IN": str(self.settings["state_dir"])}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_daemon_killed_at_each_write_makes_the_same_noise_and_is_charged_once(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon dies at its first, second, ... change of a file, until it comes through a round of records.

    Each round has the bits of a simulation with the device's secret. The account has each round's steps once: never
    less than was sent, and no more either, because the same work is charged once.
    """
    fleet = Fleet(workspace, 0)
    server = fleet.server
    daemon = fleet.daemon(0, 1)
    state = Path(daemon.settings["state_dir"])
    state.mkdir(mode=0o700)
    write_account(state / FILE, Account(simulated_secret("edge-0")))
    killed = KilledDaemon(workspace, server, "edge-0", process="killed")
    killed._module = "tests.processes.killed_daemon"
    killed.configure(**{name: daemon.settings[name] for name in ("state_dir", "shard", "task")})
    kills = 0
    for step in range(1, _LATEST):
        name = f"records-{step}"
        server.create(name, **OF_RECORDS)
        killed.step = step
        killed.start()
        eventually(partial(has_ended, server, killed, name), f"{name}: the daemon dies, or the run is over")
        if killed.exit_code is None and not is_over(server, name):
            raise AssertionError("it neither died nor came through")
        came_through = killed.exit_code is None
        if came_through:
            killed.clean_up()
        else:
            assert killed.exit_code == -signal.SIGKILL
            kills += 1
            daemon.start()
        digests = server.digests(name)
        daemon.clean_up()
        assert digests == simulated_digests(name, clients=1, **OF_RECORDS), name
        account = read_account(state / FILE)
        assert account is not None
        assert account.spent == {Mechanism(1.5, BATCH / EXAMPLES): step * STEPS}
        if came_through:
            break
    assert kills >= 15


def is_over(server: Any, run: str) -> bool:
    """Whether the run has ended."""
    return bool(server.run(run).HasField("ended"))


def has_ended(server: Any, daemon: Daemon, run: str) -> bool:
    """Whether the daemon is dead, or the run over."""
    return daemon.exit_code is not None or is_over(server, run)
