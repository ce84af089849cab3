"""A federation that real faults happen to while a real Prometheus looks on."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import torch
from typer.testing import CliRunner

from fl_ops.admin_client import AdminClient
from fl_ops.cli import app
from fl_ops.settings import Certificates
from tests.integration.harness import Coordinator, Daemon, Fleet
from tests.integration.processes import Place, write_toml
from tests.integration.raw_client import RawClient, Update
from tests.monitoring.alert_files import groups
from tests.monitoring.programs import eventually
from tests.monitoring.prometheus import Prometheus, Setup, prometheus

SIZE, RAW = 3, 3
"""Daemons, and clients by hand."""
KEPT = 16
"""Examples of each shard that stay for evaluation on the device."""
PLANT = {"site": "plant"}
"""Label of the daemons, so that no client by hand is drawn with them."""
RUNS = ("undisturbed", "bent", "diverged", "faulted")


class Pki:
    """An authority made by `fl ca`, and the files of those for whom it issued."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "pki"
        clients = [f"edge-{index}" for index in range(SIZE)] + [f"raw-{index}" for index in range(RAW)]
        for arguments in (
            ("init",),
            ("issue", "server", "--host", "127.0.0.1"),
            ("issue", "admin", "alice"),
            *(("issue", "client", name) for name in clients),
        ):
            made = CliRunner().invoke(app, ["ca", *arguments, "--dir", str(self.folder)])
            assert made.exit_code == 0, made.output

    def files(self, stem: str) -> dict[str, str]:
        """Authority, certificate and key of one holder, as in a daemon's [tls] section."""
        names = {"ca": "ca.crt", "cert": f"{stem}.crt", "key": f"{stem}.key"}
        return {what: str(self.folder / name) for what, name in names.items()}

    def credentials(self, client: str) -> grpc.ChannelCredentials:
        """For a client by hand."""
        files = {what: Path(file).read_bytes() for what, file in self.files(f"client-{client}").items()}
        return grpc.ssl_channel_credentials(files["ca"], files["key"], files["cert"])


class SecureCoordinator(Coordinator):
    """A coordinator that wants certificates, and whose operator is alice."""

    def __init__(self, place: Place, pki: Pki) -> None:
        ours = pki.files("server-coordinator")
        tls = {"cert": ours["cert"], "key": ours["key"], "client_ca": ours["ca"]}
        settings = {"insecure": False, "tls": tls, "limits": {"reattach_grace_s": 0.5}}
        super().__init__(place, settings=settings)
        self._operator = Certificates(**{what: Path(file) for what, file in pki.files("admin-alice").items()})

    def admin(self, certificates: Certificates | None = None) -> AdminClient:
        """As alice."""
        return super().admin(certificates or self._operator)


