"""The coordinator's settings in server.toml, read and checked at the start."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from fl_common.settings import Address, Section, is_loopback, split_address
from fl_server.settings.sections import (
    ConnectionsConfig,
    EnrollmentConfig,
    LimitsConfig,
    ObjectsConfig,
    OidcConfig,
    StorageUrl,
    TlsConfig,
    TransfersConfig,
    WebTlsConfig,
    WorkersConfig,
    WorkerTlsConfig,
)

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
LEAST_ROUNDS = 20
"""Fewest rounds of each run whose details are kept."""
NEWEST_WORK = 20
"""Newest assignments and rounds of each client that the ledger keeps."""
_MAY_BE_EMPTY = ("ledger", "storage", "metrics_listen", "health_listen", "enroll_listen", "token_listen", "web_listen")


def _postgres_url(url: SecretStr) -> SecretStr:
    scheme, separator, _ = url.get_secret_value().partition("://")
    if not separator or scheme not in {"postgresql", "postgresql+psycopg"}:
        raise ValueError(
            "expected a URL such as postgresql://user@host:5432/database, got something that does not begin like "
            "that; leave it out for SQLite in state_dir"
        )
    return url


def _path_of(kind: str, example: str) -> AfterValidator:
    def checked(name: str) -> str:
        if _PATH.fullmatch(name) is None:
            raise ValueError(
                f'expected module:attribute, such as "{example}", got {name!r}: built-in {kind} and entry points of'
                " installed packages need no mention"
            )
        return name

    return AfterValidator(checked)


TaskPath = Annotated[str, _path_of("tasks", "my_task:Wine")]
MethodPath = Annotated[str, _path_of("methods", "my_methods:sign_momentum")]
ReducerPath = Annotated[str, _path_of("reducers", "my_reducers:geometric_median")]
StalenessPath = Annotated[str, _path_of("staleness", "my_rules:halving")]
"""module:attribute."""

LedgerUrl = Annotated[SecretStr, AfterValidator(_postgres_url)]
"""A URL that no message, log or repr shows, because it may have a password."""


class QuarantineConfig(Section):
    """Clients with repeatedly refused updates or failed work."""

    after: int = Field(default=3, ge=0)
    """Refusals in a row, by the client's own fault or for a lost state, from which on it is not drawn for a while.
    0: never."""
    failures: int = Field(default=10, ge=0)
    """Failures in a row that a client reports, without an update that counted. 0: never."""
    restarts: int = Field(default=5, ge=0)
    """Processes of one daemon that get an assignment without an answer; the next one means that the work has
    failed. 0: no limit."""
    deadlines: int = Field(default=3, ge=0)
    """Deadlines in a row that a client misses while at least as many others deliver in time. 0: never."""
    first_s: float = Field(default=600.0, gt=0)
    """First quarantine; each further one, without an update that counted in between, takes twice as long."""
    longest_s: float = Field(default=86_400.0, gt=0, le=31_536_000)
    """Longest quarantine."""


class AttentionConfig(Section):
    """When a client needs attention, judged by its newest 20 assignments and rounds."""

    assignments: int = Field(default=3, ge=0, le=NEWEST_WORK)
    """So many of its newest assignments failed, or were refused, or were lost. 0: never."""
    share: float = Field(default=0.2, ge=0, le=1)
    """And at least this share of them."""
    rounds: int = Field(default=5, ge=0, le=NEWEST_WORK)
    """Newest rounds with other clients from which on a client may be called slow. 0: never."""
    last_share: float = Field(default=0.5, gt=0, le=1)
    """Share of these rounds in which a slow client came last."""
    slowness: float = Field(default=2.0, gt=1)
    """And so many times the seconds of the other clients (median of its newest rounds)."""


class StatesConfig(Section):
    """Client states of methods whose clients keep one (SCAFFOLD, FedDyn, FedRobust): how often they may be lost."""

    losses: int = Field(default=3, ge=0)
    """State losses after which a client is left out of the run, until `fl clients release`. 0: no limit."""
    rounds_between_restarts: int = Field(default=10, ge=1)
    """Committed rounds between two restarts of a run's states for lost ones. A client that loses its state before
    takes no part until then. A run that has too few clients without them does not wait."""
    missing_after: int = Field(default=20, ge=1)
    """Committed rounds after which operators are warned that a client which can not be drawn is part of the states'
    sum; at least three times the rounds between two draws of one client."""


class RoundsConfig(Section):
    """Rules for the rounds of all runs."""

    min_accepted: int = Field(default=3, ge=1)
    """Least `round.min_accepted`, and its default, of a run by an operator who is no admin; such an operator
    exports no model of a round with fewer. Admins, and callers of a coordinator without certificates, may set any
    value. 1: no floor."""


class RetentionConfig(Section):
    """What is kept of ended runs and of old rounds. By default everything is kept."""

    keep_runs: int = Field(default=0, ge=0)
    """Newest ended runs that are kept; older ones are deleted as by `fl run delete`. 0: all."""
    keep_days: float = Field(default=0.0, ge=0, le=36_500)
    """Days from the end of a run until it is deleted. 0: never."""
    keep_rounds: int = Field(default=0, ge=0)
    """Newest rounds of each run whose details are kept (attempts, updates, accepted lists, clients' evaluations),
    as a replay needs them; summaries stay. Where clients keep a state, details stay until the run has ended. 0:
    all; otherwise at least 20."""

    @property
    def limits_anything(self) -> bool:
        """Whether anything is ever removed."""
        return bool(self.keep_runs or self.keep_days or self.keep_rounds)

    @model_validator(mode="after")
    def _enough_rounds(self) -> Self:
        if 0 < self.keep_rounds < LEAST_ROUNDS:
            raise ValueError(
                f"keep_rounds: expected 0, which keeps all, or at least {LEAST_ROUNDS}, got {self.keep_rounds}"
            )
        return self


class ServerConfig(Section):
    """The settings of a coordinator. Runs are created with `fl run create`."""

    state_dir: Path
    """Folder of ledger, checkpoints and spool; one coordinator at a time."""
    ledger: LedgerUrl | None = None
    """URL of a PostgreSQL database for the ledger, postgresql://user@host/database, in place of SQLite in
    `state_dir`. A password is better in PGPASSWORD or ~/.pgpass."""
    storage: StorageUrl | None = None
    """URL of an object store that has checkpoints and updates, s3://bucket/prefix (also gs://, az://, file:///folder);
    `state_dir` then has copies. It belongs to the ledger for good. Needs the extra `objects`. None: `state_dir`."""
    lease_s: float = Field(default=10.0, ge=2, le=300)
    """With a ledger in PostgreSQL: how long a leader that is cut off keeps the lease before a standby takes it."""
    listen: Address = "127.0.0.1:7070"
    """The address for clients. Port 0: any free one, which is in the log."""
    admin_listen: Address = "127.0.0.1:7071"
    """The address for operators with certificates."""
    token_listen: Address | None = None
    """The address for operators with tokens, which `[oidc]` describes: TLS, without client certificates."""
    metrics_listen: Address | None = "127.0.0.1:7072"
    """The address for Prometheus. "": none."""
    health_listen: Address | None = None
    """The address for probes: grpc.health.v1.Health in plain text and nothing else. "live" is SERVING while the
    process answers; "" and "fl.v1.Coordinator" from the end of recovery until the first SIGTERM."""
    enroll_listen: Address | None = None
    """The address for devices that get their certificate for a token: TLS without client certificates. Needs
    `[tls]` and `[enrollment]`."""
    enroll_address: Address | None = None
    """`enroll_listen` as devices dial it, for the commands that `fl enroll create` prints. None: a host of the
    certificate."""
    client_address: Address | None = None
    """`listen` as devices dial it, for the same commands. None: the host of `enroll_address`, or one of the
    certificate."""
    web_listen: Address | None = None
    """The address of the web page, live and read only, in a process of its own. Needs the extra `web`, and with
    `[tls]` `[web_tls]`. None: no page."""
    web_address: Address | None = None
    """`web_listen` as browsers reach it. Requests with another host name are refused, except this machine's own
    names."""
    tls: TlsConfig | None = None
    web_tls: WebTlsConfig | None = None
    oidc: OidcConfig | None = None
    insecure: bool = False
    """Use plain text, on this machine only."""
    insecure_remote: bool = False
    """Use plain text over a network, where others can read and change it."""
    tasks: list[TaskPath] = Field(default_factory=list)
    """Tasks that runs may name beside the built-in ones and entry points, as module:attribute: ["my_task:Wine"]. No
    other module is imported for a run."""
    task_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of tasks on this machine, which a run cannot give: {cifar10 = {data_root = "/srv/data"}}."""
    models_dir: Path | None = None
    """Folder of safetensors files from which runs may start (initial_model = "file:NAME"), so every operator can
    read them. None: no such files."""
    algorithms: list[MethodPath] = Field(default_factory=list)
    """Methods that runs may name, likewise: ["my_methods:sign_momentum"]."""
    reducers: list[ReducerPath] = Field(default_factory=list)
    """Reducers that runs may name, likewise: ["my_reducers:geometric_median"]."""
    staleness: list[StalenessPath] = Field(default_factory=list)
    """Rules for stale updates that runs may name, likewise: ["my_rules:halving"]."""
    reflection: bool = False
    """Offer gRPC server reflection to callers, which grpcurl uses."""
    objects: ObjectsConfig = ObjectsConfig()
    limits: LimitsConfig = LimitsConfig()
    connections: ConnectionsConfig = ConnectionsConfig()
    transfers: TransfersConfig = TransfersConfig()
    workers: WorkersConfig | None = None
    worker_tls: WorkerTlsConfig | None = None
    quarantine: QuarantineConfig = QuarantineConfig()
    attention: AttentionConfig = AttentionConfig()
    states: StatesConfig = StatesConfig()
    rounds: RoundsConfig = RoundsConfig()
    retention: RetentionConfig = RetentionConfig()
    enrollment: EnrollmentConfig | None = None
    denials_file: Path | None = None
    """The list of revocations and bans, read at a start, because a restored ledger lacks the latest. None:
    denials.json in the state directory; a place outside of it survives every restore."""
    durability: Literal["process", "power"] = "process"
    """An acknowledged update survives SIGKILL ("process"), or a power cut too ("power", with an fsync for each)."""
    drain_grace_s: float = Field(default=30.0, ge=0)
    """Wait after SIGTERM for uploads and a commit under way."""
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
    def _tokens_need_tls(self) -> Self:
        if (self.token_listen is None) != (self.oidc is None):
            raise ValueError(
                "token_listen and [oidc]: expected both or none, because tokens have a port of their own, got one"
            )
        if self.token_listen is not None and self.tls is None:
            raise ValueError("token_listen: expected [tls] with it, because a token that others can read is theirs")
        return self

    @model_validator(mode="after")
    def _plain_text_by_name(self) -> Self:
        if self.tls is not None:
            if self.insecure or self.insecure_remote:
                raise ValueError("insecure and [tls] contradict each other: remove one of them")
            self._client_certificates_by_name(self.tls)
            return self
        if not self.insecure:
            raise ValueError(
                "expected a [tls] section with cert, key and client_ca (`fl ca init` makes them in a minute); for "
                "plain text on this machine set insecure = true"
            )
        own = {"listen": self.listen, "admin_listen": self.admin_listen}
        if self.workers is not None:
            own |= {"workers.listen": self.workers.listen, "workers.serve": self.workers.serve}
        for name, address in own.items():
            if not is_loopback(split_address(address)[0]) and not self.insecure_remote:
                raise ValueError(
                    f"{name}: plain text on {address}, which others can reach, is refused: add [tls], or set "
                    "insecure_remote = true as well where everyone on the network may read and change what is sent"
                )
        return self

    @property
    def operators_have_names(self) -> bool:
        """Whether operators have identities, so that a browser needs a login."""
        return self.tls is not None and not self.tls.no_client_certificates

    @model_validator(mode="after")
    def _page_by_name(self) -> Self:
        if self.web_address is not None and self.web_listen is None:
            raise ValueError("web_address: expected web_listen too, which it describes, found none")
        if self.web_tls is not None and (self.web_listen is None or self.tls is None):
            raise ValueError("web_tls: expected web_listen and [tls] too, found one of them at most")
        if self.web_listen is not None and self.tls is not None and self.web_tls is None:
            raise ValueError(
                "web_listen: expected a [web_tls] section with cert and key of the page's own: `fl ca init --dir "
                "page-pki --host NAME` makes them, for an authority that no device trusts"
            )
        if self.web_listen is None or self.operators_have_names or is_loopback(split_address(self.web_listen)[0]):
            return self
        raise ValueError(
            f"web_listen: expected an address of this machine only, got {self.web_listen}, where everybody would see "
            "runs and clients without a login: add [tls] with client_ca, or listen on 127.0.0.1"
        )

    @model_validator(mode="after")
    def _enrollment_is_whole(self) -> Self:
        if self.enroll_listen is not None and self.enrollment is None:
            raise ValueError("enroll_listen: expected [enrollment] with ca_cert and ca_key too, found none")
        if self.enrollment is not None and (self.tls is None or self.tls.client_ca is None):
            raise ValueError(
                "enrollment: expected [tls] with client_ca, which checks the issued certificates, found none"
            )
        return self

    def _client_certificates_by_name(self, tls: TlsConfig) -> None:
        """TLS without client certificates only by name, and never for operators on other machines."""
        if tls.client_ca is not None:
            if tls.no_client_certificates:
                raise ValueError(
                    "tls.client_ca and tls.no_client_certificates = true contradict each other: remove one of them"
                )
            return
        if not tls.no_client_certificates:
            raise ValueError(
                "tls.client_ca: expected the CA of clients and admins (`fl ca init` makes one), found none: anybody"
                " could register as any client; to accept that, set tls.no_client_certificates = true"
            )
        if not is_loopback(split_address(self.admin_listen)[0]):
            raise ValueError(
                f"admin_listen: expected an address of this machine only, got {self.admin_listen}, where everybody"
                " would be an admin without tls.client_ca: set tls.client_ca, or listen on 127.0.0.1"
            )
