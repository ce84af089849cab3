"""Tasks that fail or differ, and models with frozen parts and buffers."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file
from torch import nn

from algorithms.model_state import read_state
from protos.codec import Layout, digest_text, pack
from protos.fl.v1 import admin_pb2
from tests.processes.federation import Coordinator, Daemon, Fleet
from tests.processes.process import HERE, TIMEOUT_S, Workspace, run_fl
from tests.processes.raw_client import Tensors
from tests.processes.tiny_task import FROZEN_ROWS, Tiny, tied

PAIR = {"clients_per_round": 2, "min_clients": 2}


@pytest.fixture
def server(workspace: Workspace) -> Coordinator:
    """A coordinator for daemons with different faults."""
    return Coordinator(workspace).serve()


def start(workspace: Workspace, server: Coordinator, client_id: str, **settings: Any) -> Daemon:
    """Start a daemon and wait until it attends."""
    daemon = Daemon(workspace, server, client_id, **settings).start()
    server.until_present(client_id)
    return daemon


def test_a_task_that_raises_ends_one_clients_work_only(workspace: Workspace, server: Coordinator) -> None:
    """The round continues with the other client. The daemon with the failed task stays up and is drawn again."""
    broken = start(workspace, server, "edge-broken", options={"fails": "loss"})
    start(workspace, server, "edge-well")
    run = server.create("raises", round={**PAIR, "quorum": 1}, stop={"rounds": 2})
    server.completed(run)
    assert [1, 1] == [summary.accepted for summary in server.rounds(run)]
    text = r"RuntimeError: the sensor is unplugged \(.*tiny_task\.py, line \d+, in loss\)"
    assert re.fullmatch(f"task_error: {text}", server.client("edge-broken").note)
    failed = broken.logged("work_failed", run=run, round=1)
    assert re.fullmatch(text, failed["message"])
    assert failed["exception"].startswith("Traceback (most recent call last):\n")
    assert server.run(run).latest_failure.message == server.client("edge-broken").note
    assert broken.terminate() == 0


def test_a_client_with_another_model_names_the_difference(workspace: Workspace, server: Coordinator) -> None:
    """Its log and the operators' view have the first different tensor with both shapes. The other client continues."""
    other = start(workspace, server, "edge-wide", options={"model": "wide"})
    start(workspace, server, "edge-well")
    run = server.create("differs", round={**PAIR, "quorum": 1}, stop={"rounds": 1})
    server.completed(run)
    text = "the model here against the coordinator's: tensor '0.weight': expected shape (6, 4) float32, got (5, 4)"
    assert text in other.logged("work_failed", reason="layout")["message"]
    assert text in server.client("edge-wide").note


def test_a_client_with_other_code_is_not_drawn(workspace: Workspace, server: Coordinator, tmp_path: Path) -> None:
    """A client with a task of the same name and other source is not drawn, and the run's reason names it."""
    (tmp_path / "other").mkdir()
    shutil.copy(HERE / "tiny_task.py", tmp_path / "other")
    with (tmp_path / "other" / "tiny_task.py").open("a") as module:
        module.write("\n# Another version.\n")
    start(workspace, server, "edge-other", path=[tmp_path / "other"])
    run = server.create("code", round={"clients_per_round": 1, "min_clients": 1}, stop={"rounds": 1})
    waiting = server.until(run, lambda status: status.state == admin_pb2.RUN_STATE_WAITING, "it waits")
    assert "clients that could be drawn: 0 of 1 here" in waiting.reason
    assert "; 1 with another version of the task's code, first edge-other: expected version '1' " in waiting.reason
    assert waiting.reason.endswith("; install the coordinator's version of the task")
    start(workspace, server, "edge-same")
    server.completed(run)


def test_an_evaluation_that_raises_fails_the_run_with_its_message(fleet: Fleet) -> None:
    """The run fails with the task's message; committed models can still be exported."""
    run = fleet.server.create("unmeasured", task={"options": {"fails": "metrics"}})
    failed = fleet.server.ended(run)
    assert failed.state == admin_pb2.RUN_STATE_FAILED
    assert "the ruler is broken" in failed.reason
    assert failed.rounds_done >= 1


def exported(fleet: Fleet, folder: Path, run: str, which: str) -> tuple[dict[str, Any], Tensors]:
    """A model as `fl export` writes it: (what the command printed, the tensors)."""
    path = folder / f"{run}-{which}.safetensors"
    address = str(fleet.server.settings["admin_listen"])
    result = run_fl(
        "export", run, "--round", which, "--out", str(path), "--json", "--insecure", "--server", address, folder=folder
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), load_file(path)


def digest_by_hand(model: nn.Module) -> str:
    """The digest of a model's trainable parameters and buffers, as on the wire."""
    state = read_state(model)
    sent = {**state.trainable, **state.buffers}
    layout = Layout.of(sent, state.trainable.keys())
    return digest_text(layout.digest(pack(sent, layout)))


