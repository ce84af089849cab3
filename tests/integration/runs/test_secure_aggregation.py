"""Rounds with secure aggregation, with a coordinator, daemons and certificates as they run."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fl_common.privacy.accountant import Mechanism, epsilon_of
from fl_web.facts.run import figures
from protos.fl.v1 import admin_pb2
from tests.processes import workers
from tests.processes.certificates import Pki, server_section
from tests.processes.policies import without_floors
from tests.processes.process import HERE, Workspace
from tests.processes.secure_fleet import SecureFleet, sections
from tests.processes.simulated import check_replay, simulated_digests, simulated_rounds

SIZE = 5
KEPT = 9
"""Examples of each shard that are held out for evaluations."""
SECURE: dict[str, Any] = {"task": {"options": {"kept": KEPT}}, **sections(SIZE)}
UNEQUAL: dict[str, Any] = {"epochs": 1, "batch_size": 29}
"""Shards of 29 examples have one batch, those of 30 have two."""


@pytest.fixture(scope="module")
def fleet(module_workspace: Workspace, pki: Pki) -> SecureFleet:
    """A coordinator and five daemons."""
    return SecureFleet(module_workspace, pki, SIZE, kept=KEPT)


@pytest.fixture(autouse=True)
def task_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulations in this process find the task of the daemons."""
    monkeypatch.syspath_prepend(str(HERE))


def test_a_run_completes(fleet: SecureFleet) -> None:
    """Both rounds count all five clients. The models are those of a simulation without masks, and of a replay."""
    run = fleet.server.create("summed", **SECURE)
    assert fleet.server.digests(run) == simulated_digests("summed", clients=SIZE, **SECURE)
    assert [summary.accepted for summary in fleet.server.rounds(run)] == [SIZE, SIZE]
    check_replay(fleet.server, run, clients=SIZE, task=SECURE["task"])
    status = fleet.server.run(run)
    secure = dict(status.latest.account.secure)
    assert (secure["members"], secure["sharers"], secure["survivors"], secure["threshold"]) == (SIZE, SIZE, SIZE, 4)
    assert secure["dropped"] == 0
    assert stages_told(fleet, run)[:4] == [
        "round 0, attempt 0: sharing; 5 of 5 clients sent their keys",
        "round 0, attempt 0: collecting; 5 of 5 clients sent their shares; 4 shares open a secret",
        "round 0, attempt 0: signing; 5 of 5 clients sent their masked updates; 4 shares open a secret",
        "round 0, attempt 0: opening; 4 of 5 clients sent their signatures; 4 shares open a secret",
    ]
    told = str(dict(figures(status))["secure aggregation"])
    assert "sums of 3 clients or more; the authority of the clients' certificates is outside" in told


def received(metrics: Mapping[str, float]) -> dict[str, float]:
    """What the clients of a round measured of the model that they received."""
    return {name: value for name, value in metrics.items() if "received" in name}


@pytest.mark.slow  # fl_ops/simulate/test_secure_runs has these sums without processes
@pytest.mark.parametrize(
    ("algorithm", "local", "section"),
    [
        pytest.param(
            {"name": "fedcm", "parameters": {"weights": "examples"}},
            UNEQUAL,
            {"min_steps": 1, "max_examples": 40},
            id="fedcm",
        ),
        pytest.param(
            {"name": "scaffold", "parameters": {"option": "I"}},
            UNEQUAL,
            {"clips": {"variate_change": 5.0}},
            id="scaffold",
        ),
        pytest.param({"name": "feddyn"}, {**UNEQUAL, "continue_data": True}, {}, id="personal"),
    ],
)
def test_several_payloads_in_one_masked_update(
    fleet: SecureFleet, algorithm: dict[str, Any], local: dict[str, Any], section: dict[str, Any]
) -> None:
    """Of clients with unequal steps, and with states that they make of what was summed. Bits as without masks.

    With personal parts the clients measure the model that they received with parts of their own, in sums under masks.
    """
    run, secure = f"several-{algorithm['name']}", {**SECURE["secure_aggregation"], **section}
    personal = ["2.*"] if algorithm["name"] == "feddyn" else []
    sections = {
        "personal": personal,
        **SECURE,
        "algorithm": algorithm,
        "local": local,
        "secure_aggregation": secure,
        "population": SIZE,
        "stop": {"rounds": 3},
        "evaluation": {"clients_every": 1 if personal else 0},
    }
    fleet.server.create(run, **sections)
    digests = fleet.server.digests(run)
    simulated = simulated_rounds(run, clients=SIZE, **sections)
    assert digests == [it.digest for it in simulated]
    rounds = fleet.server.rounds(run)
    assert [summary.accepted for summary in rounds] == [SIZE] * 3
    assert [received(summary.metrics) for summary in rounds] == [received(it.metrics) for it in simulated]
    assert [len(received(summary.metrics)) for summary in rounds] == [3 if personal else 0] * 3
    check_replay(fleet.server, run, clients=SIZE, task=SECURE["task"])


