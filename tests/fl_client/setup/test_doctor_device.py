"""The doctor on the device: state directory, disk, certificates, GPU, task, data and memory, each broken for real."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID

from fl_client.packages import landlock
from fl_client.settings.config import ClientConfig
from fl_client.settings.served_tasks import TaskConfig
from fl_client.setup.doctor import device, files
from fl_client.setup.doctor.findings import Level
from fl_client.storage.state import StateDir
from tests.fl_client.setup.conftest import TASK, Doctor, DoctorReport, Site

NOBODY = 65534


@pytest.fixture
def doctor(doctor: Doctor) -> Doctor:
    """The doctor without a coordinator. The checks of the device run all the same."""

    def on_the_device(**changes: Any) -> DoctorReport:
        return doctor(**{"server": "127.0.0.1:9", **changes})

    return on_the_device


@contextmanager
def as_nobody() -> Iterator[None]:
    """Run as an ordinary user, because root may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB with nothing free on it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a disk cannot be mounted here: {mounted.stderr.decode().strip()}")
    (folder / "filler").write_bytes(bytes(60 << 10))
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_settings_that_are_none(doctor: Doctor, tmp_path: Path) -> None:
    """The message of the settings reader, exit code 1, and no further check."""
    found = doctor(taks={"name": "digits"})
    assert (found.code, found.faults) == (1, ["FAIL settings"])
    assert "taks: unknown key, did you mean tasks?" in found.of("settings")


def test_nothing_is_left_behind(doctor: Doctor, tmp_path: Path) -> None:
    """No state directory is made, no shard is kept."""
    found = doctor()
    assert "can be written, and will be created in" in found.of("state_dir")
    assert [path.name for path in tmp_path.iterdir()] == ["client.toml"]


def test_a_state_directory_that_may_not_be_written(tmp_path_factory: pytest.TempPathFactory) -> None:
    """It belongs to another user: the message has the system's error, and the user to run as."""
    folder = tmp_path_factory.mktemp("closed")
    folder.chmod(0o555)
    for parent in folder.parents[:2]:
        parent.chmod(parent.stat().st_mode | stat.S_IXOTH | stat.S_IXGRP)
    config = ClientConfig(
        client_id="edge-1", server="127.0.0.1:9", insecure=True, state_dir=folder / "state", task=TaskConfig(name=TASK)
    )
    with as_nobody():
        (finding,) = files.check_state_directory(config)
    assert (finding.level, finding.check) == (Level.FAIL, "state_dir")
    assert "Permission denied" in finding.message
    assert "sudo -u impetus" in finding.fix


def test_a_disk_that_is_full(doctor: Doctor, full_disk: Path) -> None:
    """A test write fails."""
    found = doctor(state_dir=full_disk / "state")
    assert "FAIL state_dir" in found.faults
    assert "No space left on device" in found.of("state_dir")
    assert "is the disk full" in found.of("state_dir")


def test_a_state_directory_of_another_device(doctor: Doctor, tmp_path: Path) -> None:
    """The message has both names."""
    with StateDir(tmp_path / "state") as state:
        state.claim("edge-7")
    found = doctor()
    assert "FAIL state_dir" in found.faults
    assert "expected the directory of client 'edge-1', got that of 'edge-7'" in found.of("state_dir")


def test_a_shard_that_was_another_one(doctor: Doctor, tmp_path: Path) -> None:
    """A daemon would refuse to start: the doctor has the same message."""
    with StateDir(tmp_path / "state") as state:
        state.claim("edge-1")
        state.shard({"task": TASK, "index": 1}, lambda: [1, 2])
    found = doctor()
    assert "FAIL shard" in found.faults
    assert "a device's shard never changes" in found.of("shard")


def test_releases_are_checked_before_the_first_one_comes(doctor: Doctor, tmp_path: Path) -> None:
    """The keys, what is in use, a program that is none, and a folder that is a file; no line without the section."""
    assert doctor().of("releases") == ""
    program = tmp_path / "hook"
    program.write_text("#!/bin/sh\n")
    releases = {"signers": ["ed25519:" + "0" * 64], "oldest": 3, "hook": [str(program)]}
    found = doctor(releases=releases)
    assert "FAIL releases" in found.faults
    assert f"got '{program}'" in found.of("releases")
    program.chmod(0o755)
    model = tmp_path / "models" / "digits"
    found = doctor(releases={**releases, "folder": model.parent})
    assert f"by 1 key, from version 3 on, in {model.parent}; in use: none" in found.of("releases")
    found = doctor(releases={**releases, "announce": program / "models.json"})
    assert "FAIL releases" in found.faults


