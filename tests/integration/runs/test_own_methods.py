"""A method and reducers from outside in real processes: kills, a simulation, a replay, and other code."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fl_ops.errors import OpsError
from protos.fl.v1 import admin_pb2
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import HERE, ROOT, Workspace
from tests.processes.simulated import replay, simulated_digests

EXAMPLE = ROOT / "examples" / "sign-momentum"
METHOD, MEDIAN, SIMILAR = (
    "sign_momentum.method:sign_momentum",
    "sign_momentum.reducers:weighted_median",
    "sign_momentum.reducers:most_similar",
)
SERVER = {"algorithms": [METHOD], "reducers": [MEDIAN, SIMILAR]}
SIGN_MOMENTUM = {"name": METHOD, "parameters": {"alpha": 0.3}, "schedules": {"alpha": {"kind": "linear", "end": 0.8}}}
RUNS: dict[str, dict[str, Any]] = {
    "median": {
        "algorithm": SIGN_MOMENTUM,
        "round": {
            "clients_per_round": 3,
            "quorum": 3,
            "reducer": MEDIAN,
            "reducer_parameters": {"blend": 0.25},
        },
    },
    "similar": {
        "algorithm": {"name": "fedcm"},
        "round": {"clients_per_round": 3, "quorum": 3, "reducer": SIMILAR, "reducer_parameters": {"keep": 0.6}},
    },
    "mean": {"algorithm": SIGN_MOMENTUM},
}
PARTITION: dict[str, Any] = {"method": "iid", "seed": 1}


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example and the task can be imported here, as in the processes."""
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.syspath_prepend(EXAMPLE)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "sign_momentum"]:
        del sys.modules[name]


def started(workspace: Workspace, server: Coordinator, index: int, **settings: Any) -> Daemon:
    """A daemon that can train with the method, and attends."""
    shard = {"partition": {**PARTITION, "clients": 3}, "index": index}
    wanted = {"path": [EXAMPLE], "algorithms": [METHOD], "shard": shard, **settings}
    daemon = Daemon(workspace, server, f"edge-{index}", **wanted).start()
    server.until_present(f"edge-{index}")
    return daemon


@pytest.mark.slow
def test_killed_runs_have_the_simulated_bits_and_are_replayed(workspace: Workspace) -> None:
    """A method with a payload and a schedule of its own, and both kinds of reducers; coordinator and daemon die."""
    server = Coordinator(workspace, settings=SERVER, path=[EXAMPLE]).serve()
    daemons = [started(workspace, server, index) for index in range(3)]
    for name, sections in RUNS.items():
        server.create(name, **sections, stop={"rounds": 5})
        server.until(name, lambda run: run.rounds_done >= 1, "a round is done")
        daemons[1].kill()
        server.kill()
        daemons[1].start()
        server.serve()
        digests = simulated_digests(name, **sections, stop={"rounds": 5})
        assert server.digests(name) == digests
        result = replay(server, name)
        assert result.exit_code == 0, result.output
    assert simulated_digests("median", stop={"rounds": 5}) != digests
    offered = server.client("edge-0").methods
    assert [offer.name for offer in offered] == [METHOD]
    assert offered[0].fingerprint.version == "1"
    assert server.run("mean").spec.algorithm.fingerprint == offered[0].fingerprint
    assert server.run("median").spec.round.reducer_fingerprint.source.startswith("sha256:")
    assert not server.run("similar").spec.algorithm.HasField("fingerprint")


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"algorithm": {"name": "tracing:method"}}, "algorithm.name: expected an algorithm that this coordinator may"),
    ({"round": {"reducer": "tracing:reducer"}}, "round.reducer: expected a reducer that this coordinator may load"),
    ({"algorithm": {"name": "fedcmm"}}, 'Did you mean "fedcm"?'),
    ({"round": {"reducer": "medium"}}, 'Did you mean "median"?'),
    ({"algorithm": {"name": METHOD, "parameters": {"agreement": 2}}}, "parameter 'agreement': expected a number"),
    ({"algorithm": {"name": METHOD, "parameters": {"beta": 0.5}}}, f"unknown parameter of {METHOD}: 'beta'"),
    (
        {"algorithm": {"name": METHOD, "schedules": {"agreement": {"kind": "linear", "end": 1.0}}}},
        "agreement is the same in all rounds",
    ),
    (
        {"round": {"reducer": MEDIAN, "quorum": 3, "clients_per_round": 3, "reducer_parameters": {"blend": 2}}},
        "parameter 'blend': expected a number",
    ),
    ({"round": {"reducer": MEDIAN}}, f'round.quorum: expected at least 3 with reducer = "{MEDIAN}", got 1'),
    (
        {"round": {"reducer": MEDIAN, "sampling": "bernoulli", "clients_per_round": None}},
        'round.sampling: expected "fixed"',
    ),
    ({"round": {"reducer_parameters": {"blend": 0.1}}}, 'expected no reducer_parameters with reducer = "mean"'),
    (
        {"algorithm": {"name": "scaffold"}, "population": 3, "round": {"reducer": MEDIAN, "quorum": 3}
         | {"clients_per_round": 3}},
        "which needs a mean of all updates",
    ),
    (
        {"algorithm": SIGN_MOMENTUM, "round": {"reducer": SIMILAR, "quorum": 3, "clients_per_round": 3}},
        "its clients send other payloads, which nothing would check",
    ),
    (
        {"algorithm": {"name": METHOD, "fingerprint": {"version": "9", "source": "sha256:00"}}},
        "expected the algorithm's code that the run was made with, version '9' sha256:00, got version '1' sha256:",
    ),
)  # fmt: skip
"""Sections of a run -> a part of the refusal."""


