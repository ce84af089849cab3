"""Secrets of the programs under test, and the search for them in everything that the programs show.

A test plants what must stay secret: session ids, private keys, tokens, passwords. While a workspace is open, the output
of `fl`, the replies to operators, command lines and metrics pages are searched; when it is closed, all log files. A
secret that is found fails the test, by its kind and place and without its text.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LEDGER_PASSWORD = "planted-ledger-password-6f1d2c"
TELEMETRY_TOKEN = "planted-telemetry-token-91c4be"
LOGS = {".out", ".err", ".log", ".jsonl"}
MOST = 300
"""Secrets of one workspace: a test that makes thousands of sessions does not search for each."""


class Secrets:
    """What must not be found."""

    def __init__(self) -> None:
        self._kinds = {LEDGER_PASSWORD.encode(): "the ledger's password", TELEMETRY_TOKEN.encode(): "telemetry's token"}

    def add(self, value: str, kind: str) -> None:
        """Search for it from now on."""
        assert len(value) >= 16, f"{kind} is too short to be found"
        if len(self._kinds) < MOST:
            self._kinds[value.encode()] = kind

    def check(self, content: bytes, place: str) -> None:
        """Fail if the content has a secret."""
        found = [kind for value, kind in list(self._kinds.items()) if value in content]
        assert not found, f"found {', '.join(sorted(set(found)))} in {place}"


OPEN: list[Secrets] = []
"""Of the open workspaces."""


def plant(value: str, kind: str) -> str:
    """Make this a secret of all open workspaces; returns it."""
    for secrets in OPEN:
        secrets.add(value, kind)
    return value


def check_shown(content: bytes, place: str) -> None:
    """Fail if the content has a secret of any open workspace."""
    for secrets in OPEN:
        secrets.check(content, place)


def log_files(folder: Path) -> Iterator[Path]:
    """The files to which programs have written their output."""
    return (path for path in folder.rglob("*") if path.suffix in LOGS and path.is_file())


def command_line(pid: int) -> bytes:
    """What `ps` shows of a process; empty if it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def metrics_page(address: str) -> bytes:
    """A program's metrics; empty if it does not answer at once."""
    with suppress(OSError), urllib.request.urlopen(f"http://{address}/metrics", timeout=2) as page:
        return bytes(page.read())
    return b""
