"""The command `fl-server --config server.toml`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fl_common.extras import server_packages_missing
from fl_common.program import (
    keep_working_directory_out,
    quiet_interrupts,
    require_own_packages,
    settings_files,
    silence_libraries,
)

if TYPE_CHECKING:
    from fl_server.settings.config import ServerConfig

EXIT_OK = 0
EXIT_UNUSABLE = 2
"""Settings, state directory or port cannot be used; a restart does not help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a coordinator. Returns the exit code."""
    keep_working_directory_out()
    require_own_packages("fl-server")
    with quiet_interrupts():  # `serve` has its own handlers
        if missing := server_packages_missing("fl-server"):
            print(missing, file=sys.stderr)
            return EXIT_UNUSABLE
        return _main(arguments)


def _main(arguments: Sequence[str] | None) -> int:
    silence_libraries()
    from fl_common.allocator import share_one_heap
    from fl_common.certificates.tls_version import set_oldest_tls
    from fl_common.files import set_private_umask
    from fl_common.settings import SettingsError, read_settings
    from fl_server.settings.config import ServerConfig

    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["backup"], ["restore"]):
        from fl_server.backup import run

        return run(given[0], given[1:])
    only_check = given[:1] == ["check"]
    is_worker, given = _role(given)
    first, *on_top = _settings_files(given[1:] if only_check else given)
    try:
        config = read_settings(first, ServerConfig, on_top)
    except SettingsError as error:
        print(f"fl-server: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    set_oldest_tls("1.3" if config.tls is None else config.tls.min_version)
    if only_check:
        return _check(config)
    set_private_umask()
    # Until `serve` handles signals: the first process of a container ignores SIGTERM by default.
    signal.signal(signal.SIGTERM, _leave)
    # Before there is a second thread.
    share_one_heap()
    return _serve(config, is_worker=is_worker)


def _settings_files(given: Sequence[str]) -> list[Path]:
    """The files after --config, in order. Ends the process for other arguments, or after --help or --version."""
    from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN

    return settings_files(
        "fl-server",
        given,
        (PROTOCOL_MIN, PROTOCOL_MAX),
        "a file whose keys replace earlier ones",
        description="The coordinator of federated training: serves until SIGTERM.\n\n"
        "fl-server check --config FILE only reads the settings and uses the object store that they name: 0 if a start\n"
        "can use both, else 2.\n\n"
        "fl-server --role data --config FILE --config OWN runs a worker, which ends the clients' streams of bytes for\n"
        "the coordinator with the settings FILE; OWN has the worker's certificate.\n\n"
        "fl-server backup and fl-server restore have a --help of their own.",
        epilog="example: fl-server --config server.toml",
    )


def _role(given: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether the arguments ask for a worker, and the others. Ends the process for another role."""
    import argparse

    parser = argparse.ArgumentParser("fl-server", add_help=False, allow_abbrev=False)
    parser.add_argument("--role", choices=("data",))
    found, others = parser.parse_known_args(given)
    return found.role == "data", others


def _check(config: ServerConfig) -> int:
    """Try what a start needs and does not change: settings, and access to the object store."""
    from fl_server.store.errors import StoreError
    from fl_server.store.objects.bucket import Bucket, check_access

    if config.storage is not None:
        try:
            check_access(Bucket(config.storage, config.objects))
        except StoreError as error:
            print(f"fl-server: {error}", file=sys.stderr)
            return EXIT_UNUSABLE
        print(f"object store: {config.storage} can be read and written")
    print("settings: ok")
    return EXIT_OK


def _serve(config: ServerConfig, *, is_worker: bool = False) -> int:
    import gc

    from fl_common.logs import set_up_logs

    # Imported here: torch takes seconds, and an error in the settings should appear at once.
    from fl_server.aggregation.outside_task.child import ForkServer, default_memory
    from fl_server.app import serve
    from fl_server.leadership import may_stand_by
    from fl_server.runs.creation import outside_tasks

    # The quarter of a million objects so far live as long as the process. Without this, each full garbage collection
    # stops everything for a third of a second.
    gc.freeze()
    # A fleet of ten thousand has a million long-lived objects, and its rounds make as many short-lived ones: collected
    # as often as usual, the old ones would be searched in every round.
    gc.set_threshold(10_000, 10, 50)
    repeats = set_up_logs(config.log, config.limits.log_lines_per_minute)
    if is_worker:
        from fl_server.worker.app import serve as serve_worker

        return _ended(serve_worker(config, repeats))
    # While there is one thread. Without tasks from outside no process is needed.
    forks = ForkServer((config.limits.task_memory_mib << 20) or default_memory()) if outside_tasks(config) else None
    try:
        return _ended(serve(config, repeats, forks), may_stand_by(config))
    finally:
        if forks is not None:
            forks.close()


def _ended(process: Coroutine[Any, Any, None], may_wait: bool = False) -> int:
    """Run a process to its end. Returns the exit code. may_wait: whether a restart waits as a standby."""
    import asyncio

    from fl_common.settings import SettingsError
    from fl_server.app import EXIT_REPLACED
    from fl_server.store.errors import StoreError, StoreTakenOver, StoreUnavailable

    try:
        asyncio.run(process)
    except (SettingsError, StoreError) as error:
        print(f"fl-server: {error}", file=sys.stderr)
        waits = isinstance(error, StoreTakenOver) or (may_wait and isinstance(error, StoreUnavailable))
        return EXIT_REPLACED if waits else EXIT_UNUSABLE
    return EXIT_OK


def _leave(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(EXIT_OK)


if __name__ == "__main__":
    sys.exit(main())
