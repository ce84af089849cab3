"""The same model bit for bit: repeated runs, a coordinator killed at any point, restarted daemons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes.federation import Fleet
from tests.processes.process import HERE
from tests.processes.simulated import check_replay, simulated_digests

FEDCM = {"name": "fedcm", "parameters": {"alpha": 0.2}}
FEDAVG = {"name": "fedavg"}
PROXSKIP: dict[str, Any] = {"algorithm": {"name": "proxskip", "parameters": {"p": 0.3}}, "population": 3}
"""Rounds of random lengths with states on the clients, whose sum is zero."""


@pytest.mark.slow  # runs that are killed, simulated or replayed below have the same bits, too
@pytest.mark.parametrize("algorithm", [FEDCM, FEDAVG], ids=["fedcm", "fedavg"])
def test_a_run_repeats_itself(fleet: Fleet, algorithm: dict[str, Any]) -> None:
    """Two runs with the same settings and seed have the same model after every round. Another seed differs."""
    server, name = fleet.server, algorithm["name"]
    server.create(f"{name}-first", algorithm=algorithm)
    first = server.digests(f"{name}-first")
    server.create(f"{name}-second", algorithm=algorithm)
    server.create(f"{name}-other", algorithm=algorithm, seed=8)
    assert first == server.digests(f"{name}-second")
    assert first != server.digests(f"{name}-other")
    assert len(set(first)) == 3


PRIVATE: dict[str, Any] = {
    "algorithm": {"name": "fedcm"},
    "local": {"epochs": None, "steps": 4},
    "round": {"sampling": "bernoulli", "rate": 0.7},
    "population": 3,
    "privacy": {
        "unit": "client",
        "noise_multiplier": 0.5,
        "clip": 0.3,
        "delta": 0.01,
        "max_epsilon": 100.0,
        "clip_quantile": 0.7,
    },
    "stop": {"rounds": 4},
}


def kill_at(fleet: Fleet, run: str, event: str, detail: str) -> None:
    """SIGKILL the coordinator at an event of the run's second round, and restart it."""
    server = fleet.server
    with server.admin() as admin:
        for status in admin.runs.watch_run(run):
            fleet.release()  # not before the events are watched
            if status.run.rounds_done == 1 and status.event == event and status.detail.startswith(detail):
                server.kill()
                break
    server.serve()


@pytest.mark.parametrize(
    ("event", "detail"),
    [
        pytest.param("committed", "", id="between-rounds", marks=pytest.mark.slow),
        pytest.param("phase", "collecting", id="drawn", marks=pytest.mark.slow),
        pytest.param("admitted", "edge-", id="one-admitted", marks=pytest.mark.slow),  # the half-delivered run below
        pytest.param("phase", "stepping", id="stepping", marks=pytest.mark.slow),
        pytest.param("phase", "committing", id="committing"),
    ],
)
def test_a_killed_coordinator_ends_with_the_same_models(
    fleet: Fleet, undisturbed: list[str], event: str, detail: str
) -> None:
    """After SIGKILL at any point of a round and a restart, the run continues by itself and ends with the same model."""
    fleet.hold()
    run = fleet.server.create(f"killed-{event}-{detail or 'any'}".strip("-"))
    kill_at(fleet, run, event, detail)
    assert undisturbed == fleet.server.digests(run)
    assert all(summary.seconds > 0 for summary in fleet.server.rounds(run))


@pytest.mark.slow  # test_several_tasks kills both processes of a run with states
def test_a_run_that_skips_at_random_keeps_its_bits(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon is killed in the first round, the coordinator in the second: the models of simulation and replay.

    The number of steps of a round and the states of all clients are the same after both restarts.
    """
    monkeypatch.syspath_prepend(HERE)
    fleet.hold()
    fleet.server.create("skipping", **PROXSKIP)
    killed = fleet["edge-1"]
    killed.logged("assignment", run="skipping", round=0)
    killed.kill()
    killed.start()
    killed.logged("assignment", count=2, run="skipping", round=0)
    kill_at(fleet, "skipping", "admitted", "edge-")
    assert fleet.server.digests("skipping") == simulated_digests("skipping", **PROXSKIP)
    check_replay(fleet.server, "skipping")


@pytest.mark.slow  # test_secure_aggregation kills a run with privacy of clients, too
def test_a_private_run_keeps_its_bits(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator is killed in a step: cohorts and noise are those of the simulation and the replay."""
    monkeypatch.syspath_prepend(HERE)
    fleet.hold()
    fleet.server.create("private", **PRIVATE)
    kill_at(fleet, "private", "phase", "stepping")
    digests = fleet.server.digests("private")
    secret = (Path(fleet.server.settings["state_dir"]) / "privacy" / "private.key").read_bytes()
    assert digests == simulated_digests("private", secret=secret, **PRIVATE)
    assert digests != simulated_digests("private", **PRIVATE)
    check_replay(fleet.server, "private")
    spent = fleet.server.run("private").privacy
    assert spent.draws == 4
    assert spent.clip != PRIVATE["privacy"]["clip"]


def test_an_acknowledged_update_is_not_sent_again_after_a_kill(fleet: Fleet, undisturbed: list[str]) -> None:
    """One update is admitted, the other held. After SIGKILL the first one is kept and not trained again."""
    quick, slow = fleet.half_delivered("half")
    fleet.server.kill()
    fleet.server.serve()
    assert fleet.server.run("half").admitted == 1
    slow.hold.unlink()
    assert undisturbed == fleet.server.digests("half")
    assert len(quick.events("trained", run="half", round=0)) == 1


def test_a_stopped_coordinator_continues_after_a_restart(fleet: Fleet, undisturbed: list[str]) -> None:
    """After SIGTERM during a round it drains and exits with 0. After a restart the run ends with the same model."""
    _, slow = fleet.half_delivered("drained")
    assert fleet.server.terminate() == 0
    assert fleet.server.events("draining")
    assert slow.logged("drained", by_coordinator=True)
    fleet.server.serve()
    slow.hold.unlink()
    assert undisturbed == fleet.server.digests("drained")


def test_a_daemon_that_comes_back_within_the_grace_delivers(fleet: Fleet, undisturbed: list[str]) -> None:
    """A daemon that is killed during training and restarted trains the same update. The model does not change."""
    _, slow = fleet.half_delivered("daemon-back")
    slow.kill()
    slow.start()
    slow.logged("assignment", count=2, run="daemon-back", round=0)
    slow.hold.unlink()
    assert undisturbed == fleet.server.digests("daemon-back")


def test_an_acknowledged_update_of_a_dead_daemon_counts(fleet: Fleet, undisturbed: list[str]) -> None:
    """A daemon that is killed after its receipt counts in the round, and in later ones after its restart."""
    quick, slow = fleet.half_delivered("daemon-dead")
    quick.logged("submitted", run="daemon-dead", round=0)
    quick.kill()
    slow.hold.unlink()
    fleet.server.until("daemon-dead", lambda run: run.rounds_done, "the round is committed without it")
    quick.start()
    assert undisturbed == fleet.server.digests("daemon-dead")
    assert fleet.server.rounds("daemon-dead")[0].accepted == 2
