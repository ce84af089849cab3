"""Frozen parameters that each device has itself: never on the wire or in a checkpoint, and otherwise the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from fl_ops.commands.cli import app
from fl_ops.errors import UsageError
from fl_ops.simulate.clients import prepare
from fl_ops.simulate.settings import SimulationConfig, SimulationSection
from fl_ops.simulate.simulation import Simulation
from fl_server.run_settings.spec import from_spec
from tests.integration.runs.test_tasks_over_the_wire import transferred
from tests.processes.backbone_task import write_backbone
from tests.processes.federation import Coordinator, Daemon, run_spec
from tests.processes.process import Process, Workspace

NAME = "tests.processes.backbone_task:Adapted"
WIDTH, RANK = 96, 2
FROZEN_BYTES, TRAINED_BYTES = WIDTH * WIDTH * 4, 2 * WIDTH * RANK * 4
PARTITION: dict[str, Any] = {"method": "iid", "seed": 1}
ROUNDS = 4


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    """The file of the frozen part."""
    return write_backbone(tmp_path / "backbone.safetensors", WIDTH)


@pytest.fixture
def server(workspace: Workspace) -> Coordinator:
    """A coordinator that may load the task."""
    return Coordinator(workspace, settings={"tasks": [NAME]}).serve()


def daemon(workspace: Workspace, server: Coordinator, index: int, backbone: Path, **more: Any) -> Daemon:
    """One of three daemons. It is started."""
    hold = workspace.folder / f"edge-{index}.hold"
    options = {"backbone": str(backbone), "hold": str(hold), "kept": 8, **more}
    shard = {"partition": {**PARTITION, "clients": 3}, "index": index}
    return Daemon(workspace, server, f"edge-{index}", task={"name": NAME, "options": options}, shard=shard).start()


def three(workspace: Workspace, server: Coordinator, backbone: Path) -> list[Daemon]:
    """All three."""
    daemons = [daemon(workspace, server, index, backbone) for index in range(3)]
    for each in daemons:
        server.until_present(each.client_id)
    return daemons


def sections(backbone: Path, frozen: str = "local", **more: Any) -> dict[str, Any]:
    """A run of the task."""
    task = {"name": NAME, "options": {"backbone": str(backbone)}, "frozen": frozen}
    return {"task": task, "stop": {"rounds": ROUNDS}, "evaluation": {"clients_every": 2}, **more}


def simulated(name: str, spec: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """Digest and metrics of each round of the same run, simulated in this process."""
    run = from_spec(run_spec(name, **spec))
    options = {**run.task.options, "kept": 8}
    run = run.model_copy(update={"task": run.task.model_copy(update={"options": options})})
    config = SimulationConfig(run, SimulationSection(clients=3, names="edge-{index}", partition=PARTITION))
    prepared = prepare(config, config.run.seed)
    with Simulation(prepared.config, prepared.clients, task=prepared.server_task) as simulation:
        return [(done.digest or "", dict(done.metrics)) for done in simulation.rounds()]


@pytest.mark.slow
def test_the_run_is_that_of_sent_parameters_without_their_bytes(
    workspace: Workspace, server: Coordinator, backbone: Path
) -> None:
    """Models and metrics equal those of frozen = "send" and of a simulation; no transfer or checkpoint has the part."""
    three(workspace, server, backbone)
    server.create("local", **sections(backbone))
    digests = server.digests("local")
    assert transferred(server, "down", "frozen") == 0
    assert transferred(server, "down", "model") <= TRAINED_BYTES * (ROUNDS * 2 + 2 * 3)
    assert transferred(server, "up", "update") == TRAINED_BYTES * ROUNDS * 2
    checkpoints = list(Path(server.settings["state_dir"]).glob("checkpoints/run-local/round-*"))
    assert checkpoints
    for folder in checkpoints:
        assert set(load_file(folder / "model.safetensors")) == {"lora_A.weight", "lora_B.weight"}
        assert '"frozen": "blake3:' in (folder / "meta.json").read_text()
    metrics = [dict(each.metrics) for each in server.rounds("local")]
    assert simulated("local", sections(backbone)) == list(zip(digests, metrics, strict=True))
    server.create("sent", **sections(backbone, "send"))
    assert server.digests("sent") == digests
    assert transferred(server, "down", "frozen") == FROZEN_BYTES * 3
    # The frozen parameters of a run that sends them replace the device's own, which come back for the next run.
    server.create("again", **sections(backbone))
    assert server.digests("again") == digests


def test_a_client_with_other_frozen_parameters_is_not_drawn(
    workspace: Workspace, server: Coordinator, backbone: Path, tmp_path: Path
) -> None:
    """The run waits and names the client and both digests; with the right file the client takes part."""
    other = write_backbone(tmp_path / "other.safetensors", WIDTH, seed=1)
    daemons = [daemon(workspace, server, index, other if index == 0 else backbone) for index in range(3)]
    for each in daemons:
        server.until_present(each.client_id)
    server.create("local", **sections(backbone))
    waits = server.until("local", lambda run: "frozen" in run.reason, "it names the reason").reason
    assert "1 with other frozen parameters" in waits
    assert "first edge-0: expected blake3:" in waits
    assert daemons[0].logged("notice")["text"].startswith("run 'local' does not draw this client")
    daemons[0].terminate()
    daemons[0].configure(task={"name": NAME, "options": {"backbone": str(backbone), "kept": 8}})
    daemons[0].start()
    assert server.completed("local").rounds_done == ROUNDS


@pytest.mark.slow
def test_a_killed_coordinator_and_daemon_end_with_the_same_models(
    workspace: Workspace, server: Coordinator, backbone: Path, tmp_path: Path
) -> None:
    """SIGKILL of the coordinator and of a training daemon: the models of the simulation, which a replay repeats."""
    daemons = three(workspace, server, backbone)
    for each in daemons:
        each.hold.touch()
    server.create("killed", **sections(backbone))
    cohort = server.until("killed", lambda run: len(run.cohort) == 2, "it draws two").cohort
    first = next(each for each in daemons if each.client_id == cohort[0])
    first.logged("assignment", run="killed", round=0)
    first.kill()
    server.kill()
    server.serve()
    first.start()
    for each in daemons:
        each.hold.unlink(missing_ok=True)
    server.until("killed", lambda run: run.rounds_done >= 2, "two rounds are done")
    server.kill()
    server.serve()
    assert server.digests("killed") == [digest for digest, _ in simulated("killed", sections(backbone))]
    config = tmp_path / "replay.toml"
    config.write_text(
        f'[task]\nname = "{NAME}"\noptions = {{ backbone = "{backbone}", kept = 8 }}\n[simulation]\nclients = 3\n'
        'names = "edge-{index}"\npartition = { method = "iid", seed = 1 }\n'
    )
    arguments = ["simulate", str(config), "--replay", "killed", "--state-dir", server.settings["state_dir"]]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


@pytest.mark.slow
def test_a_coordinator_whose_file_has_changed_does_not_continue_the_run(
    workspace: Workspace, server: Coordinator, backbone: Path
) -> None:
    """The run is not loaded, with both digests as the reason; with the file back, it continues."""
    for each in three(workspace, server, backbone):
        each.hold.touch()
    server.create("changed", **sections(backbone))
    server.until("changed", lambda run: len(run.cohort) == 2, "it draws two")
    server.kill()
    before = backbone.read_bytes()
    write_backbone(backbone, WIDTH, seed=1)
    server.serve()
    assert "expected the frozen parameters of the run, blake3:" in server.logged("run_not_loaded")["error"]
    server.kill()
    backbone.write_bytes(before)
    server.serve()
    for hold in workspace.folder.glob("*.hold"):
        hold.unlink()
    assert server.completed("changed").rounds_done == ROUNDS


def resident(process: Process) -> int:
    """Bytes of its resident memory."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) * 1024


