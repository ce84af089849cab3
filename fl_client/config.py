"""The daemon's configuration: one TOML file, read and checked once, every error in words.

Relative paths count from the directory in which the daemon is started.
"""

from __future__ import annotations

import difflib
import ipaddress
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from fl_client.errors import ConfigError
from protos.wire import check_id


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[::1]:port". Raises ValueError for anything else."""
    if "://" in address:
        raise ValueError(f"expected host:port, got {address!r}: leave out the scheme")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f'expected host:port with a port from 1 to 65535, such as "127.0.0.1:7070", got {address!r}')
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether the host is this machine by its name or number alone; names are not looked up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _address(value: str) -> str:
    split_address(value)
    return value


def _client_id(value: str) -> str:
    return check_id("device name", value)


Address = Annotated[str, AfterValidator(_address)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)


class TlsConfig(_Section):
    """Files in PEM for mTLS."""

    ca: Path
    """Certificates that may have signed the coordinator's."""
    cert: Path
    """This device's certificate; its name is the device's identity."""
    key: Path
    """The certificate's private key."""


class TaskConfig(_Section):
    """What is learned."""

    name: str
    """A built-in name, or module:attribute of an installed module."""
    options: dict[str, Any] = {}
    """Passed to the task: {data_root = "..."}."""


class ShardConfig(_Section):
    """This device's part of the training data: one of partition, file and folder; none of them is all of it."""

    partition: dict[str, str | int | float] | None = None
    """A partition made from a seed; the same on every device but for `index`."""
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


class ClientConfig(_Section):
    """All that a daemon is told."""

    client_id: Annotated[str, AfterValidator(_client_id)] | None = None
    """Identity, 1 to 64 of [A-Za-z0-9._-]. None: the certificate's name."""
    server: Address
    """Coordinator's host:port."""
    state_dir: Path
    """Where identity, shard and unsent updates are kept; one daemon at a time."""
    task: TaskConfig
    shard: ShardConfig = ShardConfig()
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    threads: int = Field(default=1, ge=1, le=1024)
    """torch threads; results on a CPU repeat bit for bit at the same number only."""
    tls: TlsConfig | None = None
    insecure: bool = False
    """Speak plain text, with a coordinator on this machine."""
    insecure_remote: bool = False
    """Speak plain text over a network where everyone can read and change it."""
    labels: dict[str, str] = {}
    """Words by which runs choose clients."""
    metrics_listen: Address | None = None
    """host:port for Prometheus. None or "": none."""
    max_bundle_bytes: int = Field(default=4 << 30, ge=1)
    """Largest model, in bytes, that is taken from the coordinator."""
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
            raise ValueError("client_id: expected a name for this device (without [tls] there is no certificate's name)")
        return self


def load_config(path: Path) -> ClientConfig:
    """Read and check a configuration file. Raises ConfigError that names file and key, what was expected, what came."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        return ClientConfig.model_validate(values)
    except FileNotFoundError:
        raise ConfigError(f"{path}: expected a configuration file there, found none") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None
    except ValidationError as error:
        lines = "; ".join(_in_words(detail) for detail in error.errors())
        raise ConfigError(f"{path}: {lines}") from None


def _in_words(detail: ErrorDetails) -> str:
    """One error of pydantic as "key: expected ..., got ..."."""
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"{where}: unknown key{_suggestion(detail)}"
    if detail["type"] == "missing":
        return f"{where}: expected a value, found none"
    if detail["type"] == "value_error":
        text = str(detail["ctx"]["error"])
        return f"{where}: {text}" if where else text
    expected = detail["msg"].removeprefix("Input should be ").removeprefix("Value should be ")
    if detail["loc"] == ("device",):
        expected = '"auto", "cpu", "cuda" or "cuda:1"'
    return f"{where}: expected {expected}, got {detail['input']!r}"


def _suggestion(detail: ErrorDetails) -> str:
    """The known keys of the section, the nearest first."""
    section: type[BaseModel] = ClientConfig
    for part in detail["loc"][:-1]:
        candidates = (section.model_fields[str(part)].annotation, *get_args(section.model_fields[str(part)].annotation))
        section = next(kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel))
    known = list(section.model_fields)
    near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
    return f", did you mean {near[0]}?" if near else f", expected one of {', '.join(known)}"
