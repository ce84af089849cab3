"""SCAFFOLD and FedDyn reach the exact optimum despite faults that could separate client states from their sum."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace, eventually

TASK = "quadratic_task:Quadratic"
SIZE, ROUNDS = 4, 250
METHODS = {
    "scaffold": {"name": "scaffold"},
    "scaffold-I": {"name": "scaffold", "parameters": {"option": "I"}},
    "feddyn": {"name": "feddyn", "parameters": {"alpha": 1.0}},
}


def daemon(workspace: Workspace, server: Coordinator, index: int) -> Daemon:
    """One of four daemons with six examples each."""
    shard = {"partition": {"method": "iid", "clients": SIZE, "seed": 1}, "index": index}
    options = {"hold": str(workspace.folder / f"edge-{index}.hold")}
    return Daemon(workspace, server, f"edge-{index}", shard=shard, task={"name": TASK, "options": options})


def create(server: Coordinator, method: str, rounds: int, **round_: Any) -> str:
    """Create a run of full-batch steps; the population includes a client that joins later."""
    return server.create(
        "exact", task={"name": TASK}, algorithm=METHODS[method], population=SIZE, stop={"rounds": rounds},
        local={"epochs": 8, "batch_size": 6, "learning_rate": 0.1},
        round={"clients_per_round": 2, "quorum": 2, "deadline_s": 60.0, **round_},
        evaluation={"every": 1},
    )  # fmt: skip


def errors(server: Coordinator) -> list[float]:
    """Distance to the optimum after each evaluated round."""
    return [round_.metrics["error"] for round_ in server.rounds("exact") if round_.metrics]


def committed(server: Coordinator, rounds: int) -> None:
    """Wait until this many rounds are committed."""
    server.until("exact", lambda run: run.rounds_done >= rounds, f"{rounds} rounds are done")


@pytest.mark.slow  # half a minute each; its parts have quick tests
@pytest.mark.parametrize("method", ["scaffold", "scaffold-I", "feddyn"])
def test_the_exact_optimum_is_reached_despite_faults(workspace: Workspace, method: str) -> None:
    """A clipped update, an abandoned attempt, a crash between upload and outcome, a lost state, a client that joins."""
    server = Coordinator(workspace, settings={"limits": {"reattach_grace_s": 2.0}}).serve()
    daemons = [daemon(workspace, server, index) for index in range(SIZE)]
    for each in daemons[:3]:
        each.start()
    # The first moves are much longer than this.
    create(server, method, ROUNDS, clip_update_norm=1.5)
    committed(server, 3)

    _abandon_an_attempt(server, daemons[:3])
    _crash_between_upload_and_outcome(server, daemons[:3])
    _lose_a_state(server, daemons[0])
    daemons[3].start()

    server.completed("exact")
    assert {"states_restarted"} <= set(server.history("exact"))
    assert server.run("exact").rounds_done == ROUNDS
    assert server.client("edge-3").updates_counted > 0
    assert errors(server)[-1] < 1e-8


def _cohort(server: Coordinator) -> list[str]:
    """Wait until two clients work for the round; returns them."""
    return list(server.until("exact", lambda run: len(run.cohort) == 2, "two are drawn").cohort)


def _abandon_an_attempt(server: Coordinator, daemons: list[Daemon]) -> None:
    """Kill both members of a cohort during training. Others replace them, and their work never counts."""
    for each in daemons:
        each.hold.touch()
    victims = [each for each in daemons if each.client_id in _cohort(server)]
    for each in victims:
        each.kill()
    for each in daemons:
        each.hold.unlink()
    for each in victims:
        each.start()
    committed(server, server.run("exact").rounds_done + 3)


def _crash_between_upload_and_outcome(server: Coordinator, daemons: list[Daemon]) -> None:
    """Kill a daemon after its delivery and before the commit. It gets the outcome after its restart."""
    for each in daemons:
        each.hold.touch()
    quick = next(each for each in daemons if each.client_id in _cohort(server))
    quick.hold.unlink()
    server.until("exact", lambda run: run.admitted == 1, "one has delivered")
    quick.kill()
    done = server.run("exact").rounds_done
    for each in daemons:
        each.hold.unlink(missing_ok=True)
    committed(server, done + 1)
    quick.start()
    committed(server, done + 3)


def _lose_a_state(server: Coordinator, victim: Daemon) -> None:
    """Delete everything that a daemon stored, also the update from which its state could be restored."""
    victim.kill()
    kept = victim.folder / f"{victim.name}-state"
    assert list((kept / "states").iterdir())
    for folder in ("states", "pending"):
        shutil.rmtree(kept / folder)
    victim.start()
    eventually(lambda: "states_restarted" in server.history("exact"), "all states are restarted")
