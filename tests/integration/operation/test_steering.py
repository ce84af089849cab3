"""An operator's commands on a run, and its stop conditions."""

from __future__ import annotations

import pytest

from fl_ops.errors import OpsError
from fl_server.rounds.sampling import Draw, draw_bernoulli
from protos.fl.v1 import admin_pb2
from tests.processes.federation import Fleet


def test_a_paused_run_finishes_its_round_and_draws_no_other(fleet: Fleet, undisturbed: list[str]) -> None:
    """The current round is committed, no other starts while a second run completes, and the resumed run completes."""
    server = fleet.server
    _, slow = fleet.half_delivered("pause")
    with server.admin() as admin:
        assert admin.runs.pause_run("pause").state == admin_pb2.RUN_STATE_PAUSED
    slow.hold.unlink()
    server.until("pause", lambda run: run.rounds_done == 1, "its round is committed")
    server.completed(server.create("meanwhile"))
    assert (server.run("pause").rounds_done, server.run("pause").state) == (1, admin_pb2.RUN_STATE_PAUSED)
    with server.admin() as admin:
        admin.runs.resume_run("pause")
    assert undisturbed == server.digests("pause")
    assert {"run_paused", "run_resumed", "run_completed"} <= set(server.history("pause"))


@pytest.mark.slow
def test_a_pause_outlives_a_restart(fleet: Fleet) -> None:
    """A paused run is still paused after SIGKILL and a restart, and can be resumed."""
    server = fleet.server
    fleet.hold()
    server.create("long-pause")
    with server.admin() as admin:
        admin.runs.pause_run("long-pause")
    server.kill()
    server.serve()
    assert server.run("long-pause").state == admin_pb2.RUN_STATE_PAUSED
    fleet.release()
    with server.admin() as admin:
        admin.runs.resume_run("long-pause")
    server.completed("long-pause")


@pytest.mark.slow
def test_an_extended_run_is_the_longer_run(fleet: Fleet) -> None:
    """A run of four rounds, extended by two after its end, has the models of a run of six."""
    server = fleet.server
    server.completed(server.create("six", stop={"rounds": 6}))
    # One after the other: bits hold for runs that share no clients.
    server.completed(server.create("four", stop={"rounds": 4}))
    with server.admin() as admin:
        assert not admin.call(
            admin_pb2.ExtendRunRequest(run_id="four", rounds=2), admin_pb2.ExtendRunResponse
        ).run.HasField("ended")
    server.until("four", lambda run: run.rounds_done == 6, "two rounds more")
    assert server.digests("six") == server.digests("four")


def test_a_stopped_run_keeps_what_was_committed(fleet: Fleet) -> None:
    """A run stopped during a round ends at once with the reason. Its clients are notified, committed rounds stay."""
    server = fleet.server
    _, slow = fleet.half_delivered("stop")
    with server.admin() as admin:
        admin.runs.stop_run("stop", "the data were wrong")
    run = server.ended("stop")
    assert (run.state, run.reason, run.rounds_done) == (admin_pb2.RUN_STATE_STOPPED, "the data were wrong", 0)
    assert slow.logged("cancelled", run="stop", round=0)["reason"] == "REFUSAL_REASON_ABANDONED"
    with server.admin() as admin, pytest.raises(OpsError, match="'stop' is stopped.*needs it to be running or waiting"):
        admin.runs.pause_run("stop")


def test_a_run_ends_when_its_metric_is_reached(fleet: Fleet) -> None:
    """A target that the first evaluation reaches ends the run after one of three rounds, with that reason."""
    run = fleet.server.completed(fleet.server.create("target", stop={"metric": "accuracy", "target": 0.01}))
    assert run.rounds_done == 1
    assert "accuracy" in run.reason
    assert "0.01" in run.reason


