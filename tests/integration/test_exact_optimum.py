"""SCAFFOLD and FedDyn reach the exact optimum in spite of all that makes client states and their sum differ."""

from __future__ import annotations

import shutil

import pytest

from tests.integration.harness import Coordinator, Daemon
from tests.integration.processes import Place, eventually

TASK = "quadratic_task:Quadratic"
SIZE, ROUNDS = 4, 250
METHODS = {
    "scaffold": {"name": "scaffold"},
    "scaffold-I": {"name": "scaffold", "parameters": {"option": "I"}},
    "feddyn": {"name": "feddyn", "parameters": {"alpha": 1.0}},
}


def daemon(place, server, index):
    """One of four with six examples each."""
    shard = {"partition": {"method": "iid", "clients": SIZE, "seed": 1}, "index": index}
    options = {"hold": str(place.folder / f"edge-{index}.hold")}
    return Daemon(place, server, f"edge-{index}", shard=shard, task={"name": TASK, "options": options})


def create(server, method, rounds, **round_):
    """A run of full-batch steps; the population has a place for one that is not there yet."""
    return server.create(
        "exact", task={"name": TASK}, algorithm=METHODS[method], population=SIZE, stop={"rounds": rounds},
        local={"epochs": 8, "batch_size": 6, "learning_rate": 0.1},
        round={"clients_per_round": 2, "quorum": 2, "deadline_s": 60.0, **round_},
        evaluation={"every": 1},
    )  # fmt: skip


def errors(server):
    """Distance to the optimum after each round that was evaluated."""
    return [round_.metrics["error"] for round_ in server.rounds("exact") if round_.metrics]


def committed(server, rounds):
    """Once so many rounds are done."""
    server.until("exact", lambda run: run.rounds_done >= rounds, f"{rounds} rounds are done")


@pytest.fixture
def place(tmp_path):
    """A place for processes."""
    with Place(tmp_path) as place:
        yield place


@pytest.mark.slow  # half a minute each, and what it rests on has quick tests of its own
@pytest.mark.parametrize("method", ["scaffold", "scaffold-I", "feddyn"])
def test_the_optimum_is_reached_in_spite_of_everything(place, method):
    """A clipped update, an abandoned attempt, a crash between upload and outcome, a lost state, a client that joins."""
    server = Coordinator(place, settings={"limits": {"reattach_grace_s": 0.5}}).serve()
    daemons = [daemon(place, server, index) for index in range(SIZE)]
    for each in daemons[:3]:
        each.start()
    # The first moves are longer than this by far.
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


def _cohort(server):
    """Who works for the round, once two do."""
    return list(server.until("exact", lambda run: len(run.cohort) == 2, "two are drawn").cohort)


def _abandon_an_attempt(server, daemons):
    """Both of a cohort are killed in mid-training; others take over, and their work never counts."""
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


def _crash_between_upload_and_outcome(server, daemons):
    """One has delivered and dies before its round commits; it hears the outcome when it is back."""
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


def _lose_a_state(server, victim):
    """All that it kept is gone, also the update that its state could be made of again: its next assignment shows it."""
    victim.kill()
    kept = victim.folder / f"{victim.name}-state"
    assert list((kept / "states").iterdir())
    for folder in ("states", "pending"):
        shutil.rmtree(kept / folder)
    victim.start()
    eventually(lambda: "states_restarted" in server.history("exact"), "all states are restarted")
