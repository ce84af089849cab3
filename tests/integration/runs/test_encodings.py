"""Updates, models and directions that travel in encodings, with real processes: simulated bits, kills, replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs.test_simulation import over_the_wire, simulated
from tests.marks import slow_except
from tests.processes.federation import Fleet
from tests.processes.process import HERE, eventually
from tests.processes.simulated import replay, simulated_digests, simulated_rounds

SCAFFOLD: dict[str, Any] = {"algorithm": {"name": "scaffold"}, "population": 3}
RUNS: dict[str, dict[str, Any]] = {
    "int8-fedcm": {"encodings": {"update": "int8"}},
    "int8-scaffold": {**SCAFFOLD, "encodings": {"update": "int8"}, "round": {"clip_update_norm": 0.1}},
    "bf16-model": {"encodings": {"model": "bf16", "direction": "bf16"}},
    "eden": {"algorithm": {"name": "mime"}, "encodings": {"update": "eden2", "model": "eden4", "direction": "eden4"}},
    "all-scaffold": {**SCAFFOLD, "encodings": {"update": "int4", "model": "int8", "direction": "int8"}},
    "topk": {
        "encodings": {"update": "topk", "fraction": 0.25},
        "algorithm": {"name": "fedavg"},
        "round": {"clip_update_norm": 0.1},
    },
    "randk-scaffold": {**SCAFFOLD, "encodings": {"update": "randk", "fraction": 0.25}},
    "reference-fedcm": {"encodings": {"update": "int2", "reference": "direction"}},
    "reference-scaffold": {
        **SCAFFOLD,
        "encodings": {"update": "int4", "direction": "int8", "reference": "direction"},
        "round": {"clip_update_norm": 0.1},
    },
    "reference-mime": {
        "algorithm": {"name": "mime"},
        "encodings": {"update": "eden2", "direction": "bf16", "reference": "direction"},
    },
    "evaluated": {"encodings": {"update": "bf16", "model": "int4"}, "evaluation": {"clients_every": 2}},
    "difference": {"encodings": {"model": "bf16", "difference": "previous"}, "evaluation": {"clients_every": 2}},
}
DIFFERENCES: dict[str, Any] = {
    "encodings": {"update": "int8", "model": "int8", "direction": "bf16"},
    "round": {"clients_per_round": 3},
    "stop": {"rounds": 3},
}
"""A run whose clients hold the bundles of the round before, with and without differences."""


@pytest.fixture(autouse=True)
def _task_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the daemons' task importable here."""
    monkeypatch.syspath_prepend(HERE)


@pytest.mark.parametrize("name", slow_except(RUNS, "int8-scaffold"))
def test_simulation_run_and_replay_have_the_same_bits(fleet: Fleet, name: str) -> None:
    """Models, metrics and losses; other models than those of a plain run, and fewer bytes."""
    sections = {**RUNS[name], "stop": {"rounds": 3}}
    run = fleet.server.create(f"encoded-{name}", **sections)
    came = over_the_wire(fleet.server, run)
    assert simulated(run, **sections) == came
    result = replay(fleet.server, run)
    assert result.exit_code == 0, result.output
    plain = simulated(f"plain-{name}", **{**sections, "encodings": {}})
    assert [each[0] for each in plain] != [each[0] for each in came]


@pytest.mark.slow  # the test of differences below counts bytes, too
def test_fewer_bytes_travel(fleet: Fleet) -> None:
    """Of the same run. Its model of 43 parameters has more scales and gaps for a byte of values than a large one."""
    received = {}
    for name, encodings in {"plain": {}, "few": {"update": "int8", "model": "bf16", "direction": "bf16"}}.items():
        fleet.server.create(f"bytes-{name}", encodings=encodings, stop={"rounds": 2})
        fleet.server.completed(f"bytes-{name}")
        received[name] = fleet.server.rounds(f"bytes-{name}")[1]
    plain, few = received["plain"], received["few"]
    assert few.bytes_up < plain.bytes_up / 2
    assert few.bytes_down < 0.55 * plain.bytes_down


