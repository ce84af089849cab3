"""The daemon's configuration: one TOML file, read and checked once, every error in words.

Relative paths count from the directory in which the daemon is started.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field, model_validator

from fl_client.errors import ConfigError
from fl_client.gates import schedule
from protos.settings import Address, Section, SettingsError, is_loopback, read_settings, split_address
from protos.wire import check_id

Precision = Literal["float32", "bfloat16"]
MemoryFormat = Literal["auto", "contiguous", "channels_last"]
GateName = Literal["window", "gpu", "power", "temperature"]


def _client_id(value: str) -> str:
    return check_id("this device's name", value)


def _device(value: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is None:
        raise ValueError(f'expected "auto", "cpu", "cuda" or "cuda:1", got {value!r}')
    return value


def _reachable(value: str) -> str:
    if split_address(value)[1] == 0:
        raise ValueError(f"expected the port that the coordinator listens on, got {value!r}")
    return value


def _window(value: str) -> str:
    schedule.parse(value)
    return value


def _zone(value: str) -> str:
    try:
        return ZoneInfo(value).key if value else ""
    except (ValueError, OSError, KeyError):
        raise ValueError(
            f'expected a time zone such as "Europe/Zurich", got {value!r}; where no zone is known, install tzdata'
        ) from None


class TlsConfig(Section):
    """Files in PEM for mTLS."""

    ca: Path
    """Certificates that may have signed the coordinator's."""
    cert: Path
    """This device's certificate; its name is the device's identity."""
    key: Path
    """The certificate's private key."""


class TaskConfig(Section):
    """What is learned."""

    name: str
    """A built-in name, or module:attribute of an installed module."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task: {data_root = "..."}."""


class ShardConfig(Section):
    """This device's part of the training data: one of partition, file and folder; none of them is all of it."""

    partition: dict[str, str | bool | int | float] | None = None
    """A partition made from a seed, by the fields of tasks.PartitionSpec; the same on every device but for `index`."""
    file: Path | None = None
    """A partition file."""
    index: int | None = Field(default=None, ge=0)
    """Which client's part of the partition, from 0."""
    folder: Path | None = None
    """A folder of the device's own files, read by the task."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("partition", "file", "folder") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"expected one of partition, file and folder, got {' and '.join(given)}")
        if given in (["partition"], ["file"]) and self.index is None:
            raise ValueError(f"{given[0]} needs an index: which client's part is this device's, counted from 0")
        if self.index is not None and given not in (["partition"], ["file"]):
            raise ValueError("index needs a partition or a file that it counts in")
        return self


class GatesConfig(Section):
    """When this device may train: at any time, but for what is asked for here."""

    windows: list[Annotated[str, AfterValidator(_window)]] = Field(default_factory=list)
    """Local times at which it may: "22:00-06:00", "mon-fri 18:30-24:00", "sat,sun 00:00-24:00"."""
    timezone: Annotated[str, AfterValidator(_zone)] = ""
    """Zone of the windows, such as "Europe/Zurich". "": the device's own."""
    on_mains: bool = False
    """Only while it does not live on a battery."""
    temperature_below: float | None = Field(default=None, gt=0, le=150)
    """Only while the hottest zone is below, in degrees Celsius."""
    temperature_margin: float = Field(default=5.0, ge=0, le=50)
    """Degrees below the limit at which it may again."""
    temperature_zones: list[str] = Field(default_factory=list)
    """Types of the thermal zones that are looked at. Empty: all that can be read."""
    gpu_below: float | None = Field(default=None, gt=0, le=1)
    """Only while others use less of the GPU; 0.2 is a fifth of it."""
    finish: list[GateName] = Field(default=["window"])
    """Those of "window", "power", "temperature" and "gpu" at whose closing a round that was begun is finished; at that
    of any other it is given up."""
    check_s: float = Field(default=15.0, gt=0, le=3600)
    """Seconds between looks; a window's beginning and end are not waited for."""
    open_after_s: float = Field(default=60.0, ge=0, le=86400)
    """Seconds for which power, temperature or GPU must be well again before it may train again."""
    sysfs: Path = Path("/sys")
    """Where Linux tells of power and temperature; in a container it may be elsewhere."""

    @model_validator(mode="after")
    def _of_use(self) -> Self:
        if self.timezone and not self.windows:
            raise ValueError("timezone is the zone of the windows, and there are none: add windows, or remove it")
        if self.temperature_zones and self.temperature_below is None:
            raise ValueError("temperature_zones needs temperature_below: how hot they may be")
        return self


