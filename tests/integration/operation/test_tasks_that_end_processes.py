"""Tasks whose code ends its process, hangs or takes all memory: each costs its own run, and nothing else."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from fl_ops.errors import OpsError
from protos.fl.v1 import admin_pb2
from tests.processes.federation import TASKS, Coordinator, Daemon, Fleet
from tests.processes.process import HERE, Workspace, eventually, write_toml
from tests.processes.simulated import simulated_digests

ENDING, AT_IMPORT = "ending_task:Ending", "exits_at_import:AtImport"
LIMITS = {
    "reattach_grace_s": 20.0, "evaluation_s": 6.0, "task_load_s": 5.0, "task_memory_mib": 1024, "restore_wait_s": 2.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator with three daemons of the healthy task, and one of the task that ends processes."""
    with Workspace(tmp_path_factory.mktemp("ending")) as workspace:
        fleet = Fleet(workspace, 3, tasks=[*TASKS, ENDING, AT_IMPORT], limits=LIMITS)
        Daemon(workspace, fleet.server, "ender", task={"name": ENDING}).start()
        fleet.server.until_present("ender")
        yield fleet


def limit_evaluations(fleet: Fleet, seconds: float) -> None:
    """Restart the coordinator with this time limit, if it has another one."""
    if fleet.server.settings["limits"]["evaluation_s"] != seconds:
        fleet.server.terminate()
        serve_with(fleet, seconds)


def serve_with(fleet: Fleet, evaluation_s: float) -> None:
    """Start the coordinator with this time limit of evaluations."""
    fleet.server.settings["limits"] = {**LIMITS, "evaluation_s": evaluation_s}
    write_toml(fleet.server.config, fleet.server.settings)
    fleet.server.serve()
    fleet.until_all_present()
    fleet.server.until_present("ender")


def create(server: Coordinator, name: str, place: str, how: str, rounds: int = 3, **options: str) -> str:
    """Create a run whose task ends its process in a place."""
    return server.create(
        name,
        task={"name": ENDING, "options": {"place": place, "how": how, **options}},
        algorithm={"name": "fedavg"},
        round={"clients_per_round": 1, "min_clients": 1},
        stop={"rounds": rounds},
    )


REFUSED = (
    ("init", "exit", r"making task .* raised SystemExit: 5 \(ending_task.py, line \d+"),
    ("model", "exit", r"the task's model\(\) raised SystemExit: 5 \(ending_task.py, line \d+"),
    ("model", "cancel", r"the task's model\(\) raised CancelledError \(ending_task.py, line \d+, in _raise\)"),
    ("model", "crash", r"the task's model\(\) ended its process: signal 11 \(SIGSEGV\)"),
    ("model", "leave", r"the task's model\(\) ended its process: exit code 3"),
)

FAILED = (
    ("eval_data", "exit", r"the task's eval_data\(\) raised SystemExit: 5"),
    ("metrics", "exit", r"raised SystemExit: 5 \(ending_task.py, line \d+"),
    ("metrics", "interrupt", r"raised KeyboardInterrupt \(ending_task.py"),
    ("metrics", "cancel", r"raised CancelledError \(ending_task.py"),
    ("metrics", "own", r"raised Own: gone \(ending_task.py"),
    ("metrics", "crash", r"ended its process: signal 11 \(SIGSEGV\); the coordinator and its other runs go on"),
    ("metrics", "leave", r"ended its process: exit code 3"),
    ("metrics", "hunger", r"allocate memory.*limits.task_memory_mib"),
    ("metrics", "hang", r"did not end within 6 s"),
)


