"""/metrics of a real coordinator and a real daemon, behind a run: it is true, and Prometheus' own tool reads it."""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
import time
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.harness import Coordinator, Daemon
from tests.integration.processes import Place, eventually

PAGES = ("coordinator", "daemon")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The two pages once a run of two rounds of one client is over, and the run."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with Place(tmp_path_factory.mktemp("pages")) as place:
        server = Coordinator(place).serve()
        daemon = Daemon(place, server, "a-device", metrics_listen=f"127.0.0.1:{port}").start()
        run = server.completed(server.create("r", round={"clients_per_round": 1, "min_clients": 1}, stop={"rounds": 2}))
        address = daemon.settings["metrics_listen"]
        admitted = ("fl_client_updates_total", "result=admitted")
        eventually(lambda: samples(read(address))[admitted] == 2, "the daemon has its receipts")
        addresses = (server.settings["metrics_listen"], daemon.settings["metrics_listen"])
        yield dict(zip(PAGES, map(read, addresses), strict=True)), run


def read(address):
    """The page as it is sent."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
        return answer.read().decode()


def samples(page):
    """(name, labels) -> value."""
    families = text_string_to_metric_families(page)
    return {
        (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.mark.parametrize("which", PAGES)
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_prometheus_own_tool_finds_nothing_to_say(pages, which):
    """`promtool check metrics` reads the page, and knows no convention that it breaks."""
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=pages[0][which], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


def test_the_coordinator_tells_of_the_run_what_the_ledger_has(pages):
    """State, rounds, last commit, best value and norms; what runs here, and where."""
    texts, run = pages
    found = samples(texts["coordinator"])
    assert found["fl_run_state", "run=r", "state=completed"] == found["fl_runs", "state=completed"] == 1
    assert found["fl_round", "run=r"] == found["fl_rounds_planned", "run=r"] == 2
    assert found["fl_last_commit_timestamp_seconds", "run=r"] == pytest.approx(
        run.latest.committed.ToNanoseconds() / 1e9
    )
    assert found["fl_evaluation_best", "metric=accuracy", "run=r"] == run.best.metrics["accuracy"]
    assert found["fl_norm", "of=update_smallest", "run=r"] == found["fl_norm", "of=update_largest", "run=r"] > 0
    assert found["fl_update_staleness_rounds_count", "run=r"] == 2
    assert found["fl_training_loss", "run=r"] == run.latest.training_loss
    assert 0 < found["fl_state_dir_available_bytes",] <= found["fl_state_dir_size_bytes",]
    assert found["fl_draining",] == 0
    assert [key for key in found if key[0] == "fl_build_info"]


def test_the_daemon_tells_of_its_work(pages):
    """Two updates were made and admitted; loss, examples, device and disk are known by then."""
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
def test_no_series_is_a_clients_own(pages, which):
    """Not in any label; what a scraper adds is its own affair."""
    assert "a-device" not in pages[0][which]
