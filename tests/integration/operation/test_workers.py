"""Workers end the clients' streams of model bytes: killed, without their coordinator, several on one port."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos.fl.v1 import training_pb2
from tests.marks import slow_except
from tests.processes.federation import Coordinator, Fleet
from tests.processes.pods import is_ready
from tests.processes.process import Process, Workspace, eventually
from tests.processes.raw_client import HALF_BYTES, RawClient, Update, halting, messages
from tests.processes.relay import Relay
from tests.processes.workers import Worker, free_address, section

ONE = {"clients_per_round": 1, "min_clients": 1}


@pytest.fixture(scope="module")
def fleet_with_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator that sends its clients to workers, and three daemons."""
    with Workspace(tmp_path_factory.mktemp("fleet")) as workspace:
        yield Fleet(workspace, 3, workers=section())


@pytest.fixture
def fleet(fleet_with_workers: Fleet) -> Iterator[Fleet]:
    """The fleet, idle and connected. No worker runs."""
    with fleet_with_workers.lent() as lent:
        yield lent


@pytest.fixture
def workspace(fleet: Fleet) -> Iterator[Workspace]:
    """For the workers of one test."""
    with Workspace(fleet.workspace.folder) as workspace:
        yield workspace


def started(fleet: Fleet, workspace: Workspace, name: str, count: int = 1) -> list[Worker]:
    """Workers that serve."""
    return [Worker(workspace, fleet.server, f"{name}-{number}").serve() for number in range(count)]


@pytest.mark.parametrize("count", slow_except([1, 2, 4], 2))
def test_models_are_those_of_one_process(
    fleet: Fleet, workspace: Workspace, undisturbed: list[str], count: int
) -> None:
    """Every byte of models and updates passes through a worker, and no bit differs."""
    started(fleet, workspace, f"worker-{count}", count)
    before = calls(fleet, "ReceiveUpdate")
    assert undisturbed == fleet.server.digests(fleet.server.create(f"by-{count}"))
    assert calls(fleet, "ReceiveUpdate") - before == 6
    assert (calls(fleet, "SubmitUpdate"), calls(fleet, "FetchModel")) == (0, 0)


def test_a_run_goes_on_at_another_worker(fleet: Fleet, workspace: Workspace, undisturbed: list[str]) -> None:
    """The only worker is killed with work under way; clients wait for the next one, and no bit differs."""
    (first,) = started(fleet, workspace, "first")
    _, slow = fleet.half_delivered("goes-on")
    first.kill()
    slow.hold.unlink()
    slow.logged("trained", run="goes-on", round=0)
    started(fleet, workspace, "second")
    assert undisturbed == fleet.server.digests("goes-on")


@pytest.mark.slow  # test_workers_elsewhere has this with workers that share no folder
def test_a_killed_coordinator_continues_with_its_workers(
    fleet: Fleet, workspace: Workspace, undisturbed: list[str]
) -> None:
    """They attach to the next one. The admitted update counts, and its client does not train again."""
    (worker,) = started(fleet, workspace, "stays")
    assert undisturbed == fleet.killed_in_mid_round("coordinator-killed")
    worker.logged("attached", 2)


@pytest.mark.slow  # the two tests above kill the worker, and the coordinator
def test_everything_is_killed(fleet: Fleet, workspace: Workspace, undisturbed: list[str]) -> None:
    """Coordinator, worker and daemons start again into the same round with the update that was admitted."""
    (worker,) = started(fleet, workspace, "all")
    _, slow = fleet.half_delivered("all-killed")
    processes = [fleet.server, worker, *fleet.daemons.values()]
    for process in processes:
        process.kill()
    slow.hold.unlink()
    fleet.server.serve()
    for process in processes[1:]:
        process.start()
    assert undisturbed == fleet.server.digests("all-killed")


def test_connections_end_with_age_so_that_a_new_worker_gets_its_share(tmp_path: Path) -> None:
    """Of the connections that daemons have opened to the first worker, some move to the second."""
    with Workspace(tmp_path) as workspace:
        fleet = Fleet(workspace, 3, workers=section(age_s=1.0))
        settings = {"metrics_listen": "127.0.0.1:0"}
        Worker(workspace, fleet.server, "first", settings).serve()
        fleet.server.create("long", round={"clients_per_round": 3}, stop={"rounds": 10_000})
        fleet.server.until("long", lambda run: run.rounds_done, "a round is committed")
        second = Worker(workspace, fleet.server, "second", settings).serve()
        eventually(lambda: count_of(second, "SubmitUpdate"), "the second worker receives updates")
        with fleet.server.admin() as admin:
            admin.runs.stop_run("long", "seen")
        assert fleet.server.run("long").rounds_done > 1