class LimitsConfig(Section):
    """What a coordinator may ask of this device. The size of what it sends is tied to the task's own model."""

    max_steps: int = Field(default=10_000_000, ge=1)
    """Local steps of one assignment; one that asks for more is refused."""
    max_batch_size: int = Field(default=65_536, ge=1)
    """Examples in one batch; one that asks for more, where the shard has more, is refused."""
    max_seconds: float = Field(default=86_400.0, gt=0, le=31_536_000)
    """Seconds of computing for one assignment, and seconds after which an assignment is given up whose deadline is
    missing or later."""
    max_assignments: int = Field(default=4, ge=1, le=64)
    """Assignments that are kept at once, and as many evaluations; of more, the oldest is given up."""
    max_wait_s: float = Field(default=3_600.0, ge=1, le=604_800)
    """Longest wait before the next try that a coordinator is given."""
    max_runs: int = Field(default=16, ge=1)
    """Runs that client states are kept for at once; work of another run that needs one is refused."""
    max_kept_bytes: int = Field(default=16 << 30, ge=1)
    """Bytes on disk of client states and of the updates that leave them; work that needs more is refused."""


class ClientConfig(Section):
    """All that a daemon is told."""

    client_id: Annotated[str, AfterValidator(_client_id)] | None = None
    """Identity, 1 to 64 of [A-Za-z0-9._-]. None: the certificate's name."""
    server: Annotated[Address, AfterValidator(_reachable)]
    """Coordinator's host:port."""
    state_dir: Path
    """Where identity, shard and unsent updates are kept; one daemon at a time."""
    task: TaskConfig
    shard: ShardConfig = ShardConfig()
    device: Annotated[str, AfterValidator(_device)] = "auto"
    """"auto": CUDA where there is one, else the CPU."""
    precision: Precision = "float32"
    """What forward and backward passes are computed in; "bfloat16" is for devices that are faster with it. Parameters
    and updates stay float32."""
    memory_format: MemoryFormat = "auto"
    """Order of axes of images and convolutions: "channels_last" suits CUDA and is "auto" there, "contiguous" is "auto"
    elsewhere."""
    threads: int = Field(default=1, ge=1, le=1024)
    """torch threads; results on a CPU repeat bit for bit at the same number only."""
    tls: TlsConfig | None = None
    insecure: bool = False
    """Speak plain text, with a coordinator on this machine."""
    insecure_remote: bool = False
    """Speak plain text over a network where everyone can read and change it."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Words by which runs choose clients."""
    gates: GatesConfig = GatesConfig()
    limits: LimitsConfig = LimitsConfig()
    metrics_listen: Address | None = None
    """host:port for Prometheus. None or "": none."""
    max_bundle_bytes: int = Field(default=4 << 30, ge=1)
    """Largest model, in bytes, that is taken from the coordinator; what is no model of this task never is."""
    log: Literal["auto", "json", "pretty"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _empty_is_absent(cls, values: Any) -> Any:
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if (key, value) != ("metrics_listen", "")}
        return values

    @model_validator(mode="after")
    def _plain_text_by_name(self) -> Self:
        if self.tls is not None:
            if self.insecure or self.insecure_remote:
                raise ValueError("insecure and [tls] contradict each other: remove one of them")
            return self
        if not self.insecure:
            raise ValueError("expected a [tls] section with ca, cert and key; for plain text set insecure = true")
        if not is_loopback(split_address(self.server)[0]) and not self.insecure_remote:
            raise ValueError(
                f"server: plain text to {self.server}, which is not this machine, is refused: add [tls], or set"
                " insecure_remote = true where everyone on the network may read and change what is sent"
            )
        if self.client_id is None:
            raise ValueError(
                "client_id: expected a name for this device (without [tls] there is no certificate's name)"
            )
        return self


def load_config(path: Path, on_top: Sequence[Path] = ()) -> ClientConfig:
    """Read a file, with others on top. Raises ConfigError that names file and key, what was expected and what came."""
    try:
        return read_settings(path, ClientConfig, on_top)
    except SettingsError as error:
        raise ConfigError(str(error)) from None
