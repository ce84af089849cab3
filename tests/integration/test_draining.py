"""A coordinator is told to leave while many uploads run, and starts again: no update is lost, and none made twice."""

from __future__ import annotations

import signal
import time
from collections import Counter

import pytest

from tests.chaos.proxy import Proxy
from tests.integration.harness import PRESENT, Coordinator, Daemon
from tests.integration.processes import eventually, write_toml

SIZE = 3
CHUNK = 64 << 10
"""Updates of 256 KiB come in five chunks."""
ALL = {
    "task": {"options": {"model": "broad"}},
    "round": {"clients_per_round": SIZE, "min_clients": SIZE, "quorum": SIZE},
}
pytestmark = pytest.mark.slow


class Site:
    """A coordinator with so much grace, and daemons that each reach it through a proxy."""

    def __init__(self, place, drain_grace_s):
        limits = {"chunk_bytes": CHUNK, "reattach_grace_s": 60.0}
        settings = {"limits": limits, "drain_grace_s": drain_grace_s}
        self.server = Coordinator(place, settings=settings).serve()
        self.proxies = [Proxy(self.server.address) for _ in range(SIZE)]
        self.daemons = [self._daemon(place, index, proxy) for index, proxy in enumerate(self.proxies)]
        for daemon in self.daemons:
            eventually(
                lambda name=daemon.client_id: self.server.client(name).state == PRESENT, f"{daemon.name} attends"
            )

    def _daemon(self, place, index, proxy):
        shard = {"partition": {"method": "iid", "clients": SIZE, "seed": 1}, "index": index}
        daemon = Daemon(place, self.server, f"edge-{index}", shard=shard, options={"model": "broad"})
        write_toml(daemon.config, {**daemon.settings, "server": proxy.address})
        return daemon.start()

    def told_to_leave(self, run):
        """A run of two rounds, and SIGTERM when every upload of the first has brought one chunk of five."""
        traps = [proxy.cut("up", 2, action="hold") for proxy in self.proxies]
        self.server.create(run, **ALL, stop={"rounds": 2})
        for trap in traps:
            assert trap.snapped.wait(60)
        self.server.signal(signal.SIGTERM)
        self.server.logged("draining")
        time.sleep(1)  # a coordinator that waits for nobody has closed its ports by now

    def as_if_nothing_had_happened(self, run):
        """The run completes, with the models of an undisturbed one; every update was made once and counted."""
        digests = self.server.digests(run)
        again = self.server.create("undisturbed", **ALL, stop={"rounds": len(digests)})
        assert self.server.digests(again) == digests
        for daemon in self.daemons:
            rounds = dict.fromkeys(range(len(digests)), 1)
            assert Counter(line["round"] for line in daemon.events("trained", run=run)) == rounds
            eventually(lambda daemon=daemon: len(daemon.events("outcome", run=run)) >= len(digests), "it heard of all")
            counted = {line["round"] for line in daemon.events("outcome", run=run, counted=True)}
            assert counted == rounds.keys() == {line["round"] for line in daemon.events("submitted", run=run)}


@pytest.fixture
def site(place, request):
    """All are there."""
    site = Site(place, request.param)
    yield site
    for proxy in site.proxies:
        proxy.close()


@pytest.mark.parametrize("site", [50.0], indirect=True)
def test_every_upload_in_flight_is_awaited(site):
    """One after the other ends, and is acknowledged by the coordinator that is leaving; nothing is sent twice."""
    site.told_to_leave("awaited")
    for proxy, daemon in zip(site.proxies, site.daemons, strict=True):
        assert site.server.exit_code is None
        proxy.pass_on()
        daemon.logged("submitted", run="awaited", round=0)
    assert site.server.wait() == 0
    assert len(site.server.events("round_committed", run="awaited")) == 1
    site.server.serve()
    site.as_if_nothing_had_happened("awaited")
    assert site.server.events("upload_resumed") == []


@pytest.mark.parametrize("site", [3.0], indirect=True)
def test_what_does_not_end_in_the_grace_goes_on_afterwards(site):
    """One update is acknowledged in time and counts; the others are taken from where they were."""
    site.told_to_leave("cut-off")
    site.proxies[0].pass_on()
    site.daemons[0].logged("submitted", run="cut-off", round=0)
    assert site.server.wait() == 0
    for proxy in site.proxies[1:]:
        proxy.pass_on()
    site.server.serve()
    site.as_if_nothing_had_happened("cut-off")
    resumed = [(line["client"], line["offset"]) for line in site.server.events("upload_resumed")]
    assert sorted(resumed) == [("edge-1", CHUNK), ("edge-2", CHUNK)]


@pytest.mark.parametrize("site", [30.0], indirect=True)
def test_restarts_under_load_change_no_bit(site):
    """Four coordinators follow each other while rounds run as fast as they can."""
    site.server.create("restarted", **ALL, stop={"rounds": 24})
    for restart in range(1, 5):
        site.server.logged("round_committed", 4 * restart, run="restarted")
        assert site.server.terminate() == 0
        site.server.serve()
    site.as_if_nothing_had_happened("restarted")
