"""A daemon with two processes: the models of one process up to rounding, a rank that dies, and none that is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fl_ops.commands.cli import app
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace, eventually

RUN: dict[str, Any] = {
    "round": {"clients_per_round": 1, "min_clients": 1},
    "stop": {"rounds": 3},
    "local": {"batch_size": 7, "epochs": 1, "max_gradient_norm": 1.0, "micro_batch_size": 2},
}


def daemon_of(workspace: Workspace, server: Coordinator, name: str, **settings: Any) -> Daemon:
    """A daemon with the first of two shards."""
    shard = {"partition": {"method": "iid", "clients": 2, "seed": 1}, "index": 0}
    return Daemon(workspace, server, name, shard=shard, process=f"{name}-{settings['processes']}", **settings)


def ranks_of(daemon: Daemon) -> list[int]:
    """Process numbers of the other ranks."""
    return [child.pid for child in psutil.Process(daemon.pid).children() if "fl_client.ranks.member" in child.cmdline()]


def exported(server: Coordinator, run: str, folder: Path) -> dict[str, torch.Tensor]:
    """The latest model of a run."""
    path = folder / f"{run}.safetensors"
    address = str(server.settings["admin_listen"])
    result = CliRunner().invoke(app, ["export", run, "--out", str(path), "--server", address, "--insecure"])
    assert result.exit_code == 0, result.output
    return load_file(path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedcm", "fedsam", "mime"])
def test_two_processes_have_the_models_of_one(workspace: Workspace, tmp_path: Path, method: str) -> None:
    """With clipping, micro batches and batches that two processes cannot share evenly."""
    server, models = Coordinator(workspace).serve(), []
    for processes in (1, 2):
        daemon = daemon_of(workspace, server, "edge-0", processes=processes).start()
        name = f"{method}-{processes}"
        server.create(name, algorithm={"name": method}, **RUN)
        server.completed(name)
        models.append(exported(server, name, tmp_path))
        assert len(ranks_of(daemon)) == processes - 1
        assert daemon.terminate() == 0
    assert models[0].keys() == models[1].keys()
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_rank_that_dies_fails_the_work_by_its_number(workspace: Workspace) -> None:
    """The coordinator names rank and signal; the next work starts another rank; a killed daemon leaves none."""
    server = Coordinator(workspace).serve()
    daemon = daemon_of(workspace, server, "edge-0", processes=2).start()
    daemon.hold.touch()
    server.create("dies", **RUN)
    (rank,) = eventually(lambda: ranks_of(daemon), "the other rank")
    eventually(lambda: daemon.events("ranks_joined"), "both ranks have joined")
    os.kill(rank, signal.SIGKILL)
    daemon.hold.unlink()
    server.completed("dies")
    (failed,) = daemon.events("work_failed")
    assert "rank 1 of 2 ended with signal 9; the end of " in failed["message"]
    assert len(daemon.events("ranks_joined")) == 2
    (rank,) = ranks_of(daemon)
    daemon.kill()
    eventually(lambda: not psutil.pid_exists(rank), "the rank ends with its daemon")


@pytest.mark.slow
def test_an_own_loop_has_its_rank_and_the_group(workspace: Workspace, tmp_path: Path) -> None:
    """It wraps the model in DistributedDataParallel; both ranks run it."""
    (tmp_path / "ddp_task.py").write_text(LOOP)
    server = Coordinator(workspace, settings={"tasks": ["ddp_task:Ddp"]}, path=[tmp_path]).serve()
    daemon = Daemon(
        workspace, server, "edge-0", path=[tmp_path], processes=2, task={"name": "ddp_task:Ddp", "options": {}}
    ).start()
    server.create("ddp", task={"name": "ddp_task:Ddp", "options": {}}, algorithm={"name": "fedavg"}, **RUN | LOCAL)
    server.completed("ddp")
    log = Path(daemon.settings["state_dir"]) / "ranks" / "rank-1.log"
    assert "rank 1 of 2, a group of 2" in log.read_text()


LOCAL = {"local": {"epochs": 1}}
LOOP = """
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from fl_tasks.own_loop import TrainReport
from tests.processes.tiny_task import Tiny


class Ddp(Tiny):
    def train(self, model, data, context):
        print(f"rank {context.rank} of {context.processes}, a group of {distributed.get_world_size()}", flush=True)
        shared = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), context.learning_rate)
        for inputs, targets in context.batches():
            optimizer.zero_grad()
            part = slice(context.rank, None, context.processes)
            self.loss(shared(inputs[part]), targets[part]).backward()
            optimizer.step()
        return TrainReport(steps=context.steps, examples=len(data))
"""
