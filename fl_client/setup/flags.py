"""The flags of `fl-client init`, by subject."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fl_client.errors import UsageError
from fl_client.setup.questions import Flags, parse_pairs
from fl_common.command_help import FlagGroup


@dataclass(frozen=True)
class DaemonFlags(FlagGroup):
    """The daemon and its coordinator."""

    server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of the coordinator.")] = None
    client_id: Annotated[str | None, typer.Option(metavar="NAME", help="With TLS: the certificate's name.")] = None
    state_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of the daemon's files.")] = None


@dataclass(frozen=True)
class DataFlags(FlagGroup):
    """What is trained, on which part of the data."""

    task: Annotated[str | None, typer.Option(metavar="NAME", help="Task to train.")] = None
    option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Option of the task; repeat.")] = None
    partition: Annotated[str | None, typer.Option(metavar="NAME=VALUE,...", help="Partition of the data.")] = None
    shard_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Partition file.")] = None
    shard_folder: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the device's own files.")] = None
    index: Annotated[int | None, typer.Option(min=0, help="Part of the partition or file, from 0.")] = None

    def shard(self) -> dict[str, Any]:
        """The table `shard` of the settings."""
        partition = _parsed(self.partition.split(",")) if self.partition else None
        return _given(partition=partition, file=self.shard_file, folder=self.shard_folder, index=self.index)


@dataclass(frozen=True)
class TlsFlags(FlagGroup):
    """TLS with files that are there, or plain text."""

    ca: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: tls/ca.crt in --config's folder.")] = None
    cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: tls/tls.crt there.")] = None
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: tls/tls.key there.")] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="Plain text, with a coordinator here.")] = False
    insecure_remote: Annotated[bool, typer.Option("--insecure-remote", help="Plain text over a network.")] = False


@dataclass(frozen=True)
class TokenFlags(FlagGroup):
    """A certificate for a token."""

    token: Annotated[str | None, typer.Option(metavar="TOKEN", help="Get a certificate for a token.")] = None
    token_file: Annotated[Path | None, typer.Option(metavar="FILE|-", help="The token; -: on stdin.")] = None
    ca_fingerprint: Annotated[str | None, typer.Option(metavar="SHA256", help="Fingerprint of the authority.")] = None
    enroll_server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Default: port 7074.")] = None
    only_certificate: Annotated[bool, typer.Option("--only-certificate", help="Write no settings.")] = False
    follow_token: Annotated[bool, typer.Option("--follow-token", help="Stay, and use later tokens.")] = False


@dataclass(frozen=True)
class OtherFlags(FlagGroup):
    """Settings for which there is no question."""

    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda", help="Training device.")] = None
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Label for runs; repeat.")] = None
    metrics_listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="For Prometheus.")] = None
    proxy: Annotated[str | None, typer.Option(metavar="none|environment|URL", help="HTTP proxy.")] = None

    def settings(self) -> dict[str, Any]:
        """Keys of the settings file."""
        return _given(
            device=self.device,
            threads=self.threads,
            labels=_parsed(self.label, as_text=True),
            metrics_listen=self.metrics_listen,
            proxy=self.proxy,
        )


@dataclass(frozen=True)
class WayFlags(FlagGroup):
    """How `init` works."""

    yes: Annotated[bool, typer.Option("--yes", help="No questions: flags and defaults.")] = False
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing settings.")] = False
    doctor: Annotated[bool, typer.Option("--doctor/--no-doctor", help="Run the doctor afterwards.")] = True


def settings_flags(daemon: DaemonFlags, data: DataFlags, tls: TlsFlags, other: OtherFlags) -> Flags:
    """The flags that settings are written from. Raises UsageError."""
    return Flags(
        daemon.server,
        daemon.client_id,
        daemon.state_dir,
        data.task,
        options=_parsed(data.option) or {},
        shard=data.shard(),
        tls=_given(ca=tls.ca, cert=tls.cert, key=tls.key),
        insecure=tls.insecure,
        insecure_remote=tls.insecure_remote,
        other=other.settings(),
    )


def _given(**flags: Any) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _parsed(pairs: list[str] | None, *, as_text: bool = False) -> dict[str, Any] | None:
    try:
        return parse_pairs(pairs, as_text=as_text) if pairs else None
    except ValueError as error:
        raise UsageError(str(error)) from None