def test_the_kernel_hides_files_from_packages(doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the version, or a warning without it; no line without packages."""
    assert doctor().of("packages") == ""
    policy = tmp_path / "policy.toml"
    policy.write_text('[packages]\nsigners = ["ed25519:' + "0" * 64 + '"]\n')
    packaged = {"task": None, "tasks": [{"name": "waves:Waves", "package": "waves"}], "policy": str(policy)}
    config = ClientConfig.model_validate(
        {"client_id": "edge-1", "server": "127.0.0.1:9", "insecure": True, "state_dir": tmp_path, **packaged}
    )
    for known, level in ((7, Level.OK), (0, Level.WARN)):
        monkeypatch.setattr(landlock, "version", lambda known=known: known)
        (finding,) = files.check_packages(config)
        assert (finding.level, "Landlock" in finding.message) == (level, True)


def test_an_unknown_task(doctor: Doctor) -> None:
    """The message has the names of the available tasks."""
    found = doctor(task={"name": "digit"})
    assert "FAIL task" in found.faults
    assert 'Did you mean "digits"?' in found.of("task")


def test_a_partition_file_that_is_missing(doctor: Doctor, tmp_path: Path) -> None:
    """The file is named, and from where relative paths count."""
    found = doctor(shard={"file": tmp_path / "parts.json", "index": 0})
    assert "FAIL task" in found.faults
    assert "parts.json" in found.of("task")
    assert "/var/lib/impetus as a service" in found.of("task")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_a_device_that_is_not_there(doctor: Doctor) -> None:
    """CUDA where torch has none: why, and how to have it; task and data are not tried on it."""
    found = doctor(device="cuda")
    assert "FAIL device" in found.faults
    assert 'expected a CUDA device for "cuda", found none' in found.of("device")
    assert found.of("task") == ""


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")
def test_a_gpu_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch, doctor: Doctor, tmp_path: Path) -> None:
    """There is a node of NVIDIA's driver, torch is built without CUDA: a warning, for the CPU works."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(device, "_NODES", (str(tmp_path / "nvidia0"),))
    found = doctor()
    assert "WARN device" in found.faults
    assert "is built without CUDA" in found.of("device")
    assert "install a torch that is built for CUDA" in found.of("device")


def test_more_threads_than_cores(doctor: Doctor) -> None:
    """More threads than cores would compete."""
    cores = len(os.sched_getaffinity(0))
    found = doctor(threads=cores + 1)
    assert "WARN device" in found.faults
    assert f"expected at most {cores} threads, one per core, got threads = {cores + 1}" in found.of("device")


def test_a_step_that_fails(doctor: Doctor) -> None:
    """The task loads, and its loss raises: the finding has the error's name."""
    found = doctor(task={"name": TASK, "options": {"fails": "loss"}})
    assert "FAIL step" in found.faults
    assert "RuntimeError: the sensor is unplugged" in found.of("step")


@pytest.mark.parametrize(
    ("task", "message"),
    [
        pytest.param({"name": "tests.processes.odd_task:Grown"}, "tensor 'cache': expected shape", id="growing"),
        pytest.param(
            {"name": "tests.processes.odd_task:Odd", "options": {"kind": "float8"}}, "cannot be sent", id="float8"
        ),
        pytest.param({"name": "tests.processes.odd_task:Odd", "options": {"kind": "none"}}, "got None", id="none"),
    ],
)
def test_a_model_that_no_run_can_train(doctor: Doctor, task: dict[str, object], message: str) -> None:
    """The finding names the tensor, or what model() returned."""
    found = doctor(task=task)
    assert "FAIL step" in found.faults
    assert message in found.of("step")


def test_a_private_key_that_everyone_reads(doctor: Doctor, site: Site) -> None:
    """A fault: the daemon does not take it."""
    files = site.issue("client", "edge-open")
    Path(files["key"]).chmod(0o644)
    found = doctor(tls=files)
    assert "FAIL tls.key" in found.faults
    assert f"chmod 600 {files['key']}" in found.of("tls.key")


def test_a_private_key_of_another_certificate(doctor: Doctor, site: Site) -> None:
    """Files of two devices were mixed up. No connection is made with them."""
    files = {**site.issue("client", "edge-a"), "key": site.issue("client", "edge-b")["key"]}
    found = doctor(tls=files)
    assert "FAIL tls.key" in found.faults
    assert "got the key of another certificate" in found.of("tls.key")
    assert found.of("name") == ""


def test_a_certificate_that_has_ended(doctor: Doctor, site: Site) -> None:
    """With its last day, and how to renew it."""
    found = doctor(tls=site.issue("client", "edge-old", since=100, days=90))
    assert "FAIL tls.cert" in found.faults
    assert "got one that ended" in found.of("tls.cert")
    assert "fl ca issue client NAME --force" in found.of("tls.cert")


def test_a_certificate_that_ends_soon(doctor: Doctor, site: Site) -> None:
    """Ten days are left of ninety."""
    found = doctor(tls=site.issue("client", "edge-soon", since=80, days=90))
    assert "WARN tls.cert" in found.faults


def test_a_certificate_of_a_coordinator(doctor: Doctor, site: Site) -> None:
    """A device cannot be one: it has no client's name."""
    found = doctor(tls=site.issue("server", "coordinator-2", ("127.0.0.1",)))
    assert "FAIL identity" in found.faults
    assert "expected a client's certificate" in found.of("identity")


def test_a_certificate_for_other_uses(doctor: Doctor, site: Site) -> None:
    """A client's name in a certificate that is for servers: TLS at the coordinator would refuse it."""
    files = site.issue("client", "edge-use")
    issued = x509.load_pem_x509_certificate(Path(files["cert"]).read_bytes())
    made = x509.CertificateBuilder(
        issued.issuer, issued.subject, issued.public_key(), issued.serial_number,
        issued.not_valid_before_utc, issued.not_valid_after_utc,
    )  # fmt: skip
    names = issued.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    made = made.add_extension(names, critical=False)
    made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    signed = made.sign(site.authority.key, hashes.SHA256())
    Path(files["cert"]).write_bytes(signed.public_bytes(Encoding.PEM))
    found = doctor(tls=files)
    assert "FAIL tls.cert" in found.faults
    assert "expected a certificate for clients (clientAuth), got one for serverAuth" in found.of("tls.cert")


def test_a_clock_from_before_the_certificates(doctor: Doctor, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Made tomorrow, as a board without a battery sees it: the clock is named, not the certificate alone."""
    found = doctor(tls=site.issue("client", "edge-tomorrow", since=-2))
    assert "FAIL clock" in found.faults
    assert "timedatectl set-ntp true" in found.of("clock")


@pytest.mark.parametrize(
    ("free", "level"), [(199, Level.WARN), (200, Level.OK), (100, Level.WARN), (99, Level.FAIL), (0, Level.FAIL)]
)
def test_enough_space_is_twice_the_need(free: int, level: Level) -> None:
    """Of 100 needed, 200 are well, 100 a warning, 99 a fault."""
    assert device._compared("disk", free, 100, "free", "free some").level is level


def test_a_control_groups_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1000 bytes allowed 400 are used: 600 are left, whatever the machine has."""
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("400\n")
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    assert device.available_memory() == 600


def test_no_limit_is_the_machines_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For `max` the kernel's value counts."""
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("400\n")
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    assert device.available_memory() > 1 << 20


def test_a_gate_without_its_sensor(doctor: Doctor, tmp_path: Path) -> None:
    """There is no thermal zone: the daemon would not start, and the doctor reports a failure."""
    found = doctor(gates={"temperature_below": 70, "sysfs": tmp_path})
    assert "FAIL gates" in found.faults


def test_a_gate_that_is_closed_is_no_fault(doctor: Doctor) -> None:
    """A window of one minute of the week that is not now: level OK."""
    day = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")[(datetime.now(UTC).weekday() + 3) % 7]
    found = doctor(gates={"windows": [f"{day} 12:00-12:01"], "timezone": "UTC"})
    assert "FAIL gates" not in found.faults
    assert "window is closed now" in found.of("gates")


def test_a_gate_that_is_open(doctor: Doctor) -> None:
    """Every day, all day."""
    assert doctor(gates={"windows": ["mon-sun 00:00-24:00"]}).of("gates") == "window is open | "


@pytest.mark.parametrize(
    ("form", "shown"), [("samples", "90 examples to train"), ("batched", "in 13 batches to train")]
)
def test_a_step_of_dict_batches(doctor: Doctor, form: str, shown: str) -> None:
    """The doctor trains on a data set, and on batches of the task's own, and names their number."""
    task = {"name": "tests.processes.sequence_task:Counting", "options": {"form": form}}
    found = doctor(task=task)
    assert shown in found.of("task")
    assert "the first batch of" in found.of("step")
