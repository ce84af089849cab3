"""One coordinator and four daemons, real processes kept from seed to seed, with a proxy before each daemon."""

from __future__ import annotations

import os
from typing import Any, Self

from protos.fl.v1 import admin_pb2
from protos.settings import split_address
from tests.chaos.jobs import Job
from tests.chaos.points import Orders, order_beside
from tests.chaos.proxy import Proxy
from tests.integration.harness import Coordinator, Daemon, Fleet
from tests.integration.processes import Place, write_toml

DAEMONS = 4
GRACE_S = 60.0
"""A daemon that comes back within it is not lost: longer than a start takes on a busy machine."""
CHUNK_BYTES = 64 << 10
STEP_S = 0.06
"""What a training step takes: a round must be long enough to be disturbed."""


class MortalCoordinator(Coordinator):
    """A coordinator that can be ordered to die at a point."""

    def __init__(self, place: Place, settings: dict[str, Any]) -> None:
        super().__init__(place, settings=settings)
        self._module = "tests.chaos.server"
        self.orders = Orders(order_beside(self.config))
        self.lives = 0
        """Times that it came to serve."""

    def serve(self) -> Self:
        """Start it, and wait until it serves; the log of earlier lives may have been cut."""
        self._starts = len(self.events("serving"))
        super().serve()
        self.lives += 1
        return self


class Arena(Fleet):
    """Where seeds are played, one after the other."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.run_id = ""
        limits = {"reattach_grace_s": GRACE_S, "chunk_bytes": CHUNK_BYTES}
        self.server: MortalCoordinator = MortalCoordinator(place, {"limits": limits}).serve()
        self.proxies: dict[str, Proxy] = {}
        self.daemons = {}
        self._undisturbed: dict[str, list[str]] = {}
        for index in range(DAEMONS):
            daemon = self.daemon(index, DAEMONS).start()
            self.daemons[daemon.client_id] = daemon
        self.attend()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the proxies; the processes are the place's."""
        for proxy in self.proxies.values():
            proxy.close()

    def daemon(self, index: int, size: int) -> Daemon:
        """A daemon behind a proxy of its own, not started yet."""
        shard = {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index}
        options = {"model": "broad", "step_s": STEP_S}
        daemon = Daemon(self.place, self.server, f"edge-{index}", shard=shard, options=options)
        daemon._module = "tests.chaos.daemon"
        proxy = self.proxies[daemon.client_id] = Proxy(lambda: split_address(self.server.address))
        daemon.settings["server"] = proxy.address
        write_toml(daemon.config, daemon.settings)
        return daemon

    def heal(self) -> None:
        """Whatever a seed left behind: all is well again, and the logs are empty."""
        self.server.orders.withdraw()
        for proxy in self.proxies.values():
            proxy.pass_on()
        super().heal()
        for process in self.place.processes:
            for path in (process._out, process._err):
                os.truncate(path, 0)

    def begin(self, job: Job, name: str, **sections: Any) -> str:
        """Create a run of a job, and make it the arena's."""
        self.run_id = self.server.create(name, **job.with_sections(**sections))
        return self.run_id

    def undisturbed(self, job: Job) -> list[str]:
        """Digests of the job's rounds when nothing happens to it, more of them than any seed needs."""
        if job.name not in self._undisturbed:
            self.heal()
            self._undisturbed[job.name] = self.server.digests(self.begin(job, f"undisturbed-{job.name}"))
        return self._undisturbed[job.name]

    def until_round(self, round_: int) -> admin_pb2.RunStatus:
        """The run's status once this round is under way, or a later one, or the run is over."""
        return self.server.until(
            self.run_id,
            lambda run: run.HasField("ended") or run.rounds_done > round_ or (run.rounds_done == round_ and run.cohort),
            f"round {round_} is under way",
        )

    def over(self) -> bool:
        """Whether the run has ended."""
        return self.server.run(self.run_id).HasField("ended")
