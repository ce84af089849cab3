"""Which process of a package a daemon keeps while the coordinator changes its mind."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fl_client.packages import daemon
from fl_client.packages.daemon import Packages
from fl_client.packages.held import HeldPackages
from fl_client.policy.config import Policy
from fl_client.settings.config import ClientConfig
from fl_common.signatures import make_key
from protos.fl.v1 import coordinator_pb2 as pb
from tests.processes.wheels import package, sources, wheel


class Process:
    """Stands for the process of a package: a real one loads torch."""

    def __init__(self, config: object, installed: Any, device: object) -> None:
        """Start it."""
        del config, device
        self.package, self.closed = installed, False
        Process.begun(self)

    begun: Any = staticmethod(lambda process: None)
    """Called when one has started."""

    def close(self) -> None:
        """End it."""
        self.closed = True


SETTINGS: dict[str, Any] = {
    "client_id": "edge-1", "server": "127.0.0.1:1", "insecure": True, "policy": "p",
    "tasks": [{"name": "waves:Waves", "package": "waves"}],
}  # fmt: skip


async def test_a_process_that_waits_for_idle_ends_when_its_version_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work begins with version 1 while version 2 starts; then the coordinator goes back to version 1."""
    key, held = make_key(tmp_path / "key.pem"), HeldPackages(tmp_path)
    files = sources()
    one, two = (
        held.keep(package([wheel("waves", files | {"ripples.py": text})], key)) for text in ("a = 1\n", "a = 2\n")
    )
    config = ClientConfig.model_validate({**SETTINGS, "state_dir": tmp_path})
    policy = Policy.model_validate({"packages": {"signers": [key.signer], "approval": False}})
    site, audit = SimpleNamespace(policy=policy), SimpleNamespace(note=lambda *_, **__: None)
    trainers: list[Any] = []
    parts: tuple[Any, ...] = (site, SimpleNamespace(), audit, lambda: torch.device("cpu"))
    packages = Packages(config, trainers, *parts)
    monkeypatch.setattr(daemon, "PackageTrainer", Process)

    packages.offered(pb.PackageOffer(name="waves", digest=one.digest))
    await packages._look_at("waves")
    (first,) = trainers
    started: list[Process] = []
    work = packages.using(first)

    def work_begins(process: Process) -> None:
        started.append(process)
        work.__enter__()

    monkeypatch.setattr(Process, "begun", work_begins)
    packages.offered(pb.PackageOffer(name="waves", digest=two.digest))
    await packages._look_at("waves")
    assert trainers == [first]
    assert [process.closed for process in started] == [False]

    packages.offered(pb.PackageOffer(name="waves", digest=one.digest))
    await packages._look_at("waves")
    assert [process.closed for process in started] == [True]
    work.__exit__(None, None, None)
    await packages._look_at("waves")
    assert (trainers, first.closed) == ([first], False)
