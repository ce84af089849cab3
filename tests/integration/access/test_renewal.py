"""Devices with certificates of seconds: a run goes on while every daemon renews its certificate again and again."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.processes.certificates import Pki
from tests.processes.enrolling import enrolled_daemon
from tests.processes.enrollment import EnrollingCoordinator
from tests.processes.federation import TASK, Daemon
from tests.processes.process import Workspace, eventually

SHORTEST_S = 10.0
"""The shortest lifetime that a coordinator accepts."""


@dataclass
class Site:
    """A coordinator, and daemons that train steps of 20 ms."""

    workspace: Workspace
    size: int
    lifetime_s: float = SHORTEST_S
    transfers: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    """Further settings of the coordinator."""
    daemons: dict[str, Daemon] = field(default_factory=dict)

    def __post_init__(self) -> None:
        section: dict[str, Any] = {"lifetime_s": self.lifetime_s, "renewals_per_min": 60.0}
        settings = {"transfers": self.transfers, "limits": {"chunk_bytes": 64 << 10}, **self.more}
        pki = Pki(self.workspace.folder / "pki")
        self.server = EnrollingCoordinator(self.workspace, pki, settings, **section).serve()
        for index in range(self.size):
            shard = {"partition": {"method": "iid", "clients": self.size, "seed": 1}, "index": index}
            options = {"model": "broad", "step_s": 0.02}
            name = f"edge-{index}"
            self.daemons[name] = enrolled_daemon(
                self.server, self.workspace, name, shard=shard, options=options
            ).start()
        for name in self.daemons:
            self.server.until_present(name)

    def until_moved(self, times: int) -> None:
        """Wait until every daemon has moved to a connection with a new certificate so often."""
        for daemon in self.daemons.values():
            for number in range(1, times + 1):
                daemon.logged("moved", number)

    def problems(self) -> dict[str, list[Any]]:
        """Everything that a renewal must not cause, by event."""
        server = {event: self.server.events(event) for event in ("client_lost", "update_refused", "rpc_failed")}
        names = ("disconnected", "not_moved", "certificates_not_used", "work_failed", "update_refused",
                 "renewal_failed", "renewal_refused", "renewal_broken", "fenced")  # fmt: skip
        daemons = {name: [line for each in self.daemons.values() for line in each.events(name)] for name in names}
        return {event: lines for event, lines in {**server, **daemons}.items() if lines}

    def registrations(self) -> list[int]:
        """Of each daemon."""
        return [len(daemon.events("registered")) for daemon in self.daemons.values()]

    def stopped(self, run: str) -> int:
        """End the run between two rounds; returns the number of its rounds."""
        with self.server.admin() as admin:
            admin.runs.pause_run(run)
            self.server.until(run, lambda status: status.rounds_done == self.rounds(), "its round is committed")
            admin.runs.stop_run(run, "it has seen enough")
        return self.rounds()

    def rounds(self) -> int:
        """Rounds that have begun. Fails if one of them has begun twice."""
        began = [(line["round"], line["attempt"]) for line in self.server.events("attempt_opened")]
        assert began == [(number, began[0][1]) for number in range(len(began))]
        return len(began)

    def check_work(self, rounds: int) -> None:
        """Each daemon has trained and sent each round, and each of its updates counted.

        An update may be sent twice: the coordinator repeats an assignment on a new stream, and its receipt may come at
        the same moment. The second one gets the same receipt.
        """
        for daemon in self.daemons.values():
            assert [line["round"] for line in daemon.events("trained")] == list(range(rounds)), daemon.name
            assert {line["round"] for line in daemon.events("submitted")} == set(range(rounds)), daemon.name
        accepted = [line["accepted"] for line in self.server.events("round_committed")]
        assert accepted == [self.size] * rounds


MODEL: dict[str, Any] = {"task": {"name": TASK, "options": {"model": "broad"}}}


def endless(size: int) -> dict[str, Any]:
    """Sections of a run in which every daemon works in each round."""
    return {**MODEL, "round": {"clients_per_round": size, "min_clients": size}, "stop": {"rounds": 100_000}}


@pytest.mark.slow
def test_daemons_renew_their_certificates_during_a_run(workspace: Workspace) -> None:
    """Beyond the end of the first certificates: one registration each, every update counts, nothing is refused."""
    site = Site(workspace, 3, lifetime_s=15.0)
    run = site.server.create("renewed", **endless(3))
    site.until_moved(1)
    ended = time.time() + site.lifetime_s
    eventually(lambda: time.time() > ended, "the first certificates have ended")
    site.server.logged("round_committed", len(site.server.events("round_committed")) + 2)
    rounds = site.stopped(run)
    assert (site.problems(), site.registrations()) == ({}, [1, 1, 1])
    site.check_work(rounds)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_renewals_change_no_bit(workspace: Workspace, tmp_path: Path) -> None:
    """Each daemon gets twenty certificates in one run. No update is lost, and the bits are those of a quiet run."""
    site = Site(workspace, 3)
    run = site.server.create("twenty", **endless(3))
    site.until_moved(20)
    rounds = site.stopped(run)
    assert (site.problems(), site.registrations()) == ({}, [1, 1, 1])
    site.check_work(rounds)
    digests = [summary.model_digest for summary in site.server.rounds(run)]
    with Workspace(tmp_path / "quiet") as other:
        other.folder.mkdir()
        quiet = Site(other, 3, lifetime_s=86_400.0)
        sections = endless(3) | {"stop": {"rounds": rounds}}
        again = quiet.server.create("twenty", **sections)
        eventually(lambda: quiet.server.run(again).HasField("ended"), "the quiet run ends", within_s=240)
        assert quiet.server.digests(again) == digests


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thirty_daemons_with_certificates_of_twenty_seconds(workspace: Workspace) -> None:
    """Three certificates each, beyond the end of the second: no daemon drops out, and no update is lost."""
    site = Site(workspace, 30, lifetime_s=20.0)
    run = site.server.create("thirty", **endless(30))
    site.until_moved(3)
    rounds = site.stopped(run)
    assert (site.problems(), set(site.registrations())) == ({}, {1})
    site.check_work(rounds)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_upload_that_is_longer_than_a_certificate_goes_on(workspace: Workspace) -> None:
    """The coordinator ends the call with the old certificate. The rest goes over the new connection."""
    site = Site(workspace, 2, transfers={"bytes_per_s": 20_000.0})
    run = site.server.create("long", **(endless(2) | {"stop": {"rounds": 1}}))
    eventually(lambda: site.server.run(run).HasField("ended"), "the run ends", within_s=240)
    assert site.server.events("upload_resumed")
    assert site.server.events("rpc_refused", rpc="FetchModel", code="UNAUTHENTICATED")
    assert (site.server.events("client_lost"), site.registrations()) == ([], [1, 1])
    assert [line["attempt"] for line in site.server.events("attempt_opened")] == [0]
