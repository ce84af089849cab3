"""Sites with policies: a real coordinator, real daemons, and a device that refuses by each kind of rule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.hashes import SHA256

from protos.fl.v1 import admin_pb2, coordinator_pb2
from tests.marks import slow_except
from tests.processes.certificates import Pki, section
from tests.processes.federation import Coordinator, Daemon, Fleet, SecureCoordinator
from tests.processes.policies import without_floors
from tests.processes.process import Workspace, eventually, run_fl

EVERYBODY = {"sampling": "bernoulli", "rate": 1.0, "clients_per_round": None, "min_clients": 2, "quorum": 2}
"""Every client that may be drawn is in every cohort; the deadline is ten minutes."""
ONE = {"clients_per_round": 1, "min_clients": 1}
OTHER_CODE = "00" * 32


class Site(Daemon):
    """A daemon with a policy file, which its site replaces while it runs."""

    policy: Path

    def rules(self, text: str) -> None:
        """Replace the file, and wait until the daemon works by it: it registers anew, or takes no work."""
        before = len(self.events("policy_changed"))
        beside = self.policy.with_suffix(".new")
        beside.write_text(without_floors(text))
        beside.replace(self.policy)
        if self.exit_code is None and self.pid:
            self.logged("policy_changed", before + 1)


def site(workspace: Workspace, server: Coordinator, name: str, text: str = "", **settings: Any) -> Site:
    """A site's daemon, not started yet."""
    policy = workspace.folder / f"{name}-policy.toml"
    policy.write_text(without_floors(text))
    gates = {"check_s": 0.05}
    daemon = Site(workspace, server, name, policy=str(policy), gates=gates, **settings)
    daemon.policy = policy
    return daemon


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A folder for all processes of this file."""
    with Workspace(tmp_path_factory.mktemp("policy")) as workspace:
        yield workspace


class PolicyFleet(Fleet):
    """Two devices without a policy and one with, each with a third of the data."""

    def daemon(self, index: int, size: int) -> Daemon:
        daemon = super().daemon(index, 3)
        daemon.configure(labels={"rules": "none"})
        return daemon


@pytest.fixture(scope="module")
def fleet(workspace: Workspace) -> PolicyFleet:
    """Its coordinator quarantines a client after one failure."""
    return PolicyFleet(workspace, 2, quarantine={"failures": 1, "after": 1})


@pytest.fixture(scope="module")
def strict(workspace: Workspace, fleet: PolicyFleet) -> Site:
    """The third device."""
    shard = {"partition": {"method": "iid", "clients": 3, "seed": 1}, "index": 2}
    daemon = site(workspace, fleet.server, "strict", shard=shard)
    daemon.start()
    fleet.server.until_present("strict")
    return daemon


@pytest.fixture(scope="module")
def without(fleet: PolicyFleet) -> list[str]:
    """Digests of a run that never asked the third device."""
    return undisturbed(fleet, "without")


def undisturbed(fleet: PolicyFleet, name: str, **sections: Any) -> list[str]:
    """Digests of a run of the devices without a policy."""
    alone = {"round": EVERYBODY, "stop": {"rounds": 2}, "labels": {"rules": "none"}}
    return fleet.server.digests(fleet.server.create(name, **alone, **sections))


REFUSALS = {
    "tasks": ('[tasks]\nallow = ["digits"]', {}),
    "fingerprints": (f'[tasks.fingerprints]\n"tiny_task:Tiny" = ["{OTHER_CODE}"]', {}),
    "algorithms": ('[algorithms]\nallow = ["fedavg"]', {}),
    "epochs": ("[work]\nmax_epochs = 1", {"local": {"epochs": None, "steps": 5}}),
    "min_batch_size": ("[work]\nmin_batch_size = 17", {}),
    "min_examples": ("[work]\nmin_examples = 1000", {}),
    "min_steps": ("[work]\nmin_steps = 1000", {}),
    "min_clients": ("[work]\nmin_clients = 3", {}),
    "model": ("[work]\nmax_model_bytes = 10", {}),
    "day": ("[day]\nmax_steps = 1", {}),
    "privacy": ("[privacy]\nmax_epsilon = 8.0", {}),
}
FLOORS = ("min_batch_size", "min_examples", "min_steps", "min_clients")
RULES = {"fingerprints": "tasks", "model": "work", **dict.fromkeys(("epochs", *FLOORS), "work")}


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_except(REFUSALS, "tasks", "epochs", "min_clients"))
def test_a_refusal_does_not_hold_up_the_round(fleet: PolicyFleet, strict: Site, without: list[str], kind: str) -> None:
    """The others finish, without the deadline, with the bits of a run that never asked the device. No quarantine."""
    text, sections = REFUSALS[kind]
    if kind == "day":  # what the device did for other tests is not written, because no budget limited it
        registered = len(strict.events("registered"))
        strict.kill()
        strict.start().logged("registered", registered + 1)
    strict.rules(text + f"\n# for {kind}")
    fleet.server.until_present("strict")
    expected = without
    if sections:
        others = fleet.server.create(
            f"without-{kind}", round=EVERYBODY, stop={"rounds": 2}, labels={"rules": "none"}, **sections
        )
        expected = fleet.server.digests(others)
    run = fleet.server.create(f"refused-{kind}", round=EVERYBODY, stop={"rounds": 2}, **sections)
    assert fleet.server.digests(run) == expected
    summaries = fleet.server.rounds(run)
    assert [each.accepted for each in summaries] == [2, 2]
    assert max(each.seconds for each in summaries) < 300
    client, rule = fleet.server.client("strict"), RULES.get(kind, kind)
    assert client.policy_refusals[run].startswith(f"{rule}: ")
    assert not client.HasField("quarantine")
    assert len(strict.events("assignment", run=run)) == 1
    assert not strict.events("trained", run=run)


def test_a_relaxed_policy_takes_effect_in_a_run_under_way(fleet: PolicyFleet, strict: Site) -> None:
    """The operator sees the refusal and its rule. The site allows the method; the device joins without a restart."""
    strict.rules('[algorithms]\nallow = ["scaffold"]')
    fleet.server.until_present("strict")
    fleet.hold()
    fleet.server.create("relaxed", round=EVERYBODY, stop={"rounds": 6})
    fleet.server.until("relaxed", lambda run: run.policy_refusals == {"algorithms": 1}, "it is refused")
    words = shown(fleet, "run", "show", "relaxed")
    assert "1 client refuses this run by policy: algorithms (1)" in words
    assert "relaxed, by policy: algorithms: 'fedcm' is not in algorithms.allow" in shown(
        fleet, "clients", "show", "strict"
    )
    strict.rules('[algorithms]\nallow = ["scaffold", "fedcm"]')
    fleet.server.until("relaxed", lambda run: not run.policy_refusals, "the refusal is over")
    fleet.release()
    fleet.server.completed("relaxed")
    assert fleet.server.rounds("relaxed")[-1].accepted == 3


def shown(fleet: PolicyFleet, *command: str) -> str:
    """The output of an operator's command."""
    server = str(fleet.server.settings["admin_listen"])
    done = run_fl(*command, "--server", server, "--insecure", folder=fleet.workspace.folder)
    assert done.returncode == 0, done.stderr
    return " ".join(done.stdout.split())


