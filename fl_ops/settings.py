"""How to reach the coordinator: flags over environment over file, and what is safe."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fl_ops.errors import Misused
from protos.settings import is_loopback

DEFAULT_SERVER = "127.0.0.1:7071"
ENVIRONMENT = {
    "server": "FL_ADMIN",
    "ca": "FL_CA",
    "cert": "FL_CERT",
    "key": "FL_KEY",
    "insecure": "FL_INSECURE",
    "insecure_remote": "FL_INSECURE_REMOTE",
}
_TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
_FILES = ("ca", "cert", "key")


@dataclass(frozen=True)
class Layer:
    """What one source says. None: nothing. The field names are the keys of the file and of `ENVIRONMENT`."""

    server: str | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    insecure: bool | None = None
    insecure_remote: bool | None = None


@dataclass(frozen=True)
class Certificates:
    """Files in PEM: the authority's certificate, one's own, and the private key of that."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True)
class Connection:
    """A checked way to the coordinator: its address, and whom to trust and who one is. None means plain text."""

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
        values[key] = Path(text) if key in _FILES else text if key == "server" else _truth(variable, text)
    return Layer(**values)


def from_file(path: Path) -> Layer:
    """The layer of a TOML file; nothing when there is none. Paths in it count from its folder.

    Raises:
        Misused: it is no TOML, or has a key or a value that does not belong there.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Layer()
    except (OSError, ValueError) as exc:
        raise Misused(f"{path} cannot be read as TOML: {exc}") from exc
    return Layer(**{key: _file_value(path, key, value) for key, value in content.items()})


def resolve(layers: Sequence[Layer]) -> Connection:
    """One connection from layers, the strongest first.

    The strongest layer that speaks of plain text or of certificates decides which of the two it is.

    Raises:
        Misused: neither or both were asked for, a file is missing, or plain text would leave this machine.
    """
    server = _first(layers, "server") or DEFAULT_SERVER
    host = _host(server)
    if _plain_text(layers):
        if not is_loopback(host) and not _first(layers, "insecure_remote"):
            raise Misused(
                f"plain text is for this machine only, and {host} is not a loopback address: use --ca --cert --key, "
                "or say --insecure-remote as well if the network between is trusted"
            )
        return Connection(server)
    paths = {name: _first(layers, name) for name in _FILES}
    missing = [f"--{name}" for name, path in paths.items() if path is None]
    if missing:
        raise Misused(
            f"{server} wants certificates, missing: {', '.join(missing)}. `fl ca init` and "
            "`fl ca issue admin NAME` make them; --insecure speaks plain text to a coordinator on this machine"
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
            raise Misused(
                f"--insecure means no certificates, but {', '.join(named)} came with it: leave out one of them"
            )
        if layer.insecure or named:
            return bool(layer.insecure)
    return False


def _host(server: str) -> str:
    host, colon, port = server.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise Misused(f"expected a server address HOST:PORT such as {DEFAULT_SERVER}, got {server!r}")
    return host.removeprefix("[").removesuffix("]")


def _truth(variable: str, text: str) -> bool:
    if text.lower() not in _TRUTH:
        raise Misused(f"{variable}: expected 1 or 0, got {text!r}")
    return _TRUTH[text.lower()]


def _file_value(path: Path, key: str, value: Any) -> Any:
    known = [field.name for field in fields(Layer)]
    if key not in known:
        raise Misused(f"{path}: unknown key {key!r}; known: {', '.join(known)}")
    wanted = bool if key.startswith("insecure") else str
    if not isinstance(value, wanted):
        words = "true or false" if wanted is bool else "text"
        raise Misused(f"{path}: {key}: expected {words}, got {value!r}")
    return path.parent / Path(str(value)).expanduser() if key in _FILES else value