@pytest.mark.parametrize("which", ["latest", "best", "1"])
def test_an_exported_model_is_the_committed_one(fleet: Fleet, tmp_path: Path, which: str) -> None:
    """latest, best and a round by number load into the task's model and have the digest of their round."""
    server = fleet.server
    server.create("export", keep_checkpoints=9) if "export" not in known(server) else None
    server.completed("export")
    facts, tensors = exported(fleet, tmp_path, "export", which)
    model = Tiny().model()
    model.load_state_dict(tensors, strict=True)
    rounds = server.rounds("export")
    best = min(rounds, key=lambda summary: summary.metrics["loss"])
    expected = {"latest": rounds[2], "best": best, "1": rounds[1]}[which]
    assert int(facts["round"].get("round", 0)) == expected.round
    assert digest_by_hand(model) == expected.model_digest


def test_an_exported_model_with_tied_weights_loads_strictly(
    workspace: Workspace, server: Coordinator, tmp_path: Path
) -> None:
    """The file has the tied weights under all names of the model's state_dict."""
    start(workspace, server, "edge-tied", options={"model": "tied"})
    section = {"clients_per_round": 1, "min_clients": 1}
    run = server.create("tied", task={"options": {"model": "tied"}}, round=section, stop={"rounds": 1})
    server.completed(run)
    path, address = tmp_path / "tied.safetensors", str(server.settings["admin_listen"])
    result = run_fl("export", run, "--out", str(path), "--insecure", "--server", address, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    model = tied()
    model.load_state_dict(load_file(path), strict=True)
    assert digest_by_hand(model) == server.rounds(run)[0].model_digest


def known(server: Coordinator) -> set[str]:
    """Ids of all runs."""
    with server.admin() as admin:
        return {run.run_id for run in admin.runs.list_runs()}


def test_a_round_that_is_not_kept_cannot_be_exported(fleet: Fleet, tmp_path: Path) -> None:
    """The error names the kept rounds; exit code 2, and no file."""
    run = fleet.server.create("pruned")
    fleet.server.completed(run)
    address = str(fleet.server.settings["admin_listen"])
    arguments = ("--round", "77", "--out", "x.safetensors", "--insecure", "--server", address)
    result = run_fl("export", run, *arguments, folder=tmp_path)
    assert result.returncode == 2
    assert '"latest", "best" or a kept round (' in result.stderr
    assert not (tmp_path / "x.safetensors").exists()


@pytest.mark.slow  # test_simulation has a model with batch norm
def test_a_model_with_batchnorm_goes_over_the_wire(workspace: Workspace, server: Coordinator, tmp_path: Path) -> None:
    """Floating buffers are averaged, batch counts take the maximum, and a second run has the same bits."""
    for index in range(2):
        start(workspace, server, f"edge-{index}", options={"model": "batchnorm"}, shard=shard(index))
    task = {"options": {"model": "batchnorm"}}
    server.create("norm", task=task, round=PAIR)
    server.create("norm-again", task=task, round=PAIR)
    assert server.digests("norm") == server.digests("norm-again")
    model = load_file(next((tmp_path / "server-state" / "checkpoints").glob("run-norm/round-000002/model.safetensors")))
    # Three rounds of one epoch: 96 examples in batches of 16 are six.
    assert int(model["1.num_batches_tracked"]) == 18
    assert not model["1.running_mean"].eq(0).any()


def shard(index: int) -> dict[str, Any]:
    """Half of the examples."""
    return {"partition": {"method": "iid", "clients": 2, "seed": 1}, "index": index}


def transferred(server: Coordinator, direction: str, kind: str) -> float:
    """Tensor bytes so far, as /metrics counts them."""
    with urllib.request.urlopen(f"http://{server.settings['metrics_listen']}/metrics", timeout=TIMEOUT_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples if sample.name == "fl_transfer_bytes_total"]
    wanted = {"direction": direction, "kind": kind}
    return sum(sample.value for sample in samples if sample.labels == wanted)


def test_frozen_parts_are_downloaded_once_and_never_uploaded(workspace: Workspace, server: Coordinator) -> None:
    """Each of two clients fetches a frozen table of 64 KiB once in three rounds, and no upload contains it."""
    for index in range(2):
        start(workspace, server, f"edge-{index}", options={"model": "frozen"}, shard=shard(index))
    run = server.create("frozen", task={"options": {"model": "frozen"}}, round=PAIR)
    server.completed(run)
    table, trained = FROZEN_ROWS * 4 * 8, 43 * 4
    assert transferred(server, "down", "frozen") == 2 * table
    assert transferred(server, "up", "update") == 3 * 2 * trained
    assert transferred(server, "down", "model") == 3 * 2 * trained
    assert server.rounds(run)[2].bytes_down < 2048
