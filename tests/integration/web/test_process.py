"""The process that serves a coordinator's page: its ends, its starts that fail, and what it is given."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes.browser import Answer, Browser, browser, web_process
from tests.processes.certificates import Pki, page_section, server_section
from tests.processes.federation import Coordinator
from tests.processes.process import ROOT, Workspace, eventually


@pytest.mark.slow
def test_the_process_comes_back_and_ends_with_the_coordinator(module_workspace: Workspace) -> None:
    """After SIGKILL of the web process a browser that waits is answered; after SIGKILL of the coordinator it ends."""
    server = Coordinator(module_workspace, "killed", {"web_listen": "127.0.0.1:0"}).serve()
    each = Browser(server.settings["web_listen"])
    assert each.get("/").status == 200
    first = web_process(server)
    os.kill(first.pid, signal.SIGKILL)
    assert each.get("/").status == 200  # the coordinator holds the socket: the request waits for the new process
    second = web_process(server, 2)
    assert server.events("web_process_ended")[0]["code"] == -signal.SIGKILL
    server.kill()
    eventually(lambda: not second.is_running() or second.status() == psutil.STATUS_ZOMBIE, "the web process has ended")
    server.serve()
    assert each.get("/").status == 200
    third = web_process(server, 3)
    assert server.terminate() == 0
    assert not third.is_running()


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_a_process_that_cannot_start_is_no_endless_wait(
    tmp_path: Path, module_workspace: Workspace, pki: Pki, *, secure: bool
) -> None:
    """Browsers get status 503 while it ends at its start, and the page once its environment is whole again."""
    package = tmp_path / "jinja2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('a file of it is missing')\n")
    own = server_section(pki.issue("server", "broken"))
    tls = {"insecure": False, "tls": own, "web_tls": page_section(pki)} if secure else {}
    server = Coordinator(
        module_workspace, f"broken-{secure}", {**tls, "web_listen": "127.0.0.1:0"}, path=[tmp_path]
    ).serve()
    each = browser(server, pki) if secure else Browser(server.settings["web_listen"])

    def answer(method: str = "GET") -> Answer | None:
        """None for a connection that was cut: between two processes it may be, and a browser tries again."""
        try:
            return each.get("/", method)
        except (OSError, http.client.HTTPException):
            return None

    found = eventually(answer, "an answer comes")
    assert (found.status, found.headers["retry-after"]) == (503, "10")
    assert "The web page cannot start" in found.text
    assert eventually(lambda: answer("HEAD"), "an answer without a body comes").text == ""
    pauses = [end["starts_again_in_s"] for end in server.events("web_process_ended")]
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert "jinja2/__init__.py" in server.errors()  # where the kernel restricts the process, it may not be read
    shutil.rmtree(package)
    ready = 401 if secure else 200
    eventually(lambda: (now := answer()) is not None and now.status == ready, "the page is back")
    assert server.terminate() == 0


def test_a_module_in_the_working_directory_is_not_run(module_workspace: Workspace) -> None:
    """The coordinator's web process, with its settings and its socket, is not a file that somebody put there."""
    made, planted = module_workspace.folder / "made", ("fl_web", "jinja2", "http", "asyncio")
    for name in planted:
        (module_workspace.folder / f"{name}.py").write_text(f"open({str(made)!r}, 'w')\n")
    server = Coordinator(module_workspace, "planted", {"web_listen": "127.0.0.1:0"}).serve()
    assert Browser(server.settings["web_listen"]).get("/").status == 200
    assert not made.exists()
    server.kill()
    for name in planted:
        (module_workspace.folder / f"{name}.py").unlink()


@pytest.mark.slow
def test_without_the_extra_the_coordinator_does_not_start(tmp_path: Path, module_workspace: Workspace) -> None:
    """It names the package that is missing, and what to install."""
    block(tmp_path, "starlette")
    server = Coordinator(module_workspace, "without", {"web_listen": "127.0.0.1:0"}, path=[tmp_path])
    server.forks = False
    assert server.start().wait() == 2
    assert "web_listen: the web page needs starlette, which is not installed" in server.errors()
    assert "pip install 'impetus-fl[web]'" in server.errors()


@pytest.mark.slow
def test_without_the_extra_fl_web_names_it(tmp_path: Path, plain: Coordinator) -> None:
    """One line with the package and what to install; `fl web open` needs no extra."""
    block(tmp_path, "uvicorn")
    address = ["--insecure", "--server", str(plain.settings["admin_listen"])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def web(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fl_ops", "web", *arguments, *address]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    done = web()
    assert (done.returncode, done.stdout) == (2, "")
    assert "fl web needs uvicorn, which is not installed: pip install 'impetus-fl[web]'" in done.stderr
    assert web("open").returncode == 0


def block(folder: Path, package: str) -> None:
    """Make every Python with this folder in its path believe that a package is not installed."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules[{package!r}] = None\n")


def test_the_process_reads_its_code_alone(module_workspace: Workspace) -> None:
    """Not the coordinator's key and state, which have the same user; it writes nothing and connects nowhere."""
    key = module_workspace.folder / "coordinator.key"
    key.write_text("a key")
    program = f"""
import socket, sys
from fl_web.sandbox import code_of_this_process, restrict
why = restrict(code_of_this_process())
def tried(function, *arguments):
    try:
        function(*arguments)
    except PermissionError:
        return "refused"
    return "done"
print(why or [tried(*each) for each in (
    (open, {str(key)!r}), (open, {str(key)!r}, "w"), (open, {str(key.parent / "new")!r}, "w"),
    (open, "/proc/{os.getpid()}/environ"), (socket.create_connection, ("127.0.0.1", 9), 1),
    (open, sys.modules["fl_web"].__file__),
)])
import fl_web.process
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    if "refused" not in done.stdout:
        pytest.skip(f"the kernel restricts no process: {done.stdout}{done.stderr}")
    assert done.stdout.strip() == str(["refused"] * 5 + ["done"]), done.stderr
    assert done.returncode == 0, done.stderr


def test_the_process_holds_nothing_of_the_coordinator(
    module_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No variable of its environment but those that a program needs."""
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    server = Coordinator(module_workspace, "environment", {"web_listen": "127.0.0.1:0"}).serve()
    process = web_process(server)
    assert "PGPASSWORD" not in process.environ()
    status = Path(f"/proc/{process.pid}/status")
    eventually(
        lambda: "NoNewPrivs:\t1" in status.read_text() or "restricts no process" in server.errors(), "it is restricted"
    )
    server.kill()
