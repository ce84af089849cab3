"""`fl-client init`, `doctor` and `unit`: arguments in, exit code out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from fl_client.setup.errors import Misused
from fl_client.setup.units import CONFIG, Wishes, systemd_version, unit_files, write

MISUSED, INTERRUPTED = 2, 130
app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def main(arguments: list[str]) -> int:
    """One command of this room; what was asked for and cannot be is a line on stderr, and 2."""
    try:
        code = app(arguments, prog_name="fl-client", standalone_mode=False)
    except Misused as error:
        print(f"fl-client: {error}", file=sys.stderr)
        return MISUSED
    except typer.Abort:
        return INTERRUPTED
    return int(code or 0)


@app.callback()
def _commands() -> None:
    """Set a device up for training."""


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
        for command in (["systemd-sysusers"], ["systemctl", "daemon-reload"]):
            _call(command)
    print("next: systemctl enable --now fl-client")


def _this_program() -> Path:
    return Path(sys.executable).parent / "fl-client"


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, check=False)  # noqa: S603 - one of two that stand above
    except OSError as error:
        raise Misused(f"{command[0]} cannot be started: {error.strerror}; is there systemd on this device?") from None
    if done.returncode:
        raise Misused(f"{' '.join(command)} ended with {done.returncode}: see above what it says")