MEASURED: dict[str, Any] = {**SECURE, "evaluation": {"clients_every": 2}, "stop": {"rounds": 3}}


def test_losses_and_evaluations_are_sums(fleet: SecureFleet) -> None:
    """The loss of every round, and what its clients measured of the model that they got: as in a simulation.

    No answer of a single client is kept.
    """
    sections = MEASURED
    run = fleet.server.create("measured", **sections)
    fleet.server.completed(run)
    simulated = simulated_rounds("measured", clients=SIZE, **sections)
    rounds = fleet.server.rounds(run)
    measured = [received(it.metrics) for it in rounds]
    assert measured == [received(it.metrics) for it in simulated]
    assert [len(metrics) for metrics in measured] == [3, 0, 3]
    assert measured[0]["clients_received_evaluated"] == SIZE
    assert [it.training_loss for it in rounds] == [it.training_loss for it in simulated]
    assert all(0 < it.training_loss < 10 for it in rounds)
    database = sqlite3.connect(fleet.server.folder / "server-state" / "ledger.sqlite")
    with closing(database):
        assert database.execute("SELECT count(*) FROM client_evaluations").fetchone() == (0,)
        alone = "SELECT count(*) FROM updates WHERE training_loss IS NOT NULL OR num_examples > 1 OR num_steps > 1"
        assert database.execute(alone).fetchone() == (0,)


@pytest.mark.slow  # tests/fl_client has a policy that shares no evaluations
def test_a_site_that_shares_no_evaluations_takes_no_part_in_sums(fleet: SecureFleet) -> None:
    """The sum of the others' evaluations is made without it."""
    private = fleet.daemons["edge-3"]
    private.terminate()
    policy = fleet.workspace.folder / "policy.toml"
    policy.write_text(without_floors("[share]\nevaluations = false\n"), encoding="utf-8")
    private.configure(policy=str(policy))
    private.start()
    fleet.until_all_present()
    run = fleet.server.create("measured-without-one", **MEASURED)
    fleet.server.completed(run)
    assert fleet.server.rounds(run)[2].metrics["clients_received_evaluated"] == SIZE - 1
    private.terminate()
    del private.settings["policy"]
    private.configure()
    private.start()
    fleet.until_all_present()


STAGES = ("agreeing", "sharing", "collecting", "signing", "opening")


def stages_told(fleet: SecureFleet, run: str) -> list[str]:
    """What the history tells of the stages of a run."""
    with fleet.server.admin() as admin:
        rows = admin.history.list_history(run, 0)
    return [row.detail for row in rows if row.event == "stage_opened"]


def counts_of(summary: admin_pb2.RoundSummary) -> list[int]:
    """Members, sharers, survivors, drop-outs and threshold of a round."""
    secure = summary.account.secure
    return [secure[name] for name in ("members", "sharers", "survivors", "dropped", "threshold")]


