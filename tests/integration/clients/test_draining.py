"""A coordinator is stopped during many uploads and restarted: no update is lost, and none is trained twice."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.chaos.proxy import Proxy
from tests.processes.federation import Coordinator, Daemon
from tests.processes.process import Workspace, write_toml

SIZE = 3
CHUNK = 64 << 10
"""Updates of 256 KiB come in five chunks."""
ALL = {
    "task": {"options": {"model": "broad"}},
    "round": {"clients_per_round": SIZE, "min_clients": SIZE, "quorum": SIZE},
}
pytestmark = pytest.mark.slow


class Site:
    """A coordinator with this grace, and daemons that each reach it through a proxy."""

    def __init__(self, workspace: Workspace, drain_grace_s: float) -> None:
        limits = {"chunk_bytes": CHUNK, "reattach_grace_s": 60.0}
        settings = {"limits": limits, "drain_grace_s": drain_grace_s}
        self.server = Coordinator(workspace, settings=settings).serve()
        self.proxies = [Proxy(self.server.address) for _ in range(SIZE)]
        self.daemons = [self._daemon(workspace, index, proxy) for index, proxy in enumerate(self.proxies)]
        for daemon in self.daemons:
            self.server.until_present(daemon.client_id)

    def _daemon(self, workspace: Workspace, index: int, proxy: Proxy) -> Daemon:
        shard = {"partition": {"method": "iid", "clients": SIZE, "seed": 1}, "index": index}
        daemon = Daemon(workspace, self.server, f"edge-{index}", shard=shard, options={"model": "broad"})
        write_toml(daemon.config, {**daemon.settings, "server": proxy.address})
        return daemon.start()

    def stopped_during_uploads(self, run: str) -> None:
        """Create a run of two rounds and send SIGTERM once every upload of the first has passed one chunk of five."""
        traps = [proxy.cut("up", 2, action="hold") for proxy in self.proxies]
        self.server.create(run, **ALL, stop={"rounds": 2})
        for trap in traps:
            assert trap.triggered.wait(60)
        self.server.signal(signal.SIGTERM)
        self.server.logged("draining")
        time.sleep(1)  # a coordinator that does not wait would have closed its ports

    def check_undisturbed(self, run: str) -> None:
        """Check that the run has the undisturbed models, and that every update was trained once and counted."""
        digests = self.server.digests(run)
        again = self.server.create("undisturbed", **ALL, stop={"rounds": len(digests)})
        assert self.server.digests(again) == digests
        for daemon in self.daemons:
            rounds = dict.fromkeys(range(len(digests)), 1)
            assert Counter(line["round"] for line in daemon.events("trained", run=run)) == rounds
            daemon.logged("outcome", len(digests), run=run)
            counted = {line["round"] for line in daemon.events("outcome", run=run, counted=True)}
            assert counted == rounds.keys() == {line["round"] for line in daemon.events("submitted", run=run)}


@pytest.fixture
def site(workspace: Workspace, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A site with all daemons connected."""
    site = Site(workspace, request.param)
    yield site
    for proxy in site.proxies:
        proxy.close()


@pytest.mark.parametrize("site", [50.0], indirect=True)
def test_all_uploads_in_flight_are_awaited(site: Site) -> None:
    """The stopping coordinator acknowledges one upload after the other; nothing is sent twice."""
    site.stopped_during_uploads("awaited")
    for proxy, daemon in zip(site.proxies, site.daemons, strict=True):
        assert site.server.exit_code is None
        proxy.pass_on()
        daemon.logged("submitted", run="awaited", round=0)
    assert site.server.wait() == 0
    assert len(site.server.events("round_committed", run="awaited")) == 1
    site.server.serve()
    site.check_undisturbed("awaited")
    assert site.server.events("upload_resumed") == []


@pytest.mark.parametrize("site", [10.0], indirect=True)
def test_uploads_beyond_the_grace_are_resumed_after_the_restart(site: Site) -> None:
    """One update is acknowledged in time and counts. The others resume."""
    site.stopped_during_uploads("cut-off")
    site.proxies[0].pass_on()
    site.daemons[0].logged("submitted", run="cut-off", round=0)
    assert site.server.wait() == 0
    for proxy in site.proxies[1:]:
        proxy.pass_on()
    site.server.serve()
    site.check_undisturbed("cut-off")
    resumed = [(line["client"], line["offset"]) for line in site.server.events("upload_resumed")]
    assert sorted(resumed) == [("edge-1", CHUNK), ("edge-2", CHUNK)]


@pytest.mark.parametrize("site", [30.0], indirect=True)
def test_restarts_under_load_change_no_bit(site: Site) -> None:
    """The coordinator restarts four times while rounds run as fast as possible."""
    site.server.create("restarted", **ALL, stop={"rounds": 24})
    for restart in range(1, 5):
        site.server.logged("round_committed", 4 * restart, run="restarted")
        assert site.server.terminate() == 0
        site.server.serve()
    site.check_undisturbed("restarted")