def test_names_that_the_settings_do_not_list_are_refused(workspace: Workspace) -> None:
    """At the creation, with what may be named. Nothing is imported: a module that leaves a trace leaves none."""
    (workspace.folder / "tracing.py").write_text(
        f"from pathlib import Path\nPath({str(workspace.folder / 'trace')!r}).touch()\n"
    )
    server = Coordinator(workspace, settings=SERVER, path=[EXAMPLE, workspace.folder]).serve()
    for sections, expected in REFUSED:
        with pytest.raises(OpsError) as refused:
            server.create("refused", **sections)
        assert expected in str(refused.value), str(refused.value)
    assert not (workspace.folder / "trace").exists()
    assert server.history("refused")[0] == "run_refused"


def other_code(folder: Path) -> Path:
    """A folder with the example, whose method's module has another text."""
    shutil.copytree(EXAMPLE / "sign_momentum", folder / "sign_momentum")
    with (folder / "sign_momentum" / "method.py").open("a") as module:
        module.write("\n# Another version.\n")
    return folder


@pytest.mark.slow
def test_a_client_without_the_same_code_is_not_drawn(workspace: Workspace, tmp_path: Path) -> None:
    """It has none, or other code. The run's reason and the device's log name it; a client with the code trains."""
    server = Coordinator(workspace, settings=SERVER, path=[EXAMPLE]).serve()
    started(workspace, server, 0, algorithms=[])
    other = started(workspace, server, 1, path=[other_code(tmp_path / "other")])
    server.create("code", algorithm=SIGN_MOMENTUM, round={"clients_per_round": 1, "min_clients": 1})
    waiting = server.until("code", lambda run: run.state == admin_pb2.RUN_STATE_WAITING, "it waits")
    assert f"; 1 without the algorithm {METHOD}, first edge-0: expected version '1' sha256:" in waiting.reason
    assert "got none; install it on the device" in waiting.reason
    assert f"; 1 with another version of the algorithm {METHOD}, first edge-1: " in waiting.reason
    assert f"with another version of the algorithm {METHOD}: expected version '1'" in other.logged("notice")["text"]
    assert server.client("edge-0").methods == []
    server.create("built-in", round={"clients_per_round": 1, "min_clients": 1}, stop={"rounds": 1})
    server.completed("built-in")
    started(workspace, server, 2)
    server.completed("code")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["method", "reducers"])
def test_a_coordinator_with_other_code_does_not_go_on(workspace: Workspace, tmp_path: Path, part: str) -> None:
    """After a restart the run is not loaded, with the reason. With the code back, it ends with the simulated bits."""
    here = tmp_path / "here"
    shutil.copytree(EXAMPLE / "sign_momentum", here / "sign_momentum")
    server = Coordinator(workspace, settings=SERVER, path=[here]).serve()
    for index in range(3):
        started(workspace, server, index)
    sections: dict[str, Any] = {**RUNS["median"], "stop": {"rounds": 60}}
    server.create("changed", **sections)
    server.until("changed", lambda run: run.rounds_done >= 1, "a round is done")
    server.kill()
    module = here / "sign_momentum" / f"{part}.py"
    text = module.read_text()
    module.write_text(f"{text}\n# Another version.\n")
    server.serve()
    [refused] = server.events("run_not_loaded", run="changed")
    field, noun = ("algorithm.name", "algorithm") if part == "method" else ("round.reducer", "reducer")
    assert refused["error"].startswith(f"{field}: expected the {noun}'s code that the run was made with, version '1' ")
    assert "on this coordinator: install that code again, or create another run with this one" in refused["error"]
    assert server.run("changed").reason == f"not loaded: {refused['error']}"
    server.kill()
    module.write_text(text)
    server.serve()
    assert server.digests("changed") == simulated_digests("changed", **sections)


def test_a_reducer_that_raises_fails_the_run_with_its_message(workspace: Workspace) -> None:
    """The run fails with the reason, and the coordinator serves other runs."""
    (workspace.folder / "broken.py").write_text(
        "import algorithms as fl\n\n\ndef broken() -> fl.Reducer:\n"
        "    return fl.Reducer(reduce=lambda values, weights: values[0] / 0 if weights is None else 1 / 0)\n"
    )
    server = Coordinator(workspace, settings={"reducers": ["broken:broken"]}, path=[workspace.folder]).serve()
    for index in range(2):
        started(workspace, server, index)
    server.create("broken", round={"reducer": "broken:broken", "min_clients": 2})
    ended = server.ended("broken")
    assert ended.state == admin_pb2.RUN_STATE_FAILED
    assert "reducer broken:broken raised ZeroDivisionError: division by zero" in ended.reason
    server.create("next", round={"min_clients": 2}, stop={"rounds": 1})
    server.completed("next")


def test_the_import_path_of_this_test_is_the_examples() -> None:
    """Without this, the simulations above could use another package of the same name."""
    assert Path(str(importlib.import_module("sign_momentum").__file__)).is_relative_to(EXAMPLE)
