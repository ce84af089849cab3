"""No output shows a secret: errors about settings, telemetry that fails, a run with every kind of secret.

tests/processes/planted.py searches the output of all other tests with processes in the same way.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fl_client.settings.config import ClientConfig
from fl_server.settings.config import ServerConfig
from tests.processes.certificates import Pki, credentials, section
from tests.processes.federation import Coordinator, Daemon, SecureCoordinator
from tests.processes.planted import LEDGER_PASSWORD, OPEN, TELEMETRY_TOKEN
from tests.processes.process import Process, Workspace, run_fl
from tests.processes.raw_client import RawClient

URL = f"postgresql://fl:{LEDGER_PASSWORD}@127.0.0.1:1/impetus"
KEY = "-----BEGIN PRIVATE KEY-----\nplanted-key-material-4a7e10\n-----END PRIVATE KEY-----\n"


class Leaky(Process):
    """A program that shows what is in its settings file."""

    forks = False

    def __init__(self, workspace: Workspace, code: str) -> None:
        super().__init__(workspace, "leaky", "leaky", [workspace.folder])
        (workspace.folder / "leaky.py").write_text(code)


LEAKS = {
    "leaky.out": "print(open('leaky.toml').read())",
    "leaky.err": "import sys; sys.exit(open('leaky.toml').read())",
    "leaky.jsonl": "open('leaky.jsonl', 'w').write(open('leaky.toml').read())",
}


SECRET = "0123456789abcdef0123"


@pytest.mark.parametrize("place", LEAKS)
def test_a_secret_in_a_log_is_found(tmp_path: Path, place: str) -> None:
    """The test of a program that logs a secret fails, with the secret's kind and place and not its text."""
    workspace = Workspace(tmp_path)
    workspace.secrets.add(SECRET, "a session id")
    leaky = Leaky(workspace, LEAKS[place])
    leaky.config.write_text(f'session = "{SECRET}"')
    leaky.start().wait()
    with pytest.raises(AssertionError, match=rf"found a session id in {re.escape(place)}") as failed:
        workspace.__exit__()
    assert SECRET not in str(failed.value)
    assert workspace.secrets not in OPEN


def test_a_secret_in_a_command_line_is_found(tmp_path: Path) -> None:
    """Everybody on a machine can list its processes."""
    workspace = Workspace(tmp_path)
    workspace.secrets.add(SECRET, "a session id")
    leaky = Leaky(workspace, 'import time; print(\'{"event": "up"}\', flush=True); time.sleep(600)')
    leaky.config = workspace.folder / f"{SECRET}.toml"
    leaky.start().logged("up")
    with pytest.raises(AssertionError, match="found a session id in the command line"):
        workspace.__exit__()
    assert leaky.exit_code is not None


WRONG_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "an unreachable database": ({"ledger": URL}, "ledger"),
    "another kind of database": ({"ledger": URL.replace("postgresql", "mysql")}, "ledger: expected a URL"),
    "a list": ({"ledger": [URL]}, "ledger: expected text"),
    "a wrong address": ({"ledger": URL, "listen": "nowhere"}, "listen: expected host:port"),
    "an unknown key": ({"ledger_url": URL}, "ledger_url: unknown key"),
}


@pytest.mark.parametrize("kind", WRONG_SETTINGS)
def test_an_error_about_the_ledger_does_not_show_its_password(workspace: Workspace, kind: str) -> None:
    """The message names the setting."""
    settings, expected = WRONG_SETTINGS[kind]
    server = Coordinator(workspace, settings=settings).start()
    assert server.wait() == 2
    assert expected in server.errors()
    workspace.secrets.check(server.errors().encode(), "the error")


def test_an_error_about_a_key_does_not_show_it(workspace: Workspace) -> None:
    """Coordinator, daemon and operator name the file of a key that they cannot read."""
    workspace.secrets.add("planted-key-material-4a7e10", "a private key")
    pki = Pki(workspace.folder / "pki")
    own = {role: pki.issue(role, "edge-1") for role in ("server", "client", "admin")}
    for files in own.values():
        files.key.write_text(KEY)
    tls = {"cert": str(own["server"].cert), "key": str(own["server"].key), "client_ca": str(pki.ca)}
    server = Coordinator(workspace, settings={"insecure": False, "tls": tls, "listen": "127.0.0.1:1"})
    daemon = Daemon(workspace, server, "edge-1", insecure=False, tls=section(own["client"]))
    assert [process.start().wait() for process in (server, daemon)] == [2, 2]
    assert "tls.key: expected a private key" in server.errors()
    assert "tls.key: expected a private key" in daemon.errors()
    named = [f"--{name}={getattr(own['admin'], name)}" for name in ("ca", "cert", "key")]
    assert "are no certificate and key in PEM" in run_fl("run", "list", *named, folder=workspace.folder).stderr


@pytest.mark.slow
def test_a_run_shows_no_secret(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """With certificates, sessions, and telemetry to an unreachable collector: no log, no page and no reply has one."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization={TELEMETRY_TOKEN}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    pki = Pki(workspace.folder / "pki")
    server = SecureCoordinator(workspace, pki).serve()
    daemon = Daemon(workspace, server, "edge-1", insecure=False, tls=section(pki.issue("client", "edge-1"))).start()
    server.until_present("edge-1")
    with RawClient(server.address, "edge-2", credentials(pki.issue("client", "edge-2"))) as client:
        client.register()
        client.attend()
        run = server.create("secretive", round={"clients_per_round": 1, "min_clients": 1}, stop={"rounds": 2})
        server.completed(run)
        with server.admin() as admin:
            admin.clients.list_clients()
            admin.history.list_history("edge-2", 0)
        client.session_id += "0"
        with pytest.raises(Exception, match="no session of this id"):
            client.attend()
    page = server.metrics()
    assert b"fl_rpc_seconds_count" in page
    assert daemon.terminate() == server.terminate() == 0


def test_a_repr_of_settings_has_no_secret() -> None:
    """Settings may be printed, in a traceback for example."""
    settings = {"state_dir": "x", "insecure": True, "ledger": URL}
    assert LEDGER_PASSWORD not in repr(ServerConfig.model_validate(settings))
    assert "ledger" in ServerConfig.model_fields
    assert not [name for name in ClientConfig.model_fields if "password" in name or "token" in name]
