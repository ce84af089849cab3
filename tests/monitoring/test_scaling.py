"""Workers are added and drained as the manifests' autoscaler says, under the load of transfers; no update is lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.fl.v1 import coordinator_pb2 as pb
from protos.fl.v1 import training_pb2
from tests.monitoring.autoscaler import NAMESPACE, SYNC_S, Autoscaler, of_the_manifest, values
from tests.monitoring.prometheus import Prometheus, Setup, prometheus
from tests.postgres_server import PostgresServer
from tests.processes.pods import Pods
from tests.processes.process import TIMEOUT_S, Workspace, eventually
from tests.processes.raw_client import RawClient, Update, messages

CLIENTS, LATE = 40, 14
"""Clients that upload at once, which two workers are too few for, and those of them that end last."""
CHUNK_BYTES, PACE_S = 4096, 4.0
"""An upload has 65 chunks, one each 4 s: longer than the test."""
DRAIN_S = 1.0
LABEL = {"test": "scaling"}
WINDOW_S = of_the_manifest().window("scaleDown")


@pytest.mark.parametrize(
    ("current", "load", "expected"),
    [
        (3, [32.0, 32.0, 32.0], 6),  # 200 of a target of 100: twice as many
        (8, [8.0] * 8, 7),  # half of it: half as many, by one pod at a time
        (2, [17.5, 17.5], 2),  # within the tolerance
        (2, [18.0, 18.0], 3),
        (2, [100.0, 100.0], 4),  # 13 by the ratio, twice as many in one period
        (8, [50.0] * 8, 8),
        (2, [0.0, 0.0], 2),
    ],
)
def test_the_algorithm(current: int, load: list[float], expected: int) -> None:
    """Ratio, tolerance, policies, and the limits of the manifest, when no window holds a number any more."""
    scaler = Autoscaler(of_the_manifest())
    scaler.decide(0.0, current, [scaler.manifest.target] * current)
    assert scaler.decide(WINDOW_S, current, load) == expected


def test_the_windows() -> None:
    """More pods come at once. The highest need of half an hour counts; then one goes in five minutes."""
    scaler, numbers = Autoscaler(of_the_manifest()), [(0.0, 2)]
    for step in range(1, 400):
        now, current = step * SYNC_S, numbers[-1][1]
        busy = now in {SYNC_S * 4, SYNC_S * 8, SYNC_S * 9}
        wanted = scaler.decide(now, current, [100.0 if busy else 0.0] * current)
        if wanted != current:
            numbers.append((now, wanted))
    # Needed last at 135 s.
    assert numbers[:3] == [(0.0, 2), (60.0, 4), (120.0, 8)]
    assert numbers[3:] == [(135.0 + WINDOW_S + 300.0 * gone, 7 - gone) for gone in range(6)]


def test_a_round_in_every_window_keeps_its_workers() -> None:
    """Clients transfer for a minute and train for 28: no worker ends meanwhile."""
    scaler, numbers = Autoscaler(of_the_manifest()), [2]
    for step in range(1, 1000):
        now, current = step * SYNC_S, numbers[-1]
        load = 60.0 if now % 1740.0 < 60.0 else 0.0
        numbers.append(scaler.decide(now, current, [load / current] * current))
    assert numbers == [2, *[4] * 999]


class SlowClient:
    """A client whose upload takes as long as it may, and is sent again to another worker when its worker ends."""

    def __init__(self, control: RawClient, data: RawClient) -> None:
        self._control, self._data = control, data
        self.may_end = threading.Event()
        self.cut = 0
        """How often a worker ended during the upload."""
        control.register(labels=LABEL)
        data.session_id = control.session_id
        self._events = control.attend()

    def deliver(self) -> training_pb2.Receipt:
        """Take the assignment and upload the update; returns the receipt."""
        assignment = next(event for event in self._events if event.HasField("assignment")).assignment
        update = self._data.update(assignment)
        while True:
            try:
                receipt: training_pb2.Receipt = self._data.stub.SubmitUpdate(self._paced(update)).receipt
            except grpc.RpcError as error:
                if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
                    raise
                self.cut += 1
                update.header.resume_offset = eventually(lambda: self._kept(update), "a worker answers") - 1
            else:
                return receipt

    def _kept(self, update: Update) -> int:
        """The bytes that are kept, and one; 0 while no worker answers."""
        try:
            return self._data.query(update).kept_bytes + 1
        except grpc.RpcError:
            return 0

    def _paced(self, update: Update) -> Iterator[pb.SubmitUpdateRequest]:
        for message in messages(update, CHUNK_BYTES):
            yield message
            self.may_end.wait(PACE_S)


class Scaled:
    """Workers whose number an autoscaler chooses, in the place of a Deployment."""

    def __init__(self, pods: Pods, prometheus: Prometheus, targets: Path) -> None:
        self.pods, self.prometheus, self._targets = pods, prometheus, targets
        self.numbers = [len(pods.workers)]
        """Every number of workers so far."""
        self._scaler, self.now = Autoscaler(of_the_manifest()), 0.0
        """A decision takes no time here, and as long as in a cluster by this clock."""
        self.show_targets()

    def show_targets(self) -> None:
        """Let Prometheus find the pods that run."""
        found = [
            {"targets": [worker.metrics_listen], "labels": {"namespace": NAMESPACE, "pod": worker.name}}
            for worker in self.pods.workers
        ]
        written = self._targets.with_suffix(".new")
        written.write_text(json.dumps(found))
        written.rename(self._targets)

    def load(self) -> dict[str, float]:
        """The metric of each worker, as soon as all of them were scraped."""
        names = [worker.name for worker in self.pods.workers]

        def seen() -> dict[str, float] | None:
            found = values(self.prometheus, of_the_manifest().metric, names)
            return found if len(found) == len(names) else None

        return eventually(seen, f"{', '.join(names)} are scraped")

    def scale(self) -> int:
        """Decide once, and start or drain workers. Returns their number."""
        load, current = self.load(), len(self.pods.workers)
        self.now += SYNC_S
        wanted = self._scaler.decide(self.now, current, list(load.values()))
        for _ in range(wanted - current):
            self.pods.worker().serve()
        for _ in range(current - wanted):
            # A Deployment may choose any: here the one whose end cuts most transfers.
            self.pods.end(max(self.pods.workers, key=lambda worker: load[worker.name]))
        if wanted != current:
            self.numbers.append(wanted)
            self.show_targets()
        return wanted

    def until(self, number: int) -> None:
        """Decide again and again until there are so many workers."""
        eventually(lambda: self.scale() == number, f"{number} workers, after {self.numbers}", 2 * TIMEOUT_S)


@pytest.fixture
def scaled(tmp_path: Path, postgres: PostgresServer) -> Iterator[Scaled]:
    """Two coordinators with PostgreSQL, two workers without load, and a Prometheus."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[objects]'")
    targets, objects = tmp_path / "targets.json", tmp_path / "objects"
    objects.mkdir()
    targets.write_text("[]")
    job = {"job_name": "fl-data", "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "1s"}]}
    shared: dict[str, Any] = {
        "ledger": postgres.new_ledger(), "storage": f"file://{objects}", "drain_grace_s": DRAIN_S,
        "limits": {"reattach_grace_s": 120.0, "stall_s": 600.0},
    }  # fmt: skip
    with Workspace(tmp_path) as workspace, prometheus(tmp_path, Setup(more={"scrape_configs": [job]})) as seen:
        pods = Pods(workspace, 0, 2, shared)
        yield Scaled(pods, seen, targets)
        pods.close()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_follow_the_load(scaled: Scaled) -> None:
    """Forty uploads need a third worker. With fourteen left it is one too many, and its drain loses no update."""
    pods = scaled.pods
    assert scaled.scale() == 2
    with ExitStack() as connections, ThreadPoolExecutor(CLIENTS) as threads:
        clients = [
            SlowClient(*(connections.enter_context(RawClient(address, f"raw-{number}")) for address in pods.addresses))
            for number in range(CLIENTS)
        ]
        everybody = {"clients_per_round": CLIENTS, "min_clients": CLIENTS}
        task = {"options": {"model": "broad"}}
        pods.server.create("scaled", round=everybody, stop={"rounds": 1}, labels=LABEL, task=task)
        receipts = [threads.submit(client.deliver) for client in clients]
        scaled.until(3)
        for client in clients[LATE:]:
            client.may_end.set()
        began = scaled.now
        scaled.until(2)
        assert scaled.now > began + WINDOW_S - SYNC_S
        cut = sum(client.cut for client in clients)
        for client in clients[:LATE]:
            client.may_end.set()
        assert all(receipt.result(TIMEOUT_S).admitted for receipt in receipts)
    assert scaled.numbers == [2, 3, 2]
    assert cut > 0
    pods.server.completed("scaled")
    assert [(each.attempts, each.accepted) for each in pods.server.rounds("scaled")] == [(1, CLIENTS)]
