"""The same model bit for bit: repeated runs, a coordinator killed at any point, daemons that come back."""

from __future__ import annotations

import pytest

FEDCM = {"name": "fedcm", "parameters": {"alpha": 0.2}}
FEDAVG = {"name": "fedavg"}


@pytest.mark.parametrize("algorithm", [FEDCM, FEDAVG], ids=["fedcm", "fedavg"])
def test_a_run_repeats_itself(fleet, algorithm):
    """Two runs of the same settings and seed have the same model after every round; another seed has another."""
    server, name = fleet.server, algorithm["name"]
    server.create(f"{name}-first", algorithm=algorithm)
    first = server.digests(f"{name}-first")
    server.create(f"{name}-second", algorithm=algorithm)
    server.create(f"{name}-other", algorithm=algorithm, seed=8)
    assert first == server.digests(f"{name}-second")
    assert first != server.digests(f"{name}-other")
    assert len(set(first)) == 4


def kill_at(fleet, run, event, detail):
    """SIGKILL the coordinator when it tells of an event of the run's third round, and start it again."""
    server = fleet.server
    with server.admin() as admin:
        for told in admin.watch_run(run):
            fleet.release()  # only now that somebody watches
            if told.run.rounds_done == 2 and told.event == event and told.detail.startswith(detail):
                server.kill()
                break
    server.serve()


@pytest.mark.parametrize(
    ("event", "detail"),
    [
        pytest.param("committed", "", id="between-rounds"),
        pytest.param("phase", "collecting", id="drawn"),
        pytest.param("admitted", "edge-", id="one-admitted"),
        pytest.param("phase", "stepping", id="stepping"),
        pytest.param("phase", "committing", id="committing"),
    ],
)
def test_a_killed_coordinator_goes_on_as_if_nothing_had_happened(fleet, undisturbed, event, detail):
    """SIGKILL at any point of a round: after a restart the run goes on by itself and ends with the same model."""
    fleet.hold()
    run = fleet.server.create(f"killed-{event}-{detail or 'any'}".strip("-"))
    kill_at(fleet, run, event, detail)
    assert undisturbed == fleet.server.digests(run)
    assert all(summary.seconds > 0 for summary in fleet.server.rounds(run))


def test_what_was_acknowledged_before_a_kill_is_not_sent_again(fleet, undisturbed):
    """One update admitted, the other held up: after SIGKILL the first is still there, and nobody trains it anew."""
    quick, slow = fleet.half_delivered("half")
    fleet.server.kill()
    fleet.server.serve()
    assert fleet.server.run("half").admitted == 1
    slow.hold.unlink()
    assert undisturbed == fleet.server.digests("half")
    assert len(quick.events("trained", run="half", round=0)) == 1


def test_a_coordinator_told_to_stop_goes_on_after_a_restart(fleet, undisturbed):
    """SIGTERM in mid-round: it drains and exits with 0; started again, the run ends with the same model."""
    _, slow = fleet.half_delivered("drained")
    assert fleet.server.terminate() == 0
    assert fleet.server.events("draining")
    assert slow.logged("drained", by_coordinator=True)
    fleet.server.serve()
    slow.hold.unlink()
    assert undisturbed == fleet.server.digests("drained")


def test_a_daemon_that_comes_back_within_the_grace_delivers(fleet, undisturbed):
    """A daemon killed in mid-training and started again trains the same update: the model is the undisturbed one."""
    _, slow = fleet.half_delivered("daemon-back")
    slow.kill()
    slow.start()
    slow.logged("assignment", count=2, run="daemon-back", round=0)
    slow.hold.unlink()
    assert undisturbed == fleet.server.digests("daemon-back")


def test_an_acknowledged_update_of_a_dead_daemon_counts(fleet, undisturbed):
    """A daemon killed after its receipt is part of the round all the same, and of the next ones when it is back."""
    quick, slow = fleet.half_delivered("daemon-dead")
    quick.logged("submitted", run="daemon-dead", round=0)
    quick.kill()
    slow.hold.unlink()
    fleet.server.until("daemon-dead", lambda run: run.rounds_done, "the round is committed without it")
    quick.start()
    assert undisturbed == fleet.server.digests("daemon-dead")
    assert fleet.server.rounds("daemon-dead")[0].accepted == 2
