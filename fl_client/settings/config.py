"""The daemon's configuration: TOML files, read and checked once.

Relative paths are relative to the directory in which the daemon is started.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field, model_validator

from fl_client.errors import ConfigError
from fl_client.settings import schedule
from fl_client.settings.served_tasks import CodePath, ServedTask, ShardConfig, TaskConfig, check_apart
from fl_common.certificates.tls_version import TlsVersion
from fl_common.names import check_id
from fl_common.proxies import ENVIRONMENT, ProxySetting
from fl_common.settings import Address, Section, SettingsError, is_loopback, read_settings, split_address
from fl_common.signatures import check_signer

Precision = Literal["float32", "bfloat16", "float16"]
MemoryFormat = Literal["auto", "contiguous", "channels_last"]
GateName = Literal["window", "gpu", "power", "temperature"]


MOST_PROCESSES = 64


def _device(value: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is None:
        raise ValueError(f'expected "auto", "cpu", "cuda" or "cuda:1", got {value!r}')
    return value


def _processes(value: int | str) -> int | str:
    if value != "auto" and not (isinstance(value, int) and 1 <= value <= MOST_PROCESSES):
        raise ValueError(f'expected a whole number from 1 to {MOST_PROCESSES}, or "auto", got {value!r}')
    return value


def reachable(value: str) -> str:
    """An address with a port above 0. Raises ValueError."""
    if split_address(value)[1] == 0:
        raise ValueError(f"expected the coordinator's port, got {value!r}")
    return value


def _window(value: str) -> str:
    schedule.parse(value)
    return value


def _zone(value: str) -> str:
    try:
        return ZoneInfo(value).key if value else ""
    except (ValueError, OSError, KeyError):
        raise ValueError(
            f'expected a time zone such as "Europe/Zurich", got {value!r}; if no zone is known, install tzdata'
        ) from None


WindowText = Annotated[str, AfterValidator(_window)]
"""A window of local time."""
ZoneName = Annotated[str, AfterValidator(_zone)]
"""A time zone; empty for the device's own."""


class TlsConfig(Section):
    """PEM files for mTLS."""

    ca: Path
    """CA certificates that may have signed the coordinator's."""
    cert: Path
    """This device's certificate. Its name is the device's identity."""
    key: Path
    """The certificate's private key."""
    min_version: TlsVersion = "1.3"
    """Oldest TLS version of connections. "1.2" is for a proxy in between that cannot do better."""
    renew: bool = False
    """The daemon renews the certificate at the coordinator and replaces the files, those of `fl-client init
    --token` only. Otherwise their owner renews them."""
    enroll_server: Annotated[Address, AfterValidator(reachable)] | None = None
    """host:port of the coordinator's `enroll_listen`, where a daemon with an expired certificate asks for a new
    one. None: it needs a token."""

    @property
    def folder(self) -> Path:
        """The folder whose link `current` the renewal replaces."""
        return self.cert.parent.parent

    @model_validator(mode="after")
    def _replaceable(self) -> Self:
        if not self.renew:
            return self
        link = self.cert.parent
        if (link.name, self.cert.name, self.key, self.ca) != ("current", "tls.crt", link / "tls.key", link / "ca.crt"):
            raise ValueError(
                "renew: expected ca.crt, tls.crt and tls.key in a folder `tls/current`, as `fl-client init --token`"
                f" writes them, got {self.ca}, {self.cert} and {self.key}: remove renew, or enroll this device"
            )
        return self


class GatesConfig(Section):
    """Conditions for training. Without any of them the device may train at any time."""

    windows: list[WindowText] = Field(default_factory=list)
    """Local times of training: "22:00-06:00", "mon-fri 18:30-24:00", "sat,sun 00:00-24:00"."""
    timezone: ZoneName = ""
    """Time zone of the windows, such as "Europe/Zurich". "": the device's own."""
    on_mains: bool = False
    """Train only while the device does not run on a battery."""
    temperature_below: float | None = Field(default=None, gt=0, le=150)
    """Train only while the hottest zone is below this, in degrees Celsius."""
    temperature_margin: float = Field(default=5.0, ge=0, le=50)
    """Degrees below the limit at which training may start again."""
    temperature_zones: list[str] = Field(default_factory=list)
    """Types of the thermal zones that count. Empty: all that can be read."""
    gpu_below: float | None = Field(default=None, gt=0, le=1)
    """Train only while other programs use less of the GPU than this share. 0.2 is a fifth."""
    finish: list[GateName] = Field(default=["window"])
    """Gates that let a round in progress finish when they close: "window", "power", "temperature", "gpu"."""
    check_s: float = Field(default=15.0, gt=0, le=3600)
    """Seconds between checks. Windows begin and end at their own times."""
    open_after_s: float = Field(default=60.0, ge=0, le=86400)
    """Seconds for which power, temperature or GPU must be good before training starts again."""
    sysfs: Path = Path("/sys")
    """Folder of Linux's files about power and temperature. In a container it may be another one."""

    @model_validator(mode="after")
    def _of_use(self) -> Self:
        if self.timezone and not self.windows:
            raise ValueError(
                "timezone is the time zone of windows, and there are none: add windows, or remove timezone"
            )
        if self.temperature_zones and self.temperature_below is None:
            raise ValueError("temperature_zones needs temperature_below")
        return self


