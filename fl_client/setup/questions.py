"""The values of `fl-client init`: from flags, from questions on a terminal, or from defaults."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import typer

from fl_client.errors import UsageError
from fl_client.settings.config import reachable
from fl_common.built_in import TASKS
from fl_common.names import check_id
from fl_common.settings import is_loopback, split_address

Check = Callable[[str], object]
"""Raises ValueError for an answer that is not valid."""
SHARDS = ("all", "partition", "file", "folder")


@dataclass(frozen=True, slots=True)
class Flags:
    """The values of the flags. None: the flag was not given."""

    server: str | None = None
    client_id: str | None = None
    state_dir: Path | None = None
    task: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    shard: dict[str, Any] = field(default_factory=dict)
    tls: dict[str, Path] = field(default_factory=dict)
    insecure: bool = False
    insecure_remote: bool = False
    other: dict[str, Any] = field(default_factory=dict)
    """Other keys of the file, for which there is no question."""


class DefaultAnswers:
    """Defaults without questions: `--yes`."""

    def text(self, flag: str, question: str, default: str | None, check: Check) -> str:
        """The default. Raises UsageError where there is none."""
        if default is None:
            raise UsageError(f"{flag} is needed: {question}")
        check(default)
        return default

    def confirm(self, question: str, default: bool) -> bool:  # noqa: ARG002 - as TerminalPrompts
        """The default."""
        return default


class TerminalPrompts:
    """Questions on a terminal. A question is repeated until its answer is valid."""

    def text(self, flag: str, question: str, default: str | None, check: Check) -> str:  # noqa: ARG002 - as DefaultAnswers
        """An answer that passes the check."""

        def checked(answer: str) -> str:
            try:
                check(answer.strip())
            except ValueError as error:
                raise typer.BadParameter(str(error)) from None
            return answer.strip()

        answer: str = typer.prompt(question, default=default, value_proc=checked)
        return answer

    def confirm(self, question: str, default: bool) -> bool:
        """True for yes."""
        return typer.confirm(question, default=default)


Answers = DefaultAnswers | TerminalPrompts
"""The source of values that no flag gave."""


def collect_values(flags: Flags, answers: Answers, config: Path) -> dict[str, Any]:
    """The values of the settings file, by key. Raises UsageError for missing or contradicting flags."""
    server = flags.server or answers.text("--server", "Coordinator, host:port", None, reachable)
    values = {"server": server, **_identity(flags, answers, config, server)}
    task = flags.task or answers.text("--task", f"Task: {', '.join(TASKS)}, or module:attribute", None, _not_empty)
    place = flags.state_dir or answers.text(
        "--state-dir", "State directory", str(default_state_dir(config)), _not_empty
    )
    values |= {"state_dir": Path(place).absolute(), "task": {"name": task} | _options(flags, answers)}
    if shard := flags.shard or _shard(answers):
        values["shard"] = {key: value.absolute() if isinstance(value, Path) else value for key, value in shard.items()}
    if "device" not in flags.other:
        values["device"] = answers.text("--device", "Device: auto, cpu or cuda", "auto", _not_empty)
    return values | flags.other


def _identity(flags: Flags, answers: Answers, config: Path, server: str) -> dict[str, Any]:
    """TLS with the device's certificate, or plain text with a name."""
    if flags.insecure and flags.tls:
        raise UsageError("--insecure excludes --ca, --cert and --key: leave out one of them")
    plain = flags.insecure or flags.insecure_remote
    if not plain and (flags.tls or answers.confirm("Use TLS, with a certificate of this device?", True)):
        named = {} if flags.client_id is None else {"client_id": flags.client_id}
        return named | {"tls": {key: _file(flags, answers, config, key) for key in _FILES}}
    name = flags.client_id or answers.text(
        "--client-id", "Name of this device", _host_name(), partial(check_id, "this device's name")
    )
    values: dict[str, Any] = {"client_id": name, "insecure": True}
    if flags.insecure_remote or not is_loopback(split_address(server)[0]):
        if not flags.insecure_remote and not answers.confirm(_OPEN, False):
            raise UsageError(
                f"plain text to {server}, which is not this machine, is refused: use TLS or --insecure-remote"
            )
        values["insecure_remote"] = True
    return values


def _file(flags: Flags, answers: Answers, config: Path, key: str) -> Path:
    name, question = _FILES[key]
    if key in flags.tls:
        return flags.tls[key].absolute()
    return Path(answers.text(f"--{key}", question, str(config.absolute().parent / "tls" / name), _not_empty)).absolute()


def _options(flags: Flags, answers: Answers) -> dict[str, Any]:
    options = flags.options
    if not options:
        options = _listed(answers.text("--option", "Options of the task: name=value, separated by commas", "", _listed))
    return {"options": options} if options else {}


def _shard(answers: Answers) -> dict[str, Any]:
    kind = answers.text("--shard-*", f"This device's part of the data: {', '.join(SHARDS)}", "all", _shard_kind)
    if kind == "folder":
        return {"folder": Path(answers.text("--shard-folder", "Folder of the device's own files", None, _not_empty))}
    if kind == "all":
        return {}
    if kind == "file":
        source: dict[str, Any] = {"file": Path(answers.text("--shard-file", "Partition file", None, _not_empty))}
    else:
        question = "Partition: name=value, separated by commas, such as method=iid,clients=10,seed=1"
        source = {"partition": _listed(answers.text("--partition", question, None, _listed))}
    return source | {"index": int(answers.text("--index", "Number of this device's part, from 0", "0", int))}


def parse_pairs(texts: Iterable[str], *, as_text: bool = False) -> dict[str, Any]:
    """Parse texts of the form name=value into a mapping. Raises ValueError.

    as_text: all values are text. Otherwise numbers, true and false are parsed.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not name or not equals:
            raise ValueError(f"expected name=value, got {text!r}")
        values[name] = value if as_text else _value(value)
    return values


def _listed(text: str) -> dict[str, Any]:
    """Parse pairs that are separated by commas."""
    return parse_pairs(filter(str.strip, text.split(",")))


def _value(text: str) -> str | bool | int | float:
    if text in {"true", "false"}:
        return text == "true"
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?\d*\.\d+(e-?\d+)?", text) else text


def _not_empty(text: str) -> None:
    if not text:
        raise ValueError("expected an answer, got none")


def _shard_kind(text: str) -> None:
    if text not in SHARDS:
        raise ValueError(f"expected one of {', '.join(SHARDS)}, got {text!r}")


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip(".-")[:64] or "edge"


def default_state_dir(config: Path) -> Path:
    """The service's directory for settings in /etc, else a folder in the settings' folder."""
    path = config.absolute()
    return Path("/var/lib/impetus") if path.is_relative_to("/etc") else path.parent / "state"


_FILES = {
    "ca": ("ca.crt", "Certificate of the authority that signed the coordinator's"),
    "cert": ("tls.crt", "This device's certificate"),
    "key": ("tls.key", "Its private key"),
}
_OPEN = "Plain text: everyone on the network may read and change what is sent. Use it?"
