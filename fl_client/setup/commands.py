"""`fl-client init`, `doctor` and `unit`: arguments in, exit code out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fl_client.setup.doctor import examine
from fl_client.setup.errors import Misused
from fl_client.setup.questions import Defaults, Given, Terminal, pairs, settle
from fl_client.setup.report import report
from fl_client.setup.units import CONFIG, Wishes, systemd_version, unit_files, write
from fl_client.setup.writing import save, settings_text

OK, MISUSED, INTERRUPTED = 0, 2, 130
_IN_FORCE = (
    ["systemd-sysusers"],
    # As the service would make it: so that the doctor can look before the first start, as the service's user.
    ["install", "-d", "-m", "0700", "-o", "impetus", "-g", "impetus", "/var/lib/impetus"],
    ["systemctl", "daemon-reload"],
)
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main(arguments: list[str]) -> int:
    """One command of this room; what was asked for and cannot be is a line on stderr, and 2."""
    try:
        app(arguments, prog_name="fl-client")
    except Misused as error:
        print(f"fl-client: {error}", file=sys.stderr)
        return MISUSED
    except SystemExit as end:  # a command always ends so, a wrong command line in words and with 2
        return int(end.code or 0)
    return OK


@app.callback()
def _commands() -> None:
    """Set a device up for training."""


@app.command()
def init(
    config: Annotated[Path, typer.Option(metavar="FILE", help="Where to write.")] = Path(CONFIG),
    server: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where the coordinator listens.")] = None,
    client_id: Annotated[str | None, typer.Option(metavar="NAME", help="With TLS: by the certificate.")] = None,
    state_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where the daemon keeps what it must.")] = None,
    task: Annotated[str | None, typer.Option(metavar="NAME", help="What is learned.")] = None,
    option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="Of the task; repeat.")] = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME=VALUE,...", help="A dealt shard.")] = None,
    shard_file: Annotated[Path | None, typer.Option(metavar="FILE", help="A partition file.")] = None,
    shard_folder: Annotated[Path | None, typer.Option(metavar="DIR", help="The device's own files.")] = None,
    index: Annotated[int | None, typer.Option(min=0, help="Which part of the partition or file, from 0.")] = None,
    ca: Annotated[Path | None, typer.Option(metavar="FILE", help="By default tls/ca.crt beside --config.")] = None,
    cert: Annotated[Path | None, typer.Option(metavar="FILE", help="By default tls/tls.crt there.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="By default tls/tls.key there.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Plain text, with a coordinator here.")] = False,
    insecure_remote: Annotated[bool, typer.Option("--insecure-remote", help="Plain text over a network.")] = False,
    device: Annotated[str | None, typer.Option(metavar="auto|cpu|cuda", help="What to train on.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="torch threads.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="For runs to choose; repeat.")] = None,
    metrics_listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="For Prometheus.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: flags and defaults.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over settings that are there.")] = False,
    look: Annotated[bool, typer.Option("--doctor/--no-doctor", help="Whether to look if it works.")] = True,
) -> None:
    """Write the settings of a daemon, by flags or by asking, and look whether it can work with them."""
    if config.exists() and not force:
        raise Misused(
            f"{config} is there already: --force writes over it, `fl-client doctor --config {config}` looks at it"
        )
    shard = {
        "partition": _pairs(partition.split(",") if partition else None),
        "file": shard_file,
        "folder": shard_folder,
        "index": index,
    }
    more = {
        "device": device,
        "threads": threads,
        "labels": _pairs(label, as_text=True),
        "metrics_listen": metrics_listen,
    }
    given = Given(
        server, client_id, state_dir, task,
        options=_pairs(option) or {},
        shard=_said(shard),
        tls=_said({"ca": ca, "cert": cert, "key": key}),
        insecure=insecure, insecure_remote=insecure_remote,
        more=_said(more),
    )  # fmt: skip
    try:
        values = settle(given, Defaults() if yes else Terminal(), config)
    except ValueError as error:
        raise Misused(str(error)) from None
    except typer.Abort:
        print("\nfl-client: no more answers, nothing was written; --yes takes flags and defaults", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    save(config, settings_text(values))
    print(f"wrote {config}")
    if look:
        raise typer.Exit(report(examine(config), as_json=False))


@app.command()
def doctor(
    config: Annotated[Path, typer.Option(metavar="FILE", help="The settings of the daemon.")] = Path(CONFIG),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")] = False,
) -> None:
    """Look whether a daemon can work on this device: 0 if so, 1 if not. A daemon that runs is not disturbed."""
    raise typer.Exit(report(examine(config), as_json))


@app.command()
def unit(
    config: Annotated[Path, typer.Option(metavar="FILE", help="The settings, where the service finds them.")] = Path(
        CONFIG
    ),
    cuda: Annotated[bool, typer.Option("--cuda", help="Open the GPU's devices to it.")] = False,
    cores: Annotated[float | None, typer.Option(min=0.1, help="Cores that it may use.")] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help='What it may use: "4G", "60%".')] = None,
    install: Annotated[bool, typer.Option("--install", help="Write the files, as root, instead of showing them.")] = (
        False
    ),
    root: Annotated[Path, typer.Option(metavar="DIR", help="Write below this directory: an image's.")] = Path("/"),
    program: Annotated[Path | None, typer.Option(metavar="FILE", help="fl-client, if not this one.")] = None,
) -> None:
    """Make the daemon a service of systemd: hardened, limited, started again after a fault."""
    files = unit_files(Wishes(program or _this_program(), config, cuda, cores, memory), systemd_version())
    if not install:
        print("\n".join(f"# /{path}\n{text}" for path, text in files.items()), end="")
        return
    write(files, root)
    for path in files:
        print(f"wrote {root / path}")
    if root == Path("/"):
        for command in _IN_FORCE:
            _call(command)
    print("next: systemctl enable --now fl-client")


def _said(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _pairs(said: list[str] | None, *, as_text: bool = False) -> dict[str, Any] | None:
    try:
        return pairs(said, as_text=as_text) if said else None
    except ValueError as error:
        raise Misused(str(error)) from None


def _this_program() -> Path:
    called = Path(sys.argv[0]).absolute()
    return called if called.name == "fl-client" else Path(sys.executable).parent / "fl-client"


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, check=False)  # noqa: S603 - one of those that stand here
    except OSError as error:
        raise Misused(f"{command[0]} cannot be started: {error.strerror}; is there systemd on this device?") from None
    if done.returncode:
        raise Misused(f"{' '.join(command)} ended with {done.returncode}: see above what it says")
