"""Programs on a machine with an HTTP proxy in its environment, and a coordinator behind a proxy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes.federation import Coordinator, Daemon
from tests.processes.http_proxy import http_proxy
from tests.processes.process import Workspace, run_fl

CLOSED = "http://127.0.0.1:9"
"""Nothing listens there."""
INVALID = "coordinator.invalid"
"""No name server knows this host, so only a proxy leads to it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator in plain text."""
    with Workspace(tmp_path_factory.mktemp("proxies")) as workspace:
        yield Coordinator(workspace).serve()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@dataclass(frozen=True)
class Elsewhere:
    """The coordinator's port under the name that only a proxy knows."""

    port: str

    @property
    def address(self) -> str:
        """host:port."""
        return f"{INVALID}:{self.port}"


def elsewhere(server: Coordinator, listen: str = "listen") -> Elsewhere:
    """The same port on another machine, as it looks."""
    return Elsewhere(str(server.settings[listen]).rpartition(":")[2])


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_loopback_needs_no_proxy(
    server: Coordinator, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """With a dead proxy in the environment, fl and a daemon reach a coordinator on this machine."""
    monkeypatch.setenv(variable, CLOSED)
    admin = str(server.settings["admin_listen"])
    listed = run_fl("clients", "list", "--insecure", "--server", admin, folder=workspace.folder)
    assert listed.returncode == 0, listed.stderr
    server.until_present(Daemon(workspace, server, variable).start().client_id)


def test_a_daemon_and_fl_go_through_a_proxy(
    server: Coordinator, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A coordinator that only the proxy can reach gets its daemon and its operator through it."""
    admin = elsewhere(server, "admin_listen").address
    with http_proxy(tmp_path) as proxy:
        monkeypatch.setenv("https_proxy", f"http://{proxy.address}")
        daemon = Daemon(workspace, elsewhere(server), "behind", insecure_remote=True).start()
        server.until_present("behind")
        listed = run_fl("clients", "list", "--insecure", "--insecure-remote", "--server", admin, folder=tmp_path)
        assert "behind" in listed.stdout, listed.stderr
        assert {daemon.settings["server"], admin} == set(proxy.asked)


def test_the_setting_names_a_proxy(
    server: Coordinator, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A daemon and fl use the proxy of their setting, and not the dead one of the environment."""
    admin = elsewhere(server, "admin_listen").address
    monkeypatch.setenv("http_proxy", CLOSED)
    with http_proxy(tmp_path) as proxy:
        url = f"http://{proxy.address}"
        daemon = Daemon(workspace, elsewhere(server), "named", insecure_remote=True, proxy=url).start()
        server.until_present("named")
        monkeypatch.setenv("FL_PROXY", url)
        listed = run_fl("clients", "list", "--insecure", "--insecure-remote", "--server", admin, folder=tmp_path)
        assert "named" in listed.stdout, listed.stderr
        assert {daemon.settings["server"], admin} == set(proxy.asked)
    wrong = run_fl("clients", "list", "--insecure", "--server", admin, "--proxy", "off", folder=tmp_path)
    assert (wrong.returncode, '"none", "environment" or the URL' in wrong.stderr) == (2, True)


def test_a_failure_names_the_proxy_and_its_variable(
    server: Coordinator, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Daemon and fl say that the proxy refuses or does not answer, which variable names it, and what turns it off."""
    admin = elsewhere(server, "admin_listen").address
    fl = ("clients", "list", "--insecure", "--insecure-remote", "--server", admin)
    monkeypatch.setenv("http_proxy", CLOSED)
    refused = Daemon(workspace, elsewhere(server), "refused", insecure_remote=True).start()
    reason = refused.logged("disconnected")["reason"]
    with http_proxy(tmp_path, 403) as proxy:
        monkeypatch.setenv("http_proxy", proxy.address)
        error = run_fl(*fl, folder=tmp_path).stderr
    assert "the proxy does not answer: nothing listens there" in reason
    assert f"the proxy {CLOSED} of the variable http_proxy" in reason
    assert 'proxy = "none"' in reason
    assert "the proxy refuses the connection with status 403" in error
    assert f"the proxy http://{proxy.address} of the variable http_proxy" in error
    assert "--proxy none" in error


@pytest.mark.parametrize("way", ["setting", "no_proxy"])
def test_proxies_can_be_turned_off(
    server: Coordinator, workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    """With the setting, the option or `no_proxy=*` the proxy is not asked, and the name server is."""
    admin = elsewhere(server, "admin_listen").address
    with http_proxy(tmp_path) as proxy:
        monkeypatch.setenv("http_proxy", proxy.address)
        options = ["--proxy", "none"] if way == "setting" else []
        if way == "no_proxy":
            monkeypatch.setenv("no_proxy", "*")
        setting = "none" if way == "setting" else "environment"
        daemon = Daemon(workspace, elsewhere(server), f"off-{way}", insecure_remote=True, proxy=setting)
        daemon.start()
        assert "name is not known" in daemon.logged("disconnected")["reason"]
        fl = ("clients", "list", "--insecure", "--insecure-remote", "--server", admin, *options)
        assert run_fl(*fl, folder=tmp_path).returncode != 0
        assert proxy.asked == []


def test_a_proxy_with_a_login(server: Coordinator, workspace: Workspace, tmp_path: Path) -> None:
    """User and password are in the URL. Without them the message says so; the password is in no log."""
    with http_proxy(tmp_path, login="site:p@ss:word") as proxy:
        url = f"http://site:p%40ss%3Aword@{proxy.address}"
        known = Daemon(workspace, elsewhere(server), "login", insecure_remote=True, proxy=url).start()
        server.until_present("login")
        unknown = Daemon(
            workspace, elsewhere(server), "anonymous", insecure_remote=True, proxy=f"http://{proxy.address}"
        )
        reason = unknown.start().logged("disconnected")["reason"]
    assert "asks for a login (status 407): its URL is http://USER:PASSWORD@HOST:PORT" in reason
    assert known.events("registered")
    assert not any("word" in (workspace.folder / f"login.{end}").read_text() for end in ("out", "err"))
