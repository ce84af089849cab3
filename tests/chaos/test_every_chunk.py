"""The link is cut at every chunk boundary of an upload and a download, and inside every chunk. Nothing is lost.

The model has 262,156 bytes: three chunks of 100,000 bytes at most. In each round of one run, one daemon's upload and
the other daemon's download are cut at the next point.
"""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.proxy import Proxy
from tests.chaos.traps import Where
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import TIMEOUT_S, Workspace, write_toml

CHUNK, SIZE, CHUNKS = 100_000, 262_156, 3
POINTS: list[tuple[Where, int]] = [
    ("before", 1),
    *((where, number) for number in range(1, CHUNKS + 1) for where in ("inside", "behind")),
]
SECTIONS = {
    "task": {"options": {"model": "broad"}},
    "round": {"clients_per_round": 2, "min_clients": 2},
    "stop": {"rounds": 2 + len(POINTS)},
}


class Pair:
    """A coordinator and two daemons, each behind a proxy."""

    def __init__(self, workspace: Workspace) -> None:
        limits = {"chunk_bytes": CHUNK, "reattach_grace_s": 60.0}
        self.server = Coordinator(workspace, settings={"limits": limits}).serve()
        self.proxies = [Proxy(self.server.address) for _ in range(2)]
        self.metrics = [str(self.server.settings["metrics_listen"]), free_address()]
        for index, proxy in enumerate(self.proxies):
            self.start(workspace, index, server=proxy.address, metrics_listen=self.metrics[1] if index else "")

    def start(self, workspace: Workspace, index: int, **settings: Any) -> None:
        """Start a daemon with half of the examples and wait until it attends."""
        name, shard = f"edge-{index}", {"partition": {"method": "iid", "clients": 2, "seed": 1}, "index": index}
        daemon = Daemon(workspace, self.server, name, shard=shard, options={"model": "broad"})
        write_toml(daemon.config, {**daemon.settings, **settings})
        daemon.start()
        self.server.until_present(name)

    def bytes(self) -> tuple[float, float]:
        """Tensor bytes so far: (received by the coordinator from both, received by the second daemon)."""
        up = {"direction": "up", "kind": "update"}
        return counted(self.metrics[0], "fl", up), counted(self.metrics[1], "fl_client", {"direction": "down"})

    def one_round(self, run: str, before: int) -> None:
        """Run exactly one round of a paused run; returns after its commit."""
        with self.server.admin() as admin:
            admin.runs.resume_run(run)
            self.server.until(run, lambda status: status.cohort, "a round is under way")
            admin.runs.pause_run(run)
        now = self.server.until(run, lambda status: status.rounds_done > before and not status.cohort, "it is over")
        assert now.rounds_done == before + 1


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Two idle daemons and their coordinator."""
    with Workspace(tmp_path) as workspace:
        pair = Pair(workspace)
        yield pair
        for proxy in pair.proxies:
            proxy.close()


def free_address() -> str:
    """A free address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def counted(address: str, namespace: str, labels: dict[str, str]) -> float:
    """The tensor bytes of a process's /metrics with these labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples if sample.labels == labels]
    return sum(sample.value for sample in samples if sample.name == f"{namespace}_transfer_bytes_total")


@pytest.mark.slow
def test_a_cut_at_every_chunk_costs_a_chunk_at_most(pair: Pair) -> None:
    """The models are those without cuts, and each end receives at most one chunk twice."""
    ups, downs = pair.proxies
    undisturbed = pair.server.digests(pair.server.create("undisturbed", **SECTIONS))
    each_round = pair.bytes()[1] / len(undisturbed)
    with pair.server.admin() as admin:
        run = pair.server.create("cut", **SECTIONS)
        admin.runs.pause_run(run)
    pair.server.until(run, lambda status: status.rounds_done and not status.cohort, "the first round is over")
    for before, (where, number) in enumerate(POINTS, start=1):
        up, down = pair.bytes()
        traps = ups.cut("up", number, where), downs.cut("down", number, where)
        pair.one_round(run, before)
        assert all(trap.triggered.is_set() for trap in traps), f"nothing was cut {where} chunk {number}"
        up_again, down_again = (now - then for now, then in zip(pair.bytes(), (up, down), strict=True))
        assert 0 <= up_again - 2 * SIZE <= CHUNK
        assert 0 <= down_again - each_round <= CHUNK
    with pair.server.admin() as admin:
        admin.runs.resume_run(run)
    assert undisturbed == pair.server.digests(run)
    assert ups.cuts == downs.cuts == len(POINTS)
