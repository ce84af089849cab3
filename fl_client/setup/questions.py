"""What `fl-client init` wants to know, in its order: from flags, else asked, else by default."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import typer

from fl_client.setup.errors import Misused
from protos.settings import is_loopback, split_address
from protos.wire import check_id

Check = Callable[[str], object]
"""Raises ValueError in words for an answer that cannot be."""
SHARDS = ("all", "partition", "file", "folder")


@dataclass(frozen=True, slots=True)
class Given:
    """What the flags said; None: nothing."""

    server: str | None = None
    client_id: str | None = None
    state_dir: Path | None = None
    task: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    shard: dict[str, Any] = field(default_factory=dict)
    tls: dict[str, Path] = field(default_factory=dict)
    insecure: bool = False
    insecure_remote: bool = False
    more: dict[str, Any] = field(default_factory=dict)
    """Other keys of the file, which nobody is asked for."""


class Asker(Protocol):
    """Where answers come from that no flag gave."""

    def text(self, flag: str, question: str, default: str | None, check: Check) -> str:
        """An answer that the check takes."""
        ...

    def agreed(self, question: str, default: bool) -> bool:
        """Yes or no."""
        ...


class Defaults:
    """Nobody is asked: `--yes`."""

    def text(self, flag: str, question: str, default: str | None, check: Check) -> str:
        """The default. Raises Misused where there is none."""
        if default is None:
            raise Misused(f"{flag} is needed: {question}")
        check(default)
        return default

    def agreed(self, question: str, default: bool) -> bool:  # noqa: ARG002 - as the role has it
        """The default."""
        return default


class Terminal:
    """Somebody sits there; an answer that cannot be is asked for again."""

    def text(self, flag: str, question: str, default: str | None, check: Check) -> str:  # noqa: ARG002 - likewise
        """See Asker."""

        def checked(answer: str) -> str:
            try:
                check(answer.strip())
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
            return answer.strip()

        answer: str = typer.prompt(question, default=default, value_proc=checked)
        return answer

    def agreed(self, question: str, default: bool) -> bool:
        """See Asker."""
        return typer.confirm(question, default=default)


def settle(given: Given, asker: Asker, config: Path) -> dict[str, Any]:
    """The values of the file, by key. Raises Misused where a flag is missing or two contradict each other."""
    server = given.server or asker.text("--server", "Coordinator, host:port", None, _server)
    values = {"server": server, **_identity(given, asker, config, server)}
    task = given.task or asker.text("--task", f"Task: {_BUILT_IN}, or module:attribute", None, _said)
    place = given.state_dir or asker.text("--state-dir", "State directory", str(_state_dir(config)), _said)
    values |= {"state_dir": Path(place).absolute(), "task": {"name": task} | _options(given, asker)}
    if shard := given.shard or _shard(asker):
        values["shard"] = {key: value.absolute() if isinstance(value, Path) else value for key, value in shard.items()}
    if "device" not in given.more:
        values["device"] = asker.text("--device", "Device: auto, cpu or cuda", "auto", _said)
    return values | given.more


def _identity(given: Given, asker: Asker, config: Path, server: str) -> dict[str, Any]:
    """TLS with the device's certificate, or plain text and a name."""
    if given.insecure and given.tls:
        raise Misused("--insecure means no certificates, but some came with it: leave out one of them")
    plain = given.insecure or given.insecure_remote
    if not plain and (given.tls or asker.agreed("Speak TLS, with a certificate of this device?", True)):
        named = {} if given.client_id is None else {"client_id": given.client_id}
        return named | {"tls": {key: _file(given, asker, config, key) for key in _FILES}}
    name = given.client_id or asker.text("--client-id", "Name of this device", _host_name(), _id)
    values: dict[str, Any] = {"client_id": name, "insecure": True}
    if given.insecure_remote or not is_loopback(split_address(server)[0]):
        if not given.insecure_remote and not asker.agreed(_OPEN, False):
            raise Misused(
                f"plain text to {server}, which is not this machine, is refused: use TLS or --insecure-remote"
            )
        values["insecure_remote"] = True
    return values


def _file(given: Given, asker: Asker, config: Path, key: str) -> Path:
    name, words = _FILES[key]
    if key in given.tls:
        return given.tls[key].absolute()
    return Path(asker.text(f"--{key}", words, str(config.absolute().parent / "tls" / name), _said)).absolute()


def _options(given: Given, asker: Asker) -> dict[str, Any]:
    options = given.options
    if not options:
        options = _listed(asker.text("--option", "Options of the task, name=value with commas between", "", _listed))
    return {"options": options} if options else {}


def _shard(asker: Asker) -> dict[str, Any]:
    kind = asker.text("--shard-*", f"This device's part of the data: {', '.join(SHARDS)}", "all", _shard_kind)
    if kind == "folder":
        return {"folder": Path(asker.text("--shard-folder", "Folder of the device's own files", None, _said))}
    if kind == "all":
        return {}
    if kind == "file":
        source: dict[str, Any] = {"file": Path(asker.text("--shard-file", "Partition file", None, _said))}
    else:
        question = "Partition, name=value with commas between, such as method=iid,clients=10,seed=1"
        source = {"partition": _listed(asker.text("--partition", question, None, _listed))}
    return source | {"index": int(asker.text("--index", "Which client's part is this device's, from 0", "0", int))}


def pairs(said: Iterable[str], *, as_text: bool = False) -> dict[str, Any]:
    """name=value, each as an entry of a mapping. Raises ValueError.

    as_text: all values are text; else numbers, true and false are what they say.
    """
    found: dict[str, Any] = {}
    for each in said:
        name, equals, value = (part.strip() for part in each.partition("="))
        if not name or not equals:
            raise ValueError(f"expected name=value, got {each!r}")
        found[name] = value if as_text else _value(value)
    return found


def _listed(text: str) -> dict[str, Any]:
    """Pairs with commas between."""
    return pairs(filter(str.strip, text.split(",")))


def _value(text: str) -> str | bool | int | float:
    if text in {"true", "false"}:
        return text == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d*\.\d+(e-?\d+)?", text) else text


def _server(text: str) -> None:
    if split_address(text)[1] == 0:
        raise ValueError(f"expected the port that the coordinator listens on, got {text!r}")


def _said(text: str) -> None:
    if not text:
        raise ValueError("expected an answer, got none")


def _id(text: str) -> None:
    check_id("this device's name", text)


def _shard_kind(text: str) -> None:
    if text not in SHARDS:
        raise ValueError(f"expected one of {', '.join(SHARDS)}, got {text!r}")


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip(".-")[:64] or "edge"


def _state_dir(config: Path) -> Path:
    """Where a service keeps its state, else beside the settings."""
    path = config.absolute()
    return Path("/var/lib/impetus") if path.is_relative_to("/etc") else path.parent / "state"


_BUILT_IN = "digits, fashion-mnist, cifar10, cifar100, emnist, emnist-digits"
_FILES = {
    "ca": ("ca.crt", "Certificate of the authority that signed the coordinator's"),
    "cert": ("tls.crt", "This device's certificate"),
    "key": ("tls.key", "Its private key"),
}
_OPEN = "Plain text: everyone on the network may read and change what is sent. Really?"
