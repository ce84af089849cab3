"""The units: what systemd's own tools say of them, what they promise of the programs, and where their files go."""

from __future__ import annotations

import configparser
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fl_client import __main__ as client
from fl_client import daemon
from fl_client.errors import UsageError
from fl_client.settings.config import ClientConfig
from fl_client.setup.units import UnitOptions, unit_files, write
from fl_server import app
from fl_server.__main__ import EXIT_UNUSABLE
from fl_server.settings.config import ServerConfig

ROOT = Path(__file__).parents[3]
SERVER_UNIT = ROOT / "fl_server" / "systemd" / "fl-server.service"
PROGRAM = Path(shutil.which("true") or "/bin/true")
"""Stands where fl-client does: verify wants a program to be there."""
UNITS = Path("etc/systemd/system")
OLD, NEW = 249, 256
"""systemd of JetPack 6, and one that knows a growing wait."""
CLIENT_WISHES = {
    "cpu": UnitOptions(PROGRAM),
    "cuda": UnitOptions(PROGRAM, cuda=True),
    "limits": UnitOptions(PROGRAM, cores=1.5, memory="2G"),
}

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed: apt-get install systemd"
)


@pytest.fixture(params=[*CLIENT_WISHES, "server"])
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A unit in a root directory of its own, with its drop-ins: the daemon's three, and the coordinator's."""
    if request.param == "server":
        path = tmp_path / UNITS / SERVER_UNIT.name
        path.parent.mkdir(parents=True)
        path.write_text(SERVER_UNIT.read_text().replace("/opt/impetus/bin/fl-server", str(PROGRAM)))
        return path
    write(unit_files(CLIENT_WISHES[request.param], OLD), tmp_path)
    return tmp_path / UNITS / "fl-client.service"


def settings(*texts: str) -> dict[str, str]:
    """All settings of a unit's sections, the last one of each name, by name."""
    return dict(pair for text in texts for pair in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


def seconds(text: str) -> float:
    """Seconds of "30s"."""
    return float(text.removesuffix("s"))


@needs_systemd
def test_systemd_verifies_a_unit(unit: Path) -> None:
    """`systemd-analyze verify`: no unknown key, no value that is none, no program that is missing."""
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{unit.parent}:"}
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit.name], env=environment, cwd=unit.parent,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@needs_systemd
def test_verify_would_find_a_misspelt_key(unit: Path) -> None:
    """The test before could fail: a key with a letter too many is named."""
    unit.write_text(unit.read_text().replace("NoNewPrivileges=", "NoNewPrivilegess="))
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{unit.parent}:"}
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit.name], env=environment, cwd=unit.parent,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "NoNewPrivilegess" in done.stderr


@needs_systemd
def test_a_unit_is_closed_enough(unit: Path) -> None:
    """`systemd-analyze security` gives "OK" or better, with devices for CUDA too: 2.0 is well below its limit of 5."""
    done = subprocess.run(
        ["systemd-analyze", f"--root={unit.parents[3]}", "--offline=true", "--threshold=20", "security", unit.name],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert re.search(r"exposure level for \S+: \d\.\d (OK|SAFE|PERFECT)", done.stdout)


LOCKS = {
    "NoNewPrivileges": "yes", "CapabilityBoundingSet": "", "AmbientCapabilities": "", "RestrictSUIDSGID": "yes",
    "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes", "PrivateDevices": "yes", "UMask": "0077",
    "RestrictNamespaces": "yes", "SystemCallArchitectures": "native", "LockPersonality": "yes", "User": "impetus",
}  # fmt: skip
"""What must not be lost from a unit, whatever a version of systemd makes of it in points."""


@pytest.mark.parametrize("name", ["fl_client/systemd/fl-client.service", "fl_server/systemd/fl-server.service"])
def test_no_lock_is_lost(name: str) -> None:
    """Points add up, so that one lock could hide behind the others: each of these is there by itself."""
    found = settings((ROOT / name).read_text())
    assert {key: found.get(key) for key in LOCKS} == LOCKS


def test_what_only_a_person_mends_is_not_started_again() -> None:
    """The exit codes of settings that cannot be used and of a second daemon, as the programs have them."""
    texts = unit_files(UnitOptions(PROGRAM), OLD).values()
    assert settings(*texts)["RestartPreventExitStatus"] == str(client.CANNOT_START)
    assert settings(*texts)["Restart"] == "on-failure"
    assert settings(SERVER_UNIT.read_text())["RestartPreventExitStatus"] == str(EXIT_UNUSABLE)


def test_a_stop_is_waited_for_until_the_programs_are_done() -> None:
    """The daemon: ten times its goodbye and its step, for a slow disk. The coordinator: its grace and its end."""
    texts = unit_files(UnitOptions(PROGRAM), OLD).values()
    own = daemon.GOODBYE_SECONDS + daemon.STEP_SECONDS
    assert seconds(settings(*texts)["TimeoutStopSec"]) >= 10 * own
    grace = ServerConfig.model_fields["drain_grace_s"].default + app.STOP_S
    assert seconds(settings(SERVER_UNIT.read_text())["TimeoutStopSec"]) > grace


def test_the_quota_has_room_for_the_default_threads() -> None:
    """As many cores as torch has threads, and one for the network."""
    threads = ClientConfig.model_fields["threads"].default
    assert settings(*unit_files(UnitOptions(PROGRAM), OLD).values())["CPUQuota"] == f"{100 * (threads + 1)}%"


def test_limits_of_ones_own_stand_in_a_drop_in() -> None:
    """A core and a half are 150 %; memory is written as it was asked for."""
    files = unit_files(UnitOptions(PROGRAM, cores=1.5, memory="2G"), OLD)
    limits = settings(files[UNITS / "fl-client.service.d" / "20-limits.conf"])
    assert (limits["CPUQuota"], limits["MemoryMax"]) == ("150%", "2G")


@pytest.mark.parametrize("memory", ["lots", "4", "4GB", "4G\nUser=root"])
def test_memory_that_systemd_would_not_read_is_refused(memory: str) -> None:
    """It would say so in the journal only, and have no limit."""
    with pytest.raises(UsageError, match='expected memory such as "4G"'):
        unit_files(UnitOptions(PROGRAM, memory=memory), OLD)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (UnitOptions(Path("/home/ann/venv/bin/fl-client")), "cannot access /home, so it cannot read the program"),
        (UnitOptions(PROGRAM, Path("/root/client.toml")), "cannot access /root, so it cannot read the settings"),
        (UnitOptions(PROGRAM, Path("/tmp/client.toml")), "cannot access /tmp"),  # noqa: S108 - a path that is refused
        (UnitOptions(PROGRAM, Path("client.toml")), "an absolute path"),
        (UnitOptions(PROGRAM, Path("/etc/a b.toml")), "without blanks"),
    ],
)
def test_a_path_hidden_from_the_service_is_refused(options: UnitOptions, words: str) -> None:
    """Before it is a unit that fails on every start, with the reason and a better place."""
    with pytest.raises(UsageError, match=words):
        unit_files(options, OLD)


