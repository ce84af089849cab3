"""Methods and reducers whose code ends the coordinator's process or hangs: each costs one restart at most, and its run.

They run in the coordinator's process. A healthy run goes on beside them, and ends with the simulated bits.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos.fl.v1 import admin_pb2
from tests.processes.federation import TASKS, Coordinator, Daemon, Fleet
from tests.processes.process import HERE, Workspace
from tests.processes.simulated import simulated_digests

ENDING, METHOD, REDUCER = "ending_task:Ending", "ending_code:method", "ending_code:reducer"
SETTINGS: dict[str, Any] = {
    "tasks": [*TASKS, ENDING],
    "algorithms": [METHOD],
    "reducers": [REDUCER],
    "limits": {"reattach_grace_s": 20.0, "method_s": 6.0},
    "drain_grace_s": 1.0,
}
PLACE = r"ending_code.py, line \d+"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator with three daemons of the healthy task, and one for the runs with code from outside."""
    with Workspace(tmp_path_factory.mktemp("ending")) as workspace:
        fleet = Fleet(workspace, 3, **SETTINGS)
        Daemon(workspace, fleet.server, "ender", task={"name": ENDING}, algorithms=[METHOD]).start()
        fleet.server.until_present("ender")
        yield fleet


def create(server: Coordinator, name: str, part: str, how: str) -> str:
    """Create a run of the daemon "ender" whose method or reducer can end in this way; wait until it has a round."""
    parameters = {"how": how}
    algorithm = {"name": METHOD, "parameters": parameters} if part == "method" else {"name": "fedavg"}
    reducer = {"reducer": REDUCER, "reducer_parameters": parameters} if part == "reducer" else {}
    server.create(
        name,
        task={"name": ENDING},
        algorithm=algorithm,
        round={"clients_per_round": 1, "min_clients": 1, **reducer},
        stop={"rounds": 2000},
    )
    server.until(name, lambda run: run.rounds_done >= 1, "a round is done")
    return name


def failed(server: Coordinator, run: str, reason: str) -> None:
    """The run has failed, for this reason."""
    ended = server.ended(run)
    assert ended.state == admin_pb2.RUN_STATE_FAILED
    assert re.search(reason, ended.reason), ended.reason


def trigger(fleet: Fleet, name: str) -> Path:
    """From now on the code ends the process or hangs."""
    path = fleet.workspace.folder / name
    path.touch()
    return path


@pytest.mark.parametrize("part", ["reducer", pytest.param("method", marks=pytest.mark.slow)])
def test_a_crash_costs_one_restart_and_one_run(fleet: Fleet, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After SIGSEGV the run has failed with the place; the healthy one goes on. The failed one can be resumed."""
    monkeypatch.syspath_prepend(HERE)
    server, healthy = fleet.server, f"healthy-{part}"
    create(server, f"crashes-{part}", part, "crash")
    server.create(healthy, stop={"rounds": 5})
    now = trigger(fleet, f"{part}.crash")
    assert server.wait() == -signal.SIGSEGV
    server.serve()
    reason = f"{'reducer' if part == 'reducer' else 'algorithm'} ending_code:{part} ended the coordinator's process: "
    failed(server, f"crashes-{part}", f"{reason}Segmentation fault \\({PLACE}")
    assert server.history(f"crashes-{part}").count("run_failed") == 1
    assert server.digests(healthy) == simulated_digests(healthy, stop={"rounds": 5})
    now.unlink()
    with server.admin() as admin:
        before = admin.runs.resume_run(f"crashes-{part}").rounds_done
        server.until(f"crashes-{part}", lambda run: run.rounds_done > before, "it goes on")
        admin.runs.stop_run(f"crashes-{part}", "enough")
        server.ended(f"crashes-{part}")
        admin.call(
            admin_pb2.DeleteRunRequest(run_id=f"crashes-{part}", reason="its code is loaded at each start"),
            admin_pb2.DeleteRunResponse,
        )


def test_an_import_that_crashes_is_not_repeated(fleet: Fleet) -> None:
    """The first restart dies of it, the next one serves: the run has failed, and is imported when it is resumed."""
    server = fleet.server
    create(server, "importing", "reducer", "leave")
    server.kill()
    now = trigger(fleet, "import.crash")
    server.start()
    assert server.wait() == -signal.SIGSEGV
    server.serve()
    server.kill()
    server.serve()
    failed(server, "importing", f"ended the coordinator's process: Segmentation fault \\({PLACE}")
    assert server.history("importing").count("run_failed") == 1
    now.unlink()
    with server.admin() as admin:
        admin.runs.resume_run("importing")
        admin.runs.stop_run("importing", "enough")
    fleet.until_all_present()
    server.completed(server.create("after-import", stop={"rounds": 1}))


@pytest.mark.slow
def test_ends_without_a_report_fail_the_run_after_three(fleet: Fleet) -> None:
    """An exit code tells no thread: after three ends in the same call the run fails. One SIGKILL alone fails none."""
    server = fleet.server
    create(server, "leaves", "reducer", "leave")
    now = trigger(fleet, "reducer.leave")
    assert server.wait() == 3
    for _ in range(2):
        server.start()
        assert server.wait() == 3
    server.serve()
    failed(server, "leaves", "reducer ending_code:reducer ended the coordinator's process 3 times")
    now.unlink()


def test_a_hanging_step_fails_its_run_and_delays_no_end(fleet: Fleet) -> None:
    """The run fails with the place after the limit; others go on. A process with such a thread ends in its grace."""
    server = fleet.server
    fleet.until_all_present()
    server.until_present("ender")
    create(server, "hangs", "reducer", "sleep")
    now = trigger(fleet, "reducer.sleep")
    failed(server, "hangs", f"reducer ending_code:reducer did not end within 6 s \\(at {PLACE}")
    server.completed(server.create("beside", stop={"rounds": 1}))
    assert server.terminate() == 0
    now.unlink()
    server.serve()


@pytest.mark.slow  # the test above: a hanging step delays no end
def test_an_endless_loop_is_ended_and_a_step_at_the_end_is_repeated(fleet: Fleet) -> None:
    """A coordinator that is told to end while a reducer loops ends in its grace; the next one computes the round."""
    server = fleet.server
    fleet.until_all_present()
    server.until_present("ender")
    create(server, "held", "reducer", "spin")
    now = trigger(fleet, "reducer.spin")
    server.until("held", lambda run: run.phase == "stepping", "it computes a model")
    assert server.terminate() == 0
    now.unlink()
    server.serve()
    before = server.run("held").rounds_done
    server.until("held", lambda run: run.rounds_done > before, "it goes on")
    with server.admin() as admin:
        admin.runs.stop_run("held", "enough")
