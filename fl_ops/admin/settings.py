"""Settings of the connection to the coordinator, from flags, environment variables and a file, in this order."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fl_common import proxies
from fl_common.files import check_secret
from fl_common.proxies import Proxy, checked_proxy, proxy_for
from fl_common.settings import SettingsError, is_loopback, parse_toml
from fl_ops.errors import UsageError

DEFAULT_SERVER = "127.0.0.1:7071"
ENVIRONMENT = {
    "server": "FL_ADMIN",
    "ca": "FL_CA",
    "cert": "FL_CERT",
    "key": "FL_KEY",
    "token_file": "FL_TOKEN_FILE",
    "token": "FL_TOKEN",
    "insecure": "FL_INSECURE",
    "insecure_remote": "FL_INSECURE_REMOTE",
    "proxy": "FL_PROXY",
}
_PROBE_S = 3.0
"""Wait for one of several addresses."""
_LONGEST_TOKEN = 8000
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/=-]{{1,{_LONGEST_TOKEN}}}")
_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
_FILES = ("ca", "cert", "key", "token_file")
_PAIR, _TOKENS = ("cert", "key"), ("token_file", "token")


@dataclass(frozen=True)
class Layer:
    """The values of one source; None is unset. The field names are the keys of the file and of `ENVIRONMENT`."""

    server: str | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    token_file: Path | None = None
    token: str | None = field(default=None, repr=False)
    """Only in the environment: other users can see a command line, and a settings file is not for secrets."""
    insecure: bool | None = None
    insecure_remote: bool | None = None
    proxy: str | None = None


@dataclass(frozen=True)
class Certificates:
    """Files in PEM: the authority's certificate, the operator's certificate and its private key."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True)
class Token:
    """A bearer token, and the certificate of the authority that signed the coordinator's. Exactly one of file and text.

    The token is never part of a text, a repr or an error.
    """

    ca: Path
    file: Path | None = None
    """Read before each call, because another program may renew it."""
    text: str = field(default="", repr=False)

    def read(self) -> str:
        """The token. Raises UsageError, which names the source."""
        source = "FL_TOKEN" if self.file is None else f"--token-file {self.file}"
        text = self.text
        if self.file is not None:
            try:
                check_secret(self.file, "--token-file", "token")
                text = self.file.read_text(encoding="utf-8-sig")
            except SettingsError as error:
                raise UsageError(str(error)) from None
            except OSError as error:
                raise UsageError(f"{source} cannot be read: {error.strerror}") from None
            except UnicodeDecodeError:
                raise UsageError(f"{source}: expected a token, got other content") from None
        if not _TOKEN.fullmatch(text.strip()):
            raise UsageError(f"{source}: expected a token on one line, at most {_LONGEST_TOKEN} characters, got none")
        return text.strip()


@dataclass(frozen=True)
class Connection:
    """The address of the coordinator, and what the caller proves its identity with; None: plain text."""

    server: str
    security: Certificates | Token | None = None
    proxy_setting: str = proxies.ENVIRONMENT
    """A `ProxySetting`."""

    @property
    def proxy(self) -> Proxy | None:
        """The proxy of the connection; None for a direct one."""
        return proxy_for(self.server, self.proxy_setting)


def file_path(environ: Mapping[str, str]) -> Path:
    """The settings file: impetus/fl.toml under XDG_CONFIG_HOME or ~/.config."""
    home = environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path("~/.config").expanduser()) / "impetus" / "fl.toml"


def from_environment(environ: Mapping[str, str]) -> Layer:
    """The layer of the variables in ENVIRONMENT; empty counts as unset."""
    values: dict[str, Any] = {}
    for key, variable in ENVIRONMENT.items():
        text = environ.get(variable, "")
        if not text:
            continue
        is_text = key in {"server", "token", "proxy"}
        values[key] = Path(text) if key in _FILES else text if is_text else _boolean(variable, text)
    return Layer(**values)


def from_file(path: Path) -> Layer:
    """The layer of a TOML file; all unset if there is no file. Paths are relative to its folder.

    Raises:
        UsageError: the file is no TOML, or has an unknown key or an invalid value.
    """
    try:
        content = parse_toml(path.read_bytes())
    except FileNotFoundError:
        return Layer()
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path} cannot be read as TOML: {exc}") from exc
    return Layer(**{key: _file_value(path, key, value) for key, value in content.items()})


