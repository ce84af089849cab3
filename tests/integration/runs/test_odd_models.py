"""Models as people have them, in real processes: trained with the simulated bits, or refused by name at creation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load

from fl_ops.errors import UsageError
from fl_ops.simulate.clients import SimulatedClients
from fl_ops.simulate.simulation import Simulation
from fl_server.run_settings.spec import from_spec
from protos.fl.v1 import admin_pb2
from tests.processes.federation import Coordinator, Daemon, run_spec
from tests.processes.odd_task import Grown, Kept, Odd
from tests.processes.process import HERE, Workspace

TASKS = ["odd_task:Odd", "odd_task:Kept", "odd_task:Grown"]
ROUND = {"clients_per_round": 1, "min_clients": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator with a small limit of updates, and a device for each of two tasks."""
    with Workspace(tmp_path_factory.mktemp("odd")) as workspace:
        settings = {"tasks": TASKS, "limits": {"reattach_grace_s": 20.0, "max_update_mib": 1}}
        server = Coordinator(workspace, settings=settings).serve()
        for name in ("Kept", "Grown"):
            daemon = Daemon(workspace, server, name.lower())
            daemon.configure(task={"name": f"odd_task:{name}"})
            daemon.start()
        for name in ("kept", "grown"):
            server.until_present(name)
        yield server


def sections(kind: str, **others: Any) -> dict[str, Any]:
    """A run of two rounds with one client. kind: the task's class."""
    return {"task": {"name": f"odd_task:{kind}"}, "round": ROUND, "stop": {"rounds": 2}, **others}


def simulated(run: str, task: Odd, client: str) -> Simulation:
    """The same run in this process."""
    config = from_spec(run_spec(run, **sections(type(task).__name__)))
    part = {client: torch.arange(32)}
    return Simulation(config, SimulatedClients(config.task.name, task, part), task=task)


def test_constants_and_a_module_made_once_have_the_simulated_bits(
    server: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs of a task that returns one module begin from the same values.

    A mask of minus infinity keeps its bits. Expanded values are trained.
    """
    monkeypatch.syspath_prepend(HERE)
    first = Kept().model().state_dict()
    for name in ("first", "second"):
        server.create(name, **sections("Kept"))
        with simulated(name, Kept(), "kept") as simulation:
            expected = [done.digest for done in simulation.rounds()]
        assert server.digests(name) == expected
        with server.admin() as admin:
            parts = [part.chunk.data for part in admin.models.export_model(name, "latest") if part.HasField("chunk")]
        model = load(b"".join(parts))
        assert torch.equal(model["mask"], first["mask"])
        assert torch.equal(model["turned"], first["turned"])
        assert not torch.equal(model["shared"], first["shared"])


def test_a_run_whose_model_changes_its_layout_fails_with_the_buffers_name(
    server: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator's reason and a simulation's have buffer and rule."""
    monkeypatch.syspath_prepend(HERE)
    server.create("growing", **sections("Grown"))
    run = server.ended("growing")
    assert run.state == admin_pb2.RUN_STATE_FAILED
    rule = "parameters and buffers keep their shapes and types in training"
    for text in (run.reason, simulated_failure()):
        assert "tensor 'cache': expected shape (0, 4) float32, got (32, 4) float32" in text
        assert rule in text
    assert "persistent=False" in run.reason


def simulated_failure() -> str:
    """Why the growing model fails in a simulation."""
    with simulated("growing", Grown(), "grown") as simulation:
        assert not list(simulation.rounds())
        assert simulation.ending is not None
        return simulation.ending[1]


@pytest.mark.parametrize(
    ("kind", "came"),
    [
        pytest.param("lazy", "'0.weight' of a lazy module", id="lazy"),
        pytest.param("meta", "'layer.weight' on the device \"meta\"", id="meta"),
        pytest.param("float8", "tensor 'more': expected a dtype of float32", id="float8"),
        pytest.param("infinite", "finite parameters in the first model.*'more'", id="infinite"),
        pytest.param("function", "got the function <lambda>", id="function"),
        pytest.param("none", "got None", id="none"),
        pytest.param("class", "got the class Plain", id="class"),
        pytest.param("dict", "an object of type dict", id="dict"),
        pytest.param("long_name", "a name of 1 to 512 characters, got 613", id="long-name"),
        pytest.param("wide", r"at most 1 MiB \(limits.max_update_mib in server.toml\), got 2", id="wide"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_when_the_run_is_created(
    server: Coordinator, kind: str, came: str
) -> None:
    """The error is the creator's, and says what came."""
    task = {"name": "odd_task:Odd", "options": {"kind": kind}}
    with pytest.raises(UsageError, match=came):  # that of INVALID_ARGUMENT
        server.create(kind, **sections("Odd", task=task))


def test_the_creator_of_a_run_is_told_of_an_extra_state(server: Coordinator) -> None:
    """The run is created; the remark has the name in the state_dict."""
    task = {"name": "odd_task:Odd", "options": {"kind": "counted"}}
    with server.admin() as admin:
        created = admin.runs.create_run(run_spec("counted", **sections("Odd", task=task)))
        admin.runs.stop_run("counted", "only its creation is tested")
    assert ["'0._extra_state'" in remark for remark in created.remarks] == [True]
