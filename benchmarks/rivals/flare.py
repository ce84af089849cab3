"""NVIDIA FLARE: a provisioned server and clients with mTLS, and a job of its FedAvg recipe."""

from __future__ import annotations

import os
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.environments import python_of
from benchmarks.rivals.contest import Case, Failed, Place, Running, last_lines
from benchmarks.rivals.ports import free_ports

REQUIREMENTS = ["nvflare==2.9.0"]
JOB = Path(__file__).with_name("flare_job")
PROJECT = """api_version: 3
name: rivals
participants:
  - {{name: localhost, type: server, org: rivals, fed_learn_port: {port}, admin_port: {admin}}}
{clients}
  - {{name: admin@rivals.org, type: admin, org: rivals, role: project_admin}}
builders:
  - path: nvflare.lighter.impl.workspace.WorkspaceBuilder
    args: {{template_file: [master_template.yml]}}
  - path: nvflare.lighter.impl.static_file.StaticFileBuilder
    args: {{config_folder: config}}
  - path: nvflare.lighter.impl.cert.CertBuilder
  - path: nvflare.lighter.impl.signature.SignatureBuilder
"""
STARTED = re.compile(r"(?m)^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) - FedAvg\b.*\n-+\n +Round (\d+) started\.")


def start(case: Case, place: Place) -> Running:
    """Provision, start the server and the clients, and submit the job."""
    python = python_of("flare", place.environments, REQUIREMENTS)
    sites = [f"site-{index}" for index in range(case.clients)]
    kits = _provision(python, place.folder, sites)
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}", "TZ": "UTC"}
    children = {
        name: place.processes.run(
            name, ["bash", str(kits / name / "startup" / "sub_start.sh"), "--once"], environment, kits
        )
        for name in ("localhost", *sites)
    }
    server = children["localhost"]
    # One round more than is measured, and one more, whose start is the end of the last.
    numbers = [case.clients, case.rounds + 2, case.parameters, case.tensors]
    command = [str(python), str(JOB / "submit.py"), str(kits / "admin@rivals.org"), *map(str, numbers)]
    submit = place.processes.run("submit", command, environment, JOB)
    if submit.process.wait(timeout=case.limit_s):
        raise Failed(f"the submission ended with {submit.process.returncode}:\n{last_lines(submit.log)}")
    return Running(server, lambda: round_ends(server.log), server.log)


def _provision(python: Path, folder: Path, sites: list[str]) -> Path:
    """Startup kits with keys and certificates. Returns their folder."""
    port, admin = free_ports(2)
    clients = "\n".join(f"  - {{name: {site}, type: client, org: rivals}}" for site in sites)
    project = folder / "project.yml"
    project.write_text(PROJECT.format(port=port, admin=admin, clients=clients), encoding="utf-8")
    command = [str(python.parent / "nvflare"), "provision", "-p", str(project), "-w", str(folder / "kits"), "--force"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - our own command
    if done.returncode:
        raise Failed(f"nvflare provision ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    kits = folder / "kits" / "rivals" / "prod_00"
    # Jobs of an earlier run would be found in the default folder, and run again.
    local = kits / "localhost" / "local"
    resources = (local / "resources.json.default").read_text(encoding="utf-8")
    (local / "resources.json").write_text(resources.replace("/tmp/nvflare", str(folder / "storage")), encoding="utf-8")  # noqa: S108
    return kits


def round_ends(log: Path) -> list[float]:
    """When the rounds after the first began: the server logs each start."""
    found = {
        int(number): datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp() + int(milliseconds) / 1000
        for moment, milliseconds, number in STARTED.findall(log.read_text(encoding="utf-8", errors="replace"))
    }
    return [found[number] for number in sorted(found) if number]
