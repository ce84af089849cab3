"""A PostgreSQL server for tests, in a temporary folder, on a socket in that folder."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.processes.planted import LEDGER_PASSWORD

TIMEOUT_S = 60.0
UNTIL_WE_ARE_GONE = 'postgres "$@" & server=$!; read -r never; kill -INT $server; wait $server'
"""The server ends when its stdin does, so also when the tests are killed. INT is PostgreSQL's fast shutdown."""

CUT = """SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"""


class PostgresServer:
    """A running server for any number of ledgers, each in its own schema."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._at = folder, f"host={folder}"
        self._names = (f"ledger_{number}" for number in count())

    @property
    def socket(self) -> str:
        """The path of its socket."""
        return f"{self._folder}/.s.PGSQL.5432"

    @staticmethod
    def over_tcp(url: str, port: int) -> str:
        """The URL of a ledger through a relay to the socket, which listens on this port of loopback."""
        place, _, options = url.partition("@")
        return f"{place}@127.0.0.1:{port}/postgres?{options.partition('&')[2]}"

    def new_ledger(self) -> str:
        """URL of a new, empty schema. The server ignores the password; no output of a program may have it."""
        name = next(self._names)
        self.execute(f"CREATE SCHEMA {name}")
        return f"postgresql://postgres:{LEDGER_PASSWORD}@/postgres?{self._at}&options=-csearch_path%3D{name}"

    def execute(self, statement: str, database: str = "postgres") -> list[Any]:
        """Run a statement; its rows."""
        import psycopg  # noqa: PLC0415 - an extra

        with psycopg.connect(f"{self._at} user=postgres dbname={database}", autocommit=True) as connection:
            done = connection.execute(statement.encode())
            return done.fetchall() if done.description else []

    def cut_connections(self) -> None:
        """End all other connections, as a restart of the server would."""
        self.execute(CUT, "template1")

    @contextmanager
    def away(self) -> Iterator[None]:
        """Within the block no ledger can be reached."""
        self.execute("ALTER DATABASE postgres ALLOW_CONNECTIONS false", "template1")
        try:
            self.cut_connections()
            yield
        finally:
            self.execute("ALTER DATABASE postgres ALLOW_CONNECTIONS true", "template1")


@contextmanager
def running() -> Iterator[PostgresServer]:
    """A server that ends with the block. Skips the test where PostgreSQL is not installed."""
    pytest.importorskip("psycopg", reason="the driver psycopg is not installed: pip install '.[postgres]'")
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin")))])
    if not all(shutil.which(program, path=path) for program in ("initdb", "postgres")):
        pytest.skip("no PostgreSQL server is installed: initdb and postgres are not on the path")
    with tempfile.TemporaryDirectory(prefix="pg-") as name:
        folder, data = Path(name), Path(name, "data")
        asking: dict[str, Any] = {
            "cwd": folder,
            "env": {**os.environ, "PATH": path, "LC_ALL": "C"},
            **_somebody(folder),
        }
        initdb = ["initdb", "--pgdata", str(data), "--username", "postgres", "--auth", "trust", "--encoding", "UTF8"]
        done = subprocess.run([*initdb, "--no-sync"], capture_output=True, text=True, check=False, **asking)
        assert done.returncode == 0, done.stderr
        options = ["-D", str(data), "-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"]
        with (folder / "log").open("wb") as log:
            process: subprocess.Popen[bytes] = subprocess.Popen(
                ["sh", "-c", UNTIL_WE_ARE_GONE, "sh", *options], stdin=subprocess.PIPE, stdout=log, stderr=log, **asking
            )
        try:
            yield _answering(PostgresServer(folder), process, folder / "log")
        finally:
            process.communicate(timeout=TIMEOUT_S)


def _somebody(folder: Path) -> dict[str, Any]:
    """PostgreSQL refuses to run as root: another user runs it and owns the folder."""
    if os.geteuid() != 0:
        return {}
    known = {entry.pw_name: entry for entry in pwd.getpwall()}
    user = next((known[name] for name in ("postgres", "nobody") if name in known), None)
    if user is None:
        pytest.skip("PostgreSQL refuses to run as root, and there is no user postgres or nobody to run it")
    os.chown(folder, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def _answering(server: PostgresServer, process: subprocess.Popen[bytes], log: Path) -> PostgresServer:
    import psycopg  # noqa: PLC0415 - an extra

    ends = time.monotonic() + TIMEOUT_S
    while True:
        try:
            server.execute("SELECT 1")
        except psycopg.OperationalError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < ends, log.read_text()
            time.sleep(0.05)
        else:
            return server