class PackagesConfig(Section):
    """Limits of the process of a package. Which packages run is up to the site's policy."""

    memory_mib: int = Field(default=4096, ge=64)
    """MiB that it may take beyond those of an empty one with torch."""
    file_mib: int = Field(default=1024, ge=1)
    """MiB of the largest file that it may write, and of the largest package."""
    open_files: int = Field(default=256, ge=64)
    """Files that it may have open at once."""
    start_s: float = Field(default=300.0, ge=1, le=86_400)
    """Seconds in which it must have loaded the task and its data."""


class LimitsConfig(Section):
    """Limits of the work that a coordinator may request. The task's own model limits the size of downloads."""

    max_steps: int = Field(default=10_000_000, ge=1)
    """Local steps of one assignment; more are refused."""
    max_batch_size: int = Field(default=65_536, ge=1)
    """Examples in one batch; larger ones are refused, unless the shard is smaller."""
    max_seconds: float = Field(default=86_400.0, gt=0, le=31_536_000)
    """Seconds of computing for one assignment; also the latest deadline."""
    max_assignments: int = Field(default=4, ge=1, le=64)
    """Assignments in progress at once, and as many evaluations. Beyond it the oldest is given up."""
    max_wait_s: float = Field(default=3_600.0, ge=1, le=604_800)
    """Longest wait, in seconds, that a coordinator may request before the next try."""
    max_runs: int = Field(default=16, ge=1)
    """Runs with client states at once. Such work of another run is refused."""
    max_kept_bytes: int = Field(default=16 << 30, ge=1)
    """Bytes on disk of client states and of updates with a next state."""


class ReleasesConfig(Section):
    """Released models that this device takes from its coordinator. Without this section it takes none."""

    signers: list[Annotated[str, AfterValidator(check_signer)]] = Field(min_length=1)
    """Public keys, one of which must have signed a release: "ed25519:" and 64 hexadecimal digits, as
    `fl release key` shows them."""
    oldest: int = Field(default=1, ge=1)
    """Oldest version that is taken, also when the coordinator takes a newer one back."""
    folder: Path | None = None
    """Folder of the models: MODEL/current in it is a link to the version in use. None: `releases` in state_dir."""
    announce: Path | None = None
    """A JSON file with the version and path of each model in use, which is replaced when one changes. None: no file."""
    hook: list[str] = Field(default_factory=list)
    """A program of the owner and its arguments, called when a model changes, with FL_MODEL, FL_VERSION and
    FL_MODEL_PATH in its environment. If it fails, the version before is in use again. Empty: none is called."""
    hook_s: float = Field(default=60.0, gt=0, le=3600)
    """Seconds after which the program has failed."""