def test_a_growing_wait_is_for_a_systemd_that_knows_it() -> None:
    """An older one would complain at each start."""
    backoff = UNITS / "fl-client.service.d" / "10-backoff.conf"
    assert backoff not in unit_files(UnitOptions(PROGRAM), OLD)
    assert settings(unit_files(UnitOptions(PROGRAM), NEW)[backoff]) == {
        "RestartSteps": "8",
        "RestartMaxDelaySec": "10min",
    }


def test_the_unit_starts_this_program_with_these_settings() -> None:
    """Both paths of the unit that comes along are replaced."""
    text = unit_files(UnitOptions(Path("/srv/fl/bin/fl-client"), Path("/etc/fl/a.toml")), OLD)[
        UNITS / "fl-client.service"
    ]
    assert settings(text)["ExecStart"] == "/srv/fl/bin/fl-client run --config /etc/fl/a.toml"


def test_installing_again_without_cuda_takes_the_devices_away(tmp_path: Path) -> None:
    """Our drop-ins that were not asked for go; one of the owner's stays."""
    write(unit_files(UnitOptions(PROGRAM, cuda=True), OLD), tmp_path)
    drop_ins = tmp_path / UNITS / "fl-client.service.d"
    (drop_ins / "override.conf").write_text("[Service]\nNice=5\n")
    write(unit_files(UnitOptions(PROGRAM), OLD), tmp_path)
    assert [path.name for path in drop_ins.iterdir()] == ["override.conf"]


def test_files_that_may_not_be_written_are_told_so(tmp_path: Path) -> None:
    """A file stands where a folder is needed: the error is a message, not a traceback."""
    (tmp_path / "etc").write_text("")
    with pytest.raises(UsageError, match="cannot be written.*as root, with sudo"):
        write(unit_files(UnitOptions(PROGRAM), OLD), tmp_path)


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
def test_the_user_is_made_and_belongs_to_the_groups_of_the_gpu(tmp_path: Path) -> None:
    """systemd-sysusers takes the file: a system user without a shell, in video and render."""
    write(unit_files(UnitOptions(PROGRAM), OLD), tmp_path)
    subprocess.run(["systemd-sysusers", f"--root={tmp_path}"], check=True, capture_output=True)
    passwd = {line.split(":")[0]: line.split(":") for line in (tmp_path / "etc/passwd").read_text().splitlines()}
    groups = {line.split(":")[0]: line.split(":")[3] for line in (tmp_path / "etc/group").read_text().splitlines()}
    assert int(passwd["impetus"][2]) < 1000
    assert passwd["impetus"][6].endswith("nologin")
    assert (groups["video"], groups["render"]) == ("impetus", "impetus")


def test_the_drop_in_opens_devices_and_nothing_else() -> None:
    """Every key of cuda.conf is about devices, their modules, or where compiled kernels lie."""
    reader = configparser.ConfigParser(strict=False, interpolation=None)
    reader.optionxform = str  # type: ignore[assignment,method-assign] # as configparser's documentation shows it
    reader.read_string((ROOT / "fl_client" / "systemd" / "cuda.conf").read_text())
    assert set(reader["Unit"]) == {"Wants", "After"}
    assert set(reader["Service"]) == {"ExecStartPre", "PrivateDevices", "DevicePolicy", "DeviceAllow", "Environment"}


REFUSES_EXECUTION = """
import ctypes, torch
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):
    raise SystemExit("no PR_SET_MDWE")
torch.nn.functional.conv2d(torch.ones(4, 3, 16, 16), torch.ones(8, 3, 3, 3))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have other kernels for a convolution")
def test_why_memory_may_be_written_and_executed() -> None:
    """Where the kernel refuses that (prctl PR_SET_MDWE, as MemoryDenyWriteExecute does), a convolution fails."""
    done = subprocess.run([sys.executable, "-c", REFUSES_EXECUTION], capture_output=True, text=True, check=False)
    if "no PR_SET_MDWE" in done.stderr:
        pytest.skip("this kernel is older than 6.3 and has no PR_SET_MDWE")
    assert "could not create a primitive" in done.stderr