def test_privacy_of_clients_in_a_masked_sum(fleet: SecureFleet) -> None:
    """Four of five clients a round, and noise for their sum: the bits of simulation and replay with the run's secret.

    The coordinator is killed in the first round's last stage. It keeps no loss, and charges each draw once.
    """
    privacy = {"unit": "client", "noise_multiplier": 0.5, "clip": 0.5, "delta": 0.01, "max_epsilon": 900.0}
    sections = {**SECURE, "privacy": privacy, "population": SIZE}
    sections["round"] = {"clients_per_round": 4, "min_clients": SIZE}
    sections["secure_aggregation"] = {**SECURE["secure_aggregation"], "max_dropped": 0.1}
    fleet.hold()
    run = fleet.server.create("hidden", **sections)

    def kill(phase: str) -> None:
        del phase
        fleet.server.kill()
        fleet.server.serve()
        fleet.until_all_present()

    fleet.at_phases(run, ["opening"], kill)
    digests = fleet.server.digests(run)
    secret = (fleet.server.folder / "server-state" / "privacy" / f"{run}.key").read_bytes()
    assert digests == simulated_digests(run, secret=secret, clients=SIZE, **sections)
    assert digests != simulated_digests(run, clients=SIZE, **sections)
    check_replay(fleet.server, run, clients=SIZE, task=SECURE["task"])
    assert not any(it.HasField("training_loss") for it in fleet.server.rounds(run))
    assert {detail.partition(";")[0] for detail in stages_told(fleet, run)} == {*stages_told(fleet, run)}
    assert not any(it.account.secure for it in fleet.server.rounds(run))  # who drops out is told nobody, nor how many
    assert f'fl_secure_clients{{of="members",run="{run}"}}' not in fleet.server.metrics().decode()
    spent = fleet.server.run(run).privacy
    assert spent.draws == 2
    assert spent.epsilon == pytest.approx(epsilon_of({Mechanism(0.5, 4 / SIZE, fixed_size=True): 2}, 0.01))


@pytest.mark.slow
def test_a_coordinator_that_is_killed_in_any_stage_goes_on_in_it(fleet: SecureFleet) -> None:
    """SIGKILL in another stage of each round: the models are those of a simulation, and nobody is drawn again."""
    sections = {**SECURE, "stop": {"rounds": len(STAGES)}}
    fleet.hold()
    run = fleet.server.create("killed", **sections)

    def kill(phase: str) -> None:
        del phase
        fleet.server.kill()
        fleet.server.serve()
        fleet.until_all_present()

    fleet.at_phases(run, STAGES, kill)
    digests = fleet.server.digests(run)
    rounds = fleet.server.rounds(run)
    assert [(summary.accepted, summary.attempts) for summary in rounds] == [(SIZE, 1)] * len(STAGES)
    assert [counts_of(summary) for summary in rounds] == [[SIZE, SIZE, SIZE, 0, 4]] * len(STAGES)
    assert digests == simulated_digests("killed", clients=SIZE, **sections)


@pytest.mark.slow
def test_a_daemon_that_is_killed_in_any_stage_answers_the_same(fleet: SecureFleet) -> None:
    """SIGKILL of a daemon in another stage of each round: it comes back, and its update is part of every sum."""
    sections = {**SECURE, "stop": {"rounds": len(STAGES)}}
    fleet.hold()
    run = fleet.server.create("killed-daemon", **sections)

    def kill(phase: str) -> None:
        del phase
        fleet.daemons["edge-2"].kill()
        fleet.daemons["edge-2"].start()

    fleet.at_phases(run, STAGES, kill)
    assert fleet.server.digests(run) == simulated_digests("killed-daemon", clients=SIZE, **sections)
    assert [summary.accepted for summary in fleet.server.rounds(run)] == [SIZE] * len(STAGES)


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["coordinator", "daemon"])
def test_client_states_survive_kills_in_any_stage(fleet: SecureFleet, killed: str) -> None:
    """SIGKILL in another stage of each round of SCAFFOLD: each device keeps the state of the update that counted."""
    run, sections = f"states-{killed}", {**SECURE, "algorithm": {"name": "scaffold"}, "population": SIZE}
    sections["stop"] = {"rounds": len(STAGES) + 1}
    fleet.hold()
    fleet.server.create(run, **sections)

    def kill(phase: str) -> None:
        del phase
        if killed == "daemon":
            fleet.daemons["edge-2"].kill()
            fleet.daemons["edge-2"].start()
            return
        fleet.server.kill()
        fleet.server.serve()
        fleet.until_all_present()

    fleet.at_phases(run, STAGES, kill)
    assert fleet.server.digests(run) == simulated_digests(run, clients=SIZE, **sections)
    assert [summary.accepted for summary in fleet.server.rounds(run)] == [SIZE] * (len(STAGES) + 1)
    check_replay(fleet.server, run, clients=SIZE, task=SECURE["task"])


