"""Personal parameters with real processes: killed servers and daemons, a replay, a simulation, both evaluations."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from fl_ops.commands.cli import app
from fl_ops.errors import OpsError
from tests.marks import slow_except
from tests.processes.federation import Daemon, Fleet
from tests.processes.process import HERE, Workspace
from tests.processes.simulated import check_replay, simulated_digests, simulated_rounds

OPTIONS = {"model": "batchnorm", "kept": 16}
HEAD = ["3.*"]
SECTIONS: dict[str, Any] = {
    "task": {"options": OPTIONS},
    "personal": HEAD,
    "stop": {"rounds": 5},
    "evaluation": {"clients_every": 1},
}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"algorithm": {"name": "fedavg"}},
    "norms": {"algorithm": {"name": "fedavgm"}, "personal": ["1.*"]},
    "fedcm": {
        "algorithm": {"name": "fedcm", "parameters": {"alpha": 0.2}},
        "averaging": {"method": "ema", "decay": 0.5},
        "evaluation": {"clients_every": 1, "averaged_on_clients": True},
    },
    "scaffold": {"algorithm": {"name": "scaffold"}, "population": 3, "round": {"clip_update_norm": 0.1}},
    "median": {
        "algorithm": {"name": "fedavg"}, "round": {"clients_per_round": 3, "quorum": 3, "reducer": "median"}
    },
}  # fmt: skip


class PersonalFleet(Fleet):
    """Daemons with a model that has batch norm, each with examples to evaluate on."""

    def daemon(self, index: int, size: int) -> Daemon:
        """Create a daemon without starting it."""
        shard = {"partition": {"method": "iid", "clients": size, "seed": 1}, "index": index}
        return Daemon(self.workspace, self.server, f"edge-{index}", shard=shard, options=OPTIONS)


@pytest.fixture(scope="module")
def module_fleet(module_workspace: Workspace) -> PersonalFleet:
    """One fleet for all tests of this module."""
    return PersonalFleet(module_workspace, 3)


@pytest.fixture
def fleet(module_fleet: PersonalFleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[PersonalFleet]:
    """A coordinator and three idle daemons."""
    monkeypatch.syspath_prepend(HERE)
    with module_fleet.lent() as fleet:
        yield fleet


@pytest.mark.parametrize("method", slow_except(METHODS, "fedcm"))
def test_a_networked_run_is_the_simulated_run(fleet: PersonalFleet, method: str) -> None:
    """Models, and evaluations with and without the personal values, are equal for a head and for norms with buffers."""
    # With a rule by their metric each round waits for its clients' evaluation: else that of a later one may end it.
    stop = {"rounds": 5, "metric": "clients_loss", "patience": 5}
    sections = {**SECTIONS, **METHODS[method], "stop": stop}
    fleet.server.create(f"wire-{method}", **sections)
    fleet.server.completed(f"wire-{method}")
    expected = simulated_rounds(f"wire-{method}", **sections)
    came = fleet.server.rounds(f"wire-{method}")
    assert [done.digest for done in expected] == [done.model_digest for done in came]
    assert [dict(done.metrics) for done in expected] == [dict(done.metrics) for done in came]
    last = came[-1].metrics
    assert last["clients_loss"] != last["clients_loss_without_personal"]
    if method == "fedcm":
        averaged = [last[f"clients_averaged_loss{ending}"] for ending in ("", "_without_personal")]
        assert len({*averaged, last["clients_loss"], last["clients_loss_without_personal"]}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedcm", "scaffold"])
def test_killed_processes_change_no_bit(fleet: PersonalFleet, method: str) -> None:
    """Coordinator and daemon are killed after two of five rounds. The models are those of the simulation and replay."""
    name, sections = f"killed-{method}", {**SECTIONS, **METHODS[method]}
    fleet.server.create(name, **sections)
    fleet.server.until(name, lambda run: run.rounds_done >= 2, "two rounds are done")
    fleet.server.kill()
    fleet["edge-1"].kill()
    fleet.server.serve()
    fleet["edge-1"].start()
    assert fleet.server.digests(name) == simulated_digests(name, **sections)
    check_replay(fleet.server, name, {"options": OPTIONS})


def test_an_update_that_was_trained_before_a_kill_keeps_its_values(fleet: PersonalFleet) -> None:
    """A daemon is killed between its training and the commit. Its personal values are promoted with the outcome."""
    sections = {**SECTIONS, **METHODS["fedavg"]}
    quick, slow = fleet.half_delivered("promoted", **sections)
    quick.kill()
    fleet.server.kill()
    fleet.server.serve()
    quick.start()
    slow.hold.unlink()
    assert fleet.server.digests("promoted") == simulated_digests("promoted", **sections)
    assert len(quick.events("trained", run="promoted", round=0)) == 1


@pytest.mark.slow
def test_a_device_that_lost_its_values_starts_again_alone(fleet: PersonalFleet) -> None:
    """Its state directory is deleted during the run. The others keep their values, and a replay has the same models."""
    sections = {**SECTIONS, **METHODS["fedavg"], "round": {"clients_per_round": 3}}
    fleet.server.create("lost", **sections)
    fleet.server.until("lost", lambda run: run.rounds_done >= 1, "one round is done")
    with fleet.server.admin() as admin:
        admin.runs.pause_run("lost")
        fleet["edge-2"].kill()
        shutil.rmtree(fleet["edge-2"].settings["state_dir"])
        fleet["edge-2"].start()
        fleet.server.until_present("edge-2")
        admin.runs.resume_run("lost")
    digests = fleet.server.digests("lost")
    history = fleet.server.history("lost")
    assert ("state_lost" in history, "states_restarted" in history) == (True, False)
    assert digests[0] == simulated_digests("lost", **sections)[0]
    assert digests[-1] != simulated_digests("lost", **sections)[-1]
    check_replay(fleet.server, "lost", {"options": OPTIONS})


def test_the_server_keeps_the_initial_values(fleet: PersonalFleet) -> None:
    """The exported model has the head of the first model, and fewer bytes travel than without personal parameters."""
    names = {"all": {}, "head": {"personal": HEAD}}
    exported = {}
    for name, personal in names.items():
        fleet.server.create(f"export-{name}", task={"options": OPTIONS}, algorithm={"name": "fedavg"}, **personal)
        fleet.server.completed(f"export-{name}")
        path = fleet.server.folder / f"{name}.safetensors"
        options = ["--server", str(fleet.server.settings["admin_listen"]), "--insecure"]
        result = CliRunner().invoke(app, ["export", f"export-{name}", "--out", str(path), *options])
        assert result.exit_code == 0, result.output
        exported[name] = load_file(path)
    assert exported["head"].keys() == exported["all"].keys()
    sent = {name: fleet.server.rounds(f"export-{name}")[-1].bytes_up for name in names}
    assert sent["all"] - sent["head"] == 2 * 4 * (5 * 3 + 3)
    head = torch.cat([exported["head"][name].flatten() for name in ("3.weight", "3.bias")])
    assert not torch.equal(head, torch.cat([exported["all"][name].flatten() for name in ("3.weight", "3.bias")]))


@pytest.mark.parametrize(
    ("patterns", "why"),
    [
        pytest.param(
            ["haed.*"], "'haed.*' matches no trainable parameter and no buffer; there are 0.weight", id="none"
        ),
        pytest.param(["*"], "match all trainable parameters", id="all"),
        pytest.param(["3.*"] * 65, "at most 64", id="many"),
    ],
)
def test_patterns_that_do_not_fit_are_refused(fleet: PersonalFleet, patterns: list[str], why: str) -> None:
    """The creation of the run is refused, and the message names the field and the reason."""
    with pytest.raises(OpsError, match="personal") as refused:
        fleet.server.create("refused", task={"options": OPTIONS}, personal=patterns)
    assert why in str(refused.value)
