"""SIGKILL of a daemon at each step of a renewal: the next start has a pair that works, and renews it."""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path

import pytest

from fl_client.enrollment.folder import CertificateFolder
from fl_common.certificates.pem import PemFiles
from tests.processes.certificates import Pki
from tests.processes.enrolling import enrolled_daemon
from tests.processes.enrollment import EnrollingCoordinator
from tests.processes.federation import Daemon
from tests.processes.process import Workspace, eventually


class KilledDaemon(Daemon):
    """A daemon that SIGKILL ends at one step of its renewal."""

    step = 0

    def environment(self) -> dict[str, str]:
        """With the step."""
        state = Path(self.settings["state_dir"])
        return {**super().environment(), "KILL_AT": str(self.step), "KILL_IN": str(state / "tls")}


def certificate_in(folder: CertificateFolder) -> int:
    """Serial of the certificate in use. Fails unless it is whole and has its key."""
    files = folder.files()
    return PemFiles(files["cert"], files["key"], files["ca"]).read().leaf.serial_number


def due(folder: CertificateFolder) -> None:
    """Let the next start renew the certificate at once."""
    (folder.current / "renewal.json").write_text(f'{{"renew_after": {time.time() - 6 * 3600}}}')


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_kill_at_each_step_leaves_a_daemon_that_starts(workspace: Workspace) -> None:
    """After each kill the pair belongs together, and the coordinator accepts the daemon with it."""
    server = EnrollingCoordinator(workspace, Pki(workspace.folder / "pki"), renewals_per_min=10_000.0).serve()
    daemon = enrolled_daemon(server, workspace, "edge-1")
    killed = KilledDaemon(workspace, server, "edge-1", process="killed")
    killed._module = "tests.processes.killed_daemon"
    killed.settings = daemon.settings
    killed.configure()
    folder = CertificateFolder(Path(daemon.settings["state_dir"]) / "tls")
    serials = [certificate_in(folder)]
    while True:
        killed.step += 1
        due(folder)
        used = folder.current.resolve()
        killed.start()
        eventually(partial(has_ended, killed, used), f"step {killed.step}: the daemon ends or renews")
        serials.append(certificate_in(folder))
        if killed.exit_code is None:
            break
        assert killed.exit_code == -signal.SIGKILL
    killed.clean_up()
    assert killed.step > 8
    assert 1 < len(set(serials)) < len(serials)
    due(folder)
    daemon.start()
    server.until_present("edge-1")
    daemon.logged("certificates_renewed")
    daemon.logged("moved")


def has_ended(daemon: Daemon, used: Path) -> bool:
    """Whether the daemon has ended, or has come through a renewal: the earlier folder is gone."""
    return daemon.exit_code is not None or not used.exists()
