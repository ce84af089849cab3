"""`fl-client run --config client.toml`: arguments in, exit code out. `run` may be left out.

`fl-client init`, `doctor`, `unit`, `packages` and `policy` set a device up; `privacy` shows its account, `audit` its
audit log. Their code is in fl_client/setup.

Exit codes: 0 stopped by a signal; 130 Ctrl-C before the start; 2 cannot start (configuration, state directory,
device, task); 1 an error in the program, with a traceback. A second daemon with the same identity does not end: it logs
the conflict and retries.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from fl_common.program import (
    keep_working_directory_out,
    quiet_interrupts,
    raised_interrupts,
    require_own_packages,
    settings_files,
    silence_libraries,
)

if TYPE_CHECKING:
    from fl_client.settings.config import ClientConfig

OK, CANNOT_START = 0, 2
SETUP = ("init", "doctor", "unit", "packages", "policy", "privacy", "audit")
"""Commands that set a device up, those of packages and policy, of its privacy account, and of its audit log."""


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon until a signal ends it, or a set-up command, and return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    keep_working_directory_out()
    require_own_packages("fl-client")
    silence_libraries()
    with quiet_interrupts():  # `app.run` has its own handlers
        if given and given[0] in SETUP:
            from fl_common.certificates.tls_version import set_oldest_tls

            set_oldest_tls("1.3")
            from fl_client.setup.commands import main as set_up

            with raised_interrupts():
                return set_up(given)
        if given and not given[0].startswith("-") and given[0] != "run":
            wanted = f"write --config {given[0]}" if given[0].endswith(".toml") else f"expected run, {', '.join(SETUP)}"
            print(f"fl-client: {wanted}, got {given[0]!r} as a command", file=sys.stderr)
            return CANNOT_START
        return _main(given[1:] if given[:1] == ["run"] else given)


def _main(arguments: list[str]) -> int:
    from fl_client.errors import StartError
    from fl_client.settings.config import load_config
    from fl_common.settings import SettingsError
    from protos.wire import PROTOCOL_MAX, PROTOCOL_MIN

    first, *overrides = settings_files(
        "fl-client",
        arguments,
        (PROTOCOL_MIN, PROTOCOL_MAX),
        "files that override keys of the earlier ones",
        description="Train on this device's data for a coordinator.",
        usage="%(prog)s [run] --config FILE\n       %(prog)s {init,doctor,unit,packages,policy,privacy,audit} --help",
        epilog="init writes the settings, doctor checks the device, unit installs a systemd service,\n"
        "packages shows the code that came and lets it run,\n"
        "policy says which runs the device's site accepts, privacy what its data has spent,\n"
        "audit lists what the device was asked to do and did.\n\n"
        "examples:\n  fl-client init --server fl.example.org:7070 --task digits\n  fl-client --config client.toml",
    )
    signal.signal(signal.SIGTERM, _exit)  # until the event loop installs its own handlers
    try:
        return _run(load_config(first, overrides))
    except (StartError, SettingsError) as error:
        print(f"fl-client: {error}", file=sys.stderr)
        return CANNOT_START


def _run(config: ClientConfig) -> int:
    from fl_common.certificates.tls_version import set_oldest_tls
    from fl_common.files import set_private_umask

    # A crash in a library's native code writes the Python lines of all threads to stderr.
    faulthandler.enable()
    set_private_umask()
    set_oldest_tls("1.3" if config.tls is None else config.tls.min_version)
    from fl_client import app
    from fl_client.monitoring import logs

    with logs.logging(config.log) as progress:
        idle = app.run(config, progress)
        app.log.info("stopped")
    if not idle:
        sys.stdout.flush()
        os._exit(OK)  # the interpreter would wait for the training step
    return OK


def _exit(_number: int, _frame: FrameType | None) -> None:
    # At once: a SystemExit would be one of the task's own code that is being imported.
    os._exit(OK)


if __name__ == "__main__":
    sys.exit(main())