class ClientConfig(Section):
    """All settings of a daemon."""

    client_id: Annotated[str, AfterValidator(partial(check_id, "this device's name"))] | None = None
    """Identity. None: the certificate's name."""
    server: Annotated[Address, AfterValidator(reachable)]
    """Coordinator's host:port."""
    standbys: list[Annotated[Address, AfterValidator(reachable)]] = Field(default_factory=list)
    """host:port of other coordinators of the same ledger: whichever of all answers leads. One name for all of them,
    such as a Service of Kubernetes, needs no list."""
    state_dir: Path
    """Directory of identity, shard, pending updates and client states, for one daemon at a time."""
    task: TaskConfig | None = None
    shard: ShardConfig = ShardConfig()
    tasks: list[ServedTask] = Field(default_factory=list)
    algorithms: list[CodePath] = Field(default_factory=list)
    """Methods that the daemon loads beside those of installed packages, as module:attribute. No other module is
    imported for a coordinator."""
    device: Annotated[str, AfterValidator(_device)] = "auto"
    """"auto": the first CUDA device, else the CPU."""
    precision: Precision = "float32"
    """Number format of forward and backward passes. "float16" is for GPUs that lack bfloat16; the loss is scaled
    then. Parameters and updates stay float32."""
    processes: Annotated[int | str, AfterValidator(_processes)] = 1
    """Processes that compute each batch together, each a part of it, on a CUDA device of its own or on the CPU. "auto":
    one for each CUDA device."""
    memory_format: MemoryFormat = "auto"
    """Order of axes of images and convolutions. "auto": "channels_last" on CUDA, "contiguous" elsewhere."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Threads of torch. Results on a CPU are equal bit for bit only with the same number."""
    tls: TlsConfig | None = None
    insecure: bool = False
    """Use plain text with a coordinator on this machine."""
    insecure_remote: bool = False
    """Use plain text over a network, where everyone can read and change it."""
    optimizers: list[CodePath] = Field(default_factory=list)
    """Optimizers of other packages than torch.optim that runs may name, as module:Class."""
    proxy: ProxySetting = ENVIRONMENT
    """The HTTP proxy of connections: "none", http://HOST:PORT, or "environment": grpc_proxy, https_proxy or
    http_proxy, except to the hosts of no_proxy. A coordinator on this machine never has one."""
    keepalive_s: float = Field(default=30.0, ge=20, le=30)
    """Silence after which the daemon pings the coordinator. Shorter than what firewalls and load balancers on the way
    allow: `fl-client doctor --idle` measures it."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels by which runs select clients."""
    gates: GatesConfig = GatesConfig()
    limits: LimitsConfig = LimitsConfig()
    releases: ReleasesConfig | None = None
    packages: PackagesConfig = PackagesConfig()
    policy: Path | None = None
    """The site's policy file: which coordinators, tasks and amounts of work this device accepts. None: no rules."""
    metrics_listen: Address | None = None
    """host:port of the Prometheus metrics. None or "": no metrics."""
    max_bundle_bytes: int = Field(default=4 << 30, ge=1)
    """Largest bundle that is downloaded."""
    log: Literal["auto", "json", "pretty"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if (key, value) != ("metrics_listen", "")}
        return values

    @property
    def served(self) -> tuple[ServedTask, ...]:
        """All tasks: those of [[tasks]], or the one of [task] with its [shard]."""
        if self.task is None:
            return tuple(self.tasks)
        return (ServedTask(name=self.task.name, options=self.task.options, shard=self.shard),)

    @model_validator(mode="after")
    def _tasks_apart(self) -> Self:
        if (self.task is None) == (not self.tasks):
            came = "both" if self.tasks else "neither"
            raise ValueError(f"task: expected a table [task], or tables [[tasks]] for several, got {came}")
        if self.tasks and self.shard != ShardConfig():
            raise ValueError("shard: expected it inside of each of [[tasks]], got a table [shard] beside them")
        if len(self.tasks) > 1 and self.processes != 1:
            raise ValueError("processes: expected 1 with several tasks, for the processes train one task together")
        names = [one.package for one in self.tasks if one.package]
        if len(set(names)) != len(names):
            raise ValueError("tasks: expected each `package` once, for its process has the data of one task")
        if names and self.policy is None:
            raise ValueError("tasks: a `package` needs a policy with [packages] signers, and there is no policy")
        for number, one in enumerate(self.tasks):
            for other in self.tasks[:number]:
                check_apart(one, other)
        return self

    @model_validator(mode="after")
    def _plain_text_by_name(self) -> Self:
        if self.tls is not None:
            if self.insecure or self.insecure_remote:
                raise ValueError("insecure and [tls] contradict each other: remove one of them")
            return self
        if not self.insecure:
            raise ValueError("expected a [tls] section with ca, cert and key; for plain text set insecure = true")
        for address in (self.server, *self.standbys):
            if not is_loopback(split_address(address)[0]) and not self.insecure_remote:
                raise ValueError(
                    f"server: plain text to {address}, which is not this machine, is refused: add [tls], or set"
                    " insecure_remote = true where everyone on the network may read and change what is sent"
                )
        if self.client_id is None:
            raise ValueError(
                "client_id: expected a name for this device (without [tls] there is no certificate with a name)"
            )
        return self


def load_config(path: Path, overrides: Sequence[Path] = ()) -> ClientConfig:
    """Read a file, with later files replacing its keys. Raises ConfigError that names file and key."""
    try:
        return read_settings(path, ClientConfig, overrides)
    except SettingsError as error:
        raise ConfigError(str(error)) from None