class WatchedFleet(Fleet):
    """Daemons that keep a part of their shard for evaluation and tell their metrics, each at an address of its own."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.metrics = _free_addresses(SIZE)
        self.pki = Pki(place.folder)
        self.server = SecureCoordinator(place, self.pki).serve()
        self.daemons = {f"edge-{index}": self.daemon(index, SIZE).start() for index in range(SIZE)}
        self.attend()

    def daemon(self, index: int, size: int) -> Daemon:
        """A daemon that is not started yet."""
        settings = {
            "shard": {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index},
            "options": {"kept": KEPT},
            "metrics_listen": self.metrics[index],
            "labels": PLANT,
            "insecure": False,
            "tls": self.pki.files(f"client-edge-{index}"),
        }
        return Daemon(self.place, self.server, f"edge-{index}", **settings)

    @property
    def jobs(self) -> dict[str, list[str]]:
        """What is to be scraped."""
        return {"fl-server": [str(self.server.settings["metrics_listen"])], "fl-client": self.metrics}


class Story:
    """What happened: four runs, one after the other, and what Prometheus saw of them."""

    def __init__(self, fleet: WatchedFleet, seen: Prometheus) -> None:
        self.fleet, self.server, self.seen = fleet, fleet.server, seen
        self.began = time.time()
        self.undisturbed_at = self.killed_at = 0.0
        """When all was scraped of the first run; and of the last one before the coordinator was killed."""

    def play(self) -> None:
        """All of it."""
        self._undisturbed()
        self._bent()
        self._diverged()
        self._faulted()

    def sees(self, expression: str, value: float) -> None:
        """Wait until Prometheus has scraped a value."""
        eventually(lambda: self.seen.value(expression) == value, f"{expression} is {value}")

    def scraped(self) -> float:
        """Wait until every target was scraped once more; the time after that."""
        asked = f"count(timestamp(up) > {time.time():.3f} and up == 1)"
        targets = sum(map(len, self.fleet.jobs.values()))
        eventually(lambda: self.seen.value(asked) == targets, "all are scraped again")
        return time.time()

    def _undisturbed(self) -> None:
        """Four rounds of all daemons, each evaluated by the server and by the clients."""
        run = self.server.create("undisturbed", round=ALL, evaluation={"clients_every": 1}, labels=PLANT)
        self.server.completed(run)
        eventually(lambda: "clients_evaluated" in self.server.rounds(run)[-1].metrics, "clients have evaluated")
        self.undisturbed_at = self.scraped()

    def _bent(self) -> None:
        """Of two updates one has a wrong shape; the round is closed by the other."""
        site = {"site": "lab"}
        two = {"clients_per_round": 2, "min_clients": 2, "quorum": 1}
        with self._client("raw-0", site) as bad, self._client("raw-1", site) as good:
            self.server.create("bent", round=two, stop={"rounds": 1}, labels=site)
            self.scraped()
            assert not bad.submit(bad.transposed()).admitted
            assert good.submit(good.proper()).admitted
            self.server.completed("bent")

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
        """A daemon is killed in mid-round, the run is paused, and the coordinator is killed in the next round."""
        server, fleet = self.server, self.fleet
        fleet.hold()
        server.create("faulted", round={**ALL, "quorum": 2}, labels=PLANT)
        server.until("faulted", lambda run: len(run.cohort) == SIZE, "all are drawn")
        self._steer("pause_run")
        fleet["edge-2"].kill()
        self.sees('fl_assignments_total{run="faulted", state="lost"}', 1)
        fleet.release()
        server.until("faulted", lambda run: run.rounds_done == 1, "the round is closed without it")
        self.sees('fl_run_state{run="faulted", state="paused"}', 1)
        fleet["edge-2"].start()
        fleet.attend()
        fleet.hold()
        self._steer("resume_run")
        server.until("faulted", lambda run: run.cohort and run.rounds_done == 1, "the next one is under way")
        self.killed_at = self.scraped()
        server.kill()
        eventually(lambda: self.seen.value('up{job="fl-server"}') == 0, "it is seen down")
        # However busy the machine is, this time everybody is waited for.
        server.settings["limits"]["reattach_grace_s"] = 60.0
        write_toml(server.config, server.settings)
        server.serve()
        fleet.attend()
        fleet.release()
        server.completed("faulted")
        self.scraped()

    @contextmanager
    def _client(self, name: str, labels: dict[str, str]) -> Iterator[Worker]:
        with Worker(self.server.address, name, self.fleet.pki.credentials(name)) as client:
            client.begin(labels)
            yield client

    def _steer(self, what: str) -> None:
        with self.server.admin() as admin:
            steer: Any = getattr(AdminClient, what)
            steer(admin, "faulted")


ALL = {"clients_per_round": SIZE, "min_clients": SIZE}


class Worker(RawClient):
    """A client by hand with the assignment that it got."""

    def begin(self, labels: dict[str, str]) -> None:
        """Register and wait for work."""
        self.register(labels=labels)
        self._events = self.attend()

    def proper(self) -> Update:
        """What was asked for."""
        self._assignment = getattr(self, "_assignment", None) or next(self._events).assignment
        return self.update(self._assignment)

    def transposed(self) -> Update:
        """The first tensor has its axes in the wrong order."""
        first, *rest = self._ones()
        return self.update_of(self._assignment, dict([(first[0], first[1].T.contiguous()), *rest]))

    def not_finite(self) -> Update:
        """One value is NaN."""
        tensors = dict(self._ones())
        next(iter(tensors.values())).view(-1)[0] = float("nan")
        return self.update_of(self._assignment, tensors)

    def _ones(self) -> list[tuple[str, torch.Tensor]]:
        manifest = self.proper().header.payloads[0].manifest
        return [(entry.name, torch.ones(list(entry.shape))) for entry in manifest.tensors]


@contextmanager
def watched(folder: Path) -> Iterator[Story]:
    """A fleet, and a Prometheus with the deployed rules that scrapes it twice a second."""
    with Place(folder) as place:
        fleet = WatchedFleet(place)
        with prometheus(folder, Setup(jobs=fleet.jobs, rules=groups(), interval="500ms")) as seen:
            yield Story(fleet, seen)


def _free_addresses(count: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses
