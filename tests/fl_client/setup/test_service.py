"""The unit under a real systemd with all its restrictions: it trains, restarts and stops."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from fl_client.__main__ import main
from tests.fl_client.setup.booted import HOME, ROOT, Booted, why_not
from tests.processes.federation import Coordinator
from tests.processes.process import Workspace, eventually

UNIT = "fl-client"
SERVER = """
state_dir = "server"
listen = "127.0.0.1:0"
admin_listen = "127.0.0.1:0"
metrics_listen = ""
insecure = true
"""
TASK = "tests.processes.tiny_task:Tiny"
QUICKLY = "[Service]\nRestartSec=1s\n"
"""A shorter restart delay for the test."""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator outside of the system."""
    with Workspace(tmp_path_factory.mktemp("server")) as workspace:
        yield Coordinator(workspace).serve()


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory, server: Coordinator) -> Iterator[Booted]:
    """A system with the unit and settings as in docs/devices/edge.md; the unit is not started."""
    files = tmp_path_factory.mktemp("files")
    assert main(["unit", "--program", f"{HOME}/bin/fl-client", "--install", "--root", str(files)]) == 0
    (files / "etc/systemd/system/fl-client.service.d").mkdir()
    (files / "etc/systemd/system/fl-client.service.d/90-test.conf").write_text(QUICKLY)
    settings = files / "etc/impetus/client.toml"
    assert main(["init", "--config", str(settings), "--server", server.address, "--insecure", "--client-id", "edge-1",
                 "--task", TASK, "--state-dir", "/var/lib/impetus", "--yes", "--no-doctor"]) == 0  # fmt: skip
    shutil.copy(ROOT / "fl_server/systemd/fl-server.service", files / "etc/systemd/system")
    (files / "etc/impetus/server.toml").write_text(SERVER)
    with Booted(tmp_path_factory.mktemp("booted"), files) as booted:
        made = booted.run("systemd-sysusers")
        assert made.returncode == 0, made.stderr
        yield booted


@pytest.fixture
def service(system: Booted, server: Coordinator) -> Booted:
    """The started unit with an attending daemon."""
    started = system.run("systemctl", "start", UNIT)
    assert started.returncode == 0, system.report(UNIT)
    server.until_present("edge-1")
    return system


def test_a_service_with_all_restrictions_trains(service: Booted, server: Coordinator) -> None:
    """Rounds of FedCM complete: the restrictions leave torch and grpc everything that they need."""
    run = server.create(
        "service", task={"name": TASK}, round={"clients_per_round": 1, "min_clients": 1}, stop={"rounds": 2}
    )
    assert len(server.digests(run)) == 2


def test_the_service_has_its_own_user_and_limits(service: Booted) -> None:
    """Read back from the running unit: its user, no capabilities, no new privileges, limits of memory and cores."""
    pid = service.show(UNIT, "MainPID")["MainPID"]
    status = service.run("grep", "-E", "^(Uid|CapBnd|CapEff|NoNewPrivs|Seccomp):", f"/proc/{pid}/status").stdout
    facts = {line.split(":")[0]: line.split()[1] for line in status.splitlines()}
    assert facts["Uid"] == service.run("id", "-u", "impetus").stdout.strip() != "0"
    assert (int(facts["CapBnd"], 16), int(facts["CapEff"], 16), facts["NoNewPrivs"], facts["Seccomp"]) == (
        0,
        0,
        "1",
        "2",
    )
    shown = service.show(UNIT, "CPUQuotaPerSecUSec", "MemoryMax", "TasksMax")
    assert (shown["CPUQuotaPerSecUSec"], shown["TasksMax"]) == ("2s", "256")
    assert shown["MemoryMax"].isdigit()


def test_a_daemon_that_is_killed_is_started_again(service: Booted, server: Coordinator) -> None:
    """SIGKILL, as when memory runs out: another process attends."""
    before = service.show(UNIT, "MainPID")["MainPID"]
    service.run("systemctl", "kill", "--signal=SIGKILL", "--kill-who=main", UNIT)
    eventually(lambda: service.show(UNIT, "MainPID")["MainPID"] not in {before, "0"}, "it is started again")
    assert int(service.show(UNIT, "NRestarts")["NRestarts"]) >= 1


