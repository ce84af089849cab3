"""Settings of the connection to the coordinator, from flags, environment variables and a file, in this order."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fl_common.settings import is_loopback, parse_toml
from fl_common.tls_version import TlsVersion
from fl_ops.errors import UsageError

DEFAULT_SERVER = "127.0.0.1:7071"
ENVIRONMENT = {
    "server": "FL_ADMIN",
    "ca": "FL_CA",
    "cert": "FL_CERT",
    "key": "FL_KEY",
    "insecure": "FL_INSECURE",
    "insecure_remote": "FL_INSECURE_REMOTE",
}
TLS_VARIABLE = "FL_TLS_MIN_VERSION"
"""Names the oldest TLS version. Only a variable, because grpc is imported before options and the file are read."""
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
_FILES = ("ca", "cert", "key")


@dataclass(frozen=True)
class Layer:
    """The values of one source; None is unset. The field names are the keys of the file and of `ENVIRONMENT`."""

    server: str | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    insecure: bool | None = None
    insecure_remote: bool | None = None


@dataclass(frozen=True)
class Certificates:
    """Files in PEM: the authority's certificate, the operator's certificate and its private key."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True)
class Connection:
    """The address of the coordinator and the certificates for TLS; None: plain text."""

    server: str
    certificates: Certificates | None = None


def file_path(environ: Mapping[str, str]) -> Path:
    """The settings file: impetus/fl.toml under XDG_CONFIG_HOME or ~/.config."""
    home = environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path("~/.config").expanduser()) / "impetus" / "fl.toml"


def from_environment(environ: Mapping[str, str]) -> Layer:
    """The layer of FL_ADMIN, FL_CA, FL_CERT, FL_KEY, FL_INSECURE, FL_INSECURE_REMOTE; empty counts as unset."""
    values: dict[str, Any] = {}
    for key, variable in ENVIRONMENT.items():
        text = environ.get(variable, "")
        if not text:
            continue
        values[key] = Path(text) if key in _FILES else text if key == "server" else _boolean(variable, text)
    return Layer(**values)


def oldest_tls(environ: Mapping[str, str]) -> TlsVersion:
    """The oldest TLS version of this process: 1.3, or 1.2 if FL_TLS_MIN_VERSION has it. Raises UsageError."""
    match environ.get(TLS_VARIABLE, ""):
        case "" | "1.3":
            return "1.3"
        case "1.2":
            return "1.2"
        case other:
            raise UsageError(f"{TLS_VARIABLE}: expected 1.3, or 1.2 for a server without it, got {other!r}")


def from_file(path: Path) -> Layer:
    """The layer of a TOML file; all unset if there is no file. Paths are relative to its folder.

    Raises:
        UsageError: the file is no TOML, or has an unknown key or an invalid value.
    """
    try:
        content = parse_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Layer()
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path} cannot be read as TOML: {exc}") from exc
    return Layer(**{key: _file_value(path, key, value) for key, value in content.items()})


def resolve(layers: Sequence[Layer]) -> Connection:
    """The connection from layers, the strongest first.

    The strongest layer that sets plain text or certificates decides between the two.

    Raises:
        UsageError: neither or both are set, a file is missing, or plain text would go to another machine.
    """
    server = _first(layers, "server") or DEFAULT_SERVER
    host = _host(server)
    if _plain_text(layers):
        if not is_loopback(host) and not _first(layers, "insecure_remote"):
            raise UsageError(
                f"plain text is for this machine only, and {host} is not a loopback address: use --ca --cert --key, "
                "or add --insecure-remote if the network is trusted"
            )
        return Connection(server)
    paths = {name: _first(layers, name) for name in _FILES}
    missing = [f"--{name}" for name, path in paths.items() if path is None]
    if missing:
        raise UsageError(
            f"the connection to {server} needs certificates, missing: {', '.join(missing)}. `fl ca init` and "
            "`fl ca issue admin NAME` make them; --insecure uses plain text to a coordinator on this machine"
        )
    return Connection(server, Certificates(**paths))


def load(flags: Layer) -> Connection:
    """The connection of this process: flags over environment over file."""
    return resolve([flags, from_environment(os.environ), from_file(file_path(os.environ))])


def _first(layers: Sequence[Layer], name: str) -> Any:
    return next((value for layer in layers if (value := getattr(layer, name)) is not None), None)


def _plain_text(layers: Sequence[Layer]) -> bool:
    for layer in layers:
        named = [f"--{name}" for name in _FILES if getattr(layer, name) is not None]
        if layer.insecure and named:
            raise UsageError(
                f"--insecure means no certificates, but {', '.join(named)} is set as well: remove one of them"
            )
        if layer.insecure or named:
            return bool(layer.insecure)
    return False


def _host(server: str) -> str:
    host, colon, port = server.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise UsageError(f"expected a server address HOST:PORT such as {DEFAULT_SERVER}, got {server!r}")
    return host.removeprefix("[").removesuffix("]")


def _boolean(variable: str, text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise UsageError(f"{variable}: expected 1 or 0, got {text!r}")
    return _BOOLEANS[text.lower()]


def _file_value(path: Path, key: str, value: Any) -> Any:
    known = [field.name for field in fields(Layer)]
    if key not in known:
        raise UsageError(f"{path}: unknown key {key!r}; known: {', '.join(known)}")
    wanted = bool if key.startswith("insecure") else str
    if not isinstance(value, wanted):
        expected = "true or false" if wanted is bool else "text"
        raise UsageError(f"{path}: {key}: expected {expected}, got {value!r}")
    return path.parent / Path(str(value)).expanduser() if key in _FILES else value