@pytest.mark.parametrize(
    ("task", "message"),
    [
        pytest.param(
            {"options": {"broken": True}}, "task.frozen: .* got random values in 'backbone.weight'", id="random"
        ),
        pytest.param({"frozen": "disk"}, "task.frozen", id="unknown"),
    ],
)
def test_what_cannot_be_local_is_refused(
    server: Coordinator, backbone: Path, task: dict[str, Any], message: str
) -> None:
    """CreateRun names the field, and the tensor if its values are random."""
    spec = sections(backbone)
    options = {**spec["task"]["options"], **task.get("options", {})}
    with pytest.raises(UsageError, match=message):
        server.create("refused", **{**spec, "task": {**spec["task"], **task, "options": options}})


@pytest.mark.slow
def test_a_large_backbone_costs_what_its_adapters_cost(
    workspace: Workspace, server: Coordinator, tmp_path: Path
) -> None:
    """With 200 MB of backbone and 2 MB of adapters, transfers, checkpoints and server memory are those of 2 MB."""
    width, rank = 7072, 36
    frozen, trained = width * width * 4, 2 * width * rank * 4
    file = write_backbone(tmp_path / "large.safetensors", width)
    options = {"backbone": str(file), "rank": rank, "copied": True}
    edge = daemon(workspace, server, 0, file, rank=rank, copied=True)
    server.until_present("edge-0")
    idle, edge_idle = resident(server), resident(edge)
    one = {"clients_per_round": 1, "min_clients": 1}
    evaluation = {"every": 0}
    local = {"epochs": None, "steps": 2}
    task = {"name": NAME, "options": options, "frozen": "local"}
    server.create("large", task=task, round=one, evaluation=evaluation, local=local, stop={"rounds": 3})
    highest = 0
    while not server.run("large").HasField("ended"):
        highest = max(highest, resident(server))
    server.completed("large")
    folder = Path(server.settings["state_dir"])
    stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    # A model of 2 MB without a backbone takes 90 MB too: torch's code, and what it keeps.
    assert highest - idle < 0.75 * frozen
    assert resident(edge) - edge_idle < 0.75 * frozen
    assert edge_idle > frozen
    assert stored < 8 * trained
    assert (transferred(server, "down", "frozen"), transferred(server, "down", "model")) == (0, 3 * trained)
    assert transferred(server, "up", "update") == 3 * trained


@pytest.mark.slow
def test_personal_parameters_are_sent_once_beside_frozen_ones_of_the_device(
    workspace: Workspace, server: Coordinator, backbone: Path
) -> None:
    """FROZEN has the initial values of the personal parameters only; the models are those of a simulation."""
    three(workspace, server, backbone)
    spec = sections(backbone, personal=["lora_A.*"])
    server.create("personal", **spec)
    digests = server.digests("personal")
    assert transferred(server, "down", "frozen") == 3 * TRAINED_BYTES / 2
    assert [digest for digest, _ in simulated("personal", spec)] == digests
    names = set(
        load_file(next(Path(server.settings["state_dir"]).glob("checkpoints/run-personal/*/model.safetensors")))
    )
    assert names == {"lora_A.weight", "lora_B.weight"}
