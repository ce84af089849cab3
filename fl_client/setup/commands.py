"""`fl-client init`, `doctor`, `unit` and `policy`: arguments in, exit code out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from fl_client.errors import UsageError
from fl_client.setup.audit import app as audit_app
from fl_client.setup.doctor.checks import report, run_checks
from fl_client.setup.enrolling import EnrollFlags, enroll, target_of, write_settings
from fl_client.setup.enrolling import follow_token as follow
from fl_client.setup.policy import app as policy_app
from fl_client.setup.questions import DefaultAnswers, Flags, TerminalPrompts, collect_values, parse_pairs
from fl_client.setup.settings_file import save, settings_text
from fl_client.setup.units import CONFIG, UnitOptions, systemd_version, unit_files, write
from fl_common.command_help import Group, examples

OK, USAGE, INTERRUPTED = 0, 2, 130
_ACTIVATION = (
    ["systemd-sysusers"],
    # As the service would make it, so that the doctor can check it as the service's user before the first start.
    ["install", "-d", "-m", "0700", "-o", "impetus", "-g", "impetus", "/var/lib/impetus"],
    ["systemctl", "daemon-reload"],
)
app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(audit_app, name="audit")
app.add_typer(policy_app, name="policy")


def main(arguments: list[str]) -> int:
    """Run one command. A usage error is one line on stderr, and exit code 2."""
    try:
        app(arguments, prog_name="fl-client")
    except UsageError as error:
        print(f"fl-client: {error}", file=sys.stderr)
        return USAGE
    except SystemExit as end:  # every typer command ends this way
        return int(end.code or 0)
    return OK


@app.callback()
def _commands() -> None:
    """Set a device up for training."""


@app.command(**examples("fl-client init --server fl.example.org:7070 --client-id edge-3 --task digits --index 3"))
def init(
    config: Annotated[Path, typer.Option(metavar="FILE", help="Settings file to write.")] = Path(CONFIG),
    server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of the coordinator.")] = None,
    client_id: Annotated[str | None, typer.Option(metavar="NAME", help="With TLS: the certificate's name.")] = None,
    state_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of the daemon's files.")] = None,
    task: Annotated[str | None, typer.Option(metavar="NAME", help="Task to train.")] = None,
    option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Option of the task; repeat.")] = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME=VALUE,...", help="Partition of the data.")] = None,
    shard_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Partition file.")] = None,
    shard_folder: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the device's own files.")] = None,
    index: Annotated[int | None, typer.Option(min=0, help="Part of the partition or file, from 0.")] = None,
    ca: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: tls/ca.crt in --config's folder.")] = None,
    cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: tls/tls.crt there.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: tls/tls.key there.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Plain text, with a coordinator here.")] = False,
    insecure_remote: Annotated[bool, typer.Option("--insecure-remote", help="Plain text over a network.")] = False,
    token: Annotated[str | None, typer.Option(metavar="TOKEN", help="Get a certificate for a token.")] = None,
    token_file: Annotated[Path | None, typer.Option(metavar="FILE|-", help="The token; -: on stdin.")] = None,
    ca_fingerprint: Annotated[str | None, typer.Option(metavar="SHA256", help="Of the authority.")] = None,
    enroll_server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Default: port 7074.")] = None,
    only_certificate: Annotated[bool, typer.Option("--only-certificate", help="Write no settings.")] = False,
    follow_token: Annotated[bool, typer.Option("--follow-token", help="Stay, and use later tokens.")] = False,
    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda", help="Training device.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of torch.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Label for runs; repeat.")] = None,
    metrics_listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="For Prometheus.")] = None,
    no_proxy: Annotated[bool, typer.Option("--no-proxy", help="Ignore the proxy of the environment.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="No questions: flags and defaults.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing settings.")] = False,
    doctor: Annotated[bool, typer.Option("--doctor/--no-doctor", help="Run the doctor afterwards.")] = True,
) -> None:
    """Write a daemon's settings from flags and answers, and check whether the daemon can work with them.

    With a token the device makes a key and gets its certificate from the coordinator, which the daemon then renews.
    """
    flags = Flags(
        server, client_id, state_dir, task,
        options=_parsed(option) or {},
        shard=_given(partition=_parsed(partition and partition.split(",")), file=shard_file, folder=shard_folder,
                     index=index),
        tls=_given(ca=ca, cert=cert, key=key),
        insecure=insecure, insecure_remote=insecure_remote,
        other=_given(device=device, threads=threads, labels=_parsed(label, as_text=True),
                     metrics_listen=metrics_listen, use_proxy=False if no_proxy else None),
    )  # fmt: skip
    enrolling = EnrollFlags(
        token=token, token_file=token_file, fingerprint=ca_fingerprint, ca=ca, server=server,
        enroll_server=enroll_server, name=client_id, state_dir=state_dir, force=force, use_proxy=not no_proxy,
    )  # fmt: skip
    if follow_token:
        follow(enrolling, target_of(enrolling, config, only_certificate=True))
    elif enrolling.wanted or only_certificate:
        _enroll(config, flags, enrolling, ask=not yes, only_certificate=only_certificate)
    else:
        _write_settings(config, flags, ask=not yes, overwrite=force)
    if doctor and not only_certificate:
        raise typer.Exit(report(run_checks(config), as_json=False))


def _write_settings(config: Path, flags: Flags, *, ask: bool, overwrite: bool) -> None:
    if config.exists() and not overwrite:
        raise UsageError(
            f"{config} exists already: --force overwrites it, `fl-client doctor --config {config}` checks it"
        )
    save(config, settings_text(_values(config, flags, ask=ask)))
    print(f"wrote {config}")


def _enroll(config: Path, flags: Flags, enrolling: EnrollFlags, *, ask: bool, only_certificate: bool) -> None:
    """Get a certificate, and write settings where there are none."""
    if flags.insecure or flags.insecure_remote or flags.tls.keys() - {"ca"}:
        raise UsageError("a token excludes --insecure, --insecure-remote, --cert and --key: leave out one of them")
    target = target_of(enrolling, config, only_certificate=only_certificate)
    if only_certificate or (config.exists() and not enrolling.force):
        enroll(enrolling, target)
        target.folder.end_pending()
        return
    flags = replace(
        flags, server=target.server, client_id=None, state_dir=target.folder.path.parent, tls=target.folder.files()
    )
    write_settings(config, _values(config, flags, ask=ask), enrolling, target)


def _values(config: Path, flags: Flags, *, ask: bool) -> dict[str, Any]:
    try:
        return collect_values(flags, TerminalPrompts() if ask else DefaultAnswers(), config)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except typer.Abort:
        print("\nfl-client: no more answers, nothing was written; --yes takes flags and defaults", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


@app.command("doctor", **examples("fl-client doctor --config client.toml"))
def doctor_command(
    config: Annotated[Path, typer.Option(metavar="FILE", help="The daemon's settings.")] = Path(CONFIG),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")] = False,
) -> None:
    """Check whether a daemon can work on this device: 0 if so, 1 if not. A running daemon is not disturbed."""
    raise typer.Exit(report(run_checks(config), as_json))


@app.command(**examples("fl-client unit --install --memory 4G"))
def unit(
    config: Annotated[Path, typer.Option(metavar="FILE", help="The service's settings file.")] = Path(CONFIG),
    cuda: Annotated[bool, typer.Option("--cuda", help="Allow access to the GPU's devices.")] = False,
    cores: Annotated[float | None, typer.Option(min=0.1, help="Limit of CPU cores.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help='Limit of memory: "4G", "60%".')] = None,
    install: Annotated[bool, typer.Option("--install", help="Write the files, as root; else print them.")] = False,
    root: Annotated[Path, typer.Option(metavar="DIR", help="Write below this directory: an image's.")] = Path("/"),
    program: Annotated[Path | None, typer.Option(metavar="FILE", help="fl-client, if not this one.")] = None,
) -> None:
    """Make the daemon a systemd service: hardened, limited, restarted after an error."""
    files = unit_files(UnitOptions(program or _this_program(), config, cuda, cores, memory), systemd_version())
    if not install:
        print("\n".join(f"# /{path}\n{text}" for path, text in files.items()), end="")
        return
    write(files, root)
    for path in files:
        print(f"wrote {root / path}")
    if root == Path("/"):
        for command in _ACTIVATION:
            _call(command)
    print("next: systemctl enable --now fl-client")


def _given(**flags: Any) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _parsed(pairs: list[str] | str | None, *, as_text: bool = False) -> dict[str, Any] | None:
    try:
        return parse_pairs(pairs, as_text=as_text) if pairs else None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _this_program() -> Path:
    called = Path(sys.argv[0]).absolute()
    return called if called.name == "fl-client" else Path(sys.executable).parent / "fl-client"


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, check=False)  # noqa: S603 - a constant of _ACTIVATION
    except OSError as error:
        raise UsageError(f"{command[0]} cannot be started: {error.strerror}; does this device have systemd?") from None
    if done.returncode:
        raise UsageError(f"{' '.join(command)} failed with exit code {done.returncode}: see its output above")