def test_limits_of_one_client_hold_over_all_workers(tmp_path: Path) -> None:
    """A second upload at once is refused by the coordinator, whichever workers have the two connections."""
    with Workspace(tmp_path) as workspace:
        server = Coordinator(workspace, settings={"workers": section(), "transfers": {"uploads_at_once": 1}}).serve()
        for number in range(2):
            Worker(workspace, server, f"worker-{number}").serve()
        serve = str(server.settings["workers"]["serve"])
        with RawClient(server.address, "raw") as control, RawClient(serve) as one, RawClient(serve) as other:
            label = {"test": "limits"}
            control.register(labels=label)
            one.session_id = other.session_id = control.session_id
            events = control.attend()
            server.create("limits", round=ONE, stop={"rounds": 1}, labels=label)
            update = one.update(next(event for event in events if event.HasField("assignment")).assignment)
            goes_on = threading.Event()
            sending = one.stub.SubmitUpdate.future(halting(messages(update, 64), goes_on))
            eventually(lambda: other.query(update).kept_bytes == HALF_BYTES, "half of it is kept")
            with pytest.raises(grpc.RpcError, match="transfers.uploads_at_once") as refused:
                other.submit(update)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            goes_on.set()
            assert sending.result().receipt.admitted


def test_an_upload_is_resumed_at_another_worker(fleet: Fleet, workspace: Workspace) -> None:
    """A worker is killed in mid-upload. Another one finds the bytes that it had, and takes the rest."""
    (first,) = started(fleet, workspace, "cut")
    serve = str(fleet.server.settings["workers"]["serve"])
    with RawClient(fleet.server.address, "raw-cut") as control, RawClient(serve, "raw-cut") as data:
        label = {"test": "cut"}
        response = control.register(labels=label)
        assert response.data_address == f":{serve.rpartition(':')[2]}"
        data.session_id = control.session_id
        events = control.attend()
        fleet.server.create("cut", round=ONE, stop={"rounds": 1}, labels=label)
        assignment = next(event for event in events if event.HasField("assignment")).assignment
        update = data.update(assignment)
        update.header.session_id = control.session_id
        parts = messages(update, 64)
        goes_on = threading.Event()
        sending = data.stub.SubmitUpdate.future(halting(parts, goes_on))
        eventually(lambda: data.query(update).kept_bytes == HALF_BYTES, "half of it is kept")
        first.kill()
        assert sending.exception() is not None
        goes_on.set()
        started(fleet, workspace, "rest")
        kept = eventually(lambda: answered(data, update), "another worker answers")
        assert kept == HALF_BYTES
        update.header.resume_offset = kept
        receipt: training_pb2.Receipt = data.submit(update)
        assert receipt.admitted
        assert fleet.server.logged("upload_resumed", run="cut")["offset"] == HALF_BYTES


def calls(fleet: Fleet, rpc: str) -> int:
    """Calls of a method at the coordinator that have ended well, since its start."""
    return count_of(fleet.server, rpc)


def count_of(process: Process, rpc: str) -> int:
    """The same of any process."""
    counts = [
        float(line.rpartition(" ")[2])
        for line in process.metrics().decode().splitlines()
        if line.startswith("fl_rpc_seconds_count{") and f'rpc="{rpc}"' in line and 'code="OK"' in line
    ]
    return int(sum(counts))


def answered(client: RawClient, update: Update) -> int | None:
    """The bytes kept of an update; None while no worker answers."""
    try:
        return client.query(update).kept_bytes
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return None


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut off", "stopped"])
def test_clients_of_a_worker_that_cannot_work_go_to_another_one(
    tmp_path: Path, undisturbed: list[str], how: str
) -> None:
    """Long before `age_s`: one that is cut off closes its port; keepalive ends the connections of one that hangs."""
    serving, health = [free_address(), free_address()], [free_address(), free_address()]
    service = Relay(lambda: next((at for at, probe in zip(serving, health, strict=True) if is_ready(probe)), ""))
    with Workspace(tmp_path) as workspace, service:
        fleet = Fleet(workspace, 3, workers=section(address=service.address))
        with Relay(fleet.server.settings["workers"]["listen"]) as link:
            workers = []
            for number, coordinator in enumerate((link.address, fleet.server.settings["workers"]["listen"])):
                own = {"coordinator": coordinator, "serve": serving[number]}
                settings = {"health_listen": health[number], "workers": own}
                workers.append(Worker(workspace, fleet.server, f"worker-{number}", settings).serve())
            _, slow = fleet.half_delivered("moves")
            if how == "stopped":
                workers[0].signal(signal.SIGSTOP)
            else:
                link.cut()
            slow.hold.unlink()
            assert undisturbed == fleet.server.digests("moves")


@pytest.mark.slow
def test_workers_are_killed_again_and_again(fleet: Fleet, workspace: Workspace, undisturbed: list[str]) -> None:
    """Two workers are killed in turn at any moment of 20 runs, and started again. No run ends otherwise."""
    pair, chance = started(fleet, workspace, "mortal", 2), random.Random(7)
    kills = 0
    for number in range(20):
        run = fleet.server.create(f"mortal-{number}")
        while not fleet.server.run(run).HasField("ended"):
            time.sleep(chance.uniform(0.0, 0.3))
            victim = chance.choice(pair)
            victim.kill()
            victim.start()
            kills += 1
        assert undisturbed == fleet.server.digests(run)
    assert kills >= 20
