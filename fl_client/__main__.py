"""`fl-client run --config client.toml`: arguments in, exit code out. `run` may be left out.

`fl-client init`, `doctor` and `unit` set a device up, and lie in fl_client/setup.

Exit codes: 0 told to stop; 2 cannot start (configuration, state directory, device, task); 1 a fault of the program
itself, with a traceback. Another daemon with the same identity ends neither: the log says so, and this one waits.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from fl_client.config import ClientConfig, load_config
from fl_client.errors import StartError
from protos.private_files import keep_files_private

OK, CANNOT_START = 0, 2
SETUP = ("init", "doctor", "unit")
"""What is not the daemon but comes before it."""


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon until a signal ends it, or what sets a device up, and return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    if words and words[0] in SETUP:
        from fl_client.setup.commands import main as set_up

        return set_up(words)
    first, *on_top = _settings_files(words[1:] if words[:1] == ["run"] else words)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)  # until the event loop has its own handlers
    try:
        return _run(load_config(first, on_top))
    except StartError as error:
        print(f"fl-client: {error}", file=sys.stderr)
        return CANNOT_START


def _settings_files(arguments: list[str]) -> list[Path]:
    parser = argparse.ArgumentParser(
        prog="fl-client",
        description="Train on this device's data for a coordinator.",
        usage="%(prog)s [run] --config FILE\n       %(prog)s {init,doctor,unit} --help",
        epilog="init writes the settings, doctor looks whether a daemon can work with them, unit makes it a service.",
    )
    parser.add_argument(
        "--config", type=Path, required=True, action="append", metavar="FILE",
        help="settings in TOML; once more for a file whose keys take the place of those before",
    )  # fmt: skip
    files: list[Path] = parser.parse_args(arguments).config
    return files


def _run(config: ClientConfig) -> int:
    keep_files_private()
    from fl_client import app, logs

    with logs.logging(config.log) as progress:
        idle = app.run(config, progress)
        app.log.info("stopped")
    if not idle:
        sys.stdout.flush()
        os._exit(OK)  # the interpreter would wait for a training step that nobody wants
    return OK


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(OK)


if __name__ == "__main__":
    sys.exit(main())