@pytest.mark.slow
def test_a_run_ends_when_its_metric_does_not_improve(fleet: Fleet) -> None:
    """With steps too small to change an answer, patience 2 ends the run two evaluations after the first."""
    run = fleet.server.create(
        "patience", local={"learning_rate": 1e-12}, stop={"rounds": 50, "metric": "accuracy", "patience": 2}
    )
    assert fleet.server.completed(run).rounds_done == 3


def test_a_run_ends_when_its_time_is_over(fleet: Fleet) -> None:
    """The time limit ends the run during a round. It completes although its clients never deliver."""
    fleet.hold()
    run = fleet.server.completed(fleet.server.create("time", stop={"wall_time_s": 0.5}))
    assert (run.reason, run.rounds_done) == ("its 0.5 s are over", 0)


def test_two_runs_share_a_fleet(fleet: Fleet) -> None:
    """A client works for one run at a time, and both runs complete."""
    server, one = fleet.server, {"clients_per_round": 1, "min_clients": 1}
    fleet.hold()
    server.create("left", round=one)
    server.create("right", round=one, algorithm={"name": "fedavg"})
    left, right = (server.until(run, lambda status: status.cohort, "it draws").cohort for run in ("left", "right"))
    assert set(left).isdisjoint(right)
    fleet.release()
    assert len(server.digests("left")) == len(server.digests("right")) == 3


def test_the_first_arrivals_close_an_over_selected_round(fleet: Fleet) -> None:
    """With close = "goal" three are drawn for two. The run completes while one is held, and that one is cancelled."""
    fleet["edge-1"].hold.touch()
    run = fleet.server.create("goal", round={"close": "goal", "over_selection": 1.5})
    fleet.server.completed(run)
    assert [(2, 1)] * 3 == [(summary.accepted, summary.dropped) for summary in fleet.server.rounds(run)]
    assert fleet["edge-1"].logged("cancelled", run=run, round=0)["reason"] == "REFUSAL_REASON_NOT_NEEDED"


@pytest.mark.slow  # fl_server/run/test_client_shares has this without processes
def test_a_client_that_is_always_slowest_is_named(fleet: Fleet) -> None:
    """Three are drawn for two, and edge-1 never comes first: one line of the history, `fl run show`, and a metric."""
    fleet["edge-1"].hold.touch()
    server = fleet.server
    run = server.create("slowest", round={"close": "goal", "over_selection": 1.5}, stop={"rounds": 14})
    server.completed(run)
    shown = server.run(run)
    assert [(one.client_id, one.counted) for one in shown.first_below_due] == [("edge-1", 0)]
    assert shown.first_below_due[0].due == pytest.approx(14 * 2 / 3)
    assert "client_below_due" in server.history(run)


@pytest.mark.slow  # runs/test_simulation has such a run with the simulated cohorts
def test_bernoulli_sampling_draws_by_the_seed(fleet: Fleet) -> None:
    """Each round's cohort has the size that seed, round and roster give, and a second run has the same models."""
    server, section = fleet.server, {"sampling": "bernoulli", "rate": 0.6}
    server.create("coin", round=section)
    server.create("coin-again", round=section)
    assert server.digests("coin") == server.digests("coin-again")
    expected = [len(draw_bernoulli(tuple(fleet.daemons), 0.6, Draw(7, round_, 0))) for round_ in range(3)]
    assert expected == [summary.accepted for summary in server.rounds("coin")]


def test_only_clients_with_the_labels_are_drawn(fleet: Fleet) -> None:
    """A run with a label that no client has waits. Its reason has the needed and the available number of clients."""
    fleet.server.create("north", labels={"site": "north"})
    waiting = fleet.server.until("north", lambda run: run.state == admin_pb2.RUN_STATE_WAITING, "it waits")
    reason, lacks = "clients that could be drawn: 0 of 3 here", "it lacks clients with the labels site=north: 0 of "
    assert waiting.reason.startswith(f"{reason}; {lacks}")
    assert waiting.eligible_clients == 0
