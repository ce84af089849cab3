"""`fl-server --config server.toml`: arguments in, exit code out."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from fl_server.allocator import share_one_heap
from fl_server.config import ServerConfig
from protos.private_files import keep_files_private
from protos.settings import SettingsError, read_settings

EXIT_OK = 0
EXIT_UNUSABLE = 2
"""Settings, state directory or port cannot be used: starting again changes nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a coordinator; returns the exit code."""
    # What grpc would say of a port in use, we say in words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    parser = argparse.ArgumentParser(
        prog="fl-server", description="The coordinator of federated training: serves until SIGTERM."
    )
    parser.add_argument(
        "--config", type=Path, required=True, action="append", metavar="FILE",
        help="settings in TOML; once more for a file whose keys take the place of those before",
    )  # fmt: skip
    first, *on_top = parser.parse_args(arguments).config
    try:
        config = read_settings(first, ServerConfig, on_top)
    except SettingsError as error:
        print(f"fl-server: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    keep_files_private()
    # Until `serve` listens: the first process of a container would not hear SIGTERM at all.
    signal.signal(signal.SIGTERM, _leave)
    # Before there is a second thread.
    share_one_heap()
    # Only now: torch takes seconds, and a wrong file should be told at once.
    from fl_server.app import serve
    from fl_server.logs import set_up_logs
    from fl_server.store.base import StoreError

    # A quarter of a million objects that live as long as the process: looking for garbage among them stops all else
    # for a third of a second, again and again while clients come.
    gc.freeze()
    folder = set_up_logs(config.log, config.limits.log_lines_per_minute)
    try:
        asyncio.run(serve(config, folder))
    except (SettingsError, StoreError) as error:
        print(f"fl-server: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    return EXIT_OK


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(EXIT_OK)


if __name__ == "__main__":
    sys.exit(main())
