"""The federation in the pictures of the web page: a coordinator with certificates, eight daemons, all kinds of runs.

One device fails often, one is slow, one sends updates that are far too long until it is quarantined. Runs: plain,
private, with secure aggregation, one that was stopped, one that waits for clients, and one that goes on. The model of
one is released.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from docs.source.dashboards.federation import TASK
from fl_common.signatures import make_key
from tests.processes.certificates import Pki, section
from tests.processes.federation import Daemon, SecureCoordinator
from tests.processes.process import Workspace, eventually

PLAIN, PRIVATE, SECURE = "digits-fedavg", "digits-private", "digits-secure"
STOPPED, WAITING, NEWEST = "digits-scaffold", "letters", "digits-fedcm"
MODEL = TASK.rpartition(":")[2]
COMPARED = (NEWEST, PLAIN, SECURE)
_SITES = ("berlin-1", "berlin-2", "berlin-3", "lyon-1", "lyon-2", "porto-1", "porto-2", "turin-1")
_HEALTHY = 5
"""The first daemons have no fault."""
_SLOW, FAILING, SICK = "porto-1", "porto-2", "turin-1"
_PAUSE_S, _SLOW_PAUSE_S = 0.04, 0.25
_LIMIT_S = 1200.0
"""For each wait."""
_FAILS = 0.04
"""The chance of a failing device's training step to fail: about four of ten assignments fail."""
_SERVER: dict[str, Any] = {
    "tasks": [TASK, "tiny_task:Tiny"],
    "limits": {"reattach_grace_s": 20.0},
    "quarantine": {"after": 2, "first_s": 3600.0},
}
_SECTIONS: dict[str, Any] = {
    "task": {"name": TASK},
    "local": {"epochs": 1, "batch_size": 16, "learning_rate": 0.05},
    "evaluation": {"every": 1, "clients_every": 4},
    "round": {"min_clients": None, "close": "goal", "deadline_s": 120.0, "clients_per_round": 4, "quorum": 2},
}


Holds = Callable[[Any], Any]


def _run(server: SecureCoordinator, name: str, rounds: int, **sections: Any) -> None:
    merged = {key: {**value, **sections.pop(key, {})} for key, value in _SECTIONS.items()}
    server.create(name, **merged, stop={"rounds": rounds}, **sections)


def _until(server: SecureCoordinator, name: str, holds: Holds, what: str) -> None:
    eventually(lambda: holds(server.run(name)), f"{name}: {what}", _LIMIT_S)


def _completed(server: SecureCoordinator, name: str) -> None:
    _until(server, name, lambda run: run.HasField("ended"), "it ends")
    server.completed(name)


