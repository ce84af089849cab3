"""Daemons that are killed in any exchange of secure aggregation, a cohort above a full graph, and who lies."""

from __future__ import annotations

import pytest

from tests.processes.certificates import Pki
from tests.processes.federation import Coordinator
from tests.processes.process import HERE, Workspace
from tests.processes.secure_fleet import SecureFleet, sections
from tests.processes.simulated import check_replay, simulated_digests

STAGES = ("agreeing", "sharing", "collecting", "signing", "opening")
SIZE, MANY = 5, 24
"""Clients of a full graph, and of one in which a client has a part of the others for neighbours."""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def task_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations in this process find the task of the daemons."""
    monkeypatch.syspath_prepend(str(HERE))


def test_a_daemon_that_is_killed_in_an_exchange_drops_out(workspace: Workspace, pki: Pki) -> None:
    """SIGKILL in another exchange of each round, until the round is over: it counts if its masked update was here.

    No round is drawn again, and the models are those of a replay.
    """
    fleet, plan = SecureFleet(workspace, pki, SIZE), sections(SIZE, stage_s=8.0)
    lost = fleet["edge-1"]
    fleet.hold()
    run = fleet.server.create(
        "dropped", **{**plan, "round": {**plan["round"], "deadline_s": 8.0}, "stop": {"rounds": len(STAGES)}}
    )

    def kill(phase: str) -> None:
        number = STAGES.index(phase)
        lost.kill()
        fleet.server.until(run, lambda status: status.rounds_done > number, f"it goes on without it, {phase}")
        if STAGES[number + 1 : number + 2] == ("collecting",):
            lost.hold.touch()  # its update is not there before it is killed
        lost.start()

    fleet.at_phases(run, STAGES, kill)
    fleet.server.completed(run)
    rounds = [(summary.accepted, summary.attempts) for summary in fleet.server.rounds(run)]
    assert rounds == [(SIZE - 1, 1)] * 3 + [(SIZE, 1)] * 2
    check_replay(fleet.server, run, clients=SIZE)


def test_a_cohort_above_a_full_graph(workspace: Workspace, pki: Pki) -> None:
    """24 daemons toss coins for their neighbours. The coordinator is killed there, and a daemon in the next round.

    Then, in another run, two are killed while the updates are collected.
    """
    fleet, plan = SecureFleet(workspace, pki, MANY), sections(MANY, max_dropped=0.1)
    killed = iter([fleet.server, fleet["edge-5"]])
    fleet.hold()
    run = fleet.server.create("many", **plan)

    def kill(phase: str) -> None:
        del phase
        process = next(killed)
        process.kill()
        process.serve() if isinstance(process, Coordinator) else process.start()
        fleet.until_all_present()

    fleet.at_phases(run, ["tossing", "tossing"], kill)
    assert fleet.server.digests(run) == simulated_digests("many", clients=MANY, **plan)
    assert [(summary.accepted, summary.attempts) for summary in fleet.server.rounds(run)] == [(MANY, 1)] * 2
    assert fleet["edge-0"].events("stage_answered", run=run, round=0, stage=2)
    lost = [fleet["edge-3"], fleet["edge-17"]]
    for daemon in lost:
        daemon.hold.touch()
    plan = {**plan, "round": {**plan["round"], "deadline_s": 30.0}, "stop": {"rounds": 1}}
    run = fleet.server.create("fewer", **plan)
    fleet.server.until(run, lambda status: status.admitted == MANY - len(lost), "the others have delivered")
    for daemon in lost:
        daemon.kill()
    fleet.server.completed(run)
    assert [(summary.accepted, summary.attempts) for summary in fleet.server.rounds(run)] == [(MANY - len(lost), 1)]
    check_replay(fleet.server, run, clients=MANY)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("shares", "edge-2: expected shares that give the secret it committed to"),
        ("numbers", "over the clip of 0.5: a client lied"),
    ],
)
def test_a_daemon_that_lies_spoils_one_draw(
    workspace: Workspace, pki: Pki, monkeypatch: pytest.MonkeyPatch, lie: str, why: str
) -> None:
    """Its own mask cannot be found, or the sum is too long: there is no model. The next draw has one.

    The second draw has other batches. No update is refused, so that no client comes nearer to a quarantine.
    """
    monkeypatch.setenv("LIE", lie)
    fleet, plan = SecureFleet(workspace, pki, SIZE), sections(SIZE)
    liar = fleet["edge-2"]
    liar.terminate()
    liar._module = "tests.processes.lying_client"
    liar.start()
    fleet.until_all_present()
    run = fleet.server.create("lied", **{**plan, "stop": {"rounds": 1}})
    fleet.server.completed(run)
    assert [(summary.accepted, summary.attempts) for summary in fleet.server.rounds(run)] == [(SIZE, 2)]
    history = fleet.server.history(run)
    assert history.count("round_restarted") == 1
    spoiled = fleet.server.logged("round_restarted", run=run)
    assert why in spoiled["why"]
    assert [fleet.server.client(name).updates_refused for name in fleet.daemons] == [0] * SIZE
    check_replay(fleet.server, run, clients=SIZE)


@pytest.mark.parametrize(("lie", "told", "masked"), [("keys", "trust: edge-0: ", 0), ("lists", "", SIZE)])
def test_a_coordinator_that_lies_gets_no_shares(
    workspace: Workspace, pki: Pki, monkeypatch: pytest.MonkeyPatch, lie: str, told: str, masked: int
) -> None:
    """A key of its own in the list of keys: nobody sends a masked update. Two lists of survivors: nobody opens shares.

    No list has the signatures of more than two thirds. The run ends without a model.
    """
    monkeypatch.setenv("LIE", lie)
    fleet, plan = SecureFleet(workspace, pki, SIZE), sections(SIZE, on_drop="end", stage_s=20.0)
    fleet.server.terminate()
    fleet.server._module = "tests.processes.lying_coordinator"
    fleet.server.serve()
    fleet.until_all_present()
    run = fleet.server.create("lying", **plan)
    ended = fleet.server.ended(run)
    assert (ended.rounds_done, 'on_drop is "end"' in ended.reason) == (0, True)
    assert sum(len(daemon.events("submitted", run=run)) for daemon in fleet.daemons.values()) == masked
    assert not any(daemon.events("stage_answered", run=run, stage=6) for daemon in fleet.daemons.values())
    refused = [line for daemon in fleet.daemons.values() for line in daemon.events("work_failed", run=run)]
    assert [line for line in refused if told in line["message"]]
