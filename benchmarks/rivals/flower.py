"""Flower's deployment: a SuperLink and SuperNodes with TLS. It has no client certificates; nodes sign requests."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

from benchmarks.environments import python_of
from benchmarks.processes import Child
from benchmarks.rivals.contest import Case, Failed, Place, Running, last_lines, wait_for
from benchmarks.rivals.ports import free_ports
from fl_ops.certificates import ca

REQUIREMENTS = ["flwr==1.42.0"]
APP = Path(__file__).with_name("flower_app")
HOST = "127.0.0.1"


def start(case: Case, place: Place) -> Running:
    """Start the SuperLink and the SuperNodes, and submit the app."""
    programs = python_of("flower", place.environments, REQUIREMENTS).parent
    _certificates(place.folder)
    environment = {
        "FLWR_HOME": str(place.folder / "home"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        # Flower starts its other programs by name.
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
    port, *node_ports = free_ports(case.clients + 1)

    def run(name: str, program: str, *arguments: str) -> Child:
        return place.processes.run(name, [str(programs / program), *arguments], environment, place.folder)

    pem = place.folder
    tls = [
        "--ssl-ca-certfile", f"{pem}/ca.pem", "--ssl-certfile", f"{pem}/server.pem",
        "--ssl-keyfile", f"{pem}/server.key",
    ]  # fmt: skip
    link = run(
        "superlink", "flower-superlink", "--host", HOST, "--port", str(port),
        "--disable-runtime-dependency-installation", *tls,
    )  # fmt: skip
    wait_for("the SuperLink", lambda: "Uvicorn running" in last_lines(link.log), link.log)
    for index, own in enumerate(node_ports):
        run(
            f"supernode-{index}", "flower-supernode", "--superlink", f"{HOST}:{port}", "--root-certificates",
            f"{pem}/ca.pem", "--host", HOST, "--port", str(own), *tls,
        )  # fmt: skip
    _connection(place.folder, port)
    submit = run("submit", "flwr", "run", str(_app(case, place.folder)), "rivals")
    if submit.process.wait(timeout=case.limit_s):
        raise Failed(f"flwr run ended with {submit.process.returncode}:\n{last_lines(submit.log)}")
    table = place.folder / "ends.txt"

    def ends() -> list[float]:
        return [float(line) for line in table.read_text().splitlines()] if table.exists() else []

    return Running(link, ends, link.log)


def _connection(folder: Path, port: int) -> None:
    """The SuperLink's address in the settings of `flwr`."""
    (folder / "home").mkdir(exist_ok=True)
    text = f'[superlink.rivals]\naddress = "{HOST}:{port}"\nroot-certificates = "{folder}/ca.pem"\n'
    (folder / "home" / "config.toml").write_text(text, encoding="utf-8")


def _certificates(folder: Path) -> None:
    """The server's certificate and key, and the authority's certificate."""
    since = datetime.now(UTC) - timedelta(minutes=5)
    authority = ca.make_authority("rivals", ca.Validity(since, 2))
    certificate, key = ca.issue(authority, ca.Identity("server", "superlink", (HOST,)), ca.Validity(since, 1))
    (folder / "ca.pem").write_bytes(ca.certificate_pem(authority.certificate))
    (folder / "server.pem").write_bytes(ca.certificate_pem(certificate))
    (folder / "server.key").write_bytes(ca.key_pem(key))


def _app(case: Case, folder: Path) -> Path:
    """The app with the case's numbers, and the file that names the SuperLink."""
    app = shutil.copytree(APP, folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
    facts = {"CLIENTS": case.clients, "ROUNDS": case.rounds + 1, "PARAMETERS": case.parameters, "TENSORS": case.tensors}
    text = (app / "pyproject.toml").read_text(encoding="utf-8")
    for name, value in {**facts, "ENDS": folder / "ends.txt"}.items():
        text = text.replace(f'"{name}"', f'"{value}"' if name == "ENDS" else str(value))
    (app / "pyproject.toml").write_text(text, encoding="utf-8")
    return app
