"""`fl-server backup` and `fl-server restore`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fl_common.files import set_private_umask
from fl_common.settings import SettingsError, read_settings
from fl_server.backup.making import make_backup
from fl_server.backup.restoring import restore_backup
from fl_server.settings.config import ServerConfig
from fl_server.store.errors import StoreError

EXIT_OK, EXIT_FAILED = 0, 2


def parser_of(command: str) -> argparse.ArgumentParser:
    """The arguments of "backup" or "restore"."""
    parser = argparse.ArgumentParser(f"fl-server {command}", description=_ABOUT[command])
    parser.add_argument("--config", type=Path, required=True, action="append", metavar="FILE", help="settings in TOML")
    where = "new folder of the backup" if command == "backup" else "folder of the backup"
    parser.add_argument(
        f"--{'to' if command == 'backup' else 'from'}", dest="folder", type=Path, required=True, help=where
    )
    if command == "restore":
        about = "nothing was released from privacy accounts since the backup"
        parser.add_argument("--without-counts", action="store_true", help=about)
    return parser


def run(command: str, arguments: Sequence[str]) -> int:
    """Make or restore a backup. Returns the exit code."""
    options = parser_of(command).parse_args(arguments)
    set_private_umask()
    try:
        config = read_settings(options.config[0], ServerConfig, options.config[1:])
        if command == "backup":
            content = make_backup(config, options.folder)
        else:
            content = restore_backup(config, options.folder, without_counts=options.without_counts)
    except (SettingsError, StoreError) as error:
        print(f"fl-server: {error}", file=sys.stderr)
        return EXIT_FAILED
    done = "written" if command == "backup" else "restored"
    print(f"{done}: ledger {content.ledger}, {len(content.digests)} files, in {options.folder}")
    return EXIT_OK


_ABOUT = {
    "backup": "Write ledger, checkpoints, updates, keys and privacy accounts into a new folder. With a ledger in "
    "PostgreSQL and an object store the coordinator may run; otherwise stop it first.",
    "restore": "Restore a backup into an empty database or state directory. Keys are copied by hand from its folder.",
}
