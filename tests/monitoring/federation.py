"""A federation with real faults, scraped by a real Prometheus."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.monitoring.alert_files import groups
from tests.monitoring.prometheus import Prometheus, Setup, prometheus
from tests.processes import workers
from tests.processes.certificates import Pki, credentials, section, server_section
from tests.processes.federation import Daemon, Fleet, SecureCoordinator
from tests.processes.process import Workspace, eventually, write_toml
from tests.processes.raw_client import RawClient, Update

SIZE = 3
"""Daemons."""
ROUNDS = 4
"""Of the runs of all daemons."""
KEPT = 16
"""Examples of each shard kept for evaluation on the device."""
PLANT = {"site": "plant"}
"""Label of the daemons, so that their runs draw no raw client."""
RUNS = ("undisturbed", "misshapen", "diverged", "faulted")


class ScrapedFleet(Fleet):
    """Daemons that keep a part of their shard for evaluation and serve their metrics, each at its own address.

    Their bytes pass through a worker.
    """

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.metrics = _free_addresses(SIZE)
        self.pki = Pki(workspace.folder / "pki")
        settings = {"limits": {"reattach_grace_s": 0.5}, "workers": workers.section()}
        self.server = SecureCoordinator(workspace, self.pki, settings).serve()
        own = {"tls": server_section(self.pki.issue("worker", "worker-1")), "metrics_listen": _free_addresses(1)[0]}
        self.worker = workers.Worker(workspace, self.server, "worker-1", own).serve()
        self.daemons = {f"edge-{index}": self.daemon(index, SIZE).start() for index in range(SIZE)}
        self.until_all_present()

    def daemon(self, index: int, size: int) -> Daemon:
        """Create a daemon without starting it."""
        settings: dict[str, Any] = {
            "shard": {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index},
            "options": {"kept": KEPT},
            "metrics_listen": self.metrics[index],
            "labels": PLANT,
            "insecure": False,
            "tls": section(self.pki.issue("client", f"edge-{index}")),
        }
        return Daemon(self.workspace, self.server, f"edge-{index}", **settings)

    @property
    def jobs(self) -> dict[str, list[str]]:
        """Scrape job -> addresses of its targets."""
        return {
            "fl-server": [str(self.server.settings["metrics_listen"])],
            "fl-data": [self.worker.metrics_listen],
            "fl-client": self.metrics,
        }


class MonitoredRuns:
    """Four runs, one after the other, and their metrics in Prometheus."""

    def __init__(self, fleet: ScrapedFleet, prometheus: Prometheus) -> None:
        self.fleet, self.server, self.prometheus = fleet, fleet.server, prometheus
        self.began = time.time()
        self.undisturbed_at = self.killed_at = 0.0
        """Unix times at which the first run, and the last one before the kill, were completely scraped."""

    def execute(self) -> None:
        """Execute all four runs."""
        self._undisturbed()
        self._misshapen()
        self._diverged()
        self._faulted()

    def sees(self, expression: str, value: float) -> None:
        """Wait until Prometheus has scraped a value."""
        eventually(lambda: self.prometheus.value(expression) == value, f"{expression} is {value}")

    def scraped(self) -> float:
        """Wait until every target was scraped once more; returns the time afterwards."""
        asked = f"count(timestamp(up) > {time.time():.3f} and up == 1)"
        targets = sum(map(len, self.fleet.jobs.values()))
        eventually(lambda: self.prometheus.value(asked) == targets, "all are scraped again")
        return time.time()

    def _undisturbed(self) -> None:
        """Four rounds of all daemons, each evaluated by the server and by the clients."""
        run = self.server.create(
            "undisturbed",
            round=ALL,
            stop={"metric": "accuracy", "rounds": ROUNDS},
            evaluation={"clients_every": 1},
            labels=PLANT,
        )
        self.server.completed(run)
        eventually(lambda: "clients_evaluated" in self.server.rounds(run)[-1].metrics, "clients have evaluated")
        self.undisturbed_at = self.scraped()

    def _misshapen(self) -> None:
        """One of two updates has a wrong shape. The other one completes the round."""
        site = {"site": "lab"}
        two = {"clients_per_round": 2, "min_clients": 2, "quorum": 1}
        with self._client("raw-0", site) as bad, self._client("raw-1", site) as good:
            self.server.create("misshapen", round=two, stop={"rounds": 1}, labels=site)
            self.scraped()
            assert not bad.submit(bad.transposed()).admitted
            assert good.submit(good.proper()).admitted
            self.server.completed("misshapen")

    def _diverged(self) -> None:
        """The only client sends NaN, and the run fails."""
        site = {"site": "desert"}
        one = {"clients_per_round": 1, "min_clients": 1}
        with self._client("raw-2", site) as hot:
            self.server.create("diverged", round=one, stop={"rounds": 1}, labels=site)
            self.scraped()
            assert not hot.submit(hot.not_finite()).admitted
            self.server.ended("diverged")

    def _faulted(self) -> None:
        """A daemon is killed during a round, the run is paused, and the coordinator is killed in the next round."""
        server, fleet = self.server, self.fleet
        fleet.hold()
        server.create("faulted", round={**ALL, "quorum": 2}, stop={"rounds": ROUNDS}, labels=PLANT)
        server.until("faulted", lambda run: len(run.cohort) == SIZE, "all are drawn")
        self._steer("pause_run")
        fleet["edge-2"].kill()
        self.sees('fl_assignments_total{run="faulted", state="lost"}', 1)
        fleet.release()
        server.until("faulted", lambda run: run.rounds_done == 1, "the round is closed without it")
        self.sees('fl_run_state{run="faulted", state="paused"}', 1)
        fleet["edge-2"].start()
        fleet.until_all_present()
        fleet.hold()
        self._steer("resume_run")
        server.until("faulted", lambda run: run.cohort and run.rounds_done == 1, "the next one is under way")
        self.killed_at = self.scraped()
        server.kill()
        eventually(lambda: self.prometheus.value('up{job="fl-server"}') == 0, "it is seen down")
        # On a busy machine daemons reconnect late: wait for all of them.
        server.settings["limits"]["reattach_grace_s"] = 60.0
        write_toml(server.config, server.settings)
        server.serve()
        fleet.until_all_present()
        fleet.release()
        server.completed("faulted")
        self.scraped()

    @contextmanager
    def _client(self, name: str, labels: dict[str, str]) -> Iterator[Worker]:
        with Worker(self.server.address, name, credentials(self.fleet.pki.issue("client", name))) as client:
            client.begin(labels)
            yield client

    def _steer(self, what: str) -> None:
        with self.server.admin() as admin:
            getattr(admin.runs, what)("faulted")


ALL = {"clients_per_round": SIZE, "min_clients": SIZE}


class Worker(RawClient):
    """A raw client with its assignment."""

    def begin(self, labels: dict[str, str]) -> None:
        """Register and wait for work."""
        self.register(labels=labels)
        self._events = self.attend()

    def proper(self) -> Update:
        """A correct update."""
        self._assignment = getattr(self, "_assignment", None) or next(self._events).assignment
        return self.update(self._assignment)

    def transposed(self) -> Update:
        """An update with the first tensor transposed."""
        first, *rest = self._ones()
        return self.update_of(self._assignment, dict([(first[0], first[1].T.contiguous()), *rest]))

    def not_finite(self) -> Update:
        """An update with one NaN."""
        tensors = dict(self._ones())
        next(iter(tensors.values())).view(-1)[0] = float("nan")
        return self.update_of(self._assignment, tensors)

    def _ones(self) -> list[tuple[str, torch.Tensor]]:
        manifest = self.proper().header.payloads[0].manifest
        return [(entry.name, torch.ones(list(entry.shape))) for entry in manifest.tensors]


@contextmanager
def scraped_federation(folder: Path) -> Iterator[MonitoredRuns]:
    """A fleet, scraped twice a second by a Prometheus with the deployed rules."""
    with Workspace(folder) as workspace:
        fleet = ScrapedFleet(workspace)
        with prometheus(folder, Setup(jobs=fleet.jobs, rules=groups(), interval="500ms")) as seen:
            yield MonitoredRuns(fleet, seen)


def _free_addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{bound.getsockname()[1]}" for bound in sockets]
    for bound in sockets:
        bound.close()
    return addresses