def resolve(layers: Sequence[Layer]) -> Connection:
    """The connection from layers, the strongest first.

    The strongest layer that sets plain text, a certificate or a token decides between them.

    Raises:
        UsageError: none or several are set, a file is missing, or plain text would go to another machine.
    """
    proxy = _first(layers, "proxy") or proxies.ENVIRONMENT
    try:
        checked_proxy(proxy)
    except ValueError as error:
        raise UsageError(f"--proxy, FL_PROXY or proxy in the settings: {error}") from None
    server = leading(_first(layers, "server") or DEFAULT_SERVER, proxy)
    host = _host(server)
    if _plain_text(layers):
        if not is_loopback(host) and not _first(layers, "insecure_remote"):
            raise UsageError(
                f"plain text is for this machine only, and {host} is not a loopback address: use --ca --cert --key, "
                "or add --insecure-remote if the network is trusted"
            )
        return Connection(server, None, proxy)
    if token := _token(layers):
        return Connection(server, token, proxy)
    paths = {name: _first(layers, name) for name in ("ca", *_PAIR)}
    missing = [f"--{name}" for name, path in paths.items() if path is None]
    if missing:
        raise UsageError(
            f"the connection to {server} needs certificates, missing: {', '.join(missing)}. `fl ca init` and "
            "`fl ca issue admin NAME` make them; --ca with --token-file is for a coordinator with tokens; --insecure "
            "uses plain text to a coordinator on this machine"
        )
    return Connection(server, Certificates(**paths), proxy)


def leading(servers: str, proxy_setting: str) -> str:
    """The first of the addresses, separated by commas, whose port is open: a standby has closed it. Else the first."""
    addresses = [address.strip() for address in servers.split(",")]
    for address in addresses:
        _host(address)
    for address in addresses if len(addresses) > 1 else ():
        with suppress(OSError):
            proxies.connect(address, proxy_for(address, proxy_setting), _PROBE_S).close()
            return address
    return addresses[0]


def load(flags: Layer) -> Connection:
    """The connection of this process: flags over environment over file."""
    return resolve([flags, from_environment(os.environ), from_file(file_path(os.environ))])


def _first(layers: Sequence[Layer], name: str) -> Any:
    return next((value for layer in layers if (value := getattr(layer, name)) is not None), None)


def _token(layers: Sequence[Layer]) -> Token | None:
    """The token of the strongest layer with an identity; None if that is a certificate, or there is none."""
    layer = next((given for given in layers if _named(given, *_PAIR, *_TOKENS)), Layer())
    named = _named(layer, *_PAIR, *_TOKENS)
    if not _named(layer, *_TOKENS):
        return None
    if len(named) > 1:
        raise UsageError(f"expected a certificate or one token, got {', '.join(named)}: remove all but one")
    if (ca := _first(layers, "ca")) is None:
        raise UsageError("--ca: expected the authority of the coordinator's certificate with a token, found none")
    return Token(ca, layer.token_file, layer.token or "")


def _named(layer: Layer, *names: str) -> list[str]:
    """The options of these that a layer sets, as an operator writes them."""
    given = (name for name in names if getattr(layer, name) is not None)
    return ["FL_TOKEN" if name == "token" else f"--{name.replace('_', '-')}" for name in given]


def _plain_text(layers: Sequence[Layer]) -> bool:
    for layer in layers:
        named = _named(layer, *_FILES, "token")
        if layer.insecure and named:
            raise UsageError(
                f"--insecure means no certificates and no token, but {', '.join(named)} is set as well: remove one of "
                "them"
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
    known = [field.name for field in fields(Layer) if field.name != "token"]
    if key not in known:
        raise UsageError(f"{path}: unknown key {key!r}; known: {', '.join(known)}")
    wanted = bool if key.startswith("insecure") else str
    if not isinstance(value, wanted):
        expected = "true or false" if wanted is bool else "text"
        raise UsageError(f"{path}: {key}: expected {expected}, got {value!r}")
    return path.parent / Path(str(value)).expanduser() if key in _FILES else value
