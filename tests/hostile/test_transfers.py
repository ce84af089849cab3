"""The transfers of one registered client stay within its share, and an honest run is not affected."""

from __future__ import annotations

import re
import urllib.request
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from tests.hostile.assigned import begin_run_of
from tests.hostile.attacker import Attacker
from tests.hostile.attacks import query_storm, refetch, silent_uploads, unread_bytes, unread_fetches
from tests.hostile.federation import Federation, Memory
from tests.hostile.target import for_seconds, target, under
from tests.marks import slow_except
from tests.processes.process import TIMEOUT_S, Workspace, eventually

MIB = 1 << 20
ATTACK_S = 5.0


def metric(federation: Federation, sample: str) -> float:
    """A sample of the coordinator's metrics by name and labels; 0 if it is missing."""
    address = federation.server.settings["metrics_listen"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as page:
        found = re.search(rf"^{re.escape(sample)} (\S+)$", page.read().decode(), re.MULTILINE)
    return float(found[1]) if found else 0.0


def metric_is_zero(federation: Federation, sample: str) -> bool:
    """Whether the sample of the coordinator's page is 0."""
    return metric(federation, sample) == 0


def refused(federation: Federation, limit: str) -> float:
    """Calls that were refused at a limit of the client, or because too many calls of its method were open."""
    too_many = metric(federation, 'fl_requests_refused_total{port="listen",reason="calls"}')
    return too_many + metric(federation, f'fl_transfer_limits_total{{limit="{limit}"}}')


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "limit", "calls", "most_mib"),
    slow_except(
        [
            (silent_uploads, "uploads", 300, 45),
            (unread_fetches, "downloads", 100, 100),
            (query_storm, "calls", 50, 40),
            (refetch, "fetches", 10, 40),
        ],
        (refetch, "fetches", 10, 40),
    ),
    ids=["silent uploads", "unread fetches", "query storm", "refetch"],
)
def test_a_client_gets_no_more_than_its_share(
    federation: Federation,
    undisturbed: list[str],
    attack: ModuleType,
    limit: str,
    calls: int,
    most_mib: float,
) -> None:
    """Its calls are refused and counted, memory does not grow, and the honest run has the same bits."""
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
        drained = partial(metric_is_zero, federation, sample)
        eventually(drained, f"no {kind} are left")


@pytest.mark.slow
def test_bytes_that_nobody_reads_are_limited(federation: Federation, undisturbed: list[str]) -> None:
    """A call holds `transfers.ahead_mib` of them. Downloads that read nothing go on sending behind their request."""
    begin_run_of(federation, "unread-bytes")
    memory, run = Memory(federation.server.pid), federation.begin_run()
    memory.forget_peak()
    usual = memory.now()
    unread_bytes.attack(target(federation, "unread-bytes"), for_seconds(ATTACK_S))
    assert memory.peak() - usual < 45
    federation.still_works(undisturbed, run)


def test_repeated_fetches_are_limited(federation: Federation) -> None:
    """Sixteen fetches of an assignment are allowed, and then one in half a minute."""
    sent = metric(federation, 'fl_transfer_bytes_total{direction="down",kind="frozen"}')
    assert sent < (16 + 4) * 2.2 * MIB


def test_an_attack_without_work_is_a_failure(federation: Federation, tmp_path: Path) -> None:
    """An attack on its own assignment that ends before it got one reports that it attacked nothing."""
    attacker = Attacker("unread_bytes", target(federation, "without-work"), tmp_path / "out")
    attacker.ask_to_end()
    assert "the attacker got no work" in attacker.failure()


@pytest.mark.slow
def test_an_attack_ends_when_it_is_asked_to(federation: Federation, tmp_path: Path) -> None:
    """It has begun when its constructor returns, and it has no time of its own."""
    attacker = Attacker("silent_connections", target(federation), tmp_path / "out")
    open_ones = 'fl_connections{port="listen"}'
    eventually(lambda: metric(federation, open_ones) > 50, "it holds connections")
    attacker.ask_to_end()
    assert attacker.failure() == ""
    eventually(lambda: metric(federation, open_ones) < 50, "its connections are closed")


@pytest.mark.slow
def test_honest_clients_retry_after_a_limit_and_lose_nothing(workspace: Workspace, undisturbed: list[str]) -> None:
    """Uploads are refused at first. Nothing is trained twice, and the models are the same bit for bit.

    Each assignment grants two calls, and a work of four takes less than the second that the limit wants for the other
    two. A machine on which it takes longer gets another run.
    """
    tight, runs = Federation(workspace, transfers={"calls": 2, "calls_per_s": 2.0}), 0
    while refused(tight, "calls") < 1:
        runs += 1
        assert tight.server.digests(tight.begin_run(stop={"rounds": 2})) == undisturbed[:2]
    trained = [event for daemon in tight.daemons.values() for event in daemon.events("trained")]
    assert len(trained) == 4 * runs