def test_a_stop_is_a_success(service: Booted, server: Coordinator) -> None:
    """SIGTERM gives exit code 0 long before the unit's stop timeout, so nothing is killed."""
    stopped = service.run("systemctl", "stop", UNIT)
    assert stopped.returncode == 0, stopped.stderr
    shown = service.show(UNIT, "Result", "ExecMainStatus", "ActiveState")
    assert shown == {"Result": "success", "ExecMainStatus": "0", "ActiveState": "inactive"}


def test_unusable_settings_are_not_retried(service: Booted) -> None:
    """Exit code 2: the unit is failed and stays so, and nothing is started again."""
    service.run("systemctl", "stop", UNIT)
    service.run("sed", "-i", "s/^server = /sever = /", "/etc/impetus/client.toml")
    try:
        service.run("systemctl", "start", UNIT)
        eventually(lambda: service.show(UNIT, "ActiveState")["ActiveState"] == "failed", "it fails")
        shown = service.show(UNIT, "ExecMainStatus", "NRestarts")
        assert (shown["ExecMainStatus"], shown["NRestarts"]) == ("2", "0")
    finally:
        service.run("sed", "-i", "s/^sever = /server = /", "/etc/impetus/client.toml")
        service.run("systemctl", "reset-failed", UNIT)


def test_the_doctor_as_the_services_user_finds_no_fault(service: Booted) -> None:
    """`sudo -u impetus fl-client doctor`, as in docs/devices/edge.md, while the daemon runs."""
    user = ["setpriv", "--reuid=impetus", "--regid=impetus", "--init-groups", "env", "--chdir=/var/lib/impetus"]
    looked = service.run(*user, f"{HOME}/bin/fl-client", "doctor")
    assert looked.returncode == 0, looked.stdout + looked.stderr
    assert "a daemon runs" in looked.stdout


def test_home_directories_are_hidden(service: Booted) -> None:
    """Inside the unit /root is empty, and /etc cannot be written."""
    pid = service.show(UNIT, "MainPID")["MainPID"]
    inside = ["nsenter", "-t", pid, "-m"]
    assert service.run(*inside, "sh", "-c", "ls -A /root; ls -A /home").stdout == ""
    refused = service.run(*inside, "touch", "/etc/impetus/new")
    assert "Read-only file system" in refused.stderr


def test_a_service_with_devices_for_cuda_works_without_any(service: Booted, server: Coordinator) -> None:
    """With `--cuda` on a machine without a GPU, missing drivers and programs have no effect."""
    installed = service.run(f"{HOME}/bin/fl-client", "unit", "--install", "--cuda")
    assert installed.returncode == 0, installed.stderr
    before = service.show(UNIT, "MainPID")["MainPID"]
    restarted = service.run("systemctl", "restart", UNIT)
    assert restarted.returncode == 0, service.report(UNIT)
    assert service.show(UNIT, "PrivateDevices", "DevicePolicy") == {"PrivateDevices": "no", "DevicePolicy": "closed"}
    server.until_present("edge-1")
    assert service.show(UNIT, "MainPID")["MainPID"] not in {before, "0"}
    assert service.run(f"{HOME}/bin/fl-client", "unit", "--install").returncode == 0
    service.run("systemctl", "stop", UNIT)


def test_the_coordinators_unit_serves_and_stops(system: Booted) -> None:
    """With all restrictions a coordinator serves, and SIGTERM is a success."""
    started = system.run("systemctl", "start", "fl-server")
    assert started.returncode == 0, system.report("fl-server")
    eventually(lambda: '"event": "serving"' in system.report("fl-server"), "the coordinator serves")
    assert system.run("systemctl", "stop", "fl-server").returncode == 0
    assert system.show("fl-server", "Result", "ExecMainStatus") == {"Result": "success", "ExecMainStatus": "0"}
