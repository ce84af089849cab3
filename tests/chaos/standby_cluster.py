"""Two coordinators of one ledger and one object store, four daemons that know both, and a relay on every way.

Each coordinator reaches PostgreSQL, an S3 server and its clients through relays of its own, so that any of these ways
can be cut; so do two workers, if there are any, with the coordinators and the store. A trigger in the database compares
the mark of the writing connection with the epoch of the ledger, in each transaction that changes a run: a write of a
leader that was replaced would be seen.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tests.chaos.cluster import CHUNK_BYTES, DAEMONS, GRACE_S, STEP_S
from tests.chaos.jobs import Job
from tests.chaos.points import KillOrders, order_path
from tests.postgres_server import PostgresServer
from tests.processes.federation import Coordinator, Daemon, Fleet
from tests.processes.pods import is_ready
from tests.processes.process import Workspace, eventually
from tests.processes.relay import Relay, free_port
from tests.processes.standby import NAMES, Candidate
from tests.processes.workers import Worker, free_address
from tests.s3_server import S3Server

WATCHED = ("attempts", "updates", "accepted", "commits", "objects")
"""Tables whose writes decide rounds."""
_TRIGGER = """
CREATE TABLE {schema}.writes (written text, mine bigint, ledger bigint);
CREATE FUNCTION {schema}.note_write() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
INSERT INTO {schema}.writes SELECT TG_TABLE_NAME, (SELECT max(objid::bigint) FROM pg_locks WHERE pid = pg_backend_pid()
AND locktype = 'advisory' AND objsubid = 2 AND mode = 'ShareLock'), epoch FROM {schema}.identity; RETURN NULL;
END $$"""


class KillableCandidate(Candidate):
    """A coordinator that kills itself at a chosen point."""

    module = "tests.chaos.server"

    def __init__(self, workspace: Workspace, name: str, settings: Mapping[str, Any]) -> None:
        super().__init__(workspace, name, settings)
        self.orders = KillOrders(order_path(self.config))


class Ways:
    """The relays of one coordinator."""

    def __init__(self, postgres: PostgresServer, s3: S3Server | None) -> None:
        self.database = Relay(postgres.socket)
        self.store = None if s3 is None else Relay(f"127.0.0.1:{s3.port}")
        self.clients: Relay | None = None

    @property
    def all(self) -> list[Relay]:
        """Every relay."""
        return [relay for relay in (self.database, self.store, self.clients) if relay is not None]


class KillableWorker(Worker):
    """A worker with a disk and relays of its own, which kills itself at a chosen point."""

    def __init__(self, cluster: StandbyCluster, number: int, serve: str) -> None:
        name, listening = f"worker-{number}", [each.settings["workers"]["listen"] for each in cluster.each()]
        self.coordinators = [Relay(address) for address in listening]
        self.store = [Relay(f"127.0.0.1:{cluster.s3.port}")] if cluster.s3 is not None else []
        one, two = (relay.address for relay in self.coordinators)
        self.health = f"127.0.0.1:{free_port()}"
        settings: dict[str, Any] = {
            "state_dir": str(cluster.workspace.folder / f"{name}-state"),
            "health_listen": self.health,
            "workers": {"coordinator": one, "standbys": [two], "serve": serve},
        }
        if self.store:
            settings["objects"] = {"endpoint": f"http://{self.store[0].address}"}
        super().__init__(cluster.workspace, cluster.server, name, settings, "tests.chaos.server")
        self.orders = KillOrders(order_path(self.config))

    @property
    def relays(self) -> list[Relay]:
        """Every relay."""
        return [*self.coordinators, *self.store]

    def settle(self) -> bool:
        """Let it go on, start it if it has ended. Returns whether it is attached to the leader."""
        if self.exit_code is None:
            self.signal(signal.SIGCONT)
            return is_ready(self.health)
        self.start()
        return False


class StandbyCluster(Fleet):
    """The federation that runs all seeds. `server` is the leader."""

    def __init__(
        self, workspace: Workspace, postgres: PostgresServer, s3: S3Server | None, *, with_workers: bool = False
    ) -> None:
        """s3: None for a folder as the object store."""
        self.workspace, self.postgres, self.s3 = workspace, postgres, s3
        serve = free_address() if with_workers else ""
        os.environ.update(CHAOS_PART_BYTES=str(96 << 10), CHAOS_REMOVALS_EVERY_S="0.5")
        url = postgres.new_ledger()
        self.schema = url.rpartition("%3D")[2]
        self.folder = workspace.folder / "objects"
        self.ways = {name: Ways(postgres, s3) for name in NAMES}
        bucket = "" if s3 is None else s3.new_bucket()
        if s3 is not None:
            os.environ.update(s3.environment)
        self.folder.mkdir()
        self.candidates = {
            name: KillableCandidate(workspace, name, self._settings(name, url, bucket, serve)) for name in NAMES
        }
        for name, ways in self.ways.items():
            ways.clients = Relay(self.candidates[name].address)
        self.server: KillableCandidate = self.candidates["one"].serve()
        self._watch_writes()
        self.standby.stand_by()
        self.workers = [KillableWorker(self, number, serve).serve() for number in range(2)] if with_workers else []
        self.daemons = {}
        for index in range(DAEMONS):
            daemon = self.daemon(index, DAEMONS).start()
            self.daemons[daemon.client_id] = daemon
        self.until_all_present()
        self._undisturbed: dict[str, list[str]] = {}

    def each(self) -> list[KillableCandidate]:
        """Both coordinators."""
        return list(self.candidates.values())

    def _relays(self) -> list[Relay]:
        """Every relay."""
        of_workers = [relay for worker in self.workers for relay in worker.relays]
        return [*of_workers, *(relay for ways in self.ways.values() for relay in ways.all)]

    def _settings(self, name: str, url: str, bucket: str, serve: str) -> dict[str, Any]:
        ways = self.ways[name]
        objects: dict[str, Any] = {"retry_s": 5.0, "request_s": 5.0}
        storage = f"file://{self.folder}"
        if ways.store is not None:
            storage, objects["endpoint"] = f"s3://{bucket}/chaos", f"http://{ways.store.address}"
        limits = {"reattach_grace_s": GRACE_S, "chunk_bytes": CHUNK_BYTES}
        ledger = self.postgres.over_tcp(url, ways.database.port)
        workers = {"workers": {"listen": free_address(), "serve": serve}} if serve else {}
        return {"ledger": ledger, "storage": storage, "objects": objects, "limits": limits, **workers}

    def _watch_writes(self) -> None:
        self.postgres.execute(_TRIGGER.format(schema=self.schema))
        for table in WATCHED:
            after = f"AFTER INSERT OR UPDATE OR DELETE ON {self.schema}.{table}"
            call = f"FOR EACH STATEMENT EXECUTE FUNCTION {self.schema}.note_write()"
            self.postgres.execute(f"CREATE TRIGGER note_{table} {after} {call}")

    def foreign_writes(self) -> tuple[int, int]:
        """Writes so far, and those of another leader than the ledger's."""
        counts = f"count(*), count(*) FILTER (WHERE mine IS DISTINCT FROM ledger) FROM {self.schema}.writes"
        ((all_, foreign),) = self.postgres.execute(f"SELECT {counts}")
        return all_, foreign

    def daemon(self, index: int, size: int) -> Daemon:
        """Create a daemon that knows both coordinators, without starting it."""
        shard = {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index}
        options = {"model": "broad", "step_s": STEP_S}
        one, two = (ways.clients for ways in self.ways.values())
        assert one is not None
        assert two is not None
        settings: dict[str, Any] = {"shard": shard, "options": options, "standbys": [two.address]}
        daemon = Daemon(self.workspace, one, f"edge-{index}", **settings)
        daemon._module = "tests.chaos.daemon"
        return daemon

    @property
    def standby(self) -> KillableCandidate:
        """The one that does not lead."""
        return next(each for each in self.candidates.values() if each is not self.server)

    def name_of(self, candidate: Coordinator) -> str:
        """The name of a coordinator."""
        return next(name for name, each in self.candidates.items() if each is candidate)

    def leader(self) -> KillableCandidate | None:
        """The coordinator that has the lease, if it serves."""
        rows = self.postgres.execute(f"SELECT holder FROM {self.schema}.leadership WHERE until > 0")  # noqa: S608
        for each in self.candidates.values():
            if rows and each.exit_code is None and f" {each.pid} " in rows[0][0] and each.leads():
                return each
        return None

    def until_led(self) -> None:
        """Wait until one of them leads and serves."""
        self.server = eventually(self.leader, "a coordinator leads and serves")

    def settle(self) -> None:
        """Let everything pass again, start what has ended, and wait for a leader and a standby."""
        for relay in self._relays():
            relay.heal()
        for each in self.candidates.values():
            if each.exit_code is None:
                each.signal(signal.SIGCONT)
        self.until_led()
        eventually(self._both, "one leads and one waits")
        for worker in self.workers:
            eventually(worker.settle, f"{worker.name} is attached")
        for each in self.candidates.values():
            each.orders.cancel()

    def _both(self) -> bool:
        for each in self.candidates.values():
            if each.exit_code is not None:
                assert each.exit_code in {0, 3, -signal.SIGKILL, 130}, f"{each.name}: {each.exit_code}, {each.errors()}"
                each.start()
        leader = self.leader()
        if leader is None:
            return False
        self.server = leader
        query = f"SELECT holder FROM {self.schema}.standbys WHERE seen > extract(epoch FROM now()) - 2"  # noqa: S608
        return any(f" {self.standby.pid} " in holder for (holder,) in self.postgres.execute(query))

    def begin(self, job: Job, name: str, rounds: int) -> str:
        """Create a run of a job."""
        return self.server.create(name, **job.with_sections(rounds=rounds))

    def undisturbed(self, job: Job, rounds: int) -> list[str]:
        """Digests of the job's rounds without faults."""
        if job.name not in self._undisturbed:
            self._undisturbed[job.name] = self.server.digests(self.begin(job, f"undisturbed-{job.name}", rounds))
        return self._undisturbed[job.name]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the relays. The workspace ends the processes."""
        for relay in self._relays():
            relay.__exit__()


def moved_away(folder: Path) -> Path:
    """The name of a folder that is out of reach."""
    return folder.with_name(f"{folder.name}-away")
