"""`fl-client --config client.toml`: arguments in, exit code out.

Exit codes: 0 told to stop; 2 cannot start (configuration, state directory, device, task); 3 another daemon uses the
identity; 1 a fault of the program itself, with a traceback.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from fl_client.config import ClientConfig, load_config
from fl_client.errors import Fenced, StartError

OK, CANNOT_START, FENCED = 0, 2, 3


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon until a signal ends it, and return the exit code."""
    parser = argparse.ArgumentParser(prog="fl-client", description="Train on this device's data for a coordinator.")
    parser.add_argument(
        "--config", type=Path, required=True, action="append", metavar="FILE",
        help="settings in TOML; once more for a file whose keys take the place of those before",
    )  # fmt: skip
    first, *on_top = parser.parse_args(arguments).config
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)  # until the event loop has its own handlers
    try:
        return _run(load_config(first, on_top))
    except StartError as error:
        print(f"fl-client: {error}", file=sys.stderr)
        return CANNOT_START


def _run(config: ClientConfig) -> int:
    from fl_client import app, logs

    with logs.logging(config.log) as progress:
        try:
            idle = app.run(config, progress)
        except Fenced as error:
            print(f"fl-client: {error}", file=sys.stderr)
            return FENCED
        app.log.info("stopped")
    if not idle:
        sys.stdout.flush()
        os._exit(OK)  # the interpreter would wait for a training step that nobody wants
    return OK


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(OK)


if __name__ == "__main__":
    sys.exit(main())