@pytest.mark.slow
def test_a_lost_client_state_restarts_all_states(fleet: SecureFleet) -> None:
    """A device without its c_i: server and devices begin with zero together, in another draw of the round."""
    sections = {**SECURE, "algorithm": {"name": "scaffold"}, "population": SIZE, "stop": {"rounds": 3}}
    fleet.hold()
    run, daemon = fleet.server.create("lost-state", **sections), fleet.daemons["edge-1"]

    def lose(phase: str) -> None:
        if phase != "agreeing":
            return
        state_dir = Path(daemon.settings["state_dir"])
        daemon.kill()
        for folder in ("states", "pending"):
            shutil.rmtree(state_dir / folder)
        daemon.start()

    fleet.at_phases(run, ["opening", "agreeing"], lose)
    fleet.server.completed(run)
    assert "states_restarted" in fleet.server.history(run)
    assert [summary.accepted for summary in fleet.server.rounds(run)] == [SIZE] * 3
    check_replay(fleet.server, run, clients=SIZE, task=SECURE["task"])


@pytest.mark.slow
@pytest.mark.parametrize("gone", [["edge-1"], ["edge-1", "edge-3"]], ids=["one", "too-many"])
def test_clients_that_leave_after_their_shares(fleet: SecureFleet, gone: list[str]) -> None:
    """The masks of one that missed the deadline are opened. With two the round is drawn again, with other batches.

    The models are those of a replay, so the sum is that of the clients that stayed.
    """
    run = f"left-{len(gone)}"
    for client in gone:
        fleet.daemons[client].hold.touch()
    fleet.server.create(run, **{**SECURE, "round": {**SECURE["round"], "deadline_s": 6.0}})
    late = len(gone) > 1
    fleet.server.until(run, lambda status: status.attempt == 1 if late else status.rounds_done == 1, "it goes on")
    fleet.release()
    fleet.server.completed(run)
    first, _ = fleet.server.rounds(run)
    assert (first.accepted, first.attempts) == ((SIZE, 2) if late else (SIZE - 1, 1))
    assert ("round_restarted" in fleet.server.history(run)) == late
    assert counts_of(first) == ([SIZE, SIZE, SIZE, 0, 4] if late else [SIZE, SIZE, SIZE - 1, 1, 4])
    if not late:
        signing = "round 0, attempt 0: signing; 4 of 5 clients sent their masked updates, and not edge-1; 4 shares open"
        assert f"{signing} a secret" in stages_told(fleet, run)
        assert f'fl_secure_clients{{of="threshold",run="{run}"}} 4.0' in fleet.server.metrics().decode()
    check_replay(fleet.server, run, clients=SIZE, task=SECURE["task"])


@pytest.mark.slow
def test_a_daemon_with_an_old_copy_of_its_state_refuses_a_round(fleet: SecureFleet) -> None:
    """What it answered since the copy is unknown, so it takes no part in the run's next round; then it does again."""
    run = fleet.server.create("copied", **SECURE)
    fleet.server.completed(run)
    daemon = fleet.daemons["edge-4"]
    daemon.terminate()
    folder = Path(daemon.settings["state_dir"]) / "secure_aggregation"
    shutil.copytree(folder, copy := folder.with_name("copy"))
    shutil.rmtree(folder)
    copy.rename(folder)
    daemon.start()
    fleet.until_all_present()
    with fleet.server.admin() as admin:
        admin.call(admin_pb2.ExtendRunRequest(run_id=run, rounds=2), admin_pb2.ExtendRunResponse)
    fleet.server.until(run, lambda status: status.rounds_done == 4 and status.HasField("ended"), "it has four rounds")
    assert [summary.accepted for summary in fleet.server.rounds(run)] == [SIZE, SIZE, SIZE - 1, SIZE]
    daemon.logged("secure_aggregation_refused", run=run, reason="restored")
    check_replay(fleet.server, run, clients=SIZE, task=SECURE["task"])
    daemon.terminate()
    shutil.rmtree(folder)  # a restored device refuses the first round of every further run, too
    daemon.start()
    fleet.until_all_present()


@pytest.mark.slow
def test_masked_updates_pass_through_workers(tmp_path: Path) -> None:
    """With certificates everywhere; a worker knows a masked update by its digest alone. The bits are the same."""
    with Workspace(tmp_path) as workspace:
        pki = Pki(tmp_path / "pki")
        fleet = SecureFleet(workspace, pki, SIZE, {"workers": workers.section()}, kept=KEPT)
        for number in range(2):
            tls = server_section(pki.issue("worker", f"w-{number}"))
            workers.Worker(workspace, fleet.server, f"worker-{number}", {"tls": tls}).serve()
        run = fleet.server.create("masked", **SECURE)
        assert fleet.server.digests(run) == simulated_digests("masked", clients=SIZE, **SECURE)