@pytest.mark.slow  # the test below kills both processes
@pytest.mark.parametrize("name", ["int8-scaffold", "eden", "reference-scaffold", "topk"])
def test_a_killed_coordinator_ends_with_the_same_models(fleet: Fleet, name: str) -> None:
    """SIGKILL after the first receipt of a round: the encoded update is kept, and not trained again."""
    run = f"killed-{name}"
    sections = {**RUNS[name], "stop": {"rounds": 3}}
    quick, slow = fleet.half_delivered(run, **sections)
    fleet.server.kill()
    fleet.server.serve()
    assert fleet.server.run(run).admitted == 1
    slow.hold.unlink()
    assert simulated_digests(run, **sections) == fleet.server.digests(run)
    trained = quick.events("trained", run=run, round=0)
    assert len(trained) == (2 if name == "eden" else 1)  # two exchanges


@pytest.mark.parametrize("name", slow_except(["int8-scaffold", "topk"], "topk"))
def test_a_daemon_killed_with_a_pending_update_sends_it(fleet: Fleet, name: str) -> None:
    """It trains while the coordinator is down, and is killed. Its next start sends the same encoded bytes."""
    run = f"pending-{name}"
    sections = {**RUNS[name], "stop": {"rounds": 3}}
    _, slow = fleet.half_delivered(run, **sections)
    fleet.server.kill()
    slow.hold.unlink()
    kept = Path(slow.settings["state_dir"])
    eventually(lambda: list(kept.glob("**/*.update")), "its update is saved")
    slow.kill()
    fleet.server.serve()
    slow.start()
    assert simulated_digests(run, **sections) == fleet.server.digests(run)
    assert len(slow.events("trained", run=run, round=0)) == 1


FEWER = {**DIFFERENCES, "encodings": {**DIFFERENCES["encodings"], "difference": "previous"}}


def bytes_down(name: str, sections: dict[str, Any]) -> list[int]:
    """Bytes down of each round of the same run, simulated in this process."""
    return [done.bytes_down for done in simulated_rounds(name, **sections)]


def test_differences_are_fewer_bytes_of_the_same_run(fleet: Fleet) -> None:
    """Models and results are those without them. From the second round on there are fewer bytes, as simulated."""
    rounds = {}
    # Daemons of the run before may hold its first direction, which is zero; after a whole run they hold another.
    for name, sections in {"before": DIFFERENCES, "whole": DIFFERENCES, "fewer": FEWER}.items():
        fleet.server.create(name, **sections)
        rounds[name] = over_the_wire(fleet.server, name)
    assert rounds["fewer"] == rounds["whole"]
    fewer, whole = ([done.bytes_down for done in fleet.server.rounds(name)] for name in ("fewer", "whole"))
    assert fewer[0] == whole[0]
    assert all(less < more for less, more in zip(fewer[1:], whole[1:], strict=True))
    assert (fewer, whole) == (bytes_down("fewer", FEWER), bytes_down("whole", DIFFERENCES))
    assert not any(daemon.events("difference_not_used") for daemon in fleet.daemons.values())


@pytest.mark.slow  # kills with encodings are above, and differences that are not used in fl_client/connection/bundles
@pytest.mark.parametrize("killed", ["server", "edge-1"])
def test_a_kill_after_a_difference_ends_with_the_same_models(fleet: Fleet, killed: str) -> None:
    """SIGKILL in the second round, whose bundles all clients fetched as differences. What is lost is fetched whole."""
    run, server = f"fewer-{killed}", fleet.server
    fleet.hold()
    server.create(run, **FEWER)
    server.until(run, lambda status: len(status.cohort) == 3, "it draws all")
    with server.admin() as admin:
        admin.runs.pause_run(run)
        fleet.release()
        first = server.until(run, lambda status: status.rounds_done == 1, "it commits one round and waits")
        fleet.hold()
        admin.runs.resume_run(run)
    expected = first.bytes_down + bytes_down(run, FEWER)[1]
    server.until(run, lambda status: status.bytes_down == expected, "all clients have fetched the differences")
    process = server if killed == "server" else fleet[killed]
    process.kill()
    server.serve() if killed == "server" else fleet[killed].start()
    fleet.release()
    assert simulated_digests(run, **DIFFERENCES) == server.digests(run)
