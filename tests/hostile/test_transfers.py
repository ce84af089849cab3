"""What one registered client can cost by its transfers: not more than its share, while an honest run ends as always."""

from __future__ import annotations

import re
import urllib.request
from types import ModuleType

import pytest

from tests.hostile.assigned import begin_run_of
from tests.hostile.attacks import query_storm, refetch, silent_uploads, unread_fetches
from tests.hostile.federation import Federation, Memory
from tests.hostile.target import target, under
from tests.integration.processes import eventually

MIB = 1 << 20


def metric(federation: Federation, sample: str) -> float:
    """A sample of the coordinator's metrics, by its name and labels as they stand on the page; 0 if it is not there."""
    address = federation.server.settings["metrics_listen"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as page:
        found = re.search(rf"^{re.escape(sample)} (\S+)$", page.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def refused(federation: Federation, limit: str) -> float:
    """Calls that were refused at a limit of the client, or because too many calls of its method were open."""
    too_many = metric(federation, 'fl_requests_refused_total{port="listen",reason="calls"}')
    return too_many + metric(federation, f'fl_transfer_limits_total{{limit="{limit}"}}')


@pytest.mark.parametrize(
    ("attack", "limit", "calls", "most_mib"),
    [
        (silent_uploads, "uploads", 300, 45),
        (unread_fetches, "downloads", 100, 100),
        (query_storm, "calls", 200, 40),
        (refetch, "fetches", 10, 40),
    ],
    ids=["silent uploads", "unread fetches", "query storm", "refetch"],
)
def test_a_client_gets_no_more_than_its_share(federation, undisturbed, attack: ModuleType, limit, calls, most_mib):
    """Its calls are refused and counted, memory stays what it was, and the honest run beside it has the same bits."""
    name = attack.__name__.rpartition(".")[2].replace("_", "-")
    begin_run_of(federation, name, "broad" if attack is query_storm else "frozen")
    memory, before = Memory(federation.server.pid), refused(federation, limit)
    memory.forget_peak()
    usual = memory.now()
    with under(attack.attack, target(federation, name)):
        eventually(lambda: refused(federation, limit) >= before + calls, f"{calls} calls are refused: {limit}")
        federation.still_works(undisturbed, federation.begin_run())
    assert memory.peak() - usual < most_mib
    for kind in ("uploads", "downloads", "queries"):
        sample = f'fl_transfer_calls{{kind="{kind}"}}'
        eventually(lambda sample=sample: metric(federation, sample) == 0, f"no {kind} are left")


def test_what_is_fetched_again_and_again_is_sent_a_few_times(federation):
    """Sixteen times for an assignment, and after that once in half a minute."""
    sent = metric(federation, 'fl_transfer_bytes_total{direction="down",kind="frozen"}')
    assert sent < (16 + 4) * 2.2 * MIB


def test_honest_clients_that_meet_a_limit_come_later_and_lose_nothing(place, undisturbed):
    """Each upload is refused at first here: nothing is trained twice, and the models are the same, bit for bit."""
    tight = Federation(place, transfers={"calls": 2, "calls_per_s": 5.0})
    digests = tight.server.digests(tight.begin_run(stop={"rounds": 2}))
    assert digests == undisturbed[:2]
    assert refused(tight, "calls") >= 2
    trained = [event for daemon in tight.daemons.values() for event in daemon.events("trained")]
    assert len(trained) == 4