def test_whatever_a_task_does_costs_its_own_run(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Creations are refused, runs fail with the reason; a healthy run beside them has the simulated bits."""
    monkeypatch.syspath_prepend(HERE)
    limit_evaluations(fleet, 6.0)
    server = fleet.server
    server.create("healthy", stop={"rounds": 6})
    failing = {create(server, f"{how}-{place}", place, how): message for place, how, message in FAILED}
    with pytest.raises(OpsError, match=r"importing exits_at_import .* raised SystemExit: 2"):
        server.create("argued", task={"name": AT_IMPORT})
    for place, how, message in REFUSED:
        with pytest.raises(OpsError, match=message):
            create(server, f"{how}-{place}", place, how)
    for run, message in failing.items():
        ended = server.ended(run)
        assert ended.state == admin_pb2.RUN_STATE_FAILED
        assert re.search(message, ended.reason), ended.reason
    assert server.exit_code is None
    assert server.digests("healthy") == simulated_digests("healthy", stop={"rounds": 6})


def test_a_restart_serves_and_no_process_of_a_task_is_left(fleet: Fleet) -> None:
    """A coordinator that is killed during an evaluation that hangs starts again, and its processes are gone.

    A run whose model() crashes at the restart has failed, and so has one whose import hangs behind the start, two times
    in a row. Both go on when they are resumed.
    """
    limit_evaluations(fleet, 60.0)
    server, now = fleet.server, fleet.workspace.folder / "now"
    create(server, "crashing", "model", "crash", rounds=2000, when=str(now))
    create(server, "importing", "init", "hang", rounds=2000, when=str(now))
    now.touch()
    create(server, "hanging", "metrics", "hang")
    server.until("hanging", lambda run: run.rounds_done >= 1, "a round is done")
    fleet.hold()
    pids = [line["pid"] for line in server.events("task_loaded")]
    server.kill()
    eventually(lambda: not any(map(_runs, pids)), "the processes of tasks have ended")
    serve_with(fleet, 2.0)
    assert "importing" in server.logged("runs_still_loading")["runs"]
    for name, why in (("crashing", r"signal 11 \(SIGSEGV\)"), ("importing", "did not end within 5 s")):
        ended = server.ended(name)
        assert (ended.state, server.history(name).count("run_failed")) == (admin_pb2.RUN_STATE_FAILED, 1)
        assert re.search(why, ended.reason), ended.reason
    now.unlink()
    fleet.release()
    goes_on(server, "crashing")
    goes_on(server, "importing")
    ended = server.ended("hanging")
    assert "did not end within 2 s" in ended.reason
    server.completed(server.create("after", stop={"rounds": 1}))


def goes_on(server: Coordinator, name: str) -> None:
    """A failed run that is resumed commits a round. Then it is stopped."""
    with server.admin() as admin:
        done = admin.runs.resume_run(name).rounds_done
        server.until(name, lambda run: run.rounds_done > done, "it goes on")
        admin.runs.stop_run(name, "enough")


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return "Z" not in Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    return False


@pytest.mark.slow  # the first test creates runs beside a healthy one whose tasks hang
def test_a_slow_model_holds_up_no_other_creation(fleet: Fleet) -> None:
    """While a task's model() hangs, other runs are created; after the time limit its creation is refused."""
    refused: list[str] = []

    def slow() -> None:
        try:
            create(fleet.server, "slow", "model", "hang")
        except OpsError as error:
            refused.append(str(error))

    thread = threading.Thread(target=slow)
    thread.start()
    fleet.server.logged("run_being_created", run="slow")
    fleet.server.completed(fleet.server.create("quick", stop={"rounds": 1}))
    assert not refused
    thread.join()
    assert refused


@pytest.mark.slow  # fl_server/run/evaluation has this without processes
def test_evaluations_of_stopped_runs_give_way(fleet: Fleet) -> None:
    """A run that waits for a place says which runs are evaluated; those that are stopped then give way to it."""
    limit_evaluations(fleet, 60.0)
    server, hanging = fleet.server, ("holds-1", "holds-2")
    for name in hanging:
        create(server, name, "metrics", "hang")
        server.until(name, lambda run: run.rounds_done >= 1, "a round is done")
    create(server, "waits", "", "")
    waiting = server.until("waits", lambda run: "waits until" in run.reason, "it says why it waits")
    assert waiting.reason == "its evaluation waits until one of 2 ends on the server; under way: holds-1, holds-2"
    with server.admin() as admin:
        admin.runs.stop_run("holds-1", "enough")
    left = server.logged("evaluation_left", run="holds-1")
    assert left["reason"].startswith("the run has ended, and another one waits for its place")
    server.completed("waits")
