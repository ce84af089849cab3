"""The coordinator's settings: server.toml, read and checked once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from protos.settings import Address, Section, is_loopback, split_address
from protos.wire import CHUNK_BYTES, MAX_CHUNK_BYTES

_TASK_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_MAY_BE_EMPTY = ("ledger", "metrics_listen", "health_listen")


def _postgres_url(url: SecretStr) -> SecretStr:
    scheme, separator, _ = url.get_secret_value().partition("://")
    if not separator or scheme not in {"postgresql", "postgresql+psycopg"}:
        raise ValueError(
            "expected a URL such as postgresql://user@host:5432/database, got something that does not begin like "
            "that; leave it out for SQLite in state_dir"
        )
    return url


def _task_path(name: str) -> str:
    if _TASK_PATH.fullmatch(name) is None:
        raise ValueError(
            f'expected module:attribute, such as "my_task:Wine", got {name!r}: built-in tasks and entry points of'
            " installed packages need no mention"
        )
    return name


TaskPath = Annotated[str, AfterValidator(_task_path)]
"""module:attribute."""

LedgerUrl = Annotated[SecretStr, AfterValidator(_postgres_url)]
"""A URL that no message, log or repr shows: it may have a password."""


class TlsConfig(Section):
    """Files in PEM."""

    cert: Path
    """The coordinator's certificate."""
    key: Path
    """Its private key."""
    client_ca: Path | None = None
    """Who signs the certificates of clients and admins. None: TLS without client certificates, names are as claimed."""


class LimitsConfig(Section):
    """What one client may take."""

    max_update_mib: int = Field(default=2048, ge=1)
    """Largest update."""
    chunk_bytes: int = Field(default=CHUNK_BYTES, ge=64 << 10, le=MAX_CHUNK_BYTES)
    """Size of the chunks sent, and the best size of those received."""
    reattach_grace_s: float = Field(default=20.0, gt=0)
    """How long a lost stream is waited for, and the roster after a start."""
    stall_s: float = Field(default=60.0, gt=0)
    """An upload that brings no header, or then less than `chunk_bytes`, in so long is ended, and goes on later where it
    stopped."""
    max_clients: int = Field(default=20_000, ge=1)
    """Sessions open at once. Each needs an open file: the process raises its own limit as far as it may."""
    registrations_per_s: float = Field(default=300.0, gt=0)
    """So many clients are let in; when more come, each has a time of its own: it waits for the next ten seconds in its
    call, and is told to come again for a later time. Two seconds' worth may come at once."""
    comebacks_per_min: float = Field(default=10.0, gt=0)
    """Times a minute that the coordinator acts on a client's report that it may train again. A report beyond that takes
    effect when its time comes; that a client may not train takes effect at once."""
    history_per_minute: int = Field(default=5, ge=0)
    """Lines of history that one client's coming, or two daemons under its name, may leave in a minute for each kind of
    event; those above are counted, and one line tells how many. 0: all are written."""
    log_lines_per_minute: int = Field(default=20, ge=0)
    """Lines of the log of one event about one client or caller in a minute; those above are counted, and one line has
    how many as `repeated`. 0: all are written."""


class TransfersConfig(Section):
    """What one client may cost by its calls. More is refused with RESOURCE_EXHAUSTED and a time to come again."""

    uploads_at_once: int = Field(default=4, ge=1)
    """Streams of SubmitUpdate; a daemon has one for each assignment under way."""
    downloads_at_once: int = Field(default=4, ge=1)
    """Streams of FetchModel; a daemon has one. Each holds two chunks in memory until its reader takes them."""
    queries_at_once: int = Field(default=4, ge=1)
    """Calls of QueryUpload and ReportEvaluation."""
    attends_at_once: int = Field(default=8, ge=1)
    """Streams of Attend, old ones that have not ended yet included."""
    calls: int = Field(default=200, ge=1)
    """Calls of all these kinds that may come in a burst. A new assignment entitles to a new burst."""
    calls_per_s: float = Field(default=20.0, gt=0)
    """Calls a second beyond the burst."""
    fetches: int = Field(default=16, ge=1)
    """Times that one resource may be fetched whole for one assignment; a daemon fetches it once."""
    fetch_again_s: float = Field(default=30.0, gt=0)
    """Beyond that it may be fetched once in so long."""
    bytes_per_s: float = Field(default=0.0, ge=0)
    """Tensor bytes a second, up and down together: transfers are slowed down to it, not refused. 0: no limit."""
    kept_files: int = Field(default=4, ge=1)
    """Unfinished uploads kept on disk, over all runs. For one more, the oldest that no stream writes is removed."""
    kept_mib: int = Field(default=4096, ge=1)
    """Room on disk for them, in the same way. One upload is kept whatever its size."""
    messages_waiting: int = Field(default=256, ge=1)
    """An Attend stream from which nothing was read for 30 s, with more messages waiting, is ended; the client
    registers again and is sent its outstanding work."""


class ConnectionsConfig(Section):
    """What strangers and peers may hold open.

    How many connections clients may have follows from `limits.max_clients` and from the process's limit on open files,
    of which a quarter is kept for ledger, checkpoints and updates.
    """

    handshake_s: float = Field(default=10.0, gt=0, le=600)
    """A connection whose TLS and HTTP/2 handshakes take longer is closed; of one to `metrics_listen`, its request."""
    idle_s: float = Field(default=300.0, ge=1, le=86_400)
    """A connection without a call is closed after that; its client opens another when it needs one."""
    admin: int = Field(default=128, ge=1, le=65_536)
    """Connections to `admin_listen` at once."""
    health: int = Field(default=64, ge=1, le=65_536)
    """Connections to `health_listen` at once; each is closed after a minute."""
    metrics: int = Field(default=32, ge=1, le=65_536)
    """Connections to `metrics_listen` at once; when more come, the one that has waited longest is closed."""
    calls_per_client: int = Field(default=64, ge=16, le=65_536)
    """Calls at once by the holder of one certificate, and on one connection. A daemon has fewer than ten."""