def _ended_runs(server: SecureCoordinator, rounds: int) -> None:
    """The runs of the healthy devices, which end."""
    healthy = {"labels": {"standing": "new"}}
    _run(server, PLAIN, rounds, algorithm={"name": "fedavg"}, **healthy)
    _completed(server, PLAIN)
    everybody = {"clients_per_round": _HEALTHY, "close": "cohort", "quorum": 4}
    uniform = {"name": "fedavg", "parameters": {"weights": "uniform"}}
    steps = {"epochs": None, "steps": 8}
    private = {"unit": "record", "noise_multiplier": 1.0, "clip": 0.5, "delta": 1e-3}
    own: dict[str, Any] = {"round": everybody, "evaluation": {"clients_every": 0}, "local": steps}
    _run(server, PRIVATE, rounds, algorithm=uniform, privacy=private, **own, **healthy)
    _completed(server, PRIVATE)
    masks = {"clip": 0.5, "max_dropped": 0.2, "stage_s": 60.0}
    _run(server, SECURE, rounds, algorithm=uniform, secure_aggregation=masks, **own, **healthy)
    _completed(server, SECURE)
    _run(server, STOPPED, 200, algorithm={"name": "scaffold"}, population=_HEALTHY, round=everybody, **healthy)
    _until(server, STOPPED, lambda run: run.rounds_done >= rounds // 3, "it has some rounds")
    with server.admin() as admin:
        admin.runs.stop_run(STOPPED, "fedcm is better")


def _daemon(workspace: Workspace, server: SecureCoordinator, pki: Pki, index: int) -> Daemon:
    name = _SITES[index]
    shard = {"partition": {"method": "dirichlet", "clients": len(_SITES), "alpha": 0.5, "seed": 3}, "index": index}
    options = {
        "pause_s": _SLOW_PAUSE_S if name == _SLOW else _PAUSE_S,
        "fails": _FAILS if name == FAILING else 0.0,
        "client_eval_fraction": 0.2,
        "sick": str(workspace.folder / name),
        "exaggeration": 1e4,
    }
    labels = {"site": name.partition("-")[0], "standing": "new" if index < _HEALTHY else "old"}
    certificates = section(pki.issue("client", name))
    return Daemon(
        workspace, server, name, shard=shard, task={"name": TASK, "options": options}, labels=labels,
        insecure=False, tls=certificates,
    )  # fmt: skip


def _of_alice(server: SecureCoordinator, pki: Pki, *arguments: str) -> list[str]:
    """A command of the operator."""
    alice = pki.issue("admin", "alice")
    command = [sys.executable, "-m", "fl_ops", *arguments, "--json", "--server", str(server.settings["admin_listen"])]
    return [*command, "--ca", str(alice.ca), "--cert", str(alice.cert), "--key", str(alice.key)]


@contextmanager
def _page(server: SecureCoordinator, pki: Pki) -> Iterator[str]:
    """`fl web` of the operator; yields the login link."""
    command = _of_alice(server, pki, "web", "--listen", "127.0.0.1:0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - our own program
        try:
            text = ""
            for line in process.stdout or ():
                text += line
                if '"link"' in line:
                    break
            yield text.partition('"link": "')[2].partition('"')[0]
        finally:
            process.terminate()


@contextmanager
def federation(folder: Path, rounds: int, tell: Callable[[str], object]) -> Iterator[str]:
    """Yield a login link when the newest run has some rounds, a restart of the coordinator and each kind of client."""
    with Workspace(folder) as workspace:
        pki = Pki(folder / "pki")
        server = SecureCoordinator(workspace, pki, _SERVER).serve()
        key = folder / "release.pem"
        signer = make_key(key).signer
        daemons = [_daemon(workspace, server, pki, index) for index in range(len(_SITES))]
        for daemon in daemons:
            daemon.configure(releases={"signers": [signer]})
            daemon.start()
        for daemon in daemons:
            server.until_present(daemon.client_id)
        tell("the devices are here: runs that end")
        _ended_runs(server, rounds)
        released = _of_alice(server, pki, "release", PLAIN, "--sign-key", str(key))
        subprocess.run(released, stdout=subprocess.DEVNULL, check=True)  # noqa: S603 - our own program
        tell("a run that goes on; a device exaggerates until it is quarantined")
        fedcm = {"name": "fedcm", "parameters": {"alpha": 0.3}}
        _run(server, NEWEST, 20 * rounds, algorithm=fedcm, round={"max_update_norm": 4.0})
        _until(server, NEWEST, lambda run: run.rounds_done >= 6, "it has norms to compare with")
        (workspace.folder / SICK).touch()
        _until(server, NEWEST, lambda run: server.client(SICK).HasField("quarantine"), "the device is quarantined")
        _until(server, NEWEST, lambda run: run.rounds_done >= rounds, "it has some rounds")
        server.kill()
        time.sleep(2)
        server.serve()
        server.create(WAITING, task={"name": "tiny_task:Tiny"})
        with _page(server, pki) as link:
            _until(server, NEWEST, lambda run: run.rounds_done >= rounds + rounds // 3, "it goes on")
            tell("the pictures")
            yield link
