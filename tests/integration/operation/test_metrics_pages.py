"""/metrics of a real coordinator and a real daemon after a run: the values are right, and promtool reads them."""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protos.fl.v1 import admin_pb2
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import TIMEOUT_S, Workspace, eventually

PAGES = ("coordinator", "daemon")


Pages = tuple[dict[str, str], admin_pb2.RunStatus]
"""Program -> its metrics page; and the run."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    """The two pages after a run of two rounds with one client, and the run."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with Workspace(tmp_path_factory.mktemp("pages")) as workspace:
        server = Coordinator(workspace).serve()
        daemon = Daemon(workspace, server, "a-device", metrics_listen=f"127.0.0.1:{port}").start()
        run = server.completed(
            server.create(
                "r", round={"clients_per_round": 1, "min_clients": 1}, stop={"rounds": 2, "metric": "accuracy"}
            )
        )
        address = daemon.settings["metrics_listen"]
        admitted = ("fl_client_updates_total", "result=admitted")
        eventually(lambda: samples(read(address))[admitted] == 2, "the daemon has its receipts")
        addresses = (server.settings["metrics_listen"], daemon.settings["metrics_listen"])
        yield dict(zip(PAGES, map(read, addresses), strict=True)), run


def read(address: str) -> str:
    """The text of the page."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
        return str(answer.read().decode())


def samples(page: str) -> dict[tuple[str, ...], float]:
    """(name, labels) -> value."""
    families = text_string_to_metric_families(page)
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize("which", PAGES)
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_no_problem(pages: Pages, which: str) -> None:
    """`promtool check metrics` reads the page without a complaint."""
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=pages[0][which], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_coordinators_metrics_are_those_of_the_ledger(pages: Pages) -> None:
    """They have state, rounds, last commit, best value and norms, the version and the address."""
    texts, run = pages
    found = samples(texts["coordinator"])
    assert found["fl_run_state", "run=r", "state=completed"] == found["fl_runs", "state=completed"] == 1
    assert found["fl_round", "run=r"] == found["fl_rounds_planned", "run=r"] == 2
    assert found["fl_last_commit_timestamp_seconds", "run=r"] == pytest.approx(
        run.latest.committed.ToNanoseconds() / 1e9
    )
    assert found["fl_evaluation_best", "better=higher", "metric=accuracy", "run=r"] == run.best.metrics["accuracy"]
    assert found["fl_norm", "of=update_smallest", "run=r"] == found["fl_norm", "of=update_largest", "run=r"] > 0
    assert found["fl_update_staleness_rounds_count", "run=r"] == 2
    assert found["fl_training_loss", "run=r"] == run.latest.training_loss
    assert 0 < found["fl_state_dir_available_bytes",] <= found["fl_state_dir_size_bytes",]
    assert found["fl_draining",] == 0
    assert [key for key in found if key[0] == "fl_build_info"]


def test_the_daemons_metrics_count_its_work(pages: Pages) -> None:
    """Two updates were trained and admitted; loss, examples, device and disk are set."""
    found = samples(pages[0]["daemon"])
    assert found["fl_client_rounds_trained_total",] == found["fl_client_updates_total", "result=admitted"] == 2
    assert found["fl_client_updates_total", "result=refused"] == 0
    assert math.isfinite(found["fl_client_training_loss",])
    assert 0 <= time.time() - found["fl_client_last_update_timestamp_seconds",] < 600
    assert found["fl_client_examples",] > 0
    assert [key for key in found if key[0] == "fl_client_device_info" and key[1] == "device=cpu"]
    assert not [key for key in found if key[0] == "fl_client_device_memory_bytes"]
    assert 0 < found["fl_client_state_dir_available_bytes",]


@pytest.mark.parametrize("which", PAGES)
def test_no_series_belongs_to_one_client(pages: Pages, which: str) -> None:
    """No label names a client; a scraper may add labels."""
    assert "a-device" not in pages[0][which]