def test_the_budget_of_a_day_survives_sigkill(workspace: Workspace, fleet: PolicyFleet) -> None:
    """A device is killed in the only assignment of its day. Afterwards it takes no work, and reports until when."""
    device = site(workspace, fleet.server, "frugal", "[day]\nmax_assignments = 1", labels={"rules": "two"})
    device.hold.touch()
    device.start()
    fleet.server.until_present("frugal")
    fleet.server.create("frugal", round=ONE, stop={"rounds": 5}, labels={"rules": "two"})
    eventually(lambda: usage(device).get("assignments") == 1, "the assignment is counted")
    device.kill()
    device.hold.unlink()
    device.start()
    reason = coordinator_pb2.UNAVAILABLE_REASON_OWNER
    eventually(lambda: fleet.server.client("frugal").availability.reason == reason, "it is known to take no work")
    availability = fleet.server.client("frugal").availability
    assert "day.max_assignments" in availability.detail
    assert availability.HasField("until")
    assert usage(device)["assignments"] == 1
    assert fleet.server.run("frugal").rounds_done == 0
    with fleet.server.admin() as admin:
        admin.runs.stop_run("frugal", "its test is over")


def usage(device: Daemon) -> dict[str, Any]:
    """The counts on the device's disk."""
    file = Path(device.settings["state_dir"]) / "usage.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


@pytest.fixture
def own_workspace(tmp_path: Path) -> Iterator[Workspace]:
    """A folder for one test's coordinator."""
    with Workspace(tmp_path) as workspace:
        yield workspace


def test_a_coordinator_of_another_authority_hears_nothing(own_workspace: Workspace) -> None:
    """Neither with a CA that is not pinned, nor with a bundle that has the pinned one too; until the site pins it."""
    workspace = own_workspace
    ours, foreign = Pki(workspace.folder / "ours"), Pki(workspace.folder / "foreign")
    server = SecureCoordinator(workspace, ours).serve()
    pins = {name: fingerprint_of(pki) for name, pki in (("ours", ours), ("foreign", foreign))}
    files = section(ours.issue("client", "pinned"))
    bundle = workspace.folder / "bundle.crt"
    bundle.write_bytes(ours.ca.read_bytes() + foreign.ca.read_bytes())
    tls = {**files, "ca": str(bundle)}
    text = '[coordinators]\nca_sha256 = ["{}"]'
    device = site(workspace, server, "pinned", text.format("00" * 32), insecure=False, tls=tls).start()
    refused = device.logged("refused")
    assert pins["ours"] in refused["reason"]
    device.rules(text.format(pins["foreign"]))
    device.logged("disconnected", 2)
    assert not device.events("registered")
    assert server.client("pinned") == admin_pb2.ClientStatus()
    device.rules(text.format(pins["ours"]))
    server.until_present("pinned")
    assert device.terminate() == 0


def fingerprint_of(pki: Pki) -> str:
    """SHA-256 of an authority's certificate."""
    return pki.authority.certificate.fingerprint(SHA256()).hex()
