"""docs/devices/edge.md is executed on a booted system, with certificates, as a service."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from fl_client.setup.commands import app
from tests.docs.pages import ROOT, Command, missing, read_page, steps
from tests.fl_client.setup.booted import Booted, why_not
from tests.fl_client.setup.conftest import Site
from tests.processes.federation import Coordinator
from tests.processes.process import Workspace, eventually

PAGE = read_page("docs/devices/edge.md")
LOOKS = re.compile(r"systemctl (is-active|show)|sudo journalctl")
"""Commands that are repeated until they show what the page shows."""

SUDO = """#!/bin/sh
test "$1" = -u || exec "$@"
user=$2
shift 2
exec setpriv --reuid=$user --regid=$user --init-groups "$@"
"""
"""A sudo that runs its arguments, because root is the only user of the system."""


def shown_commands(text: str) -> list[Command]:
    """The commands of the blocks that show output; the other blocks install packages, or end everything."""
    shown = steps(re.sub(r"^```sh\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    return [step for step in shown if isinstance(step, Command)]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """The operator's authority."""
    return Site.made(tmp_path / "pki")


@pytest.fixture
def server(tmp_path: Path, site: Site) -> Iterator[Coordinator]:
    """The coordinator that the page calls coordinator.example."""
    files = site.issue("server", "coordinator", ("127.0.0.1",))
    tls = {"cert": files["cert"], "key": files["key"], "client_ca": files["ca"]}
    folder = tmp_path / "server"
    folder.mkdir()
    with Workspace(folder) as workspace:
        yield Coordinator(workspace, settings={"tls": tls, "insecure": False}).serve()


@pytest.fixture
def device(tmp_path: Path, site: Site) -> Iterator[Any]:
    """A device with the program and the operator's three files in the folder /srv/edge, and nothing else of ours."""
    files, issued = tmp_path / "files", site.issue("client", "edge-1")
    handed, sudo = files / "srv" / "edge", files / "usr" / "local" / "bin" / "sudo"
    handed.mkdir(parents=True)
    for key, name in (("ca", "ca.crt"), ("cert", "client-edge-1.crt"), ("key", "client-edge-1.key")):
        shutil.copy(issued[key], handed / name)
    sudo.parent.mkdir(parents=True)
    sudo.write_text(SUDO)
    sudo.chmod(0o755)
    with Booted(tmp_path, files) as booted:
        yield booted


def do(device: Any, step: Command) -> None:
    """Run a command on the device until it ends well and shows what the page shows; once, if it changes something."""
    line = f"export PATH=/usr/local/bin:$PATH; cd /srv/edge; {step.text}"

    def done() -> str:
        run = device.run("bash", "-c", line)
        absent = missing(step.shown, run.stdout)
        wrong = (
            "" if run.returncode == 0 and absent is None else f"{step.text}\nended with {run.returncode}, should show"
        )
        return wrong and f"{wrong} {absent}:\n{run.stdout}{run.stderr}\n{device.report('fl-client')}"

    if LOOKS.match(step.text):
        eventually(lambda: not done(), step.text)
    else:
        wrong = done()
        assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_everything_that_the_page_shows_works(device: Any, server: Coordinator) -> None:
    """Unit, certificate, settings, doctor, start and limits, in the page's order; the coordinator knows the device."""
    for step in shown_commands(PAGE.replace("coordinator.example:7070", server.address)):
        do(device, step)
    assert "edge-1" in {event["client"] for event in server.events("client_registered")}


def test_the_page_shows_what_it_claims_to() -> None:
    """There are commands to run, and none of those that end everything is among them."""
    texts = [step.text for step in shown_commands(PAGE)]
    assert len(texts) >= 12
    assert not [text for text in texts if " rm " in text or "userdel" in text or "pip" in text]


def test_every_flag_on_the_page_exists() -> None:
    """What stands behind `fl-client init`, `doctor` and `unit` on the page is an option of that command."""
    commands: Any = vars(typer.main.get_command(app))["commands"]
    for name, words in re.findall(r"fl-client (init|doctor|unit)((?: [^`\n;]+)?)", PAGE):
        known = {flag for parameter in commands[name].params for flag in [*parameter.opts, *parameter.secondary_opts]}
        assert set(re.findall(r"--[a-z-]+", words)) <= known, (name, words)


@pytest.mark.slow
def test_the_wheel_has_the_units(tmp_path: Path) -> None:
    """`pip wheel` as on the page, from a copy of the sources: unit, drop-ins and user are in the package."""
    packages = ["protos", "fl_common", "algorithms", "fl_extensions", "fl_tasks", "fl_server", "fl_client", "fl_ops"]
    for name in packages:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", "dist", "."]
    done = subprocess.run(pip, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "dist").glob("impetus_fl-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    parts = ["fl-client.service", "cuda.conf", "backoff.conf", "impetus.conf"]
    assert {f"fl_client/systemd/{part}" for part in parts} | {"fl_server/systemd/fl-server.service"} <= names
