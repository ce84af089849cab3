"""`fl-client init`, `doctor`, `unit`, `policy` and `privacy`: arguments in, exit code out."""

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
from fl_client.setup.enrolling import EnrollFlags, enroll, follow_token, target_of, write_settings
from fl_client.setup.flags import DaemonFlags, DataFlags, OtherFlags, TlsFlags, TokenFlags, WayFlags, settings_flags
from fl_client.setup.packages import app as packages_app
from fl_client.setup.policy import app as policy_app
from fl_client.setup.privacy import app as privacy_app
from fl_client.setup.questions import DefaultAnswers, Flags, TerminalPrompts, collect_values
from fl_client.setup.settings_file import ConfigFile, save, settings_text
from fl_client.setup.units import CONFIG, UnitOptions, systemd_version, unit_files, write
from fl_common.command_help import Group, examples, with_groups

OK, USAGE, INTERRUPTED = 0, 2, 130
_ACTIVATION = (
    ["systemd-sysusers"],
    # As the service would make it, so that the doctor can check it as the service's user before the first start.
    ["install", "-d", "-m", "0700", "-o", "impetus", "-g", "impetus", "/var/lib/impetus"],
    ["systemctl", "daemon-reload"],
)
app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(audit_app, name="audit")
app.add_typer(packages_app, name="packages")
app.add_typer(policy_app, name="policy")
app.add_typer(privacy_app, name="privacy")


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
@with_groups
def init(
    *,
    config: Annotated[Path, typer.Option(metavar="FILE", help="Settings file to write.")] = Path(CONFIG),
    daemon: DaemonFlags,
    data: DataFlags,
    tls: TlsFlags,
    token: TokenFlags,
    other: OtherFlags,
    way: WayFlags,
) -> None:
    """Write a daemon's settings from flags and answers, and check whether the daemon can work with them.

    With a token the device makes a key and gets its certificate from the coordinator, which the daemon then renews.
    """
    flags = settings_flags(daemon, data, tls, other)
    enrolling = EnrollFlags(token, daemon, tls.ca, way.force, proxy=other.proxy)
    if token.follow_token:
        follow_token(enrolling, target_of(enrolling, config, only_certificate=True))
    elif enrolling.wanted or token.only_certificate:
        _enroll(config, flags, enrolling, ask=not way.yes, only_certificate=token.only_certificate)
    else:
        _write_settings(config, flags, ask=not way.yes, overwrite=way.force)
    if way.doctor and not token.only_certificate:
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
    config: ConfigFile = Path(CONFIG),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")] = False,
    idle: Annotated[
        bool, typer.Option("--idle", help="Measure which silence a connection survives on its way: half a minute.")
    ] = False,
) -> None:
    """Check whether a daemon can work on this device: 0 if so, 1 if not. A running daemon is not disturbed."""
    raise typer.Exit(report(run_checks(config, silent=idle), as_json))


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