class QuarantineConfig(Section):
    """Clients whose updates are refused, or whose work fails, again and again."""

    after: int = Field(default=3, ge=0)
    """Refusals in a row, by the client's own fault, from which on it is not drawn for a while. A client state that is
    reported as lost counts as one. 0: never."""
    failures: int = Field(default=10, ge=0)
    """Failures in a row that a client reports of its work, with no update that counted in between, from which on it is
    not drawn for a while. 0: never."""
    first_s: float = Field(default=600.0, gt=0)
    """How long at first; each further refusal, with no update that counted in between, costs twice the time."""
    longest_s: float = Field(default=86_400.0, gt=0, le=31_536_000)
    """How long at most."""


class StatesConfig(Section):
    """Client states of methods whose clients keep one (SCAFFOLD, FedDyn, FedRobust): how often they may be lost."""

    losses: int = Field(default=3, ge=0)
    """Times that a client may lose its state in one run. With the last of them it is left out of that run, until
    `fl clients release`. 0: any number of times."""
    rounds_between_restarts: int = Field(default=10, ge=1)
    """Committed rounds between two restarts of a run's states for lost ones. A client that loses its state before takes
    no part until then, and one restart does for all of them. A run that has too few clients without them does not
    wait."""
    missing_after: int = Field(default=20, ge=1)
    """Committed rounds after which operators are warned that a client which can not be drawn is still part of the
    states' sum; at least three times the rounds between two draws of one client."""


class ServerConfig(Section):
    """All that a coordinator is told; runs are created later, by `fl run create`."""

    state_dir: Path
    """Ledger, checkpoints and spool; one coordinator at a time."""
    ledger: LedgerUrl | None = None
    """URL of a PostgreSQL database, postgresql://user@host/database, that has the ledger in place of a SQLite file in
    `state_dir`. A password is better in PGPASSWORD or ~/.pgpass than here."""
    listen: Address = "127.0.0.1:7070"
    """For clients. Port 0: any free one; the log says which."""
    admin_listen: Address = "127.0.0.1:7071"
    """For operators."""
    metrics_listen: Address | None = "127.0.0.1:7072"
    """For Prometheus. "": none."""
    health_listen: Address | None = None
    """For probes: grpc.health.v1.Health in plain text and nothing else, on any address. "live" is SERVING while the
    process answers; "" and "fl.v1.Coordinator" from the end of recovery until the first SIGTERM."""
    tls: TlsConfig | None = None
    insecure: bool = False
    """Speak plain text, on this machine only."""
    insecure_remote: bool = False
    """Speak plain text over a network where everyone can read and change it."""
    tasks: list[TaskPath] = Field(default_factory=list)
    """Tasks that runs may name beside the built-in ones and the entry points of installed packages, each as
    module:attribute: ["my_task:Wine"]. No other module is ever imported for a run."""
    reflection: bool = False
    """Tell any peer that may call what services and messages there are, as grpcurl asks for it."""
    limits: LimitsConfig = LimitsConfig()
    connections: ConnectionsConfig = ConnectionsConfig()
    transfers: TransfersConfig = TransfersConfig()
    quarantine: QuarantineConfig = QuarantineConfig()
    states: StatesConfig = StatesConfig()
    durability: Literal["process", "power"] = "process"
    """What an acknowledged update survives: SIGKILL, or a power cut too (an fsync for each)."""
    drain_grace_s: float = Field(default=30.0, ge=0)
    """How long SIGTERM waits for uploads and a commit under way."""
    threads: int = Field(default=1, ge=1, le=1024)
    """torch threads for steps and evaluations."""
    log: Literal["auto", "json", "pretty"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _empty_is_none(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        return {key: None if key in _MAY_BE_EMPTY and value == "" else value for key, value in values.items()}

    @model_validator(mode="after")
    def _plain_text_by_name(self) -> Self:
        if self.tls is not None:
            if self.insecure or self.insecure_remote:
                raise ValueError("insecure and [tls] contradict each other: remove one of them")
            self._needs_client_certificates()
            return self
        if not self.insecure:
            raise ValueError(
                "expected a [tls] section with cert, key and client_ca (`fl ca init` makes them in a minute); for "
                "plain text on this machine set insecure = true"
            )
        for name in ("listen", "admin_listen"):
            address = getattr(self, name)
            if not is_loopback(split_address(address)[0]) and not self.insecure_remote:
                raise ValueError(
                    f"{name}: plain text on {address}, which others can reach, is refused: add [tls], or set "
                    "insecure_remote = true as well where everyone on the network may read and change what is sent"
                )
        return self

    def _needs_client_certificates(self) -> None:
        if self.tls is not None and self.tls.client_ca is None and not is_loopback(split_address(self.admin_listen)[0]):
            raise ValueError(
                f"admin_listen: {self.admin_listen} can be reached by others, and without tls.client_ca everybody "
                "would be an admin: set tls.client_ca, or listen on 127.0.0.1"
            )
